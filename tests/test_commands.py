"""train.py and eval.py as a shell runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests import commands
from training.restore import restore
from training.run_folder import RunFolder

VOCABULARY = 16
TINY = (
    "--config.model.d_model=16", "--config.model.num_heads=2",
    "--config.attention.gqa.num_kv_heads=1", "--config.attention.gqa.dropout=0.2",
    "--config.task.length=16", f"--config.task.vocab_size={VOCABULARY}",
    "--config.train.batch_size=4", "--config.train.log_every=4", "--config.train.eval_every=5",
    "--config.checkpoint.every=5", "--config.eval.batches=1", "--config.eval.batch_size=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One compilation cache for all commands, and warnings as errors in our own code."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")),
        "JAX_PLATFORMS": "cpu",
    }


@pytest.fixture
def command(environment):
    def start(*argv: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *argv], cwd=commands.ROOT, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


def train(folder: Path, *flags: str, steps: int = 10) -> list[str]:
    return [
        "train.py", "--config=configs/gqa.py", f"--workdir={folder}", *TINY,
        f"--config.train.steps={steps}", *flags,
    ]  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def one_line(err: str) -> str:
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def without_time(lines: list[dict]) -> list[dict]:
    return [
        {k: v for k, v in line.items() if "time" not in k and "per_second" not in k}
        for line in lines
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, environment):
    """A run of 10 steps from beginning to end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    done = subprocess.run(
        [sys.executable, *train(folder)], cwd=commands.ROOT, env=environment, text=True,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return folder, done.stdout


def test_a_run_says_how_it_goes_and_what_to_do_next(undisturbed):
    folder, out = undisturbed
    steps = [int(n) for n in re.findall(r"^step +(\d+)/10 ", out, re.M)]
    assert steps == [0, 4, 5, 8, 10]
    assert re.search(r"loss \d+\.\d+  copy 0\.\d+ \(chance 0\.083\)  induction 0\.\d+", out)
    assert f"python eval.py --workdir={folder}" in out
    assert "copy/sequence_accuracy" in out and "induction/accuracy" in out


def test_a_run_folder_holds_what_it_should(undisturbed):
    folder = RunFolder(undisturbed[0])
    assert {path.name for path in folder.path.iterdir()} == {
        "checkpoints", "config.json", "curves.png", "environment.json", "lock", "metrics.jsonl",
        "tensorboard",
    }  # fmt: skip
    assert folder.read_config()["train"]["steps"] == 10
    assert list(folder.read_config()["attention"]) == ["gqa"]
    assert folder.curves.read_bytes().startswith(b"\x89PNG\r\n")
    assert any("tfevents" in path.name for path in folder.tensorboard.iterdir())
    about = json.loads(folder.environment.read_text())
    assert set(about["attention_implementation"]) == {"layer0", "layer1"}
    assert about["platform"] == "cpu" and about["started_at_step"] == 0
    assert {"jax", "flax", "optax"} <= set(about["versions"])
    lines = folder.read_metrics()
    assert [line["step"] for line in lines] == [0, 4, 5, 8, 10]
    assert [line["tokens"] for line in lines] == [64 * line["step"] for line in lines]
    last = lines[-1]
    for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_second", "copy/accuracy",
                 "copy/sequence_accuracy", "induction/accuracy"):  # fmt: skip
        assert np.isfinite(last[name]), name
    assert last["copy/chance"] == last["induction/chance"] == 1 / (VOCABULARY - 4)


def test_a_finished_run_says_so_and_changes_nothing(undisturbed, command):
    folder, _ = undisturbed
    before = contents(folder)
    code, out, err = ended(command(*train(folder)))
    assert (code, err) == (0, "") and "is finished (10 steps)" in out
    assert contents(folder) == before


