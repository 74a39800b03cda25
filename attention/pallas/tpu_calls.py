"""How attention is laid out for the TPU kernels: tiles, rows, visits, and the Pallas calls."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention.masks import EMPTY
from attention.pallas import tpu_kernels
from attention.pallas.tpu_kernels import Rows, Scores, Statistics, Visits
from attention.tile_table import TileList, tile_table

LANES = 128


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries and keys of a tile. A tile has queries · G rows."""

    queries: int
    keys: int


def choose_tile(num_queries: int, num_keys: int, group: int, widest: int, item_size: int) -> Tile:
    """The tile of all three kernels: up to 1024 rows of 512 keys, half the rows for wide heads.

    Key tiles are read once per query tile, so many rows keep the kernel from waiting for memory:
    v6e does about 560 operations in the time in which it reads a byte, and a row of bfloat16 does
    one operation per byte. ``benchmarks/aot_tpu.py`` prints the memory that the compiler
    takes for it; which tile is fastest has not been measured on a device.

    Args:
      group: G as the kernels see it, see ``folded_group``.
      widest: the wider of H and E.
      item_size: bytes of an element of q, k and v.
    """
    rows = 1024 if widest * item_size <= 512 else 512
    unit = LANES // math.gcd(LANES, group)
    needed = -(-num_queries // unit)
    queries = unit * max(1, min(rows // (unit * group), needed))
    keys = max(LANES, 512 * rows // max(rows, queries * group) // LANES * LANES)
    return Tile(queries, min(keys, -(-num_keys // LANES) * LANES))


def folded_group(group: int) -> int:
    """G, or the next multiple of 8 where a tile of whole lanes would have too many rows."""
    unit = LANES // math.gcd(LANES, group)
    return group if unit * group <= 1024 else -(-group // 8) * 8


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is known of a call before tracing.

    Attributes:
      scores: mask, scale and number of keys.
      num_queries: T.
      group: G, without padding.
      tile: of all three kernels.
      interpret: parameters of the TPU interpreter, or None to compile.
    """

    scores: Scores
    num_queries: int
    group: int
    tile: Tile
    interpret: pltpu.InterpretParams | None

    @property
    def layout(self) -> Layout:
        return Layout(self.num_queries, self.scores.num_keys, self.group, self.tile)

    def visits(self, by_key: bool = False) -> Visits:
        """The work of a kernel, in the order of its output."""
        table = tile_table(
            self.scores.mask,
            self.num_queries,
            self.scores.num_keys,
            self.tile.queries,
            self.tile.keys,
        )
        return visits(table.by_key if by_key else table.by_query)

    @property
    def num_visits(self) -> int:
        """The most visits that one of the kernels makes."""
        return max(len(self.visits().row), len(self.visits(by_key=True).row))


def visits(tiles: TileList) -> Visits:
    """The listed tiles, and one EMPTY visit for each row without any."""
    idle = np.flatnonzero(np.diff(tiles.start) == 0).astype(np.int32)
    row = np.concatenate([tiles.row, idle])
    order = np.argsort(row, kind="stable")
    column = np.concatenate([tiles.column, np.zeros_like(idle)])[order]
    kind = np.concatenate([tiles.kind, np.full_like(idle, EMPTY)])[order]
    # An idle visit stays on the tile that is already loaded.
    working = np.maximum.accumulate(np.where(kind == EMPTY, 0, np.arange(len(kind))))
    return Visits(row[order], column[working], kind)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How heads and sequences become rows and tiles; row t·G + g is query t of head g of a group.

    Every array is padded with zeros to whole tiles, so that no kernel reads past an end.
    """

    num_queries: int
    num_keys: int
    group: int
    tile: Tile

    @property
    def padded_queries(self) -> int:
        return -(-self.num_queries // self.tile.queries) * self.tile.queries

    @property
    def padded_keys(self) -> int:
        return -(-self.num_keys // self.tile.keys) * self.tile.keys

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.tile.queries * folded_group(self.group)

    def queries(self, x_BTNH: jax.Array) -> jax.Array:
        """(B, K, H, rows of all tiles)."""
        B, T, N, H = x_BTNH.shape
        x = x_BTNH.reshape(B, T, N // self.group, self.group, H)
        padding = self.padded_queries - T, folded_group(self.group) - self.group
        x = jnp.pad(x, ((0, 0), (0, padding[0]), (0, 0), (0, padding[1]), (0, 0)))
        return x.transpose(0, 2, 4, 1, 3).reshape(B, N // self.group, H, -1)

    def heads(self, x_BKHR: jax.Array) -> jax.Array:
        """(B, T, N, H): undoes ``queries``."""
        B, K, H, _ = x_BKHR.shape
        x = x_BKHR.reshape(B, K, H, self.padded_queries, -1)
        x = x[..., : self.num_queries, : self.group].transpose(0, 3, 1, 4, 2)
        return x.reshape(B, self.num_queries, K * self.group, H)

    def per_row(self, x_BNT: jax.Array) -> jax.Array:
        """(B, K, 1, rows of all tiles), for one number per query and head."""
        return self.queries(x_BNT.transpose(0, 2, 1)[..., None])

    def per_head(self, x_BK1R: jax.Array) -> jax.Array:
        """(B, N, T): undoes ``per_row``."""
        return self.heads(x_BK1R)[..., 0].transpose(0, 2, 1)

    def keys(self, x_BSKH: jax.Array) -> jax.Array:
        """(B, K, padded S, H)."""
        padding = self.padded_keys - self.num_keys
        return jnp.pad(x_BSKH, ((0, 0), (0, padding), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    def keys_back(self, x_BKSH: jax.Array) -> jax.Array:
        """(B, S, K, H): undoes ``keys``."""
        return x_BKSH[:, :, : self.num_keys].transpose(0, 2, 1, 3)

    def sinks(self, sink_N: jax.Array) -> jax.Array:
        """(K, 1, rows of one tile): the same in all tiles."""
        sink_KG = sink_N.astype(jnp.float32).reshape(-1, self.group)
        sink_KG = jnp.pad(sink_KG, ((0, 0), (0, folded_group(self.group) - self.group)))
        return jnp.tile(sink_KG, (1, self.tile.queries))[:, None]

    def row_data(self, tags: tuple[jax.Array, jax.Array] | None) -> Rows:
        """Positions, aligned at the end, and tags, both per row."""
        G = folded_group(self.group)
        offset = self.num_keys - self.num_queries
        # Computed on the device: as a constant it would be as large as the program.
        position = jax.lax.broadcasted_iota(jnp.int32, (1, self.padded_queries * G), 1)
        position = position // G + offset
        if tags is None:
            return Rows(position, None, None)
        tag_BT, tag_BS = tags
        tag_BT = jnp.pad(tag_BT, ((0, 0), (0, self.padded_queries - self.num_queries)))
        tag_BS = jnp.pad(tag_BS, ((0, 0), (0, self.padded_keys - self.num_keys)))
        return Rows(position, jnp.repeat(tag_BT, G, axis=1)[:, None], tag_BS[:, None])


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """Block shapes; ``q_of`` and ``k_of`` read from the visits which tile comes next."""

    layout: Layout
    q_of: str
    k_of: str

    def by_query(self, height: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, height, self.layout.rows),
            lambda b, k, i, visits: (b, k, 0, getattr(visits, self.q_of)[i]),
        )

    def by_key(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, self.layout.tile.keys, width),
            lambda b, k, i, visits: (b, k, getattr(visits, self.k_of)[i], 0),
        )

    def by_key_in_lanes(self, height: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, height, self.layout.tile.keys),
            lambda b, k, i, visits: (b, k, 0, getattr(visits, self.k_of)[i]),
        )

    def rows(self, rows: Rows) -> Rows:
        position = pl.BlockSpec(
            (1, self.layout.rows), lambda b, k, i, visits: (0, getattr(visits, self.q_of)[i])
        )
        if rows.tag_1R is None:
            return Rows(position, None, None)
        q_tag = pl.BlockSpec(
            (None, 1, self.layout.rows),
            lambda b, k, i, visits: (b, 0, getattr(visits, self.q_of)[i]),
        )
        k_tag = pl.BlockSpec(
            (None, 1, self.layout.tile.keys),
            lambda b, k, i, visits: (b, 0, getattr(visits, self.k_of)[i]),
        )
        return Rows(position, q_tag, k_tag)

    def sinks(self) -> pl.BlockSpec:
        return pl.BlockSpec((None, 1, self.layout.rows), lambda b, k, i, visits: (k, 0, 0))


def _launch(kernel, plan: Plan, visits: Visits, operands, outputs, scratch, products):
    """Runs a kernel over batch, key-value heads and visits.

    Args:
      operands: pairs of an array, or a tree of them, and its block.
      outputs: pairs of a ``ShapeDtypeStruct`` and its block.
      scratch: shapes of the float32 accumulators.
      products: multiply-adds for one score, for the cost estimate.
    """
    arrays, in_specs = zip(*operands, strict=True)
    out_shape, out_specs = zip(*outputs, strict=True)
    B, K = out_shape[0].shape[:2]
    scores = B * K * np.count_nonzero(visits.kind) * plan.layout.rows * plan.tile.keys
    moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, out_shape)))
    return pl.pallas_call(
        functools.partial(kernel, plan.scores),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, K, len(visits.row)),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=int(2 * scores * products), transcendentals=int(scores), bytes_accessed=moved
        ),
        interpret=False if plan.interpret is None else plan.interpret,
        name=f"attention_{kernel.__name__}",
    )(visits, *arrays)


def forward(plan: Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, tags) -> tuple[jax.Array, ...]:
    """out_BTNE in the dtype of v, and lse, base and share (B, N, T) in float32.

    The weights of a row are exp2(score · log2 e − base) · share.
    """
    layout = plan.layout
    at = _Blocks(layout, q_of="row", k_of="column")
    q, k, v = layout.queries(q_BTNH), layout.keys(k_BSKH), layout.keys(v_BSKE)
    rows, sinks = layout.row_data(tags), layout.sinks(sink_N)
    B, K, H, R = q.shape
    E = v.shape[3]
    out, *statistics = _launch(
        tpu_kernels.forward,
        plan,
        plan.visits(),
        [
            (rows, at.rows(rows)),
            (q, at.by_query(H)),
            (k, at.by_key(H)),
            (v.swapaxes(2, 3), at.by_key_in_lanes(E)),
            (sinks, at.sinks()),
        ],
        [
            (jax.ShapeDtypeStruct((B, K, E, R), v.dtype), at.by_query(E)),
            *[(jax.ShapeDtypeStruct((B, K, 1, R), jnp.float32), at.by_query(1))] * 3,
        ],
        scratch=[(1, layout.rows), (1, layout.rows), (E, layout.rows)],
        products=H + E,
    )
    return layout.heads(out), *map(layout.per_head, statistics)


def backward(
    plan: Plan, q_BTNH, k_BSKH, v_BSKE, do_BTNE, base_BNT, share_BNT, centre_BNT, tags
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk, dv from do, what makes the weights (see ``forward``) and centre = do·out − dlse."""
    layout = plan.layout
    q, k, v = layout.queries(q_BTNH), layout.keys(k_BSKH), layout.keys(v_BSKE)
    do = layout.queries(do_BTNE)
    statistics = Statistics(*map(layout.per_row, (base_BNT, share_BNT, centre_BNT)))
    rows = layout.row_data(tags)
    H, E, width = q.shape[2], v.shape[3], layout.tile.keys

    def operands(at: _Blocks) -> list:
        return [
            (rows, at.rows(rows)),
            (q, at.by_query(H)),
            (k, at.by_key(H)),
            (v, at.by_key(E)),
            (do, at.by_query(E)),
            (statistics, Statistics(*[at.by_query(1)] * 3)),
        ]

    at = _Blocks(layout, q_of="row", k_of="column")
    (dq,) = _launch(
        tpu_kernels.query_gradient,
        plan,
        plan.visits(),
        [*operands(at), (k.swapaxes(2, 3), at.by_key_in_lanes(H))],
        [(jax.ShapeDtypeStruct(q.shape, q.dtype), at.by_query(H))],
        scratch=[(H, layout.rows)],
        products=2 * H + E,
    )
    at = _Blocks(layout, q_of="column", k_of="row")
    dk, dv = _launch(
        tpu_kernels.key_value_gradients,
        plan,
        plan.visits(by_key=True),
        operands(at),
        [
            (jax.ShapeDtypeStruct(k.shape, k.dtype), at.by_key(H)),
            (jax.ShapeDtypeStruct(v.shape, v.dtype), at.by_key(E)),
        ],
        scratch=[(width, H), (width, E)],
        products=2 * H + 2 * E,
    )
    return layout.heads(dq), layout.keys_back(dk), layout.keys_back(dv)
