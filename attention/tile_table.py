"""Which tiles of the T × S score matrix have work in them, from the mask's structure alone.

Built once per mask and shape, in NumPy, at trace time: it is static, so loops can run over its
lists and Pallas grids can prefetch them. A call that visits the listed tiles only never spends
time on an empty one, and the lists of a window grow with T, not with T².
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from attention.masks import Mask
from attention.masks.values import EMPTY, FULL, PARTIAL


@dataclasses.dataclass(frozen=True, eq=False)
class TileList:
    """The non-empty tiles in order of their row: all of row 0, all of row 1, …

    Within a row the FULL tiles come first, then the PARTIAL ones, each in ascending order, so that
    row r's full tiles are the entries start[r] … full_end[r] − 1 and its partial ones
    full_end[r] … start[r + 1] − 1. A row without work has no entry. All arrays are int32.

    Attributes:
      start: (rows + 1,), where each row's entries begin; the last is the number of entries.
      full_end: (rows,), where each row's FULL entries end.
      row: (entries,), which row an entry belongs to.
      column: (entries,), which tile of the other axis it meets.
      kind: (entries,), PARTIAL 1 or FULL 2.
    """

    start: np.ndarray
    full_end: np.ndarray
    row: np.ndarray
    column: np.ndarray
    kind: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.full_end)

    @property
    def longest_row(self) -> int:
        """The most entries that one row has: the extent of a grid axis over them."""
        return int(np.diff(self.start).max(initial=0))


@dataclasses.dataclass(frozen=True, eq=False)
class TileTable:
    """Kinds of the tiles of one mask at one shape, and the lists of those that are not empty.

    Tile (i, j) covers the queries i · q_tile … and the keys j · k_tile …; its positions are
    offset + i · q_tile … and j · k_tile …. A tile cut off by the end of the queries or the keys is
    never FULL: what lies past the end must be masked like any other hidden key.

    Attributes:
      q_tile, k_tile: queries and keys in a tile.
      num_queries, num_keys: T and S.
      offset: the position of query 0.
      kinds: (query tiles, key tiles) int8: EMPTY 0, PARTIAL 1, FULL 2.
      by_query: a row per query tile, a column per key tile (forward, and the gradient of q).
      by_key: a row per key tile, a column per query tile (the gradients of k and v).
    """

    q_tile: int
    k_tile: int
    num_queries: int
    num_keys: int
    offset: int
    kinds: np.ndarray
    by_query: TileList
    by_key: TileList

    @property
    def fraction(self) -> float:
        """Tiles with work ÷ all tiles."""
        return np.count_nonzero(self.kinds) / self.kinds.size


def _list(kinds: np.ndarray) -> TileList:
    row, column = np.nonzero(kinds)
    kind = kinds[row, column]
    order = np.lexsort((column, -kind, row))
    count = np.count_nonzero(kinds, axis=1)
    start = np.concatenate([[0], np.cumsum(count)])
    full_end = start[:-1] + np.count_nonzero(kinds == FULL, axis=1)
    arrays = start, full_end, row[order], column[order], kind[order]
    return TileList(*(_frozen(array.astype(np.int32)) for array in arrays))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False  # the table is shared by all callers of the cache
    return array


@functools.lru_cache(maxsize=256)
def tile_table(
    mask: Mask, num_queries: int, num_keys: int, q_tile: int, k_tile: int, offset: int | None = None
) -> TileTable:
    """The table of a mask; its cost grows with the number of tiles.

    Args:
      mask: which positions may meet.
      num_queries: T.
      num_keys: S.
      q_tile: queries in a tile; need not divide T.
      k_tile: keys in a tile; need not divide S.
      offset: the position of query 0; default S − T, queries and keys aligned at the end.

    Raises:
      ValueError: a length or a tile below 1.
    """
    sizes = {"num_queries": num_queries, "num_keys": num_keys, "q_tile": q_tile, "k_tile": k_tile}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"tile_table: {name} must be at least 1, got {size}")
    offset = num_keys - num_queries if offset is None else offset
    q_lo = np.arange(0, num_queries, q_tile)[:, None]
    k_lo = np.arange(0, num_keys, k_tile)[None, :]
    q_hi, k_hi = np.minimum(q_lo + q_tile, num_queries), np.minimum(k_lo + k_tile, num_keys)
    kinds = mask.tile_kinds(q_lo + offset, q_hi + offset, k_lo, k_hi)
    cut = (q_lo + q_tile > num_queries) | (k_lo + k_tile > num_keys)
    kinds = _frozen(np.where(cut & (kinds != EMPTY), PARTIAL, kinds).astype(np.int8))
    return TileTable(
        q_tile, k_tile, num_queries, num_keys, offset, kinds, _list(kinds), _list(kinds.T)
    )
