"""What benchmarks make of their times; the times themselves are no business of a test."""

import argparse
import ast
import csv
import dataclasses
import json
import stat
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache import KVCache, Slots
from attention.masks import Window
from benchmarks import attention, attention_rows, decode, options, peers, report, timing, train_step
from benchmarks.cases import DENSE, JAX_NN, OURS, SDPA, VARIANTS, program

ROOT = Path(__file__).resolve().parent.parent
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


@pytest.mark.broad
@pytest.mark.parametrize("variant", VARIANTS)
def test_implementations_of_a_variant_agree(variant: str):
    """A peer that computes something else would be a comparison of nothing."""
    case, T = VARIANTS[variant], 300
    arrays = [
        jax.random.normal(key, shape.shape)
        for key, shape in zip(jax.random.split(jax.random.key(1), 4), case.shapes(T), strict=True)
    ]
    results = {
        name: program(run, "forward")(*arrays) for name, run in case.implementations().items()
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


def test_a_verdict_names_row_and_word():
    for confirmed, word in ((True, "CONFIRMED"), (False, "NOT CONFIRMED"), (None, "NOT MEASURED")):
        line = str(report.Verdict("21", "time grows", confirmed, "T^2.00"))
        assert line == f"row 21 {word}: time grows — T^2.00"


def test_goals_tell_reached_from_missed_from_unknown():
    goals = {goal.name: goal for goal in attention_rows.goals(growing())}
    assert len(goals) == 8
    goal = goals["causal 8,192, forward, beside SDPA"]
    assert goal.reached == pytest.approx(1.5)
    assert str(goal).endswith("at least 1.2 ×, reached with 1.50 ×")
    missed = dataclasses.replace(goal, wanted=1.6)
    assert str(missed).endswith("at least 1.6 ×, NOT reached with 1.50 ×")
    assert str(goals[f"window 8,192, both, beside {JAX_NN}"]).endswith("not measured")


def test_tables_have_a_row_for_each_measurement():
    measured = growing()
    lines = attention.table(measured).splitlines()
    assert len(lines) == 2 + 8 * len(LENGTHS)
    assert "| causal, SDPA | 8,192 | 101 (101–101) | 1.50 (1.50–1.50) |" in attention.table(
        measured
    )
    assert "| window, ours | 1.00 | 1.00 |" in attention.exponents(measured)
    assert "| causal, dense | 2.00 | 2.00 |" in attention.exponents(measured)


def test_report_is_written_and_printed(tmp_path: Path, capsys):
    rows = [{"variant": "causal", "seconds": 0.5}, {"variant": "window", "seconds": 0.25}]
    decided = [report.Verdict("22", "it is so", None, "not measured")]
    report.write(tmp_path, "some", ["# Title", report.items(["one", "two"])], rows, decided)
    assert json.loads((tmp_path / "some.json").read_text()) == [
        {"row": "22", "claim": "it is so", "confirmed": None, "figures": "not measured"}
    ]
    assert (tmp_path / "some.md").read_text() == "# Title\n\n- one\n- two\n"
    assert "# Title" in capsys.readouterr().out
    with (tmp_path / "some.csv").open() as file:
        assert [row["seconds"] for row in csv.DictReader(file)] == ["0.5", "0.25"]
    report.draw(attention.panels(growing()), tmp_path / "some.png", "T", "ms")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("module", "argument", "said"),
    [
        (attention, "--variants=causal,sliding", "unknown variant 'sliding'; known are causal, "),
        (attention, "--peers=ours", "unknown peer 'ours'; known are dense, jax.nn"),
        (attention, "--lengths=1024,2k", "must be whole numbers such as 1024,2048, got '1024,2k'"),
        (attention, "--lengths=0", "must be at least 1, got 0"),
        (attention, "--repeats=0", "must be a whole number from 1, got '0'"),
        (decode, "--variants=cross", "unknown variant 'cross'; known are mha, "),
        (train_step, "--repeats=two", "must be a whole number from 1, got 'two'"),
    ],
)
def test_wrong_options_are_refused(module, argument: str, said: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        module.parse([argument])
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert argument.partition("=")[0] in errors
    assert said in errors


def test_the_short_form_is_shorter_and_gives_way_to_options():
    for module in (attention, decode, train_step):
        assert module.parse(["--short"]).repeats < module.parse([]).repeats
    arguments = attention.parse(["--short", "--lengths=64,32,64", "--repeats=2"])
    assert (arguments.lengths, arguments.repeats) == ([32, 64], 2)


def test_peers_that_were_not_asked_for_are_not_measured():
    assert attention.parse([]).peers == ["dense", "jax.nn"]
    names = [key[1] for key in attention.ours_and_jax("causal", 16, ["dense"], {})]
    assert names == ["ours", "ours", "dense", "dense"]


@pytest.mark.parametrize("module", [attention, decode, train_step])
def test_help_shows_the_commands(module, capsys):
    with pytest.raises(SystemExit):
        module.parse(["--help"])
    assert f"python -m {module.__name__} --short" in capsys.readouterr().out


def never(arguments, torch):
    raise AssertionError("nothing may be measured")


@pytest.fixture
def no_cache(monkeypatch):
    """What a command switches on would stay on for the tests that follow in this process."""
    monkeypatch.setattr(options, "enable_compilation_cache", lambda: None)


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python", "--torch_python=/nowhere/python: there is no such program"),
        (sys.executable, f"--torch_python={sys.executable} does not run torch: ModuleNotFound"),
    ],
)
def test_an_interpreter_without_torch_is_refused(python: str, said: str, tmp_path: Path, capsys):
    arguments = argparse.Namespace(torch_python=python, out=tmp_path)
    assert options.run(never, arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


@pytest.mark.usefixtures("no_cache")
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, capsys):
    (tmp_path / "file").touch()
    arguments = argparse.Namespace(torch_python=None, out=tmp_path / "file")
    assert options.run(never, arguments) == 2
    assert "error: --out=" in capsys.readouterr().err


