"""Finding a change in constructed curves, and the table and the figure of a run."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.image import imread

from analysis import emergence_plot, emergence_table
from analysis.emergence import find_change, strongest_head
from analysis.loss_by_position import (
    compared_positions,
    in_context_learning_score,
)

X = np.linspace(0, 100, 401)


def logistic(x, middle, rate, low=0.0, high=1.0):
    return low + (high - low) / (1 + np.exp(-rate * (x - middle)))


@pytest.mark.parametrize("rate", [0.5, 1.0, 3.0])
def test_a_logistic_curve(rate):
    """Half-way at its middle; from 10 to 90 % it takes ln(81)/rate."""
    change = find_change(X, logistic(X, 40, rate, low=0.05, high=0.85))
    assert change.half == pytest.approx(40, abs=0.02)
    assert change.width == pytest.approx(np.log(81) / rate, rel=0.03)
    assert (change.low, change.high) == pytest.approx((0.05, 0.85), abs=1e-4)
    assert change.start < change.half < change.end


def test_a_straight_line_and_a_step():
    line = find_change(X, np.clip((X - 20) / 50, 0, 1))
    assert (line.start, line.half, line.end) == pytest.approx((25, 45, 65))
    step = find_change(X, (X >= 30).astype(float))
    assert step.half == pytest.approx(29.875) and step.width == pytest.approx(0.2)


def test_flat_falling_and_small_curves_do_not_change():
    noise = np.random.default_rng(0).normal(0, 0.02, len(X))
    assert find_change(X, 0.05 + noise) is None
    assert find_change(X, logistic(X, 40, 1, high=0.19)) is None
    assert find_change(X, logistic(X, 40, 1, high=0.19), least_rise=0.1).high < 0.2
    assert find_change(X, logistic(X, 40, -1)) is None
    assert find_change(X, -logistic(X, 40, -1)).half == pytest.approx(40, abs=0.02)
    assert find_change(X, np.full(len(X), np.nan)) is None


def test_noise_and_a_bump_before_the_rise_do_not_widen_it():
    """10 % is where the curve last was before the rise, not where it first was by chance."""
    y = logistic(X, 60, 2)
    y[40:44] = 0.3
    change = find_change(X, y)
    assert change.half == pytest.approx(60, abs=0.05)
    assert change.width == pytest.approx(np.log(81) / 2, rel=0.05)
    noise = np.random.default_rng(0).normal(0, 0.02, len(X))
    noisy = find_change(X, logistic(X, 60, 1) + noise)
    assert noisy.half == pytest.approx(60, abs=0.5) and noisy.width < 6


def test_what_is_no_curve_is_refused():
    for x, y in (([1, 2], [0, 1]), ([1, 2, 3], [0, 1]), ([1, 3, 2], [0, 0, 1])):
        with pytest.raises(ValueError, match="3 points or more, x ascending"):
            find_change(x, y)


def test_the_strongest_head():
    scores = np.zeros((3, 2, 4))
    scores[0, 0, 0], scores[-1, 1, 2], scores[-1, 0, 3] = 1, 0.8, 0.7
    assert strongest_head(scores) == (1, 2)


# --- Loss by position -----------------------------------------------------------------------------


def test_the_score_compares_tokens_500_and_50_of_512():
    assert compared_positions(512) == (50, 500)
    assert compared_positions(128) == (12, 125) and compared_positions(64) == (6, 62)
    loss = np.zeros(512)
    loss[50], loss[500] = 3.0, 2.6
    assert in_context_learning_score(loss) == pytest.approx(-0.4)
    with pytest.raises(ValueError, match="sequence of 1 tokens"):
        compared_positions(1)


def test_neighbours_of_both_tokens_are_averaged():
    loss = np.zeros(512)
    loss[48:53], loss[500] = 3.0, 10.0
    loss[47] = loss[53] = loss[497] = loss[503] = 100.0
    assert in_context_learning_score(loss, 2) == pytest.approx(10 / 5 - 3.0)
    for around in (12, 51):
        with pytest.raises(ValueError, match=r"around \(50, 500\) are not all in 512"):
            in_context_learning_score(loss, around)


# --- The table and the figure ---------------------------------------------------------------------


def rows(steps=41, layers=2, heads=3, T=16, change_at=400):
    """A made-up run: the last head of the last layer changes, the loss falls late in sequences."""
    for step in np.linspace(0, 1000, steps):
        done = float(logistic(step, change_at, 0.05))
        prefix, previous = np.full((layers, heads), 0.03), np.full((layers, heads), 0.1)
        prefix[-1, -1], previous[0, 0] = 0.03 + 0.9 * done, 0.1 + 0.8 * done
        loss_T = 4.0 - done * 3 * (np.arange(T) >= T // 2)
        numbers = {
            "step": step,
            "tokens": 2048 * step,
            "loss": loss_T.mean(),
            "loss_repeated": loss_T[T // 2 :].mean(),
            "in_context_learning": -3 * done,
            "prefix_matching_chance": 0.02,
        }
        scores = {"prefix_matching": prefix, "previous_token": previous}
        yield emergence_table.flat_row(numbers, scores, loss_T)


@pytest.fixture
def path(tmp_path):
    for row in rows():
        emergence_table.append(tmp_path / "emergence.csv", row)
    return tmp_path / "emergence.csv"


def test_a_table_is_read_as_it_was_written(path):
    table = emergence_table.read(path)
    expected = list(rows())
    assert table.names == tuple(expected[0])
    for name in table.names:
        np.testing.assert_allclose(table[name], [row[name] for row in expected], rtol=1e-6)
    assert table.heads("prefix_matching").shape == (41, 2, 3)
    assert table.heads("prefix_matching")[-1, 1, 2] == pytest.approx(0.93, abs=1e-6)
    assert table.heads("previous_token")[-1, 0, 0] == pytest.approx(0.9, abs=1e-6)
    assert table.loss_by_position().shape == (41, 16)
    assert table.loss_by_position()[-1, [7, 8]] == pytest.approx([4, 1], abs=1e-6)
    assert path.read_text().splitlines()[1].startswith("0,0,")


def test_ten_layers_are_in_their_order(tmp_path):
    for row in rows(steps=2, layers=11, heads=12, T=12):
        emergence_table.append(tmp_path / "t.csv", row)
    prefix = emergence_table.read(tmp_path / "t.csv").heads("prefix_matching")
    assert prefix.shape == (2, 11, 12) and strongest_head(prefix) == (10, 11)


def test_rows_past_a_step_are_forgotten_and_half_a_row_too(path):
    whole = path.read_text()
    with path.open("a") as file:
        file.write("1025,2099200,3.")
    assert emergence_table.read(path)["step"][-1] == 1000
    emergence_table.forget_after(path, 500)
    assert emergence_table.read(path)["step"].max() == 500
    assert whole.startswith(path.read_text())
    emergence_table.forget_after(path, -1)
    assert emergence_table.read(path) is None
    emergence_table.append(path, next(rows()))
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:2])
    assert emergence_table.read(path.parent / "none.csv") is None


def test_the_figure_says_when_the_change_came(path, tmp_path):
    said = emergence_plot.draw(path, tmp_path / "emergence.png")
    assert said == (
        "prefix matching of layer 1 head 2 rises from 0.03 to 0.93: half-way at 819.20k tokens, "
        f"10 to 90 % within {width(path):.2f}k ({width(path) / 2048:.1%} of training)"
    )
    assert imread(tmp_path / "emergence.png").shape[:2] == (1560, 1080)


def test_the_figure_shows_what_the_table_says(path, tmp_path, monkeypatch):
    figures, make = [], emergence_plot.new_figure
    monkeypatch.setattr(
        emergence_plot, "new_figure", lambda *size: figures.append(make(*size)) or figures[-1]
    )
    emergence_plot.draw(path, tmp_path / "emergence.png")
    table = emergence_table.read(path)
    losses, learning, prefix, previous, heat, _ = figures[0].axes
    tokens = table["tokens"]

    def curves(axes):
        """The curves against tokens, less the marks of the change and of chance."""
        return [line.get_ydata() for line in axes.lines if len(line.get_xdata()) == len(tokens)]

    np.testing.assert_array_equal(curves(losses), [table["loss"], table["loss_repeated"]])
    np.testing.assert_array_equal(curves(learning), [table["in_context_learning"]])
    for axes, score in ((prefix, "prefix_matching"), (previous, "previous_token")):
        expected = table.heads(score).reshape(len(tokens), -1).T
        np.testing.assert_array_equal(curves(axes), expected)
    for axes in (losses, learning, prefix, previous):
        (half,) = (line for line in axes.lines if len(set(line.get_xdata())) == 1)
        assert half.get_xdata()[0] == pytest.approx(819_200, rel=0.01)
    (mesh,) = heat.collections
    np.testing.assert_array_equal(mesh.get_array(), table.loss_by_position().T)
    # The first position is on top.
    assert heat.get_ylim()[0] > heat.get_ylim()[1]


def width(path):
    table = emergence_table.read(path)
    return find_change(table["tokens"], table["prefix_matching/layer1/head2"]).width / 1000


def test_a_figure_of_a_run_without_a_change(tmp_path):
    for row in rows(change_at=10_000):
        emergence_table.append(tmp_path / "t.csv", row)
    assert emergence_plot.draw(tmp_path / "t.csv", tmp_path / "t.png") is None
    assert (tmp_path / "t.png").stat().st_size > 10_000
