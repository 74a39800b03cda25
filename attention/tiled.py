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

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attention.masks import Mask
from attention.masks.values import FULL, PARTIAL
from attention.tile_table import TileList, TileTable, tile_table

# Wide tiles pay the dispatch less often, narrow ones waste less at the edges of a mask. Sides of a
# tile in rows and keys, and what one costs on 2 cores in float32 at head width 64: dispatch of its
# products and loops, and per pair of a full and of a masked tile. At 1024 the scores leave the
# level-2 cache and a pair costs more again.
SIDES = (512, 256, 128)
TILE_US, FULL_NS, PARTIAL_NS = 40, 1.7, 2.6


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known before tracing.

    Attributes:
      groups: G, the query heads of a key-value head.
      masks_all: segments are data, so no tile is known to be full.
    """

    mask: Mask
    scale: float
    groups: int
    num_queries: int
    num_keys: int
    q_tile: int
    k_tile: int
    masks_all: bool

    @property
    def table(self) -> TileTable:
        return tile_table(self.mask, self.num_queries, self.num_keys, self.q_tile, self.k_tile)

    @property
    def rows(self) -> int:
        return self.q_tile * self.groups

    @property
    def direction(self) -> float:
        """scale = direction · size; −1, 0 or 1 multiplies queries exactly in any precision."""
        return float(np.sign(self.scale))

    @property
    def size(self) -> float:
        """Positive, so that the largest product of a row is also its largest score."""
        return abs(self.scale) or 1.0

    def over_entries(self, tiles: TileList, row, step, carry):
        """carry = step(column, carry, masked) over the entries of a row, FULL ones unmasked."""
        first, end, column = map(jnp.asarray, (tiles.start[:-1], tiles.start[1:], tiles.column))
        split = first if self.masks_all else jnp.asarray(tiles.full_end)
        full = np.any(tiles.full_end > tiles.start[:-1]) and not self.masks_all
        partial = np.any(tiles.full_end < tiles.start[1:]) or self.masks_all
        for occurs, masked, lo, hi in ((full, False, first, split), (partial, True, split, end)):
            if occurs:
                carry = lax.fori_loop(
                    lo[row],
                    hi[row],
                    lambda entry, carry, masked=masked: step(column[entry], carry, masked),
                    carry,
                )
        return carry


@dataclasses.dataclass(frozen=True)
class _Head:
    """Batch entry b and key-value head h, whose tiles it cuts out of whole arrays.

    What an inner loop reads again and again comes from ``_tiles``, where a tile is one contiguous
    block; what is read or written once comes straight from the caller's layout.
    """

    plan: _Plan
    b: jax.Array
    h: jax.Array

    def tile(self, x_BKIYx: jax.Array, i) -> jax.Array:
        """(Y, …): tile i of an array made by ``_tiles``."""
        corner = self.b, self.h, i, *(0,) * (x_BKIYx.ndim - 3)
        return lax.dynamic_slice(x_BKIYx, corner, (1, 1, 1, *x_BKIYx.shape[3:]))[0, 0, 0]

    def rows(self, x_BTNx: jax.Array, i) -> jax.Array:
        """(Y, …), the rows of query tile i: its positions, and within each the G heads."""
        return self._cut(x_BTNx, i, self.plan.q_tile, self.plan.groups)

    def keys(self, x_BSKx: jax.Array, j) -> jax.Array:
        """(X, …), the keys of key tile j."""
        return self._cut(x_BSKx, j, self.plan.k_tile, 1)

    def with_rows(self, x_BTNx: jax.Array, i, rows: jax.Array) -> jax.Array:
        return self._put(x_BTNx, i, rows, self.plan.q_tile, self.plan.groups)

    def with_keys(self, x_BSKx: jax.Array, j, keys: jax.Array) -> jax.Array:
        return self._put(x_BSKx, j, keys, self.plan.k_tile, 1)

    def _cut(self, x, i, tile, heads):
        corner = self.b, i * tile, self.h * heads, *(0,) * (x.ndim - 3)
        cut = lax.dynamic_slice(x, corner, (1, tile, heads, *x.shape[3:]))
        return cut.reshape(tile * heads, *x.shape[3:])

    def _put(self, x, i, values, tile, heads):
        corner = self.b, i * tile, self.h * heads, *(0,) * (x.ndim - 3)
        values = values.astype(x.dtype).reshape(1, tile, heads, *x.shape[3:])
        return lax.dynamic_update_slice(x, values, corner)

    def allowed(self, segments: _Segments, i, j, q_axis: int) -> jax.Array:
        """Which pairs of tile (i, j) may meet: (Y, X) for q_axis 0, (X, Y) for q_axis 1."""
        plan = self.plan
        row_Y = np.repeat(np.arange(plan.q_tile, dtype=np.int32), plan.groups)
        q_index = jnp.asarray(row_Y) + (i * plan.q_tile + plan.table.offset)
        k_index = jnp.arange(plan.k_tile, dtype=jnp.int32) + j * plan.k_tile
        q_index, k_index = jnp.expand_dims(q_index, 1 - q_axis), jnp.expand_dims(k_index, q_axis)
        allowed = plan.mask(q_index, k_index)
        if plan.num_keys % plan.k_tile:
            allowed = allowed & (k_index < plan.num_keys)
        q_segment = k_segment = None
        if segments.q_BT is not None:
            q_segment = lax.dynamic_slice(
                segments.q_BT, (self.b, i * plan.q_tile), (1, plan.q_tile)
            )
            q_segment = jnp.expand_dims(jnp.repeat(q_segment[0], plan.groups), 1 - q_axis)
            allowed = allowed & (q_segment != 0)
        if segments.k_BS is not None:
            k_segment = lax.dynamic_slice(
                segments.k_BS, (self.b, j * plan.k_tile), (1, plan.k_tile)
            )
            k_segment = jnp.expand_dims(k_segment[0], q_axis)
            allowed = allowed & (k_segment != 0)
        if q_segment is not None and k_segment is not None:
            allowed = allowed & (q_segment == k_segment)
        return allowed


@dataclasses.dataclass(frozen=True)
class _Segments:
    q_BT: jax.Array | None
    k_BS: jax.Array | None


def _padded(x, tile: int):
    """Zeros after the end of axis 1, up to a whole number of tiles; no copy where none is due."""
    short = -x.shape[1] % tile
    return jnp.pad(x, ((0, 0), (0, short), *((0, 0),) * (x.ndim - 2))) if short else x


def _tiles(x_BLNx: jax.Array, tile: int, heads: int = 1) -> jax.Array:
    """(B, length, N, …) → (B, N/heads, tiles, tile · heads, …): every tile one contiguous block."""
    B, length, N, *rest = x_BLNx.shape
    x = x_BLNx.reshape(B, length // tile, tile, N // heads, heads, *rest)
    x = x.transpose(0, 3, 1, 2, 4, *range(5, x.ndim))
    return x.reshape(B, N // heads, length // tile, tile * heads, *rest)


def _dot(a, b, a_axis: int, b_axis: int, dtype):
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=dtype)


def _dtypes(q, k, v):
    """Of the operands of products and of sums. Only bfloat16 products beat float32 on a CPU."""
    common = jnp.result_type(q, k, v)
    wide = jnp.promote_types(jnp.float32, common)
    return (common if common == jnp.bfloat16 else wide), wide


def _inputs(plan: _Plan, q_BTNH, k_BSKH, v_BSKE, q_segments, k_segments):
    """Padded inputs, and finite_BSK: whether a key and its value are usable."""
    q, k, v = (
        _padded(q_BTNH, plan.q_tile),
        _padded(k_BSKH, plan.k_tile),
        _padded(v_BSKE, plan.k_tile),
    )
    segments = _Segments(
        None if q_segments is None else _padded(q_segments, plan.q_tile),
        None if k_segments is None else _padded(k_segments, plan.k_tile),
    )
    return q, k, v, segments, jnp.isfinite(k).all(-1) & jnp.isfinite(v).all(-1)


def _sees_sick(plan: _Plan, segments, finite_BSK, sick_BTN):
    """Marks the rows that see a key or value that is not finite; free while there is none."""
    B, _, K = finite_BSK.shape
    tiles = plan.table.by_query

    def row(n, sick_BTN):
        z, i = n // tiles.num_rows, n % tiles.num_rows
        head = _Head(plan, z // K, z % K)

        def step(j, seen_Y, masked):
            pairs = head.allowed(segments, i, j, q_axis=0)
            return seen_Y | (pairs & ~head.keys(finite_BSK, j)[None]).any(1)

        seen_Y = plan.over_entries(tiles, i, step, jnp.zeros(plan.rows, bool))
        return head.with_rows(sick_BTN, i, seen_Y)

    return lax.cond(
        finite_BSK.all(),
        lambda sick_BTN: sick_BTN,
        lambda sick_BTN: lax.fori_loop(0, B * K * tiles.num_rows, row, sick_BTN),
        sick_BTN,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments):
    return _forward(plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments)[0]


def _forward(plan: _Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments):
    arguments = q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments
    dtype, wide = _dtypes(q_BTNH, k_BSKH, v_BSKE)
    q, k, v, segments, finite_BSK = _inputs(plan, *arguments[:3], *arguments[4:])
    (B, padded_T, N), (K, E) = q.shape[:3], v.shape[2:]
    k, v = (
        _tiles(jnp.where(finite_BSK[..., None], x, 0).astype(dtype), plan.k_tile) for x in (k, v)
    )
    tiles = plan.table.by_query
    Y = plan.rows

    def row(n, carry):
        z, i = n // tiles.num_rows, n % tiles.num_rows
        head = _Head(plan, z // K, z % K)
        q_YH = head.rows(q, i).astype(dtype) * plan.direction

        def step(j, carry, masked):
            top_Y, total_Y, sum_YE = carry
            s_YX = _dot(q_YH, head.tile(k, j), 1, 1, wide)
            if masked:
                s_YX = jnp.where(head.allowed(segments, i, j, q_axis=0), s_YX, -jnp.inf)
            new_Y = jnp.maximum(top_Y, s_YX.max(1))
            base_Y = jnp.where(new_Y == -jnp.inf, 0, new_Y)
            p_YX = jnp.exp(plan.size * (s_YX - base_Y[:, None]))
            keep_Y = jnp.exp(plan.size * (top_Y - base_Y))
            sum_YE = sum_YE * keep_Y[:, None] + _dot(
                p_YX.astype(dtype), head.tile(v, j), 1, 0, wide
            )
            return new_Y, total_Y * keep_Y + p_YX.sum(1), sum_YE

        carry_Y = jnp.full(Y, -jnp.inf, wide), jnp.zeros(Y, wide), jnp.zeros((Y, E), wide)
        top_Y, total_Y, sum_YE = plan.over_entries(tiles, i, step, carry_Y)
        empty_Y = top_Y == -jnp.inf
        base_Y = jnp.where(empty_Y, 0, top_Y)
        total_Y = jnp.where(empty_Y, 1, total_Y)
        lse_Y = plan.size * base_Y + jnp.log(total_Y)
        share_Y = jnp.where(empty_Y, 0, 1 / total_Y)
        if sink_N is not None:
            sink_G = lax.dynamic_slice(sink_N, (head.h * plan.groups,), (plan.groups,))
            with_sink_Y = jnp.logaddexp(lse_Y, jnp.tile(sink_G.astype(wide), plan.q_tile))
            share_Y, lse_Y = share_Y * jnp.exp(lse_Y - with_sink_Y), with_sink_Y
        rows = sum_YE * share_Y[:, None], jnp.where(empty_Y, -jnp.inf, lse_Y), base_Y, share_Y
        return tuple(head.with_rows(x, i, y) for x, y in zip(carry, rows, strict=True))

    statistic_BTN = jnp.zeros((B, padded_T, N), wide)
    start = jnp.zeros((B, padded_T, N, E), v_BSKE.dtype), *(statistic_BTN,) * 3
    out_BTNE, lse_BTN, base_BTN, share_BTN = lax.fori_loop(0, B * K * tiles.num_rows, row, start)
    sick_BTN = _sees_sick(plan, segments, finite_BSK, jnp.zeros((B, padded_T, N), bool))
    out_BTNE = jnp.where(sick_BTN[..., None], jnp.nan, out_BTNE)[:, : plan.num_queries]
    outputs = out_BTNE, lse_BTN[:, : plan.num_queries].swapaxes(1, 2)
    return outputs, (arguments, out_BTNE, lse_BTN, base_BTN, share_BTN, sick_BTN)


def _backward(plan: _Plan, kept, cotangents):
    arguments, out_BTNE, lse_BTN, base_BTN, share_BTN, sick_BTN = kept
    sink_N = arguments[3]
    dtype, wide = _dtypes(*arguments[:3])
    q, k, v, segments, finite_BSK = _inputs(plan, *arguments[:3], *arguments[4:])
    (B, padded_T, N, H), (K, E) = q.shape, v.shape[2:]
    tiles, num_q_tiles = plan.table.by_key, plan.table.by_query.num_rows

    # Rows that pass no gradient are selected to 0, lest a 0 weight meets inf or NaN.
    empty_BTN = lse_BTN == -jnp.inf
    mute_BTN = empty_BTN | sick_BTN
    do = _padded(cotangents[0], plan.q_tile)
    out = _padded(out_BTNE, plan.q_tile)
    dlse_BTN = _padded(cotangents[1].swapaxes(1, 2), plan.q_tile)
    # ds = p · (dp − Σ_j p dp + dlse), and Σ_j p dp = do · out. With p = e · share, the share goes
    # to do and to the sum, which are small, and e alone is as large as the tile.
    pull_BTN = jnp.where(mute_BTN, 0, (do.astype(wide) * out.astype(wide)).sum(-1))
    pull_BTN = pull_BTN - jnp.where(empty_BTN, 0, dlse_BTN)
    do = jnp.where(mute_BTN[..., None], 0, do * share_BTN[..., None]).astype(dtype)
    q_rows = jnp.where(empty_BTN[..., None], 0, q).astype(dtype) * plan.direction
    q_rows, do, base, pull = (
        _tiles(x, plan.q_tile, plan.groups) for x in (q_rows, do, base_BTN, pull_BTN * share_BTN)
    )

    def one_head(z, carry):
        head = _Head(plan, z // K, z % K)

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
                s_XY = _dot(k_XH, q_YH, 1, 1, wide)
                if masked:
                    pairs = head.allowed(segments, i, j, q_axis=1)
                    s_XY = jnp.where(pairs, s_XY, -jnp.inf)
                e_XY = jnp.exp(plan.size * (s_XY - head.tile(base, i)[None]))
                ds_XY = e_XY * (_dot(v_XE, do_YE, 1, 1, wide) - head.tile(pull, i)[None])
                if masked:
                    ds_XY = jnp.where(pairs, ds_XY, 0)
                ds_XY = ds_XY.astype(dtype)
                dq_HY = lax.dynamic_index_in_dim(dq_IHY, i, 0, keepdims=False)
                dq_HY = dq_HY + _dot(k_HX, ds_XY, 1, 0, wide)
                return (
                    lax.dynamic_update_index_in_dim(dq_IHY, dq_HY, i, 0),
                    dk_XH + _dot(ds_XY, q_YH, 1, 0, wide),
                    dv_XE + _dot(e_XY.astype(dtype), do_YE, 1, 0, wide),
                )

            zeros = jnp.zeros((plan.k_tile, H), wide), jnp.zeros((plan.k_tile, E), wide)
            dq_IHY, dk_XH, dv_XE = plan.over_entries(tiles, j, step, (dq_IHY, *zeros))
            dk = head.with_keys(dk, j, jnp.where(usable_X1, dk_XH * plan.size, 0))
            return dq_IHY, dk, head.with_keys(dv, j, jnp.where(usable_X1, dv_XE, 0))

        dq, dk, dv = carry
        dq_IHY = jnp.zeros((num_q_tiles, H, plan.rows), wide)
        dq_IHY, dk, dv = lax.fori_loop(0, tiles.num_rows, column, (dq_IHY, dk, dv))
        dq_TGH = (dq_IHY.swapaxes(1, 2) * plan.scale).reshape(padded_T, plan.groups, H)
        corner = head.b, 0, head.h * plan.groups, 0
        dq = lax.dynamic_update_slice(dq, dq_TGH[None].astype(dq.dtype), corner)
        return dq, dk, dv

    dq, dk, dv = lax.fori_loop(0, B * K, one_head, tuple(map(jnp.zeros_like, (q, k, v))))
    dsink_N = None
    if sink_N is not None:
        weight_BTN = jnp.where(empty_BTN, 0, jnp.exp(sink_N.astype(wide)[None, None] - lse_BTN))
        dsink_N = -(weight_BTN * pull_BTN).sum((0, 1)).astype(sink_N.dtype)
    T, S = plan.num_queries, plan.num_keys
    return dq[:, :T], dk[:, :S], dv[:, :S], dsink_N, None, None


_attend.defvjp(_forward, _backward)


def _tile_sizes(mask: Mask, T: int, S: int, groups: int) -> tuple[int, int]:
    """Queries and keys in a tile: the shape with the least estimated time for this mask."""

    def microseconds(sizes):
        kinds = tile_table(mask, T, S, *sizes).kinds
        pairs = sizes[0] * groups * sizes[1]
        full, partial = np.count_nonzero(kinds == FULL), np.count_nonzero(kinds == PARTIAL)
        return (full + partial) * TILE_US + (full * FULL_NS + partial * PARTIAL_NS) * pairs / 1e3

    def fitted(side):
        q_tile = max(side // groups // 16 * 16, 16)
        return min(q_tile, T), min(side, S)

    return min(map(fitted, SIDES), key=microseconds)


def run(call, tiles=None) -> tuple[jax.Array, jax.Array]:
    """Call → (out_BTNE, lse_BNT), for the front door."""
    (_, T, N, _), (_, S, K, _) = call.q_BTNH.shape, call.k_BSKH.shape
    plan = _Plan(
        call.mask,
        float(call.scale),
        N // K,
        T,
        S,
        *(tiles or _tile_sizes(call.mask, T, S, N // K)),
        call.q_segments is not None or call.k_segments is not None,
    )
    return _attend(
        plan,
        call.q_BTNH,
        call.k_BSKH,
        call.v_BSKE,
        call.sink_N,
        call.q_segments,
        call.k_segments,
    )
