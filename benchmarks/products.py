"""The products of tiled attention and nothing else: the least that its products cost in XLA.

Tiles, layouts and loops are those of ``attention/tiled.py``: two products a tile forward, five more
with all gradients. Masks, maxima, exponentials and sums are left out, so the numbers mean nothing.
Letters as there.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from attention import tiled
from attention.masks import Mask
from attention.tile_table import TileList
from attention.tiles import Head, Plan, from_tiles, in_tiles, padded


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def alone(mask: Mask, q_BTNH, k_BSKH, v_BSKE) -> jax.Array:
    """(B, T, N, E): Σ (q kᵀ) v over the tiles of the mask that are not empty, its pairs or not."""
    plan = _plan(mask, q_BTNH, k_BSKH)
    q, k, v = _cut(plan, q_BTNH, k_BSKH, v_BSKE)
    zeros = jnp.zeros((*q.shape[:-1], v.shape[-1]), q.dtype)

    def row(head: Head, i, out):
        q_YH = head.tile(q, i)

        def step(j, sum_YE, masked):
            del masked
            s_YX = tiled._dot(q_YH, head.tile(k, j), 1, 1)
            return sum_YE + tiled._dot(s_YX, head.tile(v, j), 1, 0)

        sum_YE = plan.over_entries(plan.table.by_query, i, step, zeros[0, 0, 0])
        return _with_tile(out, head, i, sum_YE)

    out = _over_rows(plan, plan.table.by_query, q.shape[:2], row, zeros)
    return from_tiles(out, plan.groups)[:, : plan.num_queries]


def _forward(mask: Mask, *arguments):
    return alone(mask, *arguments), arguments


def _backward(mask: Mask, arguments, do_BTNE):
    plan = _plan(mask, *arguments[:2])
    q, k, v = _cut(plan, *arguments)
    do = in_tiles(padded(do_BTNE, plan.q_tile), plan.q_tile, plan.groups)

    def column(head: Head, j, carry):
        k_XH, v_XE = head.tile(k, j), head.tile(v, j)
        k_HX = k_XH.T

        def step(i, carry, masked):
            del masked
            dq, dk_XH, dv_XE = carry
            q_YH, do_YE = head.tile(q, i), head.tile(do, i)
            s_XY = tiled._dot(k_XH, q_YH, 1, 1)
            ds_XY = tiled._dot(v_XE, do_YE, 1, 1)
            dq_HY = head.tile(dq, i) + tiled._dot(k_HX, ds_XY, 1, 0)
            return (
                _with_tile(dq, head, i, dq_HY),
                dk_XH + tiled._dot(ds_XY, q_YH, 1, 0),
                dv_XE + tiled._dot(s_XY, do_YE, 1, 0),
            )

        dq, dk, dv = carry
        sums = jnp.zeros_like(k_XH), jnp.zeros_like(v_XE)
        dq, dk_XH, dv_XE = plan.over_entries(plan.table.by_key, j, step, (dq, *sums))
        return dq, _with_tile(dk, head, j, dk_XH), _with_tile(dv, head, j, dv_XE)

    zeros = (jnp.zeros_like(q.swapaxes(3, 4)), jnp.zeros_like(k), jnp.zeros_like(v))
    dq, dk, dv = _over_rows(plan, plan.table.by_key, q.shape[:2], column, zeros)
    T, S = plan.num_queries, plan.num_keys
    dq = from_tiles(dq.swapaxes(3, 4), plan.groups)
    return dq[:, :T], from_tiles(dk)[:, :S], from_tiles(dv)[:, :S]


alone.defvjp(_forward, _backward)


def _plan(mask: Mask, q_BTNH, k_BSKH) -> Plan:
    """As ``tiled`` cuts this call."""
    (_, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
    sizes = tiled._tile_sizes(mask, T, S, N // K)
    return Plan(mask, H**-0.5, N // K, T, S, *sizes, masks_all=False)


def _cut(plan: Plan, q_BTNH, k_BSKH, v_BSKE) -> list[jax.Array]:
    sizes = (plan.q_tile, plan.groups), (plan.k_tile, 1), (plan.k_tile, 1)
    return [
        in_tiles(padded(x, tile), tile, heads)
        for x, (tile, heads) in zip((q_BTNH, k_BSKH, v_BSKE), sizes, strict=True)
    ]


def _over_rows(plan: Plan, tiles: TileList, heads: tuple[int, int], row, carry):
    """carry = row(head, i, carry) for every row of tiles of every head."""
    B, K = heads

    def one(n, carry):
        z = n // tiles.num_rows
        return row(Head(plan, z // K, z % K), n % tiles.num_rows, carry)

    return lax.fori_loop(0, B * K * tiles.num_rows, one, carry)


def _with_tile(x_BKIxx: jax.Array, head: Head, i, tile: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x_BKIxx, tile[None, None, None], (head.b, head.h, i, 0, 0))
