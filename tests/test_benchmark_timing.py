"""What benchmarks make of their times; the times themselves are no business of a test."""

import numpy as np
import pytest

from benchmarks import peers, timing
from benchmarks.cases import DENSE, VARIANTS, program

LENGTHS = (1024, 2048, 4096, 8192)


@pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
def test_exponent_of_a_power_is_the_power(power: float):
    values = [3e-5 * length**power for length in LENGTHS]
    assert timing.exponent(LENGTHS, values) == pytest.approx(power, abs=1e-9)


def test_exponent_is_the_least_squares_slope():
    values = [1.0, 2.2, 3.7, 8.4]
    slope = np.polyfit(np.log(LENGTHS), np.log(values), 1)[0]
    assert timing.exponent(LENGTHS, values) == pytest.approx(slope)


@pytest.mark.parametrize(
    ("lengths", "values"), [([8], [1.0]), ([8, 8], [1.0, 2.0]), ([8, 16], [1.0]), ([8, 16], [0, 1])]
)
def test_exponent_refuses_what_has_none(lengths, values):
    with pytest.raises(ValueError):
        timing.exponent(lengths, values)


def test_ratio_pairs_the_turns():
    """Ours takes half the time in every turn, though the turns differ by more than that."""
    slowly = timing.ratio([2.0, 20.0, 8.0], [1.0, 10.0, 4.0])
    assert slowly == timing.Estimate(2.0, 2.0, 2.0)
    with pytest.raises(ValueError):
        timing.ratio([1.0], [1.0, 2.0])


def test_estimate_is_median_and_quartiles():
    estimate = timing.Estimate.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert estimate == timing.Estimate(3.0, 2.0, 4.0)
    assert estimate.text() == "3.00 (2.00–4.00)"
    with pytest.raises(ValueError):
        timing.Estimate.of([])


def test_programs_take_turns():
    order = []

    def recorded(name):
        def run():
            order.append(name)
            return float(len(order))

        return run

    samples = timing.in_turns({name: recorded(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert samples == {"a": [1.0, 6.0, 7.0], "b": [2.0, 5.0, 8.0], "c": [3.0, 4.0, 9.0]}


def test_a_peer_that_fails_in_its_turn_costs_only_its_own_samples():
    answers = iter([1.0, 2.0])

    def dies():
        try:
            return next(answers)
        except StopIteration:
            raise peers.PeerError("killed") from None

    programs = {"ours": lambda: 0.5, "dies": dies, "other": lambda: 0.25}
    errors = {}
    samples = timing.in_turns(programs, 4, errors)
    assert samples == {"ours": [0.5] * 4, "other": [0.25] * 4}
    assert errors == {"dies": "killed"}
    with pytest.raises(peers.PeerError, match="killed"):
        timing.in_turns(programs, 1)


def test_calls_fill_a_turn():
    assert timing.calls_for(0.01, 0.05) == 5
    assert timing.calls_for(3.0, 0.05) == 1


def test_peak_bytes_count_the_square_of_dense_scores():
    peaks = {}
    for T in (256, 512):
        case = VARIANTS["causal"]
        lowered = program(case.implementations()[DENSE], "forward").lower(*case.shapes(T))
        peaks[T] = timing.peak_bytes(lowered.compile())
        assert peaks[T] >= 4 * case.N * T**2
    assert peaks[512] / peaks[256] == pytest.approx(4, rel=0.2)
