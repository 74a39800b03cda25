"""Softmax attention tile by tile in plain XLA: memory linear in length, empty tiles never visited.

Forward: for every query tile an online softmax over its non-empty key tiles. Backward: for every
key tile the scores of its non-empty query tiles once more, from the kept row statistics, which
yields dq, dk and dv in one pass (FlashAttention-2, Dao 2023, arXiv 2307.08691). The loops run over
the lists of the tile table, so neither the program nor its compile time grows with the length.

Arrays are cut into tiles head by head, since XLA's CPU products are three times as fast on
contiguous two-dimensional operands. The G query heads that share a key-value head lie in one query
tile under each other, its rows, so keys and values are never repeated. Letters beyond those of the
package: Z = B · K pairs of batch entry and key-value head, I query tiles, J key tiles, Y = G ·
q_tile rows of a query tile, X = k_tile keys of a key tile.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attention.masks import Mask
from attention.tile_table import TileTable, tile_table

FLOATS = ("bfloat16", "float16", "float32", "float64")

# Below this many scores the dense form is faster: a tile costs about 0.1 ms of dispatch.
CROSSOVER_SCORES = 1 << 22


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known before tracing: shapes, mask, tiles. Hashable."""

    mask: Mask
    scale: float
    groups: int
    num_queries: int
    num_keys: int
    q_tile: int
    k_tile: int
    masks_all: bool  # segments are data: no tile can be known to be full

    @property
    def table(self) -> TileTable:
        return tile_table(self.mask, self.num_queries, self.num_keys, self.q_tile, self.k_tile)

    @property
    def direction(self) -> float:
        """Multiplies the queries: exact in any precision, and leaves ``size`` positive."""
        return float(np.sign(self.scale))

    @property
    def size(self) -> float:
        """scale = direction · size, and size > 0, so the largest product is the largest score."""
        return abs(self.scale) if self.scale else 1.0

    def entries(self, tile_list):
        """Bounds (row → first, last) of the full and of the masked entries of a tile list."""
        start, full_end = jnp.asarray(tile_list.start), jnp.asarray(tile_list.full_end)
        if self.masks_all:
            full_end = start[:-1]
        has_full = not self.masks_all and bool((tile_list.full_end > tile_list.start[:-1]).any())
        has_partial = self.masks_all or bool((tile_list.full_end < tile_list.start[1:]).any())
        return (
            (False, has_full, start, full_end),
            (True, has_partial, full_end, start[1:]),
        )

    def over_entries(self, tile_list, row, step, carry):
        """Runs carry = step(column, carry, masked=…) over the entries of a row."""
        column = jnp.asarray(tile_list.column)
        for masked, occurs, first, last in self.entries(tile_list):
            if occurs:
                carry = lax.fori_loop(
                    first[row],
                    last[row],
                    lambda entry, carry, masked=masked: step(column[entry], carry, masked),
                    carry,
                )
        return carry


