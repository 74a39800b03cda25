"""Softmax attention tile by tile in plain XLA: memory linear in length, empty tiles never visited.

Forward: for every query tile an online softmax over its non-empty key tiles. Backward: for every
key tile the scores of its non-empty query tiles once more, from the kept row statistics, which
yields dq, dk and dv in one pass (FlashAttention-2, Dao 2023, arXiv 2307.08691). The loops run over
the lists of the tile table, so neither the program nor its compile time grows with the length.

Every product is one of two contiguous matrices, since XLA's CPU products are three times as fast
on those as on batched einsums. The G query heads that share a key-value head are rows of one query
tile, so keys and values are never repeated. Letters beyond those of the package: Y = q_tile · G
rows of a query tile, X = k_tile keys of a key tile, I query tiles.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attention import one_tile
from attention.everywhere import everywhere
from attention.masks import Mask
from attention.masks.values import FULL, PARTIAL
from attention.tile_table import tile_table
from attention.tiles import Head, Plan, Segments, from_tiles, in_tiles, padded

if TYPE_CHECKING:
    from attention.ops import Call

# Wide tiles pay for their dispatch less often, narrow ones waste less at the edges of a mask. What
# a tile costs forward, in µs, by its side: a full one and a masked one, on 2 cores in float32 at
# head width 64, fitted to 8,192 tokens under causal masks and windows from 64 to 2,048. The head
# width moves the costs of all sides alike.
TILE_US = {1024: (2000, 2600), 512: (600, 960), 256: (195, 340), 128: (46, 94)}

# Measured on 2 cores, 4 and 8 heads, batches 1 to 64: at 32 × 32 tiles and dense scores cost the
# same forward and with backward, above tiles win; under 32 queries dense scores are small anyway.
FEW = 32

# Off the CPU a loop of small products leaves the chip idle, so dense goes first while it fits.
DENSE_BYTES = 1 << 30


def _dot(a, b, a_axis: int, b_axis: int):
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())))


def _product_dtype(q, k, v):
    """Of all products: float32, or wider where an argument is."""
    # Some shapes of XLA's bfloat16 product with float32 sums are not implemented on the CPU.
    return jnp.result_type(q, k, v, jnp.float32)


def _inputs(plan: Plan, q_BTNH, k_BSKH, v_BSKE, q_segments, k_segments):
    """Padded inputs, and finite_BSK: whether a key and its value are usable."""
    q, k, v = (
        padded(q_BTNH, plan.q_tile),
        padded(k_BSKH, plan.k_tile),
        padded(v_BSKE, plan.k_tile),
    )
    segments = Segments(
        None if q_segments is None else padded(q_segments, plan.q_tile),
        None if k_segments is None else padded(k_segments, plan.k_tile),
    )
    finite_k_BSK = jnp.isfinite(k).all(-1)
    return q, k, v, segments, finite_k_BSK, finite_k_BSK & jnp.isfinite(v).all(-1)


def _sees_bad(plan: Plan, segments, finite_k_BSK, finite_BSK, bad_BTN):
    """The rows that see a key that is not finite, and those whose output is not.

    These see a key or a value that is not finite, or any key at all with a query that is bad. Free
    while all are finite.
    """
    B, _, K = finite_BSK.shape
    tiles = plan.table.by_query

    def row(n, seen):
        z, i = n // tiles.num_rows, n % tiles.num_rows
        head = Head(plan, z // K, z % K)
        bad_Y1 = head.rows(bad_BTN, i)[:, None]

        def step(j, seen_Y, masked):
            pairs = head.allowed(segments, i, j, q_axis=0)
            bad_k_1X, bad_1X = (~head.keys(x, j)[None] for x in (finite_k_BSK, finite_BSK))
            return tuple(
                seen | (pairs & bad).any(1)
                for seen, bad in zip(seen_Y, (bad_k_1X, bad_1X | bad_Y1), strict=True)
            )

        seen_Y = plan.over_entries(tiles, i, step, (jnp.zeros(plan.rows, bool),) * 2)
        return tuple(head.with_rows(x, i, y) for x, y in zip(seen, seen_Y, strict=True))

    nobody_BTN = jnp.zeros_like(bad_BTN)
    return lax.cond(
        everywhere(finite_BSK) & everywhere(~bad_BTN),
        lambda seen: seen,
        lambda seen: lax.fori_loop(0, B * K * tiles.num_rows, row, seen),
        (nobody_BTN, nobody_BTN),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments):
    return _forward(plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments)[0]


def _forward(plan: Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments):
    arguments = q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments
    dtype = _product_dtype(q_BTNH, k_BSKH, v_BSKE)
    q, k, v, segments, *finite = _inputs(plan, *arguments[:3], *arguments[4:])
    finite_BSK = finite[1]
    k, v = (
        in_tiles(jnp.where(finite_BSK[..., None], x, 0).astype(dtype), plan.k_tile) for x in (k, v)
    )
    forward = _one_tile_forward if one_tile.fits(plan, k.shape[1]) else _forward_by_tiles
    out_BTNE, lse_BTN, base_BTN, share_BTN = forward(plan, q, k, v, sink_N, segments, v_BSKE.dtype)
    # Scores that are all −inf, as an infinite query may have, look like those of no key.
    bad_query_BTN = lax.cond(
        everywhere(lse_BTN != -jnp.inf),
        lambda: jnp.zeros(lse_BTN.shape, bool),
        lambda: (lse_BTN == -jnp.inf) & ~jnp.isfinite(q).all(-1),
    )
    bad_key_BTN, bad_BTN = _sees_bad(plan, segments, *finite, bad_query_BTN)
    kept = arguments, out_BTNE, lse_BTN, base_BTN, share_BTN, bad_key_BTN, bad_BTN
    out_BTNE = jnp.where(bad_BTN[..., None], jnp.nan, out_BTNE)[:, : plan.num_queries]
    lse_BTN = jnp.where(bad_key_BTN, jnp.nan, lse_BTN)[:, : plan.num_queries]
    return (out_BTNE, lse_BTN.swapaxes(1, 2)), kept


def _forward_by_tiles(plan: Plan, q, k, v, sink_N, segments, out_dtype):
    (B, padded_T, N, _), (K, E), dtype = q.shape, (k.shape[1], v.shape[-1]), k.dtype
    tiles, Y = plan.table.by_query, plan.rows

    def row(n, carry):
        z, i = n // tiles.num_rows, n % tiles.num_rows
        head = Head(plan, z // K, z % K)
        q_YH = head.rows(q, i).astype(dtype) * plan.direction

        def step(j, carry, masked):
            top_Y, total_Y, sum_YE = carry
            s_YX = _dot(q_YH, head.tile(k, j), 1, 1)
            if masked:
                s_YX = jnp.where(head.allowed(segments, i, j, q_axis=0), s_YX, -jnp.inf)
            new_Y = jnp.maximum(top_Y, s_YX.max(1))
            base_Y = jnp.where(new_Y == -jnp.inf, 0, new_Y)
            p_YX = jnp.exp(plan.size * (s_YX - base_Y[:, None]))
            keep_Y = jnp.exp(plan.size * (top_Y - base_Y))
            sum_YE = sum_YE * keep_Y[:, None] + _dot(p_YX, head.tile(v, j), 1, 0)
            return new_Y, total_Y * keep_Y + p_YX.sum(1), sum_YE

        carry_Y = jnp.full(Y, -jnp.inf, dtype), jnp.zeros(Y, dtype), jnp.zeros((Y, E), dtype)
        softmax = plan.over_entries(tiles, i, step, carry_Y)
        sink_Y = None
        if sink_N is not None:
            sink_G = lax.dynamic_slice(sink_N, (head.h * plan.groups,), (plan.groups,))
            sink_Y = jnp.tile(sink_G.astype(dtype), plan.q_tile)
        rows = _normalised(plan, *softmax, sink_Y)
        return tuple(head.with_rows(x, i, y) for x, y in zip(carry, rows, strict=True))

    statistic_BTN = jnp.zeros((B, padded_T, N), dtype)
    start = jnp.zeros((B, padded_T, N, E), out_dtype), *(statistic_BTN,) * 3
    return lax.fori_loop(0, B * K * tiles.num_rows, row, start)


def _one_tile_forward(plan: Plan, q, k, v, sink_N, segments, out_dtype):
    q_BKYH = in_tiles(q.astype(k.dtype) * plan.direction, plan.q_tile, plan.groups)[:, :, 0]
    softmax = one_tile.forward(plan, q_BKYH, k[:, :, 0], v[:, :, 0], segments)
    sink_1KY = None
    if sink_N is not None:
        sink_KG = sink_N.astype(k.dtype).reshape(-1, plan.groups)
        sink_1KY = jnp.tile(sink_KG, (1, plan.q_tile))[None]
    out_BKYE, *statistics = _normalised(plan, *softmax, sink_1KY)
    rows = out_BKYE.astype(out_dtype), *statistics
    return tuple(from_tiles(x[:, :, None], plan.groups) for x in rows)


def _normalised(plan: Plan, top_Y, total_Y, sum_YE, sink_Y):
    """Output, log-sum-exp, base and share of rows whose keys have all been seen."""
    empty_Y = top_Y == -jnp.inf
    base_Y = jnp.where(empty_Y, 0, top_Y)
    total_Y = jnp.where(empty_Y, 1, total_Y)
    lse_Y = plan.size * base_Y + jnp.log(total_Y)
    share_Y = jnp.where(empty_Y, 0, 1 / total_Y)
    if sink_Y is not None:
        with_sink_Y = jnp.logaddexp(lse_Y, sink_Y)
        share_Y, lse_Y = share_Y * jnp.exp(lse_Y - with_sink_Y), with_sink_Y
    return sum_YE * share_Y[..., None], jnp.where(empty_Y, -jnp.inf, lse_Y), base_Y, share_Y


def _backward(plan: Plan, kept, cotangents):
    arguments, out_BTNE, lse_BTN, base_BTN, share_BTN, bad_key_BTN, bad_BTN = kept
    sink_N = arguments[3]
    dtype = _product_dtype(*arguments[:3])
    q, k, v, segments, _, finite_BSK = _inputs(plan, *arguments[:3], *arguments[4:])
    # Rows that pass no gradient are selected to 0, lest a 0 weight meets inf or NaN.
    empty_BTN = lse_BTN == -jnp.inf
    mute_BTN = empty_BTN | bad_BTN
    do = padded(cotangents[0], plan.q_tile)
    dlse_BTN = padded(cotangents[1].swapaxes(1, 2), plan.q_tile)
    # ds = p · (dp − Σ_j p dp + dlse), and Σ_j p dp = do · out. With p = e · share, the share goes
    # to do and to the sum, which are small, and e alone is as large as the tile.
    pull_BTN = jnp.where(mute_BTN, 0, (do.astype(dtype) * out_BTNE.astype(dtype)).sum(-1))
    pull_BTN = pull_BTN - jnp.where(empty_BTN | bad_key_BTN, 0, dlse_BTN)
    do = jnp.where(mute_BTN[..., None], 0, do * share_BTN[..., None]).astype(dtype)
    q_rows = jnp.where(empty_BTN[..., None], 0, q).astype(dtype) * plan.direction
    q_rows, do, base, pull = (
        in_tiles(x, plan.q_tile, plan.groups) for x in (q_rows, do, base_BTN, pull_BTN * share_BTN)
    )

    backward = _one_tile_backward if one_tile.fits(plan, k.shape[2]) else _backward_by_tiles
    dq, dk, dv = backward(plan, q, k, v, q_rows, do, base, pull, segments, finite_BSK)
    dsink_N = None
    if sink_N is not None:
        weight_BTN = jnp.where(empty_BTN, 0, jnp.exp(sink_N.astype(dtype)[None, None] - lse_BTN))
        dsink_N = -(weight_BTN * pull_BTN).sum((0, 1)).astype(sink_N.dtype)
    T, S = plan.num_queries, plan.num_keys
    return dq[:, :T], dk[:, :S], dv[:, :S], dsink_N, None, None


def _backward_by_tiles(plan: Plan, q, k, v, q_rows, do, base, pull, segments, finite_BSK):
    (B, padded_T, _, H), (K, E), dtype = q.shape, v.shape[2:], q_rows.dtype
    tiles, num_q_tiles = plan.table.by_key, plan.table.by_query.num_rows

    def one_head(z, carry):
        head = Head(plan, z // K, z % K)

        def column(j, carry):
            dq_IHY, dk, dv = carry
            usable_X1 = head.keys(finite_BSK, j)[:, None]
            k_XH = jnp.where(usable_X1, head.keys(k, j), 0).astype(dtype)
            v_XE = jnp.where(usable_X1, head.keys(v, j), 0).astype(dtype)
            k_HX = k_XH.T

            # Scores lie keys first: no product needs a transposed left operand, which costs double.
            def step(i, carry, masked):
                dq_IHY, dk_XH, dv_XE = carry
                q_YH, do_YE = head.tile(q_rows, i), head.tile(do, i)
                s_XY = _dot(k_XH, q_YH, 1, 1)
                if masked:
                    pairs = head.allowed(segments, i, j, q_axis=1)
                    s_XY = jnp.where(pairs, s_XY, -jnp.inf)
                e_XY = jnp.exp(plan.size * (s_XY - head.tile(base, i)[None]))
                ds_XY = e_XY * (_dot(v_XE, do_YE, 1, 1) - head.tile(pull, i)[None])
                if masked:
                    ds_XY = jnp.where(pairs, ds_XY, 0)
                dq_HY = lax.dynamic_index_in_dim(dq_IHY, i, 0, keepdims=False)
                dq_HY = dq_HY + _dot(k_HX, ds_XY, 1, 0)
                return (
                    lax.dynamic_update_index_in_dim(dq_IHY, dq_HY, i, 0),
                    dk_XH + _dot(ds_XY, q_YH, 1, 0),
                    dv_XE + _dot(e_XY, do_YE, 1, 0),
                )

            zeros = jnp.zeros((plan.k_tile, H), dtype), jnp.zeros((plan.k_tile, E), dtype)
            dq_IHY, dk_XH, dv_XE = plan.over_entries(tiles, j, step, (dq_IHY, *zeros))
            dk = head.with_keys(dk, j, jnp.where(usable_X1, dk_XH * plan.size, 0))
            return dq_IHY, dk, head.with_keys(dv, j, jnp.where(usable_X1, dv_XE, 0))

        dq, dk, dv = carry
        dq_IHY = jnp.zeros((num_q_tiles, H, plan.rows), dtype)
        dq_IHY, dk, dv = lax.fori_loop(0, tiles.num_rows, column, (dq_IHY, dk, dv))
        dq_TGH = (dq_IHY.swapaxes(1, 2) * plan.scale).reshape(padded_T, plan.groups, H)
        return head.with_all_rows(dq, dq_TGH), dk, dv

    return lax.fori_loop(0, B * K, one_head, tuple(map(jnp.zeros_like, (q, k, v))))


def _one_tile_backward(plan: Plan, q, k, v, q_rows, do, base, pull, segments, finite_BSK):
    usable = finite_BSK[..., None]
    k_BKXH, v_BKXE = (
        in_tiles(jnp.where(usable, x, 0).astype(q_rows.dtype), plan.k_tile)[:, :, 0] for x in (k, v)
    )
    rows = (x[:, :, 0] for x in (do, base, pull))
    gradients = one_tile.backward(plan, q_rows[:, :, 0], k_BKXH, v_BKXE, *rows, segments)
    dq, dk, dv = (
        from_tiles(x[:, :, None], groups)
        for x, groups in zip(gradients, (plan.groups, 1, 1), strict=True)
    )
    dk, dv = jnp.where(usable, dk * plan.size, 0), jnp.where(usable, dv, 0)
    return (dq * plan.scale).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_attend.defvjp(_forward, _backward)


def _tile_sizes(mask: Mask, T: int, S: int, groups: int) -> tuple[int, int]:
    """Queries and keys in a tile: the shape with the least estimated time for this mask."""

    def fitted(side):
        q_tile = max(side // groups // 16 * 16, 16)
        return min(q_tile, T), min(side, S)

    def microseconds(side):
        q_tile, k_tile = fitted(side)
        kinds = tile_table(mask, T, S, q_tile, k_tile).kinds
        full, masked = np.count_nonzero(kinds == FULL), np.count_nonzero(kinds == PARTIAL)
        full_us, masked_us = TILE_US[side]
        return (full * full_us + masked * masked_us) * (q_tile * groups * k_tile / side**2)

    # Of the sides that hold everything in one tile, the smallest: the others would be cut to it.
    whole = min((side for side in TILE_US if side >= max(T * groups, S)), default=max(TILE_US))
    return fitted(min((side for side in TILE_US if side <= whole), key=microseconds))


def run(call: Call) -> tuple[jax.Array, jax.Array]:
    """Call → (out_BTNE, lse_BNT), for the front door."""
    (_, T, N, _), (_, S, K, _) = call.q_BTNH.shape, call.k_BSKH.shape
    segmented = call.q_segments is not None or call.k_segments is not None
    sizes = _tile_sizes(call.mask, T, S, N // K)
    plan = Plan(call.mask, float(call.scale), N // K, T, S, *sizes, masks_all=segmented)
    inputs = call.q_BTNH, call.k_BSKH, call.v_BSKE, call.sink_N
    return _attend(plan, *inputs, call.q_segments, call.k_segments)


def cannot(call: Call) -> str | None:
    """Why tiles cannot run this call, or None; known from shapes and static values."""
    if call.q_index is not None or call.k_index is not None:
        return "explicit positions, as of a cache, are data: which tiles are empty is not known"
    if call.dropout is not None:
        return "dropout is not made tile by tile; the reference drops weights"
    if isinstance(call.scale, jax.Array):
        return "scale is an array; it must be a number, multiply the queries instead"
    if not call.q_BTNH.shape[1] or not call.k_BSKH.shape[1]:
        return "there are no queries or no keys to cut into tiles"
    return None


def unwise(call: Call) -> str | None:
    """Why "auto" should pass tiles over although they could run the call, or None."""
    (B, T, N, _), S = call.q_BTNH.shape, call.k_BSKH.shape[1]
    platform = jax.default_backend()
    if platform == "cpu":
        if min(T, S) < FEW:
            return f"with fewer than {FEW} queries or keys ({T} × {S}) dense is as fast"
        return None
    dense = 4 * B * N * T * S
    if dense <= DENSE_BYTES:
        return f"made for the CPU; on a {platform} dense is one product and its {dense} B fit"
    return None
