"""The files of a report, of folders in any state, and the commands in it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import sys
from pathlib import Path

import pytest

from sweeps import command, report, results, tables
from sweeps.description import describe
from sweeps.folder import SweepFolder
from sweeps.plan import make_plan
from tests import commands, tiny_sweep
from tests.filled_sweep import ENVIRONMENT, STUDY, fill
from training.settings import OptionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("sweep") / "sweep")


@pytest.fixture(scope="module")
def found(folder):
    return results.read(folder)


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
    header = (folder.path / "results.csv").read_text().splitlines()[0].split(",")
    assert len(set(header)) == len(header)
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


def test_a_function_of_the_user_that_fails_costs_no_report(folder, found, capsys):
    def first_of_none(results):
        return [][0]

    def half_a_picture(results, path):
        raise ValueError("no axes")

    asked = dataclasses.replace(STUDY, verdicts=(first_of_none,), pictures=(half_a_picture,))
    report.write(folder, asked, found)
    text = (folder.path / "report.md").read_text()
    assert "| first_of_none |  | cannot be judged: IndexError: list index out of range |" in text
    assert "half_a_picture could not be drawn: ValueError: no axes" in text
    assert "half_a_picture could not be drawn" in capsys.readouterr().err
    report.write(folder, STUDY, found)


def test_a_report_of_nothing_at_all(tmp_path):
    plan = make_plan(STUDY, tiny_sweep.get_config().to_dict())
    folder = SweepFolder(tmp_path / "sweep")
    folder.begin(describe("tiny", "tiny.py", STUDY, plan), Path(tiny_sweep.__file__))
    paths = report.write(folder, STUDY, results.read(folder))
    assert [path.name for path in paths] == [
        "results.jsonl", "results.csv", "report.md", "report.html",
    ]  # fmt: skip
    assert "has not run" in (folder.path / "report.md").read_text()


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
    code, _, err = commands.run("sweep.py", *argv)
    assert code == 2 and err.startswith("error: ") and said in err and err.count("\n") == 1
