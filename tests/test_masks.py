"""Masks against a plain Python reading of each formula, on random combinations and lengths."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attention.masks import (
    EMPTY,
    FULL,
    PARTIAL,
    Causal,
    First,
    Full,
    Global,
    Prefix,
    Retention,
    Window,
    parse,
)
from attention.masks.values import And, Not, Or

# Every parameter below stays under REACH, so positions up to HORIZON show all a mask ever does.
REACH = 7
HORIZON = 4 * REACH

_sizes = st.integers(1, REACH)
primitives = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(Window, _sizes, st.integers(0, REACH)),
    st.builds(First, _sizes),
    st.builds(Prefix, _sizes),
    st.builds(Global, _sizes),
    st.builds(Global, st.lists(st.integers(0, REACH), min_size=1, max_size=4).map(tuple)),
)
masks = st.recursive(
    primitives,
    lambda part: st.one_of(
        st.builds(lambda a, b: a & b, part, part),
        st.builds(lambda a, b: a | b, part, part),
        st.builds(lambda a: ~a, part),
    ),
    max_leaves=6,
)
lengths = st.integers(1, 3 * REACH)

NAMED = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(3),
    "causal window": Causal() & Window(3),
    "symmetric window": Window(3, ahead=2),
    "streaming": Causal() & (Window(4) | First(2)),
    "longformer decoder": (Window(3) | Global(2)) & Causal(),
    "longformer decoder, scattered": (Window(3) | Global((0, 4))) & Causal(),
    "longformer encoder": Window(3, ahead=2) | Global((1, 5)),
    "prefix": Causal() | Prefix(4),
    "first": First(3),
}
named = pytest.mark.parametrize("mask", NAMED.values(), ids=NAMED)


def sees(mask, i: int, j: int) -> bool:
    """The design's definition of each mask, pair by pair."""
    match mask:
        case Full():
            return True
        case Causal():
            return j <= i
        case Window(window, ahead):
            return -ahead <= i - j < window
        case First(n):
            return j < n
        case Prefix(n):
            return i < n and j < n
        case Global(tokens):
            members = range(tokens) if isinstance(tokens, int) else tokens
            return i in members or j in members
        case And(a, b):
            return sees(a, i, j) and sees(b, i, j)
        case Or(a, b):
            return sees(a, i, j) or sees(b, i, j)
        case Not(a):
            return not sees(a, i, j)
    raise AssertionError(mask)


def brute(mask, q_index, k_index) -> np.ndarray:
    return np.array([[sees(mask, int(i), int(j)) for j in k_index] for i in q_index], bool)


def brute_tile_kinds(mask, q_edges, k_edges) -> np.ndarray:
    grid = brute(mask, range(q_edges[0], q_edges[-1]), range(k_edges[0], k_edges[-1]))
    kinds = np.empty((len(q_edges) - 1, len(k_edges) - 1), int)
    for a, (q_lo, q_hi) in enumerate(itertools.pairwise(q_edges)):
        for b, (k_lo, k_hi) in enumerate(itertools.pairwise(k_edges)):
            q = slice(q_lo - q_edges[0], q_hi - q_edges[0])
            tile = grid[q, k_lo - k_edges[0] : k_hi - k_edges[0]]
            kinds[a, b] = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
    return kinds


@st.composite
def edges(draw, start: st.SearchStrategy[int]):
    """Ascending tile edges of unequal tiles."""
    lo = draw(start)
    return np.cumsum([lo, *draw(st.lists(st.integers(1, REACH), min_size=1, max_size=5))])


# --- elements -------------------------------------------------------------------------------------


@given(masks, lengths, st.integers(-5, REACH))
def test_elements_and_outside(mask, length, offset):
    q, k = np.arange(length) + offset, np.arange(length + 2)
    expected = brute(mask, q, k)
    np.testing.assert_array_equal(mask(q[:, None], k[None]), expected)
    np.testing.assert_array_equal(mask.outside(q[:, None], k[None]), ~expected)
    np.testing.assert_array_equal((~mask)(q[:, None], k[None]), ~expected)


@given(masks)
def test_numpy_and_jax_agree(mask):
    q, k = np.arange(-2, 13)[:, None], np.arange(14)[None]
    got = mask(jnp.asarray(q), jnp.asarray(k))
    assert got.dtype == bool and got.shape == (15, 14)
    np.testing.assert_array_equal(got, mask(q, k))
    np.testing.assert_array_equal(mask.outside(jnp.asarray(q), jnp.asarray(k)), ~mask(q, k))


@given(masks, masks, lengths)
def test_algebra(a, b, length):
    q, k = np.arange(length)[:, None], np.arange(length)[None]
    np.testing.assert_array_equal((a & b)(q, k), a(q, k) & b(q, k))
    np.testing.assert_array_equal((a | b)(q, k), a(q, k) | b(q, k))
    np.testing.assert_array_equal((~(a & b))(q, k), (~a | ~b)(q, k))
    np.testing.assert_array_equal((~~a)(q, k), a(q, k))


