"""Attention whose queries and keys are one tile: all heads of several batch entries in one product.

A loop over heads of short sequences is a loop over small products, and these leave all cores but
one idle. Letters as in ``tiled``: Y rows of the query tile, X keys of the key tile.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from attention.masks.values import FULL
from attention.tiles import Head, Plan, Segments

# Pairs at once: with the few arrays of float32 scores that a step holds, the level-2 caches of 2
# cores are full. Four times as many took a quarter longer at 64 sequences of 64. Where the heads of
# one batch entry have more (16 heads at 384 × 384), a loop over the heads took two thirds of the
# time and a seventh of the memory.
PAIRS = 1 << 18


def fits(plan: Plan, num_heads: int) -> bool:
    """Whether the plan is one tile, and that of all key-value heads of one batch entry is small."""
    return plan.is_one_tile and num_heads * plan.rows * plan.k_tile <= PAIRS


def forward(plan: Plan, q_BKYH, k_BKXH, v_BKXE, segments: Segments):
    """top_BKY, total_BKY and sum_BKYE of the softmax, as ``tiled`` carries them from tile to tile.

    Every argument has its final dtype, and queries are multiplied by the direction.
    """

    def some(q_BKYH, k_BKXH, v_BKXE, segments):
        s_BKYX = jnp.einsum("bkyh,bkxh->bkyx", q_BKYH, k_BKXH)
        if _masks(plan):
            s_BKYX = jnp.where(_allowed(plan, segments, q_axis=0), s_BKYX, -jnp.inf)
        top_BKY = s_BKYX.max(-1)
        base_BKY = jnp.where(top_BKY == -jnp.inf, 0, top_BKY)
        p_BKYX = jnp.exp(plan.size * (s_BKYX - base_BKY[..., None]))
        return top_BKY, p_BKYX.sum(-1), jnp.einsum("bkyx,bkxe->bkye", p_BKYX, v_BKXE)

    return _in_pieces(some, plan, q_BKYH, k_BKXH, v_BKXE, segments)


def backward(plan: Plan, q_BKYH, k_BKXH, v_BKXE, do_BKYE, base_BKY, pull_BKY, segments: Segments):
    """dq_BKYH, dk_BKXH and dv_BKXE, without the scale; arguments as ``tiled`` prepares them."""

    def some(q_BKYH, k_BKXH, v_BKXE, do_BKYE, base_BKY, pull_BKY, segments):
        # Keys first, for the reason given in ``tiled``.
        s_BKXY = jnp.einsum("bkxh,bkyh->bkxy", k_BKXH, q_BKYH)
        if _masks(plan):
            allowed = _allowed(plan, segments, q_axis=1)
            s_BKXY = jnp.where(allowed, s_BKXY, -jnp.inf)
        e_BKXY = jnp.exp(plan.size * (s_BKXY - base_BKY[:, :, None]))
        dp_BKXY = jnp.einsum("bkxe,bkye->bkxy", v_BKXE, do_BKYE)
        ds_BKXY = e_BKXY * (dp_BKXY - pull_BKY[:, :, None])
        if _masks(plan):
            ds_BKXY = jnp.where(allowed, ds_BKXY, 0)
        return (
            jnp.einsum("bkhx,bkxy->bkhy", k_BKXH.swapaxes(2, 3), ds_BKXY).swapaxes(2, 3),
            jnp.einsum("bkxy,bkyh->bkxh", ds_BKXY, q_BKYH),
            jnp.einsum("bkxy,bkye->bkxe", e_BKXY, do_BKYE),
        )

    return _in_pieces(some, plan, q_BKYH, k_BKXH, v_BKXE, do_BKYE, base_BKY, pull_BKY, segments)


def _masks(plan: Plan) -> bool:
    return plan.masks_all or plan.table.kinds[0, 0] != FULL


def _allowed(plan: Plan, segments: Segments, q_axis: int) -> jax.Array:
    """Which pairs may meet, (B or 1, 1, Y, X), or (…, X, Y) for q_axis 1."""

    def one(q_T, k_S):
        rows = Segments(*(None if x is None else x[None] for x in (q_T, k_S)))
        return Head(plan, 0, 0).allowed(rows, 0, 0, q_axis)

    if segments.q_BT is None and segments.k_BS is None:
        return one(None, None)[None, None]
    return jax.vmap(one)(segments.q_BT, segments.k_BS)[:, None]


def _in_pieces(some: Callable, plan: Plan, *arguments):
    """``some`` of as many batch entries at once as have ``PAIRS`` pairs."""
    B, K, Y = arguments[0].shape[:3]
    fit = PAIRS // (K * Y * plan.k_tile)
    piece = max(n for n in range(1, B + 1) if n <= fit and B % n == 0)
    if piece == B:
        return some(*arguments)
    cut = jax.tree.map(lambda x: x.reshape(B // piece, piece, *x.shape[1:]), arguments)
    done = lax.map(lambda piece: some(*piece), cut)
    return jax.tree.map(lambda x: x.reshape(B, *x.shape[2:]), done)
