"""The tile table against the elementwise mask, pair by pair."""

import time

import numpy as np
import pytest

from attention.masks import Causal, First, Full, Global, Mask, Prefix, Window
from attention.masks.values import EMPTY, FULL, PARTIAL
from attention.tile_table import tile_table

MASKS = [
    Full(),
    Causal(),
    Window(5),
    Window(5, ahead=4) | Global((3, 40)),
    Causal() & (Window(6) | First(2)),
    Causal() | Prefix(9),
    ~Causal(),
]
PRIMITIVES = (Full, Causal, Window, First, Prefix, Global)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("T", "S"), [(1, 1), (37, 37), (64, 48), (20, 50)])
@pytest.mark.parametrize(("q_tile", "k_tile"), [(8, 16), (16, 5)])
def test_kinds_against_every_pair(mask, T, S, q_tile, k_tile):
    table = tile_table(mask, T, S, q_tile, k_tile)
    dense = np.asarray(mask(np.arange(T)[:, None] + S - T, np.arange(S)[None]))
    assert table.kinds.shape == (-(-T // q_tile), -(-S // k_tile))
    for (i, j), kind in np.ndenumerate(table.kinds):
        tile = dense[i * q_tile : (i + 1) * q_tile, j * k_tile : (j + 1) * k_tile]
        whole = tile.shape == (q_tile, k_tile)
        if kind == EMPTY:
            assert not tile.any()
        if kind == FULL:
            assert whole and tile.all()
        if isinstance(mask, PRIMITIVES):
            assert (kind == EMPTY) == (not tile.any())
            assert (kind == FULL) == (whole and bool(tile.all()))


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_lists_hold_each_tile_with_work_once(mask):
    table = tile_table(mask, 61, 75, 8, 16)
    for tiles, kinds in ((table.by_query, table.kinds), (table.by_key, table.kinds.T)):
        assert tiles.num_rows == len(kinds)
        assert tiles.start[0] == 0 and tiles.start[-1] == len(tiles.column)
        for row in range(tiles.num_rows):
            first, split, end = tiles.start[row], tiles.full_end[row], tiles.start[row + 1]
            assert first <= split <= end
            full, partial = tiles.column[first:split], tiles.column[split:end]
            np.testing.assert_array_equal(full, np.flatnonzero(kinds[row] == FULL))
            np.testing.assert_array_equal(partial, np.flatnonzero(kinds[row] == PARTIAL))
            assert (tiles.kind[first:split] == FULL).all()
            assert (tiles.kind[split:end] == PARTIAL).all()
            assert (tiles.row[first:end] == row).all()
        assert tiles.longest_row == np.count_nonzero(kinds, axis=1).max()
        for array in (tiles.start, tiles.full_end, tiles.row, tiles.column, tiles.kind):
            assert array.dtype == np.int32 and not array.flags.writeable
    assert table.fraction == np.mean(table.kinds != EMPTY)


def test_a_row_without_work_has_no_entry():
    """More queries than keys: the first ones come before every key."""
    table = tile_table(Causal(), 96, 32, 16, 16)
    np.testing.assert_array_equal(np.diff(table.by_query.start), [0, 0, 0, 0, 1, 2])
    assert table.offset == -64


def test_offset():
    table = tile_table(Causal(), 32, 32, 16, 16, offset=100)
    assert (table.kinds == FULL).all()
    assert tile_table(Causal(), 32, 32, 16, 16).kinds.tolist() == [[1, 0], [2, 1]]


def test_the_work_of_a_window_grows_with_its_length():
    entries = [
        len(tile_table(Causal() & (Window(128) | First(4)), T, T, 128, 128).by_query.column)
        for T in (4096, 8192, 16384)
    ]
    assert entries[2] - entries[1] == 2 * (entries[1] - entries[0])
    assert tile_table(Causal(), 16384, 16384, 128, 128).fraction == pytest.approx(0.5, abs=0.01)


def test_never_as_large_as_the_scores():
    """A million tokens: T × S would be a terabyte."""
    start = time.process_time()
    table = tile_table(Window(4096), 1 << 20, 1 << 20, 512, 512)
    assert table.kinds.nbytes == 2048**2
    assert time.process_time() - start < 5


def test_built_once():
    built = []

    class Counting(Mask):
        def tile_kinds(self, *tile):
            built.append(tile)
            return Causal().tile_kinds(*tile)

    mask = Counting()
    assert tile_table(mask, 40, 40, 8, 8) is tile_table(mask, 40, 40, 8, 8)
    assert len(built) == 1


@pytest.mark.parametrize("name", ["num_queries", "num_keys", "q_tile", "k_tile"])
def test_sizes_below_one(name):
    sizes = {"num_queries": 8, "num_keys": 8, "q_tile": 4, "k_tile": 4, name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        tile_table(Full(), **sizes)
