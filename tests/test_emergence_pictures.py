"""What the pictures of watched runs show, read off their axes, of folders made by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from analysis import emergence_table
from sweeps import emergence_pictures, results
from sweeps.emergence_pictures import ByVariant, EmergenceCurves, PruningCurves
from sweeps.folder import SweepFolder
from sweeps.plan import make_plan
from tests import tiny_sweep
from training.run_folder import write_json

PLAN = make_plan(tiny_sweep.get_sweep(), tiny_sweep.get_config().to_dict())
STEPS = np.array([0, 5, 10])
LENGTH = 64
LATE = 62  # token 500 of 512
# Of each run by point and seed: the prefix-matching score of the head that ends highest, by look.
PREFIX = {
    ("gqa", 0): [0.1, 0.2, 0.8], ("gqa", 1): [0.1, 0.6, 0.6],
    ("mqa", 0): [0.1, 0.1, 0.2], ("mqa", 1): [0.0, 0.1, 0.4],
}  # fmt: skip
PRUNED = {"importance": [1.0, 0.9, 0.1], "random": [1.0, 0.5, 0.2]}


@pytest.fixture
def found(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    folder.begin(*tiny_sweep.arguments(PLAN))
    for run in PLAN.runs:
        prefix = PREFIX[run.point, run.seed]
        numbers = {f"pruned/{order}@{share}": value - 0.1 * run.seed
                   for order, values in PRUNED.items()
                   for share, value in zip((0, 50, 100), values, strict=True)}  # fmt: skip
        numbers |= {"prefix_matching": prefix[-1], "half_step": 3.0 + run.seed}
        write_json(folder.result(run.name), tiny_sweep.record(run.order()) | {"metrics": numbers})
        folder.run(run.name).path.mkdir(parents=True)
        for at, step in enumerate(STEPS):
            scores = {
                "prefix_matching": np.array([[prefix[at] / 2, prefix[at]]]),
                # The head that looks back is another one.
                "previous_token": np.array([[0.3 * at, 0.01]]),
            }
            loss_T = np.full(LENGTH, 3.0 + run.seed)
            loss_T[LATE] -= 3 * at
            row = emergence_table.flat_row({"step": step, "tokens": 10 * step}, scores, loss_T)
            emergence_table.append(folder.run(run.name).emergence, row)
    return results.read(folder), folder.path


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were drawn."""
    figures, make = [], emergence_pictures.new_figure

    def new_figure(*size):
        figures.append(make(*size))
        return figures[-1]

    monkeypatch.setattr(emergence_pictures, "new_figure", new_figure)
    return figures


def mean_lines(axes):
    """Name → (x, y) of the thick lines; the thin ones are single seeds and have no name."""
    named = {line.get_label(): line.get_xydata().T for line in axes.lines}
    return {name: xy for name, xy in named.items() if not name.startswith("_")}


@pytest.mark.parametrize("around", [0, 1])
def test_curves_are_means_of_the_strongest_heads(found, drawn, around):
    picture = EmergenceCurves((("gqa", "mqa"),), around=around)
    assert [path.name for path in picture(*found)] == ["emergence.png"]
    prefix, previous, learning = drawn[0].axes[:3]
    for axes in (prefix, previous, learning):
        assert len(axes.lines) == 2 * 3 and mean_lines(axes).keys() == {"gqa", "mqa"}
        for x, _ in mean_lines(axes).values():
            np.testing.assert_array_equal(x, 10 * STEPS)
    for point in ("gqa", "mqa"):
        expected = np.mean([PREFIX[point, 0], PREFIX[point, 1]], axis=0)
        np.testing.assert_allclose(mean_lines(prefix)[point][1], expected, atol=1e-6)
        np.testing.assert_allclose(mean_lines(previous)[point][1], [0, 0.3, 0.6], atol=1e-6)
        # One token of 2 · around + 1 has learnt.
        fall = -3 * np.arange(3) / (2 * around + 1)
        np.testing.assert_allclose(mean_lines(learning)[point][1], fall, atol=1e-5)


def test_a_study_that_was_not_watched_has_no_curves(found, drawn):
    study, path = found
    for run in PLAN.runs:
        SweepFolder(path).run(run.name).emergence.unlink()
    assert EmergenceCurves((("gqa",),))(study, path) == [] and not drawn


def test_pruning_has_both_orders_and_chance(found, drawn):
    assert len(PruningCurves(("gqa", "mqa"), chance=0.05)(*found)) == 1
    for axes in drawn[0].axes:
        lines = mean_lines(axes)
        assert lines.keys() == {"least important first", "random order", "chance 0.050"}
        for order, name in (("importance", "least important first"), ("random", "random order")):
            np.testing.assert_array_equal(lines[name][0], [0, 50, 100])
            # Of the two seeds one has .1 less.
            np.testing.assert_allclose(lines[name][1], np.array(PRUNED[order]) - 0.05)


def test_variants_stand_in_rows_by_the_way_they_were_trained(found, drawn):
    study, path = found
    points = tuple(
        dataclasses.replace(point, labels=("variant", way))
        for point, way in zip(study.points, ("plain", "smeared"), strict=True)
    )
    study = dataclasses.replace(study, points=points)
    picture = ByVariant((("prefix_matching", "prefix"), ("half_step", "half")))
    assert len(picture(study, path)) == 1
    prefix, half = drawn[0].axes[:2]
    assert [label.get_text() for label in prefix.get_yticklabels()] == ["variant"]
    for axes, means in ((prefix, (0.7, 0.3)), (half, (3.5, 3.5))):
        dots = [line.get_xydata()[0] for line in axes.lines if len(line.get_xdata()) == 1]
        np.testing.assert_allclose([x for x, _ in dots], means)
        # The ways of a variant stand beside each other, around its row.
        np.testing.assert_allclose([y for _, y in dots], [-0.09, 0.09])
    assert {text.get_text() for text in drawn[0].legends[0].get_texts()} == {"plain", "smeared"}
