"""sweep.py as a shell runs it: a whole sweep, failures, kills, packs, and one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from sweeps.folder import SweepFolder
from tests import commands
from training.restore import restore

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TINY = "tests/tiny_sweep.py"
NAMES = ["gqa,seed=0", "gqa,seed=1", "mqa,seed=0", "mqa,seed=1"]
DIVERGES = '''"""The second of two points diverges."""
from sweeps.axes import axis
from sweeps.study import Study
from tests.tiny_sweep import get_config


def get_sweep():
    return Study(
        question="?", axes=axis("optimizer.learning_rate", 1e-3, 1e38, label="lr"),
        metrics=("copy/accuracy",),
    )
'''


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Programs are compiled once for all sweeps, and quickly."""
    return os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "JAX_PLATFORMS": "cpu",
    }


def start(environment, *argv: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "sweep.py", *argv], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def sweep(environment, *argv: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "sweep.py", *argv], cwd=ROOT, env=environment, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def tiny(folder: Path, *argv: str) -> list[str]:
    return [f"--config={TINY}", f"--workdir={folder}", *argv]


def timeless(record: dict) -> dict:
    """A record without what depends on the clock and on which session it was."""
    metrics = {
        name: value
        for name, value in record["metrics"].items()
        if "time" not in name and "per_second" not in name
    }
    return {k: v for k, v in record.items() if k != "environment"} | {"metrics": metrics}


def records(path: Path) -> dict[str, dict]:
    folder = SweepFolder(path)
    return {name: folder.read_result(name) for name in NAMES}


def contents(path: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, environment):
    """A sweep of four runs from beginning to end."""
    path = tmp_path_factory.mktemp("sweep") / "whole"
    code, out, err = sweep(environment, *tiny(path, "--pack=off"))
    assert (code, err) == (0, ""), err
    return path, out


def test_a_sweep_ends_with_its_table_its_verdicts_and_its_files(undisturbed):
    path, out = undisturbed
    assert re.search(r"^4 runs$", out, re.M)
    for name in NAMES:
        assert re.search(rf"^started +{name}$", out, re.M)
        assert re.search(rf"^done +{name}  \(\d+% of the whole", out, re.M)
    assert re.search(r"^CONFIRMED: heads that share keys halve the cache$", out, re.M)
    assert re.search(r"^NOT CONFIRMED: ten steps are enough$", out, re.M)
    for name in ("report.md", "report.html", "results.csv", "results.jsonl", "comparison.png"):
        assert (path / name).exists()
    for name, record in records(path).items():
        assert record["status"] == "done" and record["metrics"]["step"] == 10
        assert record["config"]["seed"] == int(name[-1])
        assert set(record["environment"]["attention_implementation"]) == {"layer0"}
    # Different seeds train different models, and every run is what train.py makes of its options.
    losses = [record["metrics"]["loss"] for record in records(path).values()]
    assert len(set(losses)) == 4


def test_the_command_of_a_row_trains_the_same_run(undisturbed, environment, tmp_path):
    path, _ = undisturbed
    line = json.loads((path / "results.jsonl").read_text().splitlines()[3])
    assert line["run"] == NAMES[3]
    command = line["command"].replace("python", sys.executable, 1)
    command = re.sub(r"--workdir=\S+", f"--workdir={tmp_path / 'run'}", command)
    done = subprocess.run(command, shell=True, cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["loss"] == line["metrics"]["loss"]


def test_the_same_command_again_runs_nothing(undisturbed, environment):
    path, _ = undisturbed
    before = contents(path / "runs") | contents(path / "results")
    code, out, _ = sweep(environment, *tiny(path))
    assert code == 0 and "4 runs, 4 of them done before" in out and "started" not in out
    assert contents(path / "runs") | contents(path / "results") == before


def test_a_report_is_redrawn_from_the_folder_alone(undisturbed, environment):
    path, _ = undisturbed
    page = (path / "report.html").read_text()
    for name in ("report.md", "report.html", "results.csv", "curves.png"):
        (path / name).unlink()
    code, out, _ = sweep(environment, "--report_only", f"--workdir={path}")
    assert code == 0 and "CONFIRMED: heads that share keys" in out
    assert (path / "report.html").read_text() == page and (path / "curves.png").exists()


def test_points_of_a_job_array_train_side_by_side(undisturbed, environment, tmp_path):
    """As under Slurm: both begin in a folder that is not there yet."""
    path, _ = undisturbed
    points = [start(environment, *tiny(tmp_path / "sweep", f"--point={i}")) for i in range(2)]
    for process in points:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, ""), err
        assert f"report: python sweep.py --report_only --workdir={tmp_path / 'sweep'}" in out
    ours, theirs = records(tmp_path / "sweep"), records(path)
    for name in NAMES:
        for metric, value in timeless(theirs[name])["metrics"].items():
            assert ours[name]["metrics"][metric] == pytest.approx(value, rel=1e-4, abs=1e-6)
    code, out, _ = sweep(environment, "--report_only", f"--workdir={tmp_path / 'sweep'}")
    assert code == 0 and "CONFIRMED: heads that share keys halve the cache" in out


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_packed_runs_equal_unpacked_ones(undisturbed, environment, tmp_path, mode):
    """The tolerance that the README states: batched products may add in another order."""
    path, _ = undisturbed
    code, out, err = sweep(environment, *tiny(tmp_path / "packed", f"--pack={mode}"))
    assert (code, err) == (0, ""), err
    assert "gqa,seed=0 and 1 more as one program" in out
    ours, theirs = SweepFolder(tmp_path / "packed"), SweepFolder(path)
    measured = json.loads(ours.pack("gqa,seed=0,and 1 more").read_text())
    assert measured["runs"] == 2 and measured["steps"] == 10
    assert measured["packed"] or mode == "auto"
    for way in ("packed", "alone"):
        assert measured[f"{way}_compile"] > 0 and measured[f"{way}_step"] > 0
    for name in NAMES:
        mine, other = ours.run(name).read_metrics(), theirs.run(name).read_metrics()
        assert [line["step"] for line in mine] == [line["step"] for line in other]
        for one, two in zip(mine, other, strict=True):
            for metric in two.keys() - {"time", "tokens_per_second"}:
                assert one[metric] == pytest.approx(two[metric], rel=1e-4, abs=1e-6), metric
        mine, other = restore(ours.run(name)), restore(theirs.run(name))
        assert mine.step == other.step == 10
        for leaf, value in other.params.items():
            np.testing.assert_allclose(mine.params[leaf], value, rtol=1e-3, atol=1e-5)