# --- values ---------------------------------------------------------------------------------------


@given(masks, masks)
def test_equal_masks_have_equal_hashes(a, b):
    copy = parse(repr(a))
    assert copy == a and hash(copy) == hash(a)
    assert (a == b) == (repr(a) == repr(b))


def test_equality_tells_parameters_apart():
    values = [
        Full(), Causal(), Window(1), Window(2), Window(2, 1), First(2), Prefix(2), Global(2),
        Global((2,)), Causal() & First(2), Causal() | First(2), ~Causal(),
    ]  # fmt: skip
    assert len(set(values)) == len(values)
    assert Global((4, 1, 4)) == Global((1, 4))


@named
def test_a_mask_has_no_truth_value(mask):
    with pytest.raises(TypeError, match=r"no truth value.*& \| ~"):
        bool(mask)
    with pytest.raises(TypeError, match="no truth value"):
        mask and mask  # noqa: B018
    with pytest.raises(TypeError):
        mask & True


def test_masks_are_frozen():
    with pytest.raises(AttributeError):
        Window(3).window = 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Window(0), r"Window.*window.*at least 1, got 0"),
        (lambda: Window(-1), r"Window.*window.*at least 1, got -1"),
        (lambda: Window(2.0), r"Window.*window.*got 2\.0"),
        (lambda: Window(True), r"Window.*window.*got True"),
        (lambda: Window(None), r"Window.*window.*got None"),
        (lambda: Window(3, ahead=-1), r"Window.*ahead.*at least 0, got -1"),
        (lambda: First(0), r"First.*n .*at least 1, got 0"),
        (lambda: Prefix(0), r"Prefix.*n .*at least 1, got 0"),
        (lambda: Global(0), r"Global.*tokens.*at least 1, got 0"),
        (lambda: Global(()), r"Global.*got \(\)"),
        (lambda: Global((3, -1)), r"Global.*position.*got -1"),
        (lambda: Global((1.5,)), r"Global.*position.*got 1\.5"),
    ],
)
def test_bad_parameters(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("window", [10, 11, 1000, 2**30, 2**31, 2**40])
def test_a_window_wider_than_the_text_hides_nothing(window):
    """W2."""
    q, k = np.arange(10)[:, None], np.arange(10)[None]
    mask = Causal() & Window(window, ahead=window)
    np.testing.assert_array_equal(mask(q, k), Causal()(q, k))
    np.testing.assert_array_equal(mask(jnp.asarray(q), jnp.asarray(k)), Causal()(q, k))
    assert mask.tile_kinds(5, 10, 0, 5) == FULL


# --- tiles ----------------------------------------------------------------------------------------


@given(masks, edges(st.integers(-5, REACH)), edges(st.integers(0, REACH)))
def test_tile_kinds_never_lie(mask, q_edges, k_edges):
    kinds = mask.tile_kinds(q_edges[:-1, None], q_edges[1:, None], k_edges[:-1], k_edges[1:])
    expected = brute_tile_kinds(mask, q_edges, k_edges)
    assert kinds.shape == expected.shape
    assert np.isin(kinds, (EMPTY, PARTIAL, FULL)).all()
    np.testing.assert_array_equal(kinds[kinds != PARTIAL], expected[kinds != PARTIAL])


@given(primitives, edges(st.integers(-5, REACH)), edges(st.integers(0, REACH)), st.booleans())
def test_tile_kinds_of_primitives_are_exact(mask, q_edges, k_edges, inverted):
    mask = ~mask if inverted else mask
    kinds = mask.tile_kinds(q_edges[:-1, None], q_edges[1:, None], k_edges[:-1], k_edges[1:])
    np.testing.assert_array_equal(kinds, brute_tile_kinds(mask, q_edges, k_edges))


@named
def test_no_tile_of_the_usual_masks_is_visited_in_vain(mask):
    """A combination may call a full tile partial; among the usual masks no empty one."""
    for tile in (1, 3, 4, 64):
        marks = np.arange(0, 37 + tile, tile)
        kinds = mask.tile_kinds(marks[:-1, None], marks[1:, None], marks[:-1], marks[1:])
        expected = brute_tile_kinds(mask, marks, marks)
        np.testing.assert_array_equal(kinds == EMPTY, expected == EMPTY)


def test_tile_kinds_need_no_square():
    """A tile of 10¹² pairs costs as little as a small one."""
    mask = Causal() & (Window(1000) | Global((0, 5)))
    assert mask.tile_kinds(10**6, 2 * 10**6, 2 * 10**6, 3 * 10**6) == EMPTY
    assert mask.tile_kinds(10**6, 2 * 10**6, 0, 10**6) == PARTIAL
    assert (~mask).tile_kinds(10**6, 2 * 10**6, 2 * 10**6, 3 * 10**6) == FULL


# --- count ----------------------------------------------------------------------------------------


@given(masks, lengths, lengths)
def test_count(mask, T, S):
    assert mask.count(T, S) == brute(mask, range(S - T, S), range(S)).sum()


@named
def test_count_of_larger_squares(mask):
    """Beyond the size that is counted pair by pair."""
    q, k = np.arange(600)[:, None] + 111, np.arange(711)[None]
    assert mask.count(600, 711) == np.count_nonzero(mask(q, k))


def test_count_in_closed_form():
    n = 30_000
    assert Causal().count(n) == n * (n + 1) // 2
    assert Full().count(n) == n * n
    assert (Causal() & Window(100)).count(n) == 100 * n - 100 * 99 // 2
    assert (~Causal()).count(n) == n * (n - 1) // 2


# --- retention ------------------------------------------------------------------------------------


def keeps_enough(mask, retention: Retention, length: int = HORIZON) -> bool:
    """Whether each past key that the current query or a later one sees is kept till then."""
    return all(
        retention.last is None or i - j < retention.last or j in retention.pinned
        for i in range(length)
        for j in range(i + 1)
        if sees(mask, i, j)
    )


@given(masks)
def test_retention_keeps_what_can_be_seen(mask):
    retention = mask.retention()
    assert keeps_enough(mask, retention)
    assert list(retention.pinned) == sorted(set(retention.pinned))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Full(), Retention((), None)),
        (Causal(), Retention((), None)),
        (Window(5), Retention((), 5)),
        (Causal() & Window(5), Retention((), 5)),
        (Window(5) & Causal(), Retention((), 5)),
        (Causal() & Window(1), Retention((), 1)),
        (Causal() & (Window(4) | First(2)), Retention((0, 1), 4)),
        ((Window(4) | Global(2)) & Causal(), Retention((0, 1), 4)),
        (Causal() & (Window(2) | Global((3, 6))), Retention((3, 6), 7)),
        ((Window(9) | Global((3, 6))) & Causal(), Retention((3, 6), 9)),
        (Causal() & (Window(2) | Window(6)), Retention((), 6)),
        (Causal() & Window(2) & Window(6), Retention((), 2)),
        (Causal() | Prefix(4), Retention((), None)),
    ],
    ids=str,
)
def test_retention_is_the_least(mask, expected):
    retention = mask.retention()
    assert retention == expected
    if retention.last is None:
        assert not keeps_enough(mask, Retention((), HORIZON - 1)), "a ring would be enough"
        return
    assert keeps_enough(mask, retention)
    assert not keeps_enough(mask, Retention(retention.pinned, retention.last - 1))
    for one in retention.pinned:
        fewer = tuple(position for position in retention.pinned if position != one)
        assert not keeps_enough(mask, Retention(fewer, retention.last)), f"{one} is not needed"


