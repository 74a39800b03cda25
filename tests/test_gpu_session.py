"""A session on a card, as far as a CPU can tell: what fails is said, and no time is lost."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_checks, gpu_peer
from benchmarks.gpu_cases import CASES, CUDNN, FLEX, OURS, SDPA
from benchmarks.gpu_report import Report, Times, row

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu.sh"
CAUSAL = CASES[0]


def test_the_table_compares_with_the_targets_peer():
    times = {OURS: Times(2e-3, 8e-3), CUDNN: Times(1.9e-3, 7e-3)}
    assert "| 0.95 / 0.88 ✓ |" in row(CAUSAL, times)
    times[CUDNN] = Times(1.9e-3, 6e-3)
    assert "| 0.95 / 0.75 ✗ |" in row(CAUSAL, times)


def test_each_time_is_printed_and_saved_at_once(tmp_path: Path, capsys):
    path = tmp_path / "new" / "gpu.md"
    report = Report(path, "NVIDIA H200")
    assert path.read_text() == ""
    report.add(CAUSAL, {OURS: Times(2e-3, 8e-3), CUDNN: Times(error="RuntimeError: too old")})
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "causal 8,192, cuDNN: RuntimeError: too old"
    assert said[1].startswith("| causal 8,192 | 2.00 / 8.00 | — |")
    saved = path.read_text()
    assert saved.startswith("NVIDIA H200\n") and said[1] in saved
    report.add(CAUSAL, {SDPA: Times(3e-3, 9e-3)})
    assert "| 2.00 / 8.00 | — | 3.00 / 9.00 |" in path.read_text()
    # A new session does not empty the table before it has a time.
    Report(path, "NVIDIA H100")
    assert "| 2.00 / 8.00 |" in path.read_text()


def peer_that(folder: Path, body: str) -> Path:
    script = folder / "peer.py"
    script.write_text(f"import json, sys, time\ncases = json.load(sys.stdin)\n{body}")
    return script


def test_lines_that_are_no_answer_are_passed_over(tmp_path: Path, capsys):
    body = """
print("a warning from a library")
print("[1, 2]")
print(json.dumps({"case": cases[0]["name"], "peer": "SDPA", "forward": 0.5, "both": 1.0}))
print(json.dumps({"case": cases[0]["name"], "peer": "SDPA", "seconds": 0.5}))
print(json.dumps({"case": cases[1]["name"], "peer": "FlexAttention", "error": "no memory"}))
sys.exit(3)
"""
    got = list(gpu_peer.answers(sys.executable, CASES, 60, peer_that(tmp_path, body)))
    assert got == [
        (CASES[0].name, SDPA, Times(0.5, 1.0)),
        (CASES[1].name, FLEX, Times(error="no memory")),
    ]
    said = capsys.readouterr().out
    assert "PyTorch's process says: a warning from a library" in said
    assert "PyTorch's process says: [1, 2]" in said
    assert "ended early: exit code 3" in said


def test_a_peer_that_hangs_is_ended_with_its_children(tmp_path: Path, capsys):
    """What it had measured is kept; a child that holds its output open does not outlive it."""
    child = tmp_path / "child"
    body = f"""
import subprocess
print(json.dumps({{"case": "a", "peer": "SDPA", "forward": 0.5, "both": 1.0}}), flush=True)
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(child)!r}, "w").write(str(process.pid))
time.sleep(600)
"""
    got = list(gpu_peer.answers(sys.executable, CASES, 3, peer_that(tmp_path, body)))
    assert got == [("a", SDPA, Times(0.5, 1.0))]
    assert "ended early: its time, 3 seconds, was over" in capsys.readouterr().out
    assert gone(int(child.read_text()))


def gone(pid: int) -> bool:
    """A killed child whose parent is killed too is a zombie until init asks for it."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        try:
            if status.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("python", "why"),
    [
        ("/nowhere/python", "there is no such program"),
        (sys.executable, "does not run torch: ModuleNotFoundError: No module named 'torch'"),
        ("/bin/echo", "does not run benchmarks/gpu_torch.py, it answers "),
    ],
)
def test_an_interpreter_without_torch_is_refused_before_all_else(monkeypatch, capsys, python, why):
    monkeypatch.setattr(gpu, "dry_run", lambda: pytest.fail("it went on"))
    monkeypatch.setattr(gpu, "measure", lambda *_: pytest.fail("it went on"))
    # This file's folder stands before the packages of an interpreter that has torch.
    monkeypatch.setenv("PYTHONPATH", os.devnull)
    assert gpu.main(["--dry_run", f"--torch_python={python}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --torch_python={python}") and said.count("\n") == 1
    assert why in said


@pytest.fixture
def short_session(monkeypatch):
    """``measure`` on this machine: no kernel runs, and no peer needs a card."""
    monkeypatch.setattr(gpu, "check_numbers", lambda *_, **__: True)
    monkeypatch.setattr(gpu, "in_turns", lambda case, peers: {OURS: Times(1e-3, 2e-3)})
    answers = [(CASES[3].name, FLEX, Times(4e-3, 8e-3))]
    monkeypatch.setattr(gpu_peer, "answers", lambda *_: iter(answers))


@pytest.mark.parametrize("right", [True, False])
def test_a_session_ends_with_the_table_and_its_verdict(
    short_session, monkeypatch, tmp_path: Path, capsys, right: bool
):
    tolerance = dict.fromkeys(gpu_checks.NAMES, 1.0)
    outcome = gpu_checks.Outcome(dict.fromkeys(gpu_checks.NAMES, 0.0), right, tolerance)
    monkeypatch.setattr(gpu_checks, "float32_products", lambda precision: outcome)
    report = Report(tmp_path / "gpu.md", "a card")
    assert gpu.measure("python", report, time.perf_counter()) == int(not right)
    said = capsys.readouterr().out
    assert ("CHECKED_DEVICES = {" in said) == right
    assert "| 1.00 / 2.00 |" in said and "| 4.00 / 4.00 ✓ |" in said
    assert "| 4.00 / 4.00 ✓ |" in (tmp_path / "gpu.md").read_text()


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [SCRIPT, *arguments], env=os.environ | variables, capture_output=True, text=True
    )


def test_the_script_passes_its_arguments_on(tmp_path: Path):
    """And PyTorch's interpreter, which may be named in the environment."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf '<%s>' \"$@\"\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    done = script("--dry_run", PYTHON=str(python), TORCH_PYTHON="")
    assert done.stdout == "<-m><benchmarks.gpu><--dry_run>"
    done = script("--out=a b", PYTHON=str(python), TORCH_PYTHON="/with space/python")
    assert done.stdout == "<-m><benchmarks.gpu><--torch_python=/with space/python><--out=a b>"


@pytest.mark.slow
def test_the_script_runs_its_parts_for_the_cpu():
    done = script("--dry_run", PYTHON=sys.executable, TORCH_PYTHON="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": ok: out ") == len(gpu_checks.CASES) + 2
    assert "WRONG" not in done.stdout and done.stdout.count("\n| ") == len(CASES) + 1
