"""Pictures that every sweep can have, read off their axes."""

from __future__ import annotations

import dataclasses
import itertools
import types

import pytest

from sweeps import pictures, results
from sweeps.pictures import Levels, mean_curve, style, with_curves
from sweeps.results import chance_name
from tests.filled_sweep import fill


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results.read(fill(tmp_path_factory.mktemp("sweep") / "sweep"))


def test_curves_are_averaged_where_all_have_a_value():
    assert mean_curve([([0, 5, 10], [0.0, 0.5, 1.0]), ([0, 10], [0.5, 0.5]), ([], [])]) == (
        [0, 10], [0.25, 0.75],
    )  # fmt: skip


def test_a_loss_stands_beside_that_of_others(tmp_path, monkeypatch):
    """Chance of a loss is what guessing among all symbols costs; its picture has all levels."""
    runs = [
        results.RunResult(
            f"{point}{seed}", point, seed, 1e-3, "done", "",
            {"markov/loss": 0.9, "markov/uniform_loss": 1.1, "markov/bigram_loss": 0.8 + seed / 10},
            [{"tokens": t, "markov/loss": loss + seed} for t, loss in ((0, 2.0), (9, 1.0))],
            {}, {}, "",
        )
        for point in ("one", "two") for seed in (0, 1)
    ]  # fmt: skip
    points = [
        results.PointResult(name, (name,), {}, "", tuple(runs[i : i + 2]), 1e-3, "")
        for i, name in ((0, "one"), (2, "two"))
    ]
    found = results.Results("m", {"metrics": ["markov/loss"], "columns": []}, tuple(points))
    assert found.chance("markov/loss") == 1.1 and chance_name("text/loss") == "text/uniform_loss"
    assert chance_name("loss") is None
    figures, make = [], pictures.new_figure
    monkeypatch.setattr(
        pictures, "new_figure", lambda *size: figures.append(make(*size)) or figures[-1]
    )
    picture = Levels("markov/loss", (("markov/uniform_loss", "u"), ("markov/bigram_loss", "b")))
    assert picture(found, tmp_path) == [tmp_path / "levels.png"]
    lines = {line.get_label(): list(line.get_ydata()) for line in figures[0].axes[0].lines}
    assert lines == {
        "one": [2.5, 1.5], "two": [2.5, 1.5], "u: 1.100": [1.1, 1.1],
        "b: 0.850": pytest.approx([0.85, 0.85]),
    }  # fmt: skip
    assert Levels("copy/loss", ())(found, tmp_path) == []


def test_more_curves_than_can_be_told_apart_are_not_drawn(found, tmp_path):
    looks = [tuple(style(index).values()) for index in range(pictures.LOOKS)]
    assert len(set(looks)) == len(looks) == 28
    for one, two in itertools.pairwise(looks):
        assert one[0] != two[0] and one[1] != two[1]
    many = dataclasses.replace(found, points=(found.points * 15)[:29])
    assert tmp_path / "curves.png" not in pictures.draw(many, tmp_path)
    few = dataclasses.replace(found, points=(found.points * 14))
    assert tmp_path / "curves.png" in pictures.draw(few, tmp_path)


def test_only_what_was_followed_has_a_curve(found):
    """The accuracy at a length is measured once, when a run has ended."""
    some = types.SimpleNamespace(metrics=("copy/accuracy@16", "copy/accuracy"), runs=found.runs)
    assert all("copy/accuracy@16" in run.metrics for run in found.runs if run.metrics)
    assert with_curves(some) == ["copy/accuracy"]