def test_a_mask_that_would_pin_more_than_can_be_kept_keeps_all():
    assert (Causal() & First(10**12)).retention() == Retention((), None)
    assert (Causal() & First(10**12)).draw(3) == Causal().draw(3)


# --- causality ------------------------------------------------------------------------------------


def brute_causal_from(mask) -> int | None:
    """The least p such that for all i ≥ p no query up to i sees a key after i."""
    grid = brute(mask, range(HORIZON), range(HORIZON))
    leaks = [i for i in range(HORIZON - 1) if grid[: i + 1, i + 1 :].any()]
    if not leaks:
        return 0
    # The last REACH positions lie beyond every parameter: what leaks there leaks for ever.
    return None if leaks[-1] >= HORIZON - 1 - REACH else leaks[-1] + 1


@given(masks)
@example(~~Causal())
@example(Window(9, ahead=1) & Global(2))
def test_causal_from_never_promises_too_much(mask):
    position = mask.causal_from()
    exact = brute_causal_from(mask)
    if position is not None:
        assert exact is not None and position >= exact


@given(primitives)
def test_causal_from_is_exact_for_primitives(mask):
    assert mask.causal_from() == brute_causal_from(mask)


@named
def test_causal_from_is_exact_for_the_usual_masks(mask):
    assert mask.causal_from() == brute_causal_from(mask)


@given(masks)
def test_anything_under_causal_is_causal(mask):
    assert (Causal() & mask).causal_from() == (mask & Causal()).causal_from() == 0


# --- as text --------------------------------------------------------------------------------------


@given(masks)
def test_repr_can_be_parsed(mask):
    assert parse(repr(mask)) == mask
    assert parse(f"  ({mask!r})  ") == mask


def test_precedence():
    assert parse("Causal() | Full() & First(1)") == Causal() | (Full() & First(1))
    assert parse("~Causal() & First(1)") == (~Causal()) & First(1)
    assert parse("Window(3, ahead=2)") == parse("Window(window=3, ahead=2)") == Window(3, 2)
    assert parse("Global((3, 1))") == Global((1, 3))