def test_a_killed_run_ends_as_if_nothing_had_happened(undisturbed, command, tmp_path):
    folder = tmp_path / "run"
    process = command(*train(folder))
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and '"step": 5,' in metrics.read_text():
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    code, _, err = ended(command(*train(folder)))
    assert code == 0 and "Traceback" not in err, err
    ours, theirs = RunFolder(folder), RunFolder(undisturbed[0])
    assert without_time(ours.read_metrics()) == without_time(theirs.read_metrics())
    mine, other = restore(ours), restore(theirs)
    assert mine.step == other.step == 10
    for name, value in mine.params.items():
        assert np.array_equal(value, other.params[name]), name


def test_other_options_are_refused_by_name_and_neutral_ones_are_not(undisturbed):
    folder, _ = undisturbed
    before = contents(folder)
    code, _, err = commands.run(*train(folder, "--config.optimizer.learning_rate=0.1", steps=20))
    assert code == 2
    for piece in ("train.steps was 10, now 20", "optimizer.learning_rate was 0.003, now 0.1"):
        assert piece in one_line(err)
    code, out, err = commands.run(*train(folder, "--config.train.log_every=3"))
    assert (code, err) == (0, "") and "is finished" in out
    assert contents(folder) == before


def test_a_foreign_folder_is_refused_and_untouched(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    code, _, err = commands.run(*train(tmp_path))
    assert code == 2 and "no config.json" in one_line(err) and str(tmp_path) in err
    assert contents(tmp_path) == {str(tmp_path / "letter.txt"): b"dear"}


@pytest.mark.parametrize(
    ("flag", "pieces"),
    [
        ("--config.model.num_head=3", ("--config.model.num_head", "num_heads")),
        ("--config.train.steps=many", ("--config.train.steps=many", "whole number")),
        ("--config.attention.mqa.bias=True", ("attention.mqa.bias", "would do nothing", "gqa")),
        ("--config.steps=3", ("--config.steps is not an option",)),
        ("--config.train.steps.x=3", ("--config.train.steps.x is not an option",)),
        ("--workdir=", ("--workdir is empty",)),
        ("--config.train.log_every=3000000000", ("train.log_every", "at most", "3000000000")),
        ("--config=configs/nosuch.py", ("configs/nosuch.py", "no such file")),
    ],
)
def test_a_mistake_ends_in_one_line_and_writes_nothing(tmp_path, flag, pieces):
    code, _, err = commands.run(*train(tmp_path / "run"), flag)
    assert code == 2
    for piece in pieces:
        assert piece in one_line(err)
    assert not (tmp_path / "run").exists()


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(command, tmp_path):
    flags = ("--config.optimizer.learning_rate=1e38", "--config.checkpoint.every=1")
    code, _, err = ended(command(*train(tmp_path / "run", *flags)))
    assert code == 1
    assert re.search(r"(loss|gradient_norm|params/\S+) .*(nan|inf|finite).* step \d+|step \d+", err)
    one_line(err)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        assert all(np.isfinite(v) for v in json.loads(line).values())


@pytest.mark.broad
def test_an_evaluation_agrees_with_itself_and_saves(undisturbed, command):
    folder, _ = undisturbed
    argv = ("eval.py", f"--workdir={folder}", "--sequences=8", "--attention",
            "--checkpoint=last")  # fmt: skip
    code, _, err = ended(command(*argv))
    assert (code, err) == (0, ""), err
    saved = json.loads((folder / "eval.json").read_text())
    assert saved["step"] == 10 and saved["parameters"]["total"] == sum(
        n for part, n in saved["parameters"].items() if part != "total"
    )
    for row in saved["by_length"]:
        # An answer is right as a whole if and only if it is right token by token.
        assert row["sequence_accuracy"] == row["generated_sequence_accuracy"]
    assert [row["length"] for row in saved["by_length"]] == [3, 7, 15, 31, 63] * 2
    for name in ("accuracy_by_length.png", "attention_copy_0.png", "attention_induction_0.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("argv", "piece"),
    [
        (("eval.py",), "--workdir is needed"),
        (("eval.py", "--workdir=nosuch"), "does not exist"),
        (("eval.py", "--workdir=configs"), "no run folder"),
    ],
)
def test_an_evaluation_needs_a_run(argv, piece):
    code, _, err = commands.run(*argv)
    assert code == 2 and piece in one_line(err)