def peer_that(folder: Path, *answers: str, dies: str = "") -> str:
    """A program that gives these answers to the requests it reads, and then ends."""
    script = folder / "python"
    lines = "".join(f"read request\necho '{answer}'\n" for answer in answers)
    hello = json.dumps({"version": "1.0", "threads": 2})
    script.write_text(
        f"#!/bin/sh\necho '{hello}'\n{lines}read request\necho '{dies}' >&2\nexit 3\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    return str(script)


def test_peer_answers_in_turn(tmp_path: Path):
    python = peer_that(tmp_path, '{"seconds": 0.5}', '{"error": "cannot"}', dies="out of memory")
    with peers.torch_peer(python) as torch:
        assert str(torch) == "torch 1.0 on 2 threads"
        assert torch.seconds("some", "forward") == 0.5
        with pytest.raises(peers.PeerError, match="cannot"):
            torch.ask(prepare="some")
        with pytest.raises(peers.PeerError, match="does not run torch: out of memory"):
            torch.ask(prepare="some")


def test_without_an_interpreter_there_is_no_peer():
    with peers.torch_peer(None) as torch:
        assert torch is None


def test_the_peer_needs_nothing_of_ours():
    """It is run by an interpreter that has torch and numpy, and that may be an older one."""
    folder = ROOT / "benchmarks" / "torch_peer"
    allowed = {"torch", "numpy", *(path.stem for path in folder.glob("*.py"))}
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 11))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] in allowed | sys.stdlib_module_names, path.name


def test_another_model_is_no_peer():
    train_step.check_losses("same", [4.0, 3.0], [4.0, 3.0001], rtol=1e-3)
    with pytest.raises(peers.PeerError, match="other is not the same model"):
        train_step.check_losses("other", [4.0, 3.0], [4.0, 3.1], rtol=1e-3)


def test_torch_is_given_the_batches_that_ours_draws(tmp_path: Path):
    run = train_step.settings(train_step.options_of(train__steps=20, train__batch_size=4))
    request = train_step.for_torch(run, tmp_path / "some.npz", batches=3)
    assert len(request["learning_rates"]) == 20
    with np.load(tmp_path / "some.npz") as file:
        batch = run.task.sample(train_step.train_key(run.train_seed, 2), 4)
        np.testing.assert_array_equal(file["tokens"][2], batch.tokens_BT)
        np.testing.assert_array_equal(file["targets"][2], batch.targets_BT)
        np.testing.assert_array_equal(file["weights"][2], batch.weights_BT)
        assert file["params/w_embed_VD"].shape == (64, 64)