def _q_tiles(plan: _Plan, x_BTNx: jax.Array) -> jax.Array:
    """(B, T, N, …) → (Z, I, Y, …), zeros past the end."""
    B, T, N, *rest = x_BTNx.shape
    G, I, tile = plan.groups, -(-T // plan.q_tile), plan.q_tile
    x = jnp.pad(x_BTNx, ((0, 0), (0, I * tile - T), (0, 0), *((0, 0) for _ in rest)))
    x = x.reshape(B, I, tile, N // G, G, *rest)
    x = x.transpose(0, 3, 1, 4, 2, *range(5, x.ndim))
    return x.reshape(B * (N // G), I, G * tile, *rest)


def _from_q_tiles(plan: _Plan, x_ZIYx: jax.Array, B: int) -> jax.Array:
    """(Z, I, Y, …) → (B, T, N, …)."""
    Z, I, _, *rest = x_ZIYx.shape
    G, tile, T = plan.groups, plan.q_tile, plan.num_queries
    x = x_ZIYx.reshape(B, Z // B, I, G, tile, *rest)
    x = x.transpose(0, 2, 4, 1, 3, *range(5, x.ndim))
    return x.reshape(B, I * tile, Z // B * G, *rest)[:, :T]


def _k_tiles(plan: _Plan, x_BSKx: jax.Array) -> jax.Array:
    """(B, S, K, …) → (Z, J, X, …), zeros past the end."""
    B, S, K, *rest = x_BSKx.shape
    J, tile = -(-S // plan.k_tile), plan.k_tile
    x = jnp.pad(x_BSKx, ((0, 0), (0, J * tile - S), (0, 0), *((0, 0) for _ in rest)))
    x = x.reshape(B, J, tile, K, *rest)
    return x.transpose(0, 3, 1, 2, *range(4, x.ndim)).reshape(B * K, J, tile, *rest)


def _from_k_tiles(plan: _Plan, x_ZJXx: jax.Array, B: int) -> jax.Array:
    """(Z, J, X, …) → (B, S, K, …)."""
    Z, J, tile, *rest = x_ZJXx.shape
    x = x_ZJXx.reshape(B, Z // B, J, tile, *rest)
    x = x.transpose(0, 2, 3, 1, *range(4, x.ndim))
    return x.reshape(B, J * tile, Z // B, *rest)[:, : plan.num_keys]


def _at(array: jax.Array, *index) -> jax.Array:
    for i in index:
        array = lax.dynamic_index_in_dim(array, i, 0, keepdims=False)
    return array


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int, dtype) -> jax.Array:
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=dtype)


@dataclasses.dataclass(frozen=True)
class _Allowed:
    """Which pairs of a tile may meet: mask, end of the keys, segments."""

    plan: _Plan
    q_segments_BIY: jax.Array | None
    k_segments_BJX: jax.Array | None

    @classmethod
    def of(cls, plan: _Plan, q_segments_BT, k_segments_BS) -> _Allowed:
        q_segments, k_segments = q_segments_BT, k_segments_BS
        if q_segments is not None:
            rows_BTG = jnp.repeat(q_segments[:, :, None], plan.groups, axis=2)
            q_segments = _q_tiles(plan, rows_BTG)
        if k_segments is not None:
            k_segments = _k_tiles(plan, k_segments[:, :, None])
        return cls(plan, q_segments, k_segments)

    def __call__(self, b, i, j, q_axis: int) -> jax.Array:
        """(Y, X) booleans for q_axis 0, (X, Y) for q_axis 1."""
        plan, table = self.plan, self.plan.table
        row_Y = np.tile(np.arange(plan.q_tile, dtype=np.int32), plan.groups)
        q_index = jnp.expand_dims(jnp.asarray(row_Y) + (table.offset + i * plan.q_tile), 1 - q_axis)
        key_X = jnp.arange(plan.k_tile, dtype=jnp.int32) + j * plan.k_tile
        k_index = jnp.expand_dims(key_X, q_axis)
        allowed = plan.mask(q_index, k_index)
        if plan.num_keys % plan.k_tile:
            allowed = allowed & (k_index < plan.num_keys)
        q_segment = k_segment = None
        if self.q_segments_BIY is not None:
            q_segment = jnp.expand_dims(_at(self.q_segments_BIY, b, i), 1 - q_axis)
            allowed = allowed & (q_segment != 0)
        if self.k_segments_BJX is not None:
            k_segment = jnp.expand_dims(_at(self.k_segments_BJX, b, j), q_axis)
            allowed = allowed & (k_segment != 0)
        if q_segment is not None and k_segment is not None:
            allowed = allowed & (q_segment == k_segment)
        return allowed


def _operand_dtypes(q, k, v):
    """Dtype of the products' operands and of the sums. Only bfloat16 products are faster."""
    common = jnp.result_type(q, k, v)
    wide = jnp.promote_types(jnp.float32, common)
    return (common if common == jnp.bfloat16 else wide), wide


def _finite(k_BSKH, v_BSKE):
    return jnp.isfinite(k_BSKH).all(-1) & jnp.isfinite(v_BSKE).all(-1)


def _sees_sick(plan: _Plan, allowed: _Allowed, finite_BSK: jax.Array) -> jax.Array:
    """(B, T, N): the rows that see a key or value that is not finite; free while there is none."""
    B, _, K = finite_BSK.shape
    table = plan.table.by_query
    shape = B * K, table.num_rows, plan.groups * plan.q_tile

    def search(sick_ZJX):
        def row(n):
            z, i = n // table.num_rows, n % table.num_rows

            def step(j, seen_Y, masked):
                pairs = allowed(z // K, i, j, q_axis=0) & _at(sick_ZJX, z, j)[None]
                return seen_Y | pairs.any(1)

            return plan.over_entries(table, i, step, jnp.zeros(shape[2:], bool))

        return lax.map(row, jnp.arange(B * K * table.num_rows)).reshape(shape)

    sick_ZJX = _k_tiles(plan, ~finite_BSK)
    seen = lax.cond(finite_BSK.all(), lambda _: jnp.zeros(shape, bool), search, sick_ZJX)
    return _from_q_tiles(plan, seen, B)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments):
    return _forward(plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments)[0]


def _forward(plan: _Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments):
    B, _, K, E = v_BSKE.shape
    table = plan.table.by_query
    dtype, wide = _operand_dtypes(q_BTNH, k_BSKH, v_BSKE)
    allowed = _Allowed.of(plan, q_segments, k_segments)
    finite_BSK = _finite(k_BSKH, v_BSKE)
    q = _q_tiles(plan, q_BTNH.astype(dtype) * plan.direction)
    k = _k_tiles(plan, jnp.where(finite_BSK[..., None], k_BSKH, 0).astype(dtype))
    v = _k_tiles(plan, jnp.where(finite_BSK[..., None], v_BSKE, 0).astype(dtype))
    Y = q.shape[2]

    def row(n):
        z, i = n // table.num_rows, n % table.num_rows
        q_YH = _at(q, z, i)

        def step(j, carry, masked):
            top_Y, total_Y, sum_YE = carry
            s_YX = _dot(q_YH, _at(k, z, j), 1, 1, wide)
            if masked:
                s_YX = jnp.where(allowed(z // K, i, j, q_axis=0), s_YX, -jnp.inf)
            new_Y = jnp.maximum(top_Y, s_YX.max(1))
            base_Y = jnp.where(new_Y == -jnp.inf, 0, new_Y)
            p_YX = jnp.exp(plan.size * (s_YX - base_Y[:, None]))
            keep_Y = jnp.exp(plan.size * (top_Y - base_Y))
            pv_YE = _dot(p_YX.astype(dtype), _at(v, z, j), 1, 0, wide)
            return new_Y, total_Y * keep_Y + p_YX.sum(1), sum_YE * keep_Y[:, None] + pv_YE

        start = jnp.full(Y, -jnp.inf, wide), jnp.zeros(Y, wide), jnp.zeros((Y, E), wide)
        top_Y, total_Y, sum_YE = plan.over_entries(table, i, step, start)
        mean_YE = sum_YE / jnp.where(top_Y == -jnp.inf, 1, total_Y)[:, None]
        return top_Y, total_Y, mean_YE

    rows = lax.map(row, jnp.arange(B * K * table.num_rows, dtype=jnp.int32))
    top, total, mean = (
        _from_q_tiles(plan, x.reshape(B * K, table.num_rows, *x.shape[1:]), B) for x in rows
    )
    empty_BTN = top == -jnp.inf
    base_BTN = jnp.where(empty_BTN, 0, top)
    lse_BTN = plan.size * base_BTN + jnp.log(jnp.where(empty_BTN, 1, total))
    share_BTN = jnp.where(empty_BTN, 0, 1 / total)
    if sink_N is not None:
        without_BTN = lse_BTN
        lse_BTN = jnp.logaddexp(lse_BTN, sink_N.astype(wide)[None, None])
        kept_BTN = jnp.exp(without_BTN - lse_BTN)
        mean, share_BTN = mean * kept_BTN[..., None], share_BTN * kept_BTN
    sick_BTN = _sees_sick(plan, allowed, finite_BSK)
    out_BTNE = jnp.where(sick_BTN[..., None], jnp.nan, mean).astype(v_BSKE.dtype)
    lse_BTN = jnp.where(empty_BTN, -jnp.inf, lse_BTN)
    outputs = out_BTNE, lse_BTN.swapaxes(1, 2)
    statistics = base_BTN, share_BTN, empty_BTN, empty_BTN | sick_BTN
    inputs = q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments
    return outputs, (inputs, outputs, statistics)


def _backward(plan: _Plan, kept, cotangents):
    (q_BTNH, k_BSKH, v_BSKE, sink_N, q_segments, k_segments), (out_BTNE, lse_BNT), statistics = kept
    base_BTN, share_BTN, empty_BTN, mute_BTN = statistics
    B, _, K, E = v_BSKE.shape
    H = q_BTNH.shape[-1]
    table = plan.table.by_key
    dtype, wide = _operand_dtypes(q_BTNH, k_BSKH, v_BSKE)
    allowed = _Allowed.of(plan, q_segments, k_segments)
    finite_BSK1 = _finite(k_BSKH, v_BSKE)[..., None]

    # Selecting the rows that pass no gradient keeps their 0 weights from meeting inf or NaN.
    do_BTNE, dlse_BTN = cotangents[0], cotangents[1].swapaxes(1, 2).astype(wide)
    do_BTNE = jnp.where(mute_BTN[..., None], 0, do_BTNE)
    dlse_BTN = jnp.where(empty_BTN, 0, dlse_BTN)
    out_BTNE = jnp.where(mute_BTN[..., None], 0, out_BTNE)
    # ds = p · (dp − Σ_j p dp), and Σ_j p dp = do · out; the lse adds p · dlse.
    pull_BTN = (do_BTNE.astype(wide) * out_BTNE.astype(wide)).sum(-1) - dlse_BTN

    q_BTNH = jnp.where(empty_BTN[..., None], 0, q_BTNH)
    q = _q_tiles(plan, q_BTNH.astype(dtype) * plan.direction)
    do = _q_tiles(plan, do_BTNE.astype(dtype))
    base, share, pull = (_q_tiles(plan, x) for x in (base_BTN, share_BTN, pull_BTN))
    k = _k_tiles(plan, jnp.where(finite_BSK1, k_BSKH, 0).astype(dtype))
    v = _k_tiles(plan, jnp.where(finite_BSK1, v_BSKE, 0).astype(dtype))
    # Scores lie keys first here: every product is then one of a contiguous left operand by rows.
    k_T = k.swapaxes(2, 3)
    I, Y = q.shape[1:3]

    def head(z):
        def column(dq_IHY, j):
            k_XH, v_XE, k_HX = _at(k, z, j), _at(v, z, j), _at(k_T, z, j)

            def step(i, carry, masked):
                dk_XH, dv_XE, dq_IHY = carry
                q_YH, do_YE = _at(q, z, i), _at(do, z, i)
                s_XY = _dot(k_XH, q_YH, 1, 1, wide)
                pairs = allowed(z // K, i, j, q_axis=1) if masked else None
                if masked:
                    s_XY = jnp.where(pairs, s_XY, -jnp.inf)
                p_XY = jnp.exp(plan.size * (s_XY - _at(base, z, i)[None])) * _at(share, z, i)[None]
                dp_XY = _dot(v_XE, do_YE, 1, 1, wide)
                ds_XY = p_XY * (dp_XY - _at(pull, z, i)[None])
                if masked:
                    ds_XY = jnp.where(pairs, ds_XY, 0)
                ds_XY = ds_XY.astype(dtype)
                dv_XE = dv_XE + _dot(p_XY.astype(dtype), do_YE, 1, 0, wide)
                dk_XH = dk_XH + _dot(ds_XY, q_YH, 1, 0, wide)
                dq_HY = _at(dq_IHY, i) + _dot(k_HX, ds_XY, 1, 0, wide)
                dq_IHY = lax.dynamic_update_index_in_dim(dq_IHY, dq_HY, i, 0)
                return dk_XH, dv_XE, dq_IHY

            zeros = jnp.zeros((plan.k_tile, H), wide), jnp.zeros((plan.k_tile, E), wide)
            dk_XH, dv_XE, dq_IHY = plan.over_entries(table, j, step, (*zeros, dq_IHY))
            return dq_IHY, (dk_XH, dv_XE)

        columns = jnp.arange(table.num_rows, dtype=jnp.int32)
        dq_IHY, (dk_JXH, dv_JXE) = lax.scan(column, jnp.zeros((I, H, Y), wide), columns)
        return dq_IHY, dk_JXH, dv_JXE

    dq, dk, dv = lax.map(head, jnp.arange(B * K, dtype=jnp.int32))
    dq_BTNH = _from_q_tiles(plan, dq.swapaxes(2, 3), B) * plan.scale
    dk_BSKH = jnp.where(finite_BSK1, _from_k_tiles(plan, dk, B) * plan.size, 0)
    dv_BSKE = jnp.where(finite_BSK1, _from_k_tiles(plan, dv, B), 0)
    dsink_N = None
    if sink_N is not None:
        weight_BTN = jnp.exp(sink_N.astype(wide)[None, None] - lse_BNT.swapaxes(1, 2))
        weight_BTN = jnp.where(empty_BTN, 0, weight_BTN)
        dsink_N = -(weight_BTN * pull_BTN).sum((0, 1)).astype(sink_N.dtype)
    return (
        dq_BTNH.astype(q_BTNH.dtype),
        dk_BSKH.astype(k_BSKH.dtype),
        dv_BSKE.astype(v_BSKE.dtype),
        dsink_N,
        None,
        None,
    )


_attend.defvjp(_forward, _backward)


def run(call, tiles=None) -> tuple[jax.Array, jax.Array]:
    q=call.q_BTNH
    G=q.shape[2]//call.k_BSKH.shape[2]
    T,S=q.shape[1],call.k_BSKH.shape[1]
    tq,tk=tiles or (512,512)
    masks_all = call.q_segments is not None or call.k_segments is not None
    plan=_Plan(call.mask,float(call.scale),G,T,S,tq,tk,masks_all)
    return _attend(plan,q,call.k_BSKH,call.v_BSKE,call.sink_N,call.q_segments,call.k_segments)
