"""Pictures of masks, and the command that draws and counts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from matplotlib import image

from attention.masks import Causal, First, Full, Global, Window, parse
from attention.masks import __main__ as command
from tests.test_masks import brute, lengths, masks

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
