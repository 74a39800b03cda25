"""Masks against a plain Python reading of each formula, on random combinations and lengths."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib import image

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
from attention.masks import __main__ as command
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


# --- pictures -------------------------------------------------------------------------------------

EXAMPLE = "Causal() & (Window(4) | First(1))"
PICTURE = """\
■ · · · · · · · · · · ·
■ ■ · · · · · · · · · ·
■ ■ ■ · · · · · · · · ·
■ ■ ■ ■ · · · · · · · ·
■ ■ ■ ■ ■ · · · · · · ·
■ · ■ ■ ■ ■ · · · · · ·
■ · · ■ ■ ■ ■ · · · · ·
■ · · · ■ ■ ■ ■ · · · ·
■ · · · · ■ ■ ■ ■ · · ·
■ · · · · · ■ ■ ■ ■ · ·
■ · · · · · · ■ ■ ■ ■ ·
■ · · · · · · · ■ ■ ■ ■
"""
TILES = """\
▒ · ·
▒ ▒ ·
▒ ▒ ▒
"""


def test_draw():
    assert parse(EXAMPLE).draw(12) + "\n" == PICTURE


@given(masks, lengths, lengths)
def test_draw_shows_the_mask(mask, T, S):
    rows = mask.draw(T, S).split("\n")
    grid = np.array([[mark == "■" for mark in row.split(" ")] for row in rows])
    np.testing.assert_array_equal(grid, brute(mask, range(S - T, S), range(S)))
    assert set("".join(rows)) <= set("■· ")


def cells_of_png(path: Path, rows: int, columns: int) -> np.ndarray:
    """Whether each cell of the picture is dark, read from the pixels inside the frame."""
    pixels = image.imread(path)[..., :3]
    black = (pixels < 0.25).all(-1)
    ys = np.flatnonzero(black.mean(1) > 0.3)
    xs = np.flatnonzero(black.mean(0) > 0.3)
    top, bottom, left, right = ys[0], ys[-1], xs[0], xs[-1]
    y = (top + (bottom - top) * (np.arange(rows) + 0.5) / rows).astype(int)
    x = (left + (right - left) * (np.arange(columns) + 0.5) / columns).astype(int)
    return pixels[y[:, None], x, 0] < 0.6


@pytest.mark.parametrize(
    ("mask", "T", "S"),
    [
        (parse(EXAMPLE), 12, 12),
        (Causal(), 5, 9),
        (Window(3, ahead=2) | Global((4,)), 9, 5),
        (~Causal(), 50, 50),
        (Full(), 1, 1),
    ],
    ids=str,
)
def test_png(mask, T, S, tmp_path):
    path = tmp_path / "mask.png"
    text = mask.draw(T, S, path=str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list(tmp_path.iterdir()) == [path]
    np.testing.assert_array_equal(cells_of_png(path, T, S), brute(mask, range(S - T, S), range(S)))
    assert text == mask.draw(T, S)


def test_png_of_a_long_name_and_a_flat_shape(tmp_path):
    """No warning of the plotting library, whatever the mask."""
    mask = Causal()
    for n in range(1, 20):
        mask = mask & (Window(n) | First(n))
    mask.draw(2, 60, path=str(tmp_path / "flat.png"))
    mask.draw(60, 2, path=str(tmp_path / "tall.png"))


# --- the command ----------------------------------------------------------------------------------


def run_command(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["masks", *arguments])
    command.main()


def test_the_command_as_a_stranger_types_it():
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "attention.masks", EXAMPLE, "--length=12"],
        cwd=root,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    picture, tiles, share = done.stdout.split("\n\n")
    assert picture + "\n" == PICTURE
    assert tiles.split("\n", 1)[1] + "\n" == TILES
    # 1 + 2 + 3 + 4 + 8 × 5 of 144 pairs; 6 of 9 tiles, none of them full.
    assert "34.7%" in share and "66.7%" in share and "0.0%" in share
    assert "last 4" in share and "[0]" in share


def test_the_command_counts_tiles(monkeypatch, capsys):
    run_command(monkeypatch, "Causal()", "--length=10", "--tile=4")
    out = capsys.readouterr().out
    assert "▒ · ·\n█ ▒ ·\n█ █ ▒\n" in out
    # Tiles of 4, 4 and 2 positions: full 16 + 8 + 8 = 32, partial 16 + 16 + 4 = 36, of 100.
    assert "55.0%" in out and "68.0%" in out and "32.0%" in out


def test_the_command_saves_a_png(monkeypatch, capsys, tmp_path):
    path = tmp_path / "mask.png"
    run_command(monkeypatch, EXAMPLE, "--length=12", f"--png={path}")
    assert PICTURE in capsys.readouterr().out
    np.testing.assert_array_equal(
        cells_of_png(path, 12, 12), brute(parse(EXAMPLE), range(12), range(12))
    )


def refusal(monkeypatch, capsys, *arguments: str) -> str:
    """The one line of complaint; exit code 2 and nothing else printed but the usage."""
    with pytest.raises(SystemExit) as stop:
        run_command(monkeypatch, *arguments)
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err
    *_, line = printed.err.strip().split("\n")
    assert line.startswith("python -m attention.masks: error: ")
    return line


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("Windw(4)", "'Windw' is unknown; known are Full, Causal"),
        ("Causal", "write Causal()"),
        ("Causal() and Full()", "not understood"),
        ("not Causal()", "not understood"),
        ("Causal() - Window(2)", "not understood"),
        ("Causal(), Full()", "not understood"),
        ("Causal().count(5)", "not understood"),
        ("Causal() &", "not an expression"),
        ("Window(4", "not an expression"),
        ("", "not an expression"),
        ("Window(0)", "at least 1, got 0"),
        ("Window(2.5)", "whole number"),
        ("Window('4')", "whole number"),
        ("Window(1 + 1)", "whole number"),
        ("Window({[]})", "whole number"),
        ("Window(True)", "whole number"),
        ("Window()", "missing"),
        ("Window(4, ahed=2)", "ahed"),
        ("Window(window=1, window=2)", "window"),
        ("Causal(3)", "argument"),
        ("Global(())", "at least one"),
        ("Global((1, -2))", "-2"),
        ("Global(999999999999)", "at most 65536, got 999999999999"),
        ("~" * 20_000 + "Causal()", "too"),
        (" & ".join(["Causal()"] * 20_000), "too"),
    ],
    ids=lambda text: text[:30],
)
def test_a_bad_expression_is_refused_in_one_line(text, fragment, monkeypatch, capsys):
    assert fragment in refusal(monkeypatch, capsys, text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "__import__('os').mkdir('made')",
        "Window(__import__('os').mkdir('made'))",
        "Window(window=__import__('os').mkdir('made'))",
        "[Causal() for _ in [__import__('os').mkdir('made')]][0]",
        "(lambda: __import__('os').mkdir('made'))()",
        "Window(*[__import__('os').mkdir('made')])",
        "Window(**{'window': __import__('os').mkdir('made')})",
        "f\"{__import__('os').mkdir('made')}\"",
    ],
)
def test_nothing_is_evaluated(text, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    refusal(monkeypatch, capsys, text)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["--length=0"], "--length must be at least 1, got 0"),
        (["--tile=-3"], "--tile must be at least 1, got -3"),
        (["--length=ten"], "--length"),
        (["--png={tmp}/no/such/folder/mask.png"], "--png"),
        (["--png={tmp}/mask.xyz"], "--png"),
    ],
    ids=str,
)
def test_bad_options_are_refused_in_one_line(arguments, fragment, monkeypatch, capsys, tmp_path):
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    assert fragment in refusal(monkeypatch, capsys, "Causal()", *arguments)
    assert not list(tmp_path.iterdir())


def test_a_mask_that_would_pin_more_than_can_be_kept_keeps_all():
    assert (Causal() & First(10**12)).retention() == Retention((), None)
    assert (Causal() & First(10**12)).draw(3) == Causal().draw(3)


@given(masks)
def test_repr_can_be_parsed(mask):
    assert parse(repr(mask)) == mask
    assert parse(f"  ({mask!r})  ") == mask


def test_precedence():
    assert parse("Causal() | Full() & First(1)") == Causal() | (Full() & First(1))
    assert parse("~Causal() & First(1)") == (~Causal()) & First(1)
    assert parse("Window(3, ahead=2)") == parse("Window(window=3, ahead=2)") == Window(3, 2)
    assert parse("Global((3, 1))") == Global((1, 3))
