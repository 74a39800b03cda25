"""The other side of the benchmarks: an interpreter that has PyTorch, or that has not."""

import argparse
import ast
import errno
import json
import stat
import sys
from pathlib import Path

import pytest

from benchmarks import options, peers

ROOT = Path(__file__).resolve().parent.parent


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


@pytest.mark.usefixtures("no_cache")
def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, monkeypatch, capsys):
    """Before anything is measured: the user who runs the tests may write everywhere."""

    def refused(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(options.tempfile, "TemporaryFile", refused)
    assert options.run(never, argparse.Namespace(torch_python=None, out=tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --out={tmp_path}: no report can be written there (Permission")


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
        with pytest.raises(
            peers.PeerError, match=r"^PyTorch stopped in the middle: out of memory$"
        ):
            torch.ask(prepare="some")


def said_at_the_start(python: Path | str) -> str:
    with pytest.raises(peers.PeerError) as caught, peers.torch_peer(str(python)):
        pass
    return str(caught.value)


def test_a_file_that_is_no_program_is_no_peer(tmp_path: Path):
    python = tmp_path / "python"
    python.write_bytes(b"\x00\x01 no program")
    python.chmod(0o755)
    said = said_at_the_start(python)
    assert said == f"--torch_python={python} is no program that runs here: Exec format error"


@pytest.mark.parametrize("answer", ["benchmarks/torch_peer", "3", '{"version": "1.0"}'])
def test_a_program_that_answers_otherwise_is_no_peer(tmp_path: Path, answer: str):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{answer}'\n")
    python.chmod(0o755)
    said = said_at_the_start(python)
    assert said.startswith(f"--torch_python={python} does not run torch: it answers ")
    assert ("\n" not in said and "version" in said) or answer in said


@pytest.mark.parametrize("half", ["", '{"secon'])
def test_a_peer_that_is_killed_says_by_what(tmp_path: Path, half: str):
    python = tmp_path / "python"
    hello = json.dumps({"version": "1.0", "threads": 2})
    python.write_text(
        f"#!/bin/sh\necho '{hello}'\nread request\nprintf '%s' '{half}'\nkill -9 $$\n"
    )
    python.chmod(0o755)
    with peers.torch_peer(str(python)) as torch:
        for _ in range(2):
            with pytest.raises(peers.PeerError, match=r"^PyTorch stopped .*: killed by SIGKILL$"):
                torch.seconds("some", "forward")


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


def test_the_cores_rest_after_a_timed_answer_and_no_other(tmp_path: Path, monkeypatch):
    rests = []
    python = peer_that(tmp_path, '{"bytes": 8}', '{"seconds": 0.5}')
    with peers.torch_peer(python) as torch:
        monkeypatch.setattr(peers.time, "sleep", rests.append)
        torch.ask(peak="some", what="forward")
        assert rests == []
        torch.seconds("some", "forward")
    assert rests == [peers.REST_SECONDS]
