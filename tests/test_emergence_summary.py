"""Numbers of constructed emergence tables: what changed, when, and what came with it."""

from __future__ import annotations

import numpy as np
import pytest

from analysis import emergence_table
from analysis.emergence_summary import induction_heads, previous_token_heads, summary

STEPS = np.arange(0, 1001, 25)
TOKENS_PER_STEP = 2048


def logistic(middle, low, high, rate=0.05):
    return low + (high - low) / (1 + np.exp(-rate * (STEPS - middle)))


def table_of(tmp_path, prefix_RLN, previous_RLN, learning_R, copying_RLN=None):
    """An emergence.csv of these curves, as it is read."""
    path = tmp_path / "emergence.csv"
    copying_RLN = np.zeros_like(prefix_RLN) if copying_RLN is None else copying_RLN
    for row, step in enumerate(STEPS):
        numbers = {
            "step": step,
            "tokens": step * TOKENS_PER_STEP,
            "in_context_learning": learning_R[row],
        }
        scores = {
            "prefix_matching": prefix_RLN[row],
            "previous_token": previous_RLN[row],
            "copying": copying_RLN[row],
        }
        emergence_table.append(path, emergence_table.flat_row(numbers, scores, [1.0]))
    return emergence_table.read(path)


def curves(of_heads):
    """(rows, 2, 2) with .03 everywhere but in the given heads."""
    score = np.full((len(STEPS), 2, 2), 0.03)
    for head, curve in of_heads.items():
        score[:, *head] = curve
    return score


def test_a_change_with_all_that_comes_with_it(tmp_path):
    table = table_of(
        tmp_path,
        curves({(1, 0): logistic(400, 0.03, 0.83), (1, 1): logistic(500, 0.03, 0.5)}),
        # The strongest of the layer below counts, not that of the layer itself.
        curves({(0, 1): logistic(350, 0.05, 0.45), (1, 1): logistic(800, 0.05, 0.95)}),
        -logistic(430, 0.1, 3.1),
        curves({(1, 0): np.linspace(0, 0.9, len(STEPS)), (0, 0): np.ones(len(STEPS))}),
    )
    found = summary(table)
    assert found["changed"] == 1
    assert found["half_step"] == pytest.approx(400, abs=2)
    assert found["half_tokens"] == pytest.approx(400 * TOKENS_PER_STEP, rel=0.01)
    assert found["width_share"] == pytest.approx(np.log(81) / 0.05 / 1000, rel=0.1)
    assert found["previous_lag"] == pytest.approx(-50, abs=3)
    assert found["previous_sum_lag"] == pytest.approx(-50, abs=3)
    assert found["learning_lag"] == pytest.approx(30, abs=3)
    assert found["learning_inside"] == 1
    assert found["prefix_matching"] == pytest.approx(0.83, abs=1e-3)
    assert found["copying"] == pytest.approx(0.9)
    assert found["previous_token"] == pytest.approx(0.95, abs=1e-2)
    assert found["in_context_learning"] == pytest.approx(-3.1, abs=1e-3)
    assert found["previous_correlation"] == pytest.approx(1, abs=0.02)
    assert found["learning_correlation"] == pytest.approx(1, abs=0.02)


def test_heads_that_share_a_rise_are_summed(tmp_path):
    """The one that ends highest comes last; of the sum of both half is there with the first."""
    table = table_of(
        tmp_path,
        curves({(1, 0): logistic(500, 0.03, 0.83)}),
        curves({(0, 0): logistic(400, 0.03, 0.43), (0, 1): logistic(600, 0.03, 0.47)}),
        np.zeros(len(STEPS)),
    )
    found = summary(table)
    assert found["previous_lag"] == pytest.approx(100, abs=3)
    # .4 of .84 at 400, .44 at 600: half of the whole is reached between the two.
    both = logistic(400, 0.03, 0.43) + logistic(600, 0.03, 0.47)
    half = np.interp(0.06 + 0.42, both, STEPS)
    assert found["previous_sum_lag"] == pytest.approx(half - 500, abs=3) and half < 550


def test_what_comes_long_after_is_late_and_outside(tmp_path):
    table = table_of(
        tmp_path,
        curves({(1, 0): logistic(300, 0.03, 0.83)}),
        curves({(0, 0): logistic(600, 0.05, 0.45)}),
        -logistic(600, 0.1, 3.1),
    )
    found = summary(table)
    assert found["previous_lag"] == pytest.approx(300, abs=3)
    assert found["learning_lag"] == pytest.approx(300, abs=3)
    assert found["learning_inside"] == 0


def test_without_a_change_there_is_no_moment(tmp_path):
    """The strongest head is in the first layer: no layer below, no previous-token head."""
    table = table_of(tmp_path, curves({(0, 0): 0.05}), curves({}), np.full(len(STEPS), -0.1))
    found = summary(table)
    assert found == {
        "changed": 0,
        "prefix_matching": 0.05,
        "copying": 0,
        "previous_token": 0.03,
        "in_context_learning": -0.1,
    }


def test_opposed_curves_are_ranked_opposite(tmp_path):
    table = table_of(
        tmp_path,
        curves({(1, 0): logistic(400, 0.03, 0.83)}),
        curves({(0, 0): logistic(400, 0.6, 0.1)}),
        np.linspace(0, 2, len(STEPS)),
    )
    found = summary(table)
    assert found["previous_correlation"] == pytest.approx(-1, abs=0.02)
    assert found["learning_correlation"] == pytest.approx(-1, abs=0.02)
    assert "previous_lag" not in found and "learning_lag" not in found


def test_which_heads_are_of_a_kind():
    score_LN = np.array([[0.05, 0.1, 0.0], [0.8, 0.4, 0.39]])
    assert induction_heads(score_LN) == [(1, 0), (1, 1)]
    assert induction_heads(score_LN / 5) == []
    assert previous_token_heads(score_LN / 5) == [(1, 0)]
    assert previous_token_heads(score_LN / 10) == []