def test_a_run_that_diverges_is_marked_and_not_averaged(environment, tmp_path):
    """Case S1, with its second half: again only what is missing."""
    file = tmp_path / "diverges.py"
    file.write_text(DIVERGES)
    argv = (f"--config={file}", f"--workdir={tmp_path / 'sweep'}", "--pack=on")
    code, out, err = sweep(environment, *argv)
    assert (code, err) == (1, ""), err
    assert "1 of 2 runs have no result" in out
    text = (tmp_path / "sweep" / "report.md").read_text()
    assert re.search(r"\| lr=1e\+38,seed=0 \| failed \| Diverged: .* at step \d+", text)
    assert re.search(r"\| lr=1e\+38 \| – \|", text) and re.search(r"\| lr=0.001 \| 0\.", text)
    code, out, _ = sweep(environment, *argv)
    assert code == 1 and "2 runs, 1 of them done before" in out
    assert "started   lr=1e+38,seed=0\n" in out and "started   lr=0.001" not in out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "--config is needed"),
        ((f"--config={TINY}", "--config.model.num_heads=3"), "point gqa,seed=0: "),
        ((f"--config={TINY}", "--config.model.num_head=3"), "num_head is not an option"),
        (("--config=configs/gqa.py",), "has no get_sweep"),
        (("--report_only", "--workdir=configs"), "no sweep folder"),
        ((f"--config={TINY}", "--only=gqa", "--point=1"), "exclude each other"),
        ((f"--config={TINY}", "--executor=slurm"), "local or ray, got 'slurm'"),
        ((f"--config={TINY}", "--equal=parameters"), "go together"),
    ],
)
def test_a_mistake_ends_in_one_line_and_writes_nothing(tmp_path, argv, said):
    argv = argv if any("--workdir" in a for a in argv) else (*argv, f"--workdir={tmp_path / 'x'}")
    code, _, err = commands.run("sweep.py", *argv)
    assert code == 2 and said in err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "x").exists()


def test_a_dry_run_lists_cost_and_time_and_writes_nothing(environment, tmp_path):
    code, out, _ = sweep(environment, *tiny(tmp_path / "x", "--dry_run", "--seeds=3"))
    assert code == 0 and not (tmp_path / "x").exists()
    assert "6 runs of 2 points" in out
    assert re.search(r"│ 0 gqa +│ +3 │ +528 │ +64 │ +0\.\d+ │ +\d+\.\d │", out), out
    assert re.search(r"About \d+\.\d core minutes, \d+\.\d on \d+ cores", out)


# --- Kills ---------------------------------------------------------------------------------------


def workers(driver: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(driver.pid).children():
        # One that has just ended has no command line any more.
        with contextlib.suppress(psutil.Error):
            found += [child] if "sweeps.worker" in child.cmdline() else []
    return found


def wait_until(condition, driver):
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline and driver.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize("pack", ["off", "on"])
def test_a_killed_driver_and_killed_workers_change_no_result(
    undisturbed, environment, tmp_path, pack
):
    """kill -9 at random moments; a second sweep beside the first is refused meanwhile."""
    path, argv = tmp_path / "sweep", tiny(tmp_path / "sweep", f"--pack={pack}")
    seed = int.from_bytes(os.urandom(4))
    print("moments:", seed)
    chance = random.Random(seed)
    driver = start(environment, *argv)
    wait_until(lambda: workers(driver), driver)
    code, _, err = sweep(environment, *argv)
    assert code == 2 and f"in use by process {driver.pid} on " in err
    begun = path / "runs" / NAMES[0] / "metrics.jsonl"
    wait_until(begun.exists, driver)
    time.sleep(chance.uniform(0, 1.5))
    orphans = workers(driver)
    driver.kill()
    driver.communicate()
    # A worker does not outlive its driver.
    assert not psutil.wait_procs(orphans, timeout=60)[1]

    driver = start(environment, *argv)
    for _ in range(2):
        wait_until(lambda: workers(driver) or len(list((path / "results").glob("*"))) == 4, driver)
        time.sleep(chance.uniform(0, 4))
        for worker in workers(driver)[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGKILL)
    out, err = driver.communicate(timeout=300)
    assert (driver.returncode, err) == (0, ""), (out, err)
    assert "was left locked: process" in out
    ours, theirs = records(path), records(undisturbed[0])
    for name in NAMES:
        if pack == "off":
            assert timeless(ours[name]) == timeless(theirs[name])
        else:
            for metric, value in timeless(theirs[name])["metrics"].items():
                assert ours[name]["metrics"][metric] == pytest.approx(value, rel=1e-4, abs=1e-6)
