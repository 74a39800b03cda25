"""What the benchmark of attention makes of its times and bytes."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import attention, attention_rows, peers
from benchmarks.cases import (
    DENSE,
    FLEX,
    JAX_NN,
    OURS,
    PRODUCTS,
    PROGRAMS,
    SDPA,
    VARIANTS,
    program,
)  # fmt: skip

LENGTHS = (1024, 2048, 4096, 8192)


@pytest.mark.broad
@pytest.mark.parametrize("variant", VARIANTS)
def test_implementations_of_a_variant_agree(variant: str):
    """A peer that computes something else would be a comparison of nothing; products alone do."""
    case, T = VARIANTS[variant], 300
    arrays = [
        jax.random.normal(key, shape.shape)
        for key, shape in zip(jax.random.split(jax.random.key(1), 4), case.shapes(T), strict=True)
    ]
    results = {
        name: program(run, "forward")(*arrays)
        for name, run in case.implementations().items()
        if name != PRODUCTS
    }
    for name, result in results.items():
        np.testing.assert_allclose(result, results[OURS], atol=2e-5, err_msg=name)


def growing(dense=2.0, tiled=2.0, near=1.0, memory=1.0, additive=9.0, one_head=0.9):
    """Times and bytes that grow with these powers, dense always 4 times slower."""
    seconds, peaks = {}, {}
    powers = {
        ("causal", DENSE): (4 * 1024 ** (tiled - dense), dense, 2.0),
        ("causal", OURS): (1.0, tiled, memory),
        ("causal", SDPA): (1.5, tiled, memory),
        ("one_head", OURS): (one_head, tiled, memory),
        ("window", OURS): (1.0, near, memory),
        ("longformer", OURS): (1.1, near, memory),
        ("linear", OURS): (1.0, near, memory),
        ("additive", OURS): (additive, 2.0, 2.5),
    }
    for (variant, name), (factor, time, space) in powers.items():
        for T in LENGTHS:
            for what in ("forward", "both"):
                seconds[variant, name, T, what] = [factor * 1e-9 * T**time] * 3
                peaks[variant, name, T, what] = int(17 * T**space)
    return attention_rows.Measured(seconds, peaks)


def words(measured) -> dict[str, bool | None]:
    return {verdict.row: verdict.confirmed for verdict in attention_rows.verdicts(measured)}


def test_what_grows_as_claimed_is_confirmed():
    rows = "6", "13", "21", "22", "26", "27", "28"
    assert words(growing()) == dict.fromkeys(rows, True)


def test_time_is_judged_where_it_is_long():
    """Times that do not grow at the short end refute nothing; at the long end they do."""
    measured = growing()
    times = measured.seconds
    for early, late, right in ((4.0, 1.0, True), (1.0, 0.25, False)):
        changed = dict(times)
        for i, T in enumerate(LENGTHS):
            factor = late if i == len(LENGTHS) - 1 else early if i == 0 else 1.0
            changed["causal", OURS, T, "both"] = [factor * times["causal", OURS, T, "both"][0]] * 3
        found = words(attention_rows.Measured(changed, measured.peaks))
        assert found["21"] == found["26"] == right


@pytest.mark.parametrize(
    ("wrong", "rows"),
    [
        ({"dense": 1.0}, {"21", "26"}),
        ({"tiled": 1.2}, {"21", "26"}),
        ({"additive": 0.9}, {"6"}),
        ({"near": 2.0}, {"27", "28"}),
        ({"memory": 2.0}, {"26", "28"}),
        # Four heads take 1.4 times as long as one, 1.6 times, and less than two thirds as long.
        ({"one_head": 1 / 1.4}, set()),
        ({"one_head": 1 / 1.6}, {"13"}),
        ({"one_head": 1.6}, {"13"}),
    ],
)
def test_what_grows_otherwise_is_not_confirmed(wrong: dict[str, float], rows: set[str]):
    assert {row for row, confirmed in words(growing(**wrong)).items() if not confirmed} == rows


def test_what_was_not_measured_is_not_decided():
    measured = growing()
    only = {key: value for key, value in measured.seconds.items() if key[2] == 1024}
    assert words(attention_rows.Measured(only, {})) == {
        "6": None, "13": True, "21": None, "22": None, "26": None, "27": None,
        "28": None,
    }  # fmt: skip
    assert set(words(attention_rows.Measured({}, {})).values()) == {None}


def test_goals_tell_reached_from_missed_from_unknown():
    goals = {goal.name: goal for goal in attention_rows.goals(growing())}
    assert len(goals) == 8
    goal = goals["causal 8,192, forward, beside SDPA"]
    assert goal.reached == pytest.approx(1.5)
    assert str(goal).endswith("at least 1.2 ×, reached with 1.50 ×")
    missed = dataclasses.replace(goal, wanted=1.6)
    assert str(missed).endswith("at least 1.6 ×, NOT reached with 1.50 ×")
    assert str(goals[f"window 8,192, both, beside {JAX_NN}"]).endswith("not measured")


def test_bounds_are_peers_beside_the_products_alone():
    measured = growing()
    assert attention_rows.bounds(measured) == []
    seconds = dict(measured.seconds) | {("causal", PRODUCTS, 8192, "forward"): [0.05] * 3}
    assert attention_rows.bounds(attention_rows.Measured(seconds, {})) == [
        "bound causal 8,192, forward, beside SDPA: the products of the tiles alone are 2.01 × as "
        "fast"
    ]


def test_tables_have_a_row_for_each_measurement():
    measured = growing()
    lines = attention.table(measured).splitlines()
    assert len(lines) == 2 + 8 * len(LENGTHS)
    assert "| causal, SDPA | 8,192 | 101 (101–101) | 1.50 (1.50–1.50) |" in attention.table(
        measured
    )
    assert "| window, ours | 1.00 | 1.00 |" in attention.exponents(measured)
    assert "| causal, dense | 2.00 | 2.00 |" in attention.exponents(measured)
    points = attention.panels(measured)["both"]["causal, SDPA"]
    assert points[-1] == (8192, pytest.approx(1.5e-6 * 8192**2))


def test_peers_that_were_not_asked_for_are_not_measured():
    assert attention.parse([]).peers == ["dense", "jax.nn", "products"]
    assert attention.parse(["--short"]).peers == ["dense", "jax.nn"]
    options = ["--variants=causal", "--lengths=16", "--repeats=1"]
    measured = attention.measure(attention.parse([*options, "--peers=dense"]), None)
    assert {key[1] for key in measured.seconds} == {OURS, DENSE}
    assert measured.seconds.keys() == measured.peaks.keys()
    # PyTorch's rows say so themselves.
    assert {key[1] for key in measured.errors} == {SDPA, FLEX}
    assert "| causal, SDPA | 16 | not measured |  |  | not measured |" in attention.table(measured)


class FakeTorch:
    """Has an answer for everything until it ends; cannot run one of its programs a third time."""

    def __init__(self, cannot: str = "", ends_at: str = ""):
        self.cannot, self.ends_at = cannot, ends_at
        self.turns, self.dropped, self.ended = 0, [], False

    def ask(self, **request):
        self._live(request.get("prepare"))
        self.dropped += [request["drop"]] if "drop" in request else []
        return {"bytes": 2**20}

    def seconds(self, name, what, calls=1):
        self._live(name)
        self.turns += name == self.cannot
        if name == self.cannot and self.turns > 2:
            raise peers.PeerError("cannot")
        return 0.25

    def _live(self, name):
        self.ended = self.ended or name == self.ends_at
        if self.ended:
            raise peers.PeerError("has ended")


def nothing_is_run(monkeypatch):
    monkeypatch.setattr(
        attention,
        "ours_and_jax",
        lambda variant, T, names, peaks: {
            (variant, name, T, what): lambda: 0.5 for name in names for what in PROGRAMS
        },
    )


def test_what_is_left_out_is_said_with_its_reason(monkeypatch):
    nothing_is_run(monkeypatch)
    options = ["--variants=causal,additive,linear", "--lengths=1024,4096,8192", "--repeats=1"]
    measured = attention.measure(attention.parse(options), FakeTorch())
    lacks = attention.lacking(measured.errors)
    assert (
        lacks["causal, dense, T = 8,192"] == "its scores take gigabytes; measured up to T = 4,096"
    )
    assert "longest length" in lacks["causal, FlexAttention, T = 4,096"]
    assert lacks["additive, ours, T = 8,192"] == "takes seconds a call; measured up to T = 1,024"
    assert "additive, ours, T = 1,024" not in lacks
    assert not any(what.startswith(("linear", "causal, ours", "causal, jax")) for what in lacks)
    short = attention.measure(attention.parse(["--short", *options]), FakeTorch())
    for T in ("1,024", "4,096", "8,192"):
        said = attention.lacking(short.errors)[f"causal, FlexAttention, T = {T}"]
        assert "not measured in the short form" in said
    window = attention.parse(["--short", "--variants=window", "--lengths=16"])
    said = attention.lacking(attention.measure(window, None).errors)["window, dense, T = 16"]
    assert said == "not measured in the short form but for causal"


def test_all_that_was_asked_for_may_be_left_out():
    arguments = attention.parse(["--variants=additive", "--lengths=4096"])
    measured = attention.measure(arguments, None)
    assert measured.seconds == {}
    assert "| additive, ours | 4,096 | not measured |" in attention.table(measured)


def test_a_peer_that_fails_keeps_what_was_measured(monkeypatch):
    nothing_is_run(monkeypatch)
    arguments = attention.parse(["--variants=causal", "--lengths=16,32", "--repeats=2"])
    torch = FakeTorch(cannot="causal, SDPA, T = 32, both")
    measured = attention.measure(arguments, torch)
    assert measured.seconds["causal", OURS, 32, "both"] == [0.5, 0.5]
    assert measured.seconds["causal", SDPA, 16, "both"] == [0.25, 0.25]
    assert measured.seconds["causal", SDPA, 32, "forward"] == [0.25, 0.25]
    lacks = attention.lacking(measured.errors)
    assert lacks["causal, SDPA, T = 32, both"] == "cannot"
    assert "causal, SDPA, T = 16, both" not in lacks
    assert torch.dropped[:2] == ["causal, SDPA, T = 16, forward", "causal, SDPA, T = 16, both"]


def test_a_peer_that_ends_costs_its_figures_of_one_variant(monkeypatch):
    nothing_is_run(monkeypatch)
    options = ["--variants=causal,window,linear", "--lengths=16,32", "--repeats=2"]
    torch = FakeTorch(ends_at="window, SDPA, T = 32, forward")
    measured = attention.measure(attention.parse(options), torch)
    for T in (16, 32):
        assert measured.seconds["causal", SDPA, T, "both"] == [0.25, 0.25]
        assert measured.seconds["window", OURS, T, "both"] == [0.5, 0.5]
        assert measured.seconds["linear", OURS, T, "both"] == [0.5, 0.5]
        assert measured.errors["window", SDPA, T, "both"] == "has ended"


def test_times_on_both_sides_of_a_bound_decide_nothing():
    measured = growing()
    for many, confirmed in (([1.4, 1.45, 1.49], True), ([1.4, 1.55, 1.6], None),
                            ([1.52, 1.6, 1.7], False)):  # fmt: skip
        changed = dict(measured.seconds)
        changed["causal", OURS, 8192, "both"] = many
        changed["one_head", OURS, 8192, "both"] = [1.0] * 3
        assert words(attention_rows.Measured(changed, measured.peaks))["13"] is confirmed


def test_each_implementation_names_its_own_lengths():
    measured = growing()
    short = {k: v for k, v in measured.seconds.items() if k[1] != DENSE or k[2] <= 2048}
    (square,) = (
        verdict
        for verdict in attention_rows.verdicts(attention_rows.Measured(short, measured.peaks))
        if verdict.row == "21"
    )
    assert square.figures == (
        "time ~ dense T^2.00 from T = 1,024 to 2,048 (from 1,024 on T^2.00), "
        "tiled T^2.00 from T = 4,096 to 8,192 (from 1,024 on T^2.00)"
    )