def test_step_table_and_goals():
    samples = {
        ("ours", "float32"): [0.03, 0.04],
        ("ours", "bfloat16"): [0.02, 0.02],
        ("PyTorch eager", "float32"): [0.06, 0.08],
    }
    errors = {("PyTorch compiled", "float32"): "no compiler"}
    table = train_step.step_table(samples, errors, tokens=4096)
    assert "| PyTorch eager, float32 | 70.0 (65.0–75.0) | 58,514 | 2.00 (2.00–2.00) |" in table
    assert "| PyTorch compiled, float32 | no compiler |" in table
    assert "| PyTorch eager, bfloat16 | not measured |" in table
    reached = {goal.name: goal.reached for goal in train_step.goals(samples)}
    assert reached == {
        "a training step beside PyTorch compiled": None,
        "a training step beside PyTorch eager": pytest.approx(2.0),
    }


def test_what_is_spent_beside_the_steps_is_a_share_of_them():
    beside = train_step.Beside(steps=100, data=0.01, lines=0.03, checkpoints=0.04)
    assert beside.share(0.04) == pytest.approx(0.02)
    text = train_step.beside_text(beside, 0.04)
    assert "drawing batches 0.25 %, lines of the log 0.75 %, checkpoints 1.00 %" in text
    assert text.endswith("together 2.00 % (goal: under 3 %, reached)")
    assert train_step.beside_text(beside, 0.02).endswith("4.00 % (goal: under 3 %, NOT reached)")
    assert "NOT reached" in train_step.start_text(12.5, 3.0)
    assert "NOT" not in train_step.start_text(11.5, 3.0)


def test_a_filled_cache_holds_what_its_mask_keeps():
    slots = Slots.for_mask(Window(4), 32)
    cache = KVCache.create(1, slots, jnp.float32, k_BSKH=(2, 8), v_BSKE=(2, 8))
    held = np.asarray(decode.filled(cache, 10).position_BS)
    assert set(held[held >= 0].tolist()) == {6, 7, 8, 9}


def decoded(window: float = 0.0, linear: float = 0.0, mqa: float = 0.5, mqa_bytes: int = 100):
    seconds, cache_bytes = {}, {}
    for length in (256, 4096):
        for variant, factor, power, size in (
            ("mha", 2.0, 1.0, 800), ("gqa", 1.0, 1.0, 200), ("mqa", mqa, 1.0, mqa_bytes),
            ("window", 1.0, window, 0), ("linear", 1.0, linear, 0),
        ):  # fmt: skip
            seconds[variant, "ours", length] = [factor * 1e-6 * length**power] * 2
            cache_bytes[variant, length] = size * length or 512
    seconds["gqa", "PyTorch eager", 4096] = [1.5 * 4096e-6] * 2
    return decode.Measured(seconds, cache_bytes)


@pytest.mark.parametrize(
    ("measured", "wrong"),
    [
        (decoded(), set()),
        (decoded(window=0.5), {"27"}),
        (decoded(linear=0.5), {"28"}),
        (decoded(mqa=3.0), {"24"}),
        (decoded(mqa_bytes=200), {"24"}),
    ],
)
def test_rows_of_decoding(measured, wrong: set[str]):
    verdicts = {v.row: v.confirmed for v in decode.verdicts(measured)}
    assert verdicts.pop("25") is None
    assert {row for row, confirmed in verdicts.items() if not confirmed} == wrong
    goals = {goal.name: goal.reached for goal in decode.goals(measured)}
    assert goals["decoding beside PyTorch eager at 4,096"] == pytest.approx(1.5)
    assert goals["decoding beside PyTorch compiled at 4,096"] is None
    assert "| gqa, PyTorch eager | 4,096 | 6,144 (6,144–6,144) | 163 | 1.50" in decode.table(
        measured
    )


@pytest.mark.broad
def test_latent_cache_is_as_small_as_the_formula():
    seconds = {("mla", "ours", 64): [1.0], ("mha", "ours", 64): [1.0]}
    tokens = 64 + decode.NUM_TOKENS
    right = decode.Measured(seconds, {("mla", 64): 1280 * tokens, ("mha", 64): 8192 * tokens})
    wrong = decode.Measured(seconds, {("mla", 64): 1281 * tokens, ("mha", 64): 8192 * tokens})
    assert {v.row: v.confirmed for v in decode.verdicts(right)}["25"] is True
    assert {v.row: v.confirmed for v in decode.verdicts(wrong)}["25"] is False
