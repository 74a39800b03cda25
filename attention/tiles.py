"""What the tile loops of ``tiled`` are made of: the plan of a call, and tiles cut out of arrays.

Letters beyond those of the package: Y = q_tile · G rows of a query tile, X = k_tile keys of a key
tile.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attention.masks import Mask
from attention.tile_table import TileList, TileTable, tile_table


@dataclasses.dataclass(frozen=True)
class Plan:
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
    def is_one_tile(self) -> bool:
        """Whether all queries and all keys are in one tile, and none is padding."""
        return (self.q_tile, self.k_tile) == (self.num_queries, self.num_keys)

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Documents of queries and keys, 0 for padding, or None where the caller gave none."""

    q_BT: jax.Array | None
    k_BS: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Head:
    """Batch entry b and key-value head h, whose tiles it cuts out of whole arrays.

    What an inner loop reads again and again comes from ``in_tiles``, where a tile is one contiguous
    block; what is read or written once comes straight from the caller's layout.
    """

    plan: Plan
    b: jax.Array
    h: jax.Array

    def tile(self, x_BKIYx: jax.Array, i) -> jax.Array:
        """(Y, …): tile i of an array made by ``in_tiles``."""
        corner = _corner(x_BKIYx, self.b, self.h, i)
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

    def with_all_rows(self, x_BTNx: jax.Array, rows_TGx: jax.Array) -> jax.Array:
        corner = _corner(x_BTNx, self.b, 0, self.h * self.plan.groups)
        return lax.dynamic_update_slice(x_BTNx, rows_TGx[None].astype(x_BTNx.dtype), corner)

    def _cut(self, x, i, tile, heads):
        corner = _corner(x, self.b, i * tile, self.h * heads)
        cut = lax.dynamic_slice(x, corner, (1, tile, heads, *x.shape[3:]))
        return cut.reshape(tile * heads, *x.shape[3:])

    def _put(self, x, i, values, tile, heads):
        corner = _corner(x, self.b, i * tile, self.h * heads)
        values = values.astype(x.dtype).reshape(1, tile, heads, *x.shape[3:])
        return lax.dynamic_update_slice(x, values, corner)

    def allowed(self, segments: Segments, i, j, q_axis: int) -> jax.Array:
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
            corner = _corner(segments.q_BT, self.b, i * plan.q_tile)
            q_segment = lax.dynamic_slice(segments.q_BT, corner, (1, plan.q_tile))
            q_segment = jnp.expand_dims(jnp.repeat(q_segment[0], plan.groups), 1 - q_axis)
            allowed = allowed & (q_segment != 0)
        if segments.k_BS is not None:
            corner = _corner(segments.k_BS, self.b, j * plan.k_tile)
            k_segment = lax.dynamic_slice(segments.k_BS, corner, (1, plan.k_tile))
            k_segment = jnp.expand_dims(k_segment[0], q_axis)
            allowed = allowed & (k_segment != 0)
        if q_segment is not None and k_segment is not None:
            allowed = allowed & (q_segment == k_segment)
        return allowed


def padded(x, tile: int):
    """Zeros after the end of axis 1, up to a whole number of tiles; no copy where none is due."""
    short = -x.shape[1] % tile
    return jnp.pad(x, ((0, 0), (0, short), *((0, 0),) * (x.ndim - 2))) if short else x


def in_tiles(x_BLNx: jax.Array, tile: int, heads: int = 1) -> jax.Array:
    """(B, length, N, …) → (B, N/heads, tiles, tile · heads, …): every tile one contiguous block."""
    B, length, N, *rest = x_BLNx.shape
    x = x_BLNx.reshape(B, length // tile, tile, N // heads, heads, *rest)
    x = x.transpose(0, 3, 1, 2, 4, *range(5, x.ndim))
    return x.reshape(B, N // heads, length // tile, tile * heads, *rest)


def from_tiles(x_BKIYx: jax.Array, heads: int = 1) -> jax.Array:
    """(B, N/heads, tiles, tile · heads, …) → (B, length, N, …): the inverse of ``in_tiles``."""
    B, K, num_tiles, Y, *rest = x_BKIYx.shape
    x = x_BKIYx.reshape(B, K, num_tiles * Y // heads, heads, *rest)
    return x.swapaxes(1, 2).reshape(B, num_tiles * Y // heads, K * heads, *rest)


def _corner(x: jax.Array, *index) -> tuple[jax.Array, ...]:
    """Where a slice begins, 0 on the axes not given; slices want indices of one dtype."""
    return tuple(jnp.asarray(i, jnp.int32) for i in (*index, *(0,) * (x.ndim - len(index))))
