"""Results out of a folder in any state; statistics, verdicts, tables and files of a report."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from sweeps import command, report, result, results, tables
from sweeps.description import describe
from sweeps.fairness import Bill
from sweeps.folder import SweepFolder
from sweeps.pictures import Scatter, Series, mean_curve, with_curves
from sweeps.plan import make_plan
from sweeps.results import Sample
from sweeps.verdicts import Above, AllAbove, Below, Exceeds, Outdoes, Ratio, judge
from tests import tiny_sweep
from training import loop
from training.run_folder import RunFolder, write_json
from training.settings import OptionError

RATES = (1e-3, 1e-2)
STUDY = dataclasses.replace(
    tiny_sweep.get_sweep(),
    learning_rates=RATES,
    events=("half_step",),
    pictures=(
        Scatter("cache_bytes", "copy/accuracy", "memory"),
        Series("copy/accuracy@", "lengths", trained=16, chance=0.1),
    ),
)
# Point, learning rate, seed → copy accuracy; mqa's run at 0.01 with seed 1 has failed.
COPY = {
    ("gqa", 1e-3, 0): 0.25, ("gqa", 1e-3, 1): 0.75, ("gqa", 1e-2, 0): 0.5, ("gqa", 1e-2, 1): 0.625,
    ("mqa", 1e-3, 0): 0.25, ("mqa", 1e-3, 1): 0.5, ("mqa", 1e-2, 0): 1.0,
}  # fmt: skip
ENVIRONMENT = {
    "started": "2026-01-02T03:04:05+00:00", "device_kind": "cpu", "platform": "cpu",
    "cpu_count": 2, "versions": {"jax": "1.2.3"}, "git": {"commit": "a" * 40, "modified": True},
    "attention_implementation": {"layer0": "reference"},
}  # fmt: skip


def fill(path) -> SweepFolder:
    """A sweep folder with eight runs: seven done, one failed."""
    plan = make_plan(STUDY, tiny_sweep.get_config().to_dict())
    folder = SweepFolder(path)
    folder.begin(describe("tiny", "a <b>.py", STUDY, plan), Path(tiny_sweep.__file__))
    for point in plan.points:
        for run in point.runs:
            copy = COPY.get((run.point, run.learning_rate, run.seed))
            if copy is None:
                write_json(folder.result(run.name), result.failed(run.order(), "Diverged: <nan>\n"))
                continue
            numbers = dataclasses.asdict(point.bill) | {
                "copy/accuracy": copy, "copy/chance": 0.0833, "induction/accuracy": copy / 2,
                "induction/chance": 0.0833, "step_time_ms": 1.5, "copy/accuracy@16": copy,
                "copy/accuracy@32": copy / 4,
            }  # fmt: skip
            if copy == 0.5:  # something happened
                numbers["half_step"] = 40.0 + run.seed
            head = result.failed(run.order(), "")
            write_json(
                folder.result(run.name),
                head | {"status": "done", "metrics": numbers, "environment": ENVIRONMENT},
            )
            folder.run(run.name).path.mkdir(parents=True)
            for step in (0, 5, 10):
                value = 0.1 + (copy - 0.1) * step / 10
                folder.run(run.name).append_metrics(
                    {"step": step, "tokens": step * 68, "copy/accuracy": value,
                     "induction/accuracy": value / 2}
                )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("sweep") / "sweep")


@pytest.fixture(scope="module")
def found(folder):
    return results.read(folder)


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


def test_numbers_are_shown_short_and_missing_ones_as_a_dash():
    assert [tables.number(x) for x in (0.0, 0.12345, 3.0, 106816.0, 1234.56, math.nan)] == [
        "0.000", "0.123", "3", "106,816", "1,234.6", "–",
    ]  # fmt: skip


def test_all_files_of_the_report(folder, found):
    paths = report.write(folder, STUDY, found)
    assert {path.name for path in paths} == {
        "comparison.png", "curves.png", "memory.png", "lengths.png", "results.jsonl",
        "results.csv", "report.md", "report.html",
    }  # fmt: skip
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG\r\n")

    lines = [json.loads(line) for line in (folder.path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and [line["status"] for line in lines].count("failed") == 1
    first = lines[0]
    assert first["metrics"]["copy/accuracy"] == 0.25 and first["config"]["seed"] == 0
    assert first["versions"] == {"jax": "1.2.3"} and first["device"] == "cpu"
    assert first["git"]["commit"] == "a" * 40 and first["implementation"] == {"layer0": "reference"}
    assert lines[-1]["error"] == "Diverged: <nan>" and lines[-1]["metrics"] == {}

    rows = list(csv.DictReader(io.StringIO((folder.path / "results.csv").read_text())))
    assert [row["run"] for row in rows] == [line["run"] for line in lines]
    best = [row["best_learning_rate"] for row in rows]
    assert best == ["False"] * 2 + ["True"] * 4 + ["False"] * 2
    assert rows[0]["copy/accuracy"] == "0.25" and rows[0]["optimizer.learning_rate"] == "0.001"
    assert "train.steps" not in rows[0] and rows[7]["copy/accuracy"] == ""
    assert rows[7]["status"] == "failed" and rows[7]["error"] == "Diverged: <nan>"

    text = (folder.path / "report.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("| gqa | ")]
    assert table[0] == (
        "| gqa | 0.562 ± 0.088 [0.500, 0.625] | 0.083 | 0.281 ± 0.044 [0.250, 0.312] | 0.083 | "
        "40 (1 of 2) | 528 | 64 | 1.500 | 0.01 | 2 of 2 |"
    ), table[0]
    # Of the two seeds of mqa one has changed, of those of gqa too; a run without says nothing.
    assert "| 0.083 | 41 (1 of 2) | 464 |" in text, text
    assert "half step" in text and [row["half_step"] for row in rows[:3]] == ["", "", "40.0"]
    assert "| mqa,lr=0.01,seed=1 | failed | Diverged: <nan> |" in text
    assert "**0.562 ± 0.088 [0.500, 0.625]** ★" in text and "Chance is 0.083" in text
    assert "**CONFIRMED**" in text and "**NOT CONFIRMED**" in text
    assert "7 runs: 2026-01-02, cpu (cpu, 2 cores), jax 1.2.3, commit aaaaaaaaaa with" in text
    assert " --only=gqa --workdir=runs/sweeps/tiny-gqa\n" in text
    command = "python train.py '--config=a <b>.py' --config.model.pattern=gqa"
    assert rows[0]["command"].startswith(command)
    for name in ("comparison", "curves", "memory", "lengths"):
        assert f"({name}.png)" in text


def test_a_report_of_partial_and_missing_runs(tmp_path):
    folder = fill(tmp_path / "sweep")
    begun, never = "gqa,lr=0.01,seed=1", "mqa,lr=0.001,seed=0"
    for name in (begun, never):
        folder.result(name).unlink()
    (folder.run(never).metrics).unlink()
    with folder.run(begun).metrics.open("a") as file:
        file.write('{"step": 12, "tok')
    found = results.read(folder)
    status = {run.name: (run.status, run.error) for run in found.runs}
    assert status[begun] == ("partial", "at step 10 of 10")
    assert status[never] == ("missing", "has not run")
    report.write(folder, STUDY, found)
    text = (folder.path / "report.md").read_text()
    assert f"| {begun} | partial | at step 10 of 10 |" in text
    assert f"| {never} | missing | has not run |" in text
    assert "1 of 2" in text


def test_a_report_of_nothing_at_all(tmp_path):
    plan = make_plan(STUDY, tiny_sweep.get_config().to_dict())
    folder = SweepFolder(tmp_path / "sweep")
    folder.begin(describe("tiny", "tiny.py", STUDY, plan), Path(tiny_sweep.__file__))
    paths = report.write(folder, STUDY, results.read(folder))
    assert [path.name for path in paths] == [
        "results.jsonl", "results.csv", "report.md", "report.html",
    ]  # fmt: skip
    assert "has not run" in (folder.path / "report.md").read_text()


def test_curves_are_averaged_where_all_have_a_value():
    assert mean_curve([([0, 5, 10], [0.0, 0.5, 1.0]), ([0, 10], [0.5, 0.5]), ([], [])]) == (
        [0, 10], [0.25, 0.75],
    )  # fmt: skip


# --- The record of a run -------------------------------------------------------------------------


def trained(tmp_path, last):
    plan = make_plan(tiny_sweep.get_sweep(), tiny_sweep.get_config().to_dict())
    run = plan.runs[0]
    folder = SweepFolder(tmp_path).run(run.name)
    folder.begin(run.config, ENVIRONMENT)
    folder.append_metrics({"step": 4, "tokens": 272, "tokens_per_second": 1e9})
    for _ in range(2):
        folder.append_metrics({"step": last, "tokens_per_second": 68_000, "copy/accuracy": 0.5})
    return run, folder


def test_a_record_holds_the_numbers_the_costs_and_the_measures(tmp_path):
    run, folder = trained(tmp_path, last=10)
    measures = [lambda folder, settings: {"width": settings.model.d_model}]
    record = result.done(run.order(), run.settings, folder, measures, ["copy/accuracy", "width"])
    assert record["status"] == "done" and record["environment"]["platform"] == "cpu"
    numbers = record["metrics"]
    assert numbers["copy/accuracy"] == 0.5 and numbers["width"] == 8
    assert numbers["step_time_ms"] == pytest.approx(1.0)  # 68 tokens at 68,000 a second
    # Embedding and head 16 × 8 each, four projections 8 × 8, two norms of 8.
    assert numbers["parameters"] == 528 and numbers["cache_bytes_per_token"] == 2 * 8 * 4


def test_half_a_run_and_missing_numbers_are_no_success(tmp_path):
    run, folder = trained(tmp_path / "a", last=8)
    with pytest.raises(result.NoResult, match="end at step 8, not at 10"):
        result.done(run.order(), run.settings, folder, [], [])
    run, folder = trained(tmp_path / "b", last=10)
    with pytest.raises(result.NoResult, match=r"no 'recall/accuracy'; it has .*copy/accuracy"):
        result.done(run.order(), run.settings, folder, [], ["recall/accuracy"])
    measures = [lambda *_: {"x": math.nan, "y": 3.0}]
    with pytest.raises(result.NoResult, match="x is nan"):
        result.done(run.order(), run.settings, folder, measures, ["x"])
    # Not asked for, it is left out: a record is JSON, which has no NaN.
    numbers = result.done(run.order(), run.settings, folder, measures, ["y"])["metrics"]
    assert numbers["y"] == 3 and "x" not in numbers


def test_what_a_run_has_at_its_end_is_known_before(tmp_path):
    """``NUMBERS`` and ``OF_A_TASK`` are what a trained run has."""
    run = make_plan(STUDY, tiny_sweep.get_config().to_dict()).points[0].runs[0]
    folder = RunFolder(tmp_path / "run")
    loop.train(run.config, run.settings, folder)
    numbers = result.done(run.order(), run.settings, folder, [], [])["metrics"].keys()
    bill = {field.name for field in dataclasses.fields(Bill)}
    tasks = {f"{task}/{name}" for task in ("copy", "induction") for name in result.OF_A_TASK}
    assert numbers == {*result.NUMBERS, *bill, *tasks}


def test_the_commands_are_those_of_all_points_and_of_each(monkeypatch):
    for chosen in ([], ["--only=gqa"], ["--only", "gqa m*"], ["--point", "1"], ["-point=1"]):
        argv = ["sweep.py", "--config=a b.py", *chosen, "--workdir=x", "--seeds=2"]
        monkeypatch.setattr(sys, "argv", argv)
        plan = make_plan(STUDY, tiny_sweep.get_config().to_dict())
        found = describe("tiny", "a b.py", STUDY, plan)
        assert found["command"] == "python sweep.py '--config=a b.py' --workdir=x --seeds=2"
        assert [point["command"] for point in found["points"]] == [
            f"python sweep.py '--config=a b.py' --seeds=2 --only={name} "
            f"--workdir=runs/sweeps/tiny-{name}"
            for name in ("gqa", "mqa")
        ]


def test_a_report_has_all_that_the_folder_holds(folder):
    for changes, said in (
        ({"only": "gqa"}, "--only would do nothing with --report_only"),
        ({"dry_run": True}, "--dry_run would do nothing"),
        ({"overrides": {"train.steps": 3}}, "--config.train.steps would do nothing"),
    ):
        asked = dataclasses.replace(
            tiny_sweep.options(**changes), given=frozenset(changes) - {"overrides"}
        )
        with pytest.raises(OptionError, match=said):
            command.report(folder, STUDY, asked)


def test_a_run_that_failed_says_where_it_ran(tmp_path):
    folder = fill(tmp_path / "sweep")
    last = folder.run("mqa,lr=0.01,seed=1")
    last.begin({"train": {"steps": 3}}, ENVIRONMENT)
    line = report.record(results.read(folder).runs[-1])
    assert line["run"] == "mqa,lr=0.01,seed=1" and line["status"] == "failed"
    assert line["device"] == "cpu" and line["git"]["commit"] == "a" * 40


@pytest.mark.parametrize(
    ("argv", "said"),
    [((), "--config is needed"), (("--report_only", "--workdir=configs"), "no sweep folder")],
)
def test_the_command_can_be_called_without_a_config(argv, said):
    done = subprocess.run(
        [sys.executable, "sweep.py", *argv],
        cwd=Path(__file__).parents[1],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and said in done.stderr
    assert done.stderr.count("\n") == 1


def test_only_what_was_followed_has_a_curve(found):
    """The accuracy at a length is measured once, when a run has ended."""
    some = types.SimpleNamespace(metrics=("copy/accuracy@16", "copy/accuracy"), runs=found.runs)
    assert all("copy/accuracy@16" in run.metrics for run in found.runs if run.metrics)
    assert with_curves(some) == ["copy/accuracy"]
