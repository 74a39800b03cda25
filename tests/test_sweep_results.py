"""Results read out of a folder: the best learning rates, statistics, verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sweeps import results
from sweeps.results import Sample
from sweeps.verdicts import Above, AllAbove, Below, Exceeds, Outdoes, Ratio, judge
from tests.filled_sweep import RATES, fill


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results.read(fill(tmp_path_factory.mktemp("sweep") / "sweep"))


def test_the_best_learning_rate_has_the_best_mean_and_lost_no_seed(found):
    # gqa: .5 against .5625; mqa: .375 against 1.0, where one of two seeds has failed.
    assert found.point("gqa").learning_rate == 1e-2
    assert found.point("mqa").learning_rate == 1e-3
    assert found.sample("gqa", "copy/accuracy").values == (0.5, 0.625)
    assert found.point("mqa").rates == RATES
    assert found.point("mqa").sample("copy/accuracy", 1e-2).values == (1.0,)


def test_a_rate_that_lacks_a_seed_loses_to_one_that_has_all():
    runs = [
        results.RunResult("", "", seed, rate, status, "", numbers, [], {}, {}, "")
        for rate, seed, status, numbers in (
            (1e-3, 0, "done", {"copy/accuracy": 0.3}),
            (1e-3, 1, "done", {"copy/accuracy": 0.3}),
            (1e-2, 0, "done", {"copy/accuracy": 0.9}),
            (1e-2, 1, "missing", {}),
        )
    ]
    assert results._best_rate(runs, "copy/accuracy") == 1e-3
    assert results._best_rate(runs[:1] + runs[2:], "copy/accuracy") == 1e-3


def test_the_best_loss_is_the_lowest():
    runs = [
        results.RunResult("", "", 0, rate, "done", "", {"markov/loss": loss}, [], {}, {}, "")
        for rate, loss in ((1e-3, 0.9), (1e-2, 0.8), (1e-1, 1.1))
    ]
    assert results._best_rate(runs, "markov/loss") == 1e-2
    assert results._best_rate(runs, "markov/accuracy") == 1e-3  # none has it: the first


def test_mean_spread_and_interval_by_the_textbook():
    sample = Sample((0.2, 0.4, 0.9), 3)
    assert sample.mean == pytest.approx(0.5)
    assert sample.spread == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 2))
    draws = np.random.default_rng(5).choice(sample.values, (200_000, 3)).mean(1)
    low, high = sample.interval
    assert low == pytest.approx(np.quantile(draws, 0.025), abs=0.01)
    assert high == pytest.approx(np.quantile(draws, 0.975), abs=0.01)
    assert sample.interval == sample.interval  # its draws are seeded
    one = Sample((0.3,), 1)
    assert one.mean == 0.3 and one.interval is None and math.isnan(one.spread)
    assert Sample((0.3, 0.3), 2).interval == (0.3, 0.3)
    assert math.isnan(Sample((), 0).mean)


@pytest.mark.parametrize(
    ("verdict", "confirmed", "measured"),
    [
        (Above("c", "gqa", "copy/accuracy", 0.56), True, "0.5625 ± 0.088 [0.5, 0.625] (2 seeds)"),
        (Above("c", "gqa", "copy/accuracy", 0.57), False, "0.5625"),
        (Below("c", "gqa", "copy/accuracy", 0.57), True, "0.5625"),
        (Below("c", "gqa", "copy/accuracy", 0.56), False, "0.5625"),
        (Exceeds("c", "gqa", "mqa", "copy/accuracy", 0.18), True, "0.1875: 0.5625"),
        (Exceeds("c", "gqa", "mqa", "copy/accuracy", 0.19), False, "0.1875: 0.5625"),
        (Outdoes("c", "gqa", "copy/accuracy", "copy/accuracy@32", 0.42), True, "0.4219: 0.5625"),
        (Outdoes("c", "gqa", "copy/accuracy", "copy/accuracy@32", 0.43), False, "0.4219: 0.5625"),
        (Ratio("c", "gqa", "mqa", "copy/accuracy", 1.5), True, "1.5: 0.5625"),
        (Ratio("c", "gqa", "mqa", "copy/accuracy", 1.4, within=0.05), False, "1.5: 0.5625"),
        (Ratio("c", "gqa", "mqa", "copy/accuracy", 1.4, within=0.1), True, "1.5: 0.5625"),
        (Above("c", "gqa", "recall/accuracy", 0.0), False, "no result"),
        (Below("c", "gqa", "recall/accuracy", 0.0), False, "no result"),
        (Above("c", "mha", "copy/accuracy", 0.0), False, "no point 'mha'; it has gqa, mqa"),
        (AllAbove("c", ("gqa", "mqa"), "copy/accuracy", 0.37), True, "mqa 0.375"),
        (AllAbove("c", ("gqa", "mqa"), "copy/accuracy", 0.38), False, "mqa 0.375"),
        # It has happened with one seed of two.
        (Below("c", "gqa", "half_step", 50.0), False, "40 (1 of 2 seeds)"),
        (Exceeds("c", "mqa", "gqa", "half_step", 0.5), False, "1: 41 (1 of 2 seeds) and 40"),
        (Ratio("c", "gqa", "gqa", "half_step", 1.0), False, "1: 40 (1 of 2 seeds)"),
        (AllAbove("c", ("gqa",), "half_step", 30.0), False, "gqa 40 (1 of 2 seeds)"),
    ],
)
def test_verdicts(found, verdict, confirmed, measured):
    (said,) = judge((verdict,), found)
    assert said.claim == "c" and said.confirmed is confirmed and measured in said.measured
    assert str(said) == ("CONFIRMED" if confirmed else "NOT CONFIRMED")
