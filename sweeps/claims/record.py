"""The record of a piece of evidence that has run: one file, written in one step."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import shlex
from collections.abc import Iterable
from pathlib import Path

import jax

from sweeps import result
from sweeps.claims.rows import Evidence, Finding, Found, Table
from sweeps.folder import SweepFolder
from training.environment import git_commit
from training.run_folder import write_json
from training.settings import OptionError


@dataclasses.dataclass(frozen=True)
class Record:
    """What came of a piece of evidence.

    Attributes:
      error: why it has not come to its end; "" where it has.
      found: what it says; of one that has failed, as far as that could be read.
      seconds: that it took.
      started: ISO time.
      machine: what it ran on, in words.
    """

    error: str
    found: Found
    seconds: float = 0.0
    started: str = ""
    machine: str = ""

    @property
    def done(self) -> bool:
        return not self.error


NOT_RUN = Record("has not run", Found(()))


def folder_of(folder: SweepFolder, evidence: Evidence) -> Path:
    """Where its commands write."""
    return folder.path / "evidence" / evidence.name


def told(evidence: Evidence) -> str:
    """Its commands as a person types them, with a folder of their own."""
    commands = evidence.commands(Path("runs") / "again" / evidence.name)
    return " && ".join(shlex.join(("python", *command)) for command in commands)


def write(folder: SweepFolder, evidence: Evidence, error: str, found: Found, seconds: float):
    """Keeps what came of a piece of evidence; returns it."""
    started = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds)
    record = Record(
        " ".join(error.split()), found, seconds, started.isoformat(timespec="seconds"), _machine()
    )
    saved = {"status": result.FAILED if error else result.DONE, "command": _asked(evidence)}
    write_json(folder.result(evidence.name), saved | dataclasses.asdict(record))
    return record


def read(folder: SweepFolder, evidence: Evidence) -> Record:
    """What came of a piece of evidence; ``NOT_RUN`` where nothing did.

    Raises:
      OptionError: the file cannot be read.
    """
    saved = folder.read_result(evidence.name)
    if saved is None:
        return NOT_RUN
    try:
        found = saved["found"]
        table = found["table"]
        return Record(
            saved["error"],
            Found(
                tuple(Finding(**each) for each in found["findings"]),
                table and Table(tuple(table["head"]), tuple(map(tuple, table["rows"]))),
            ),
            saved["seconds"], saved["started"], saved["machine"],
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        path = folder.result(evidence.name)
        raise OptionError(f"{path} is no record of evidence ({error}); remove it") from None


def check_same(folder: SweepFolder, evidence: Iterable[Evidence]) -> None:
    """Raises OptionError where a result is kept that other commands have left."""
    for each in evidence:
        saved = folder.read_result(each.name)
        if saved is not None and saved.get("command") != _asked(each):
            raise OptionError(
                f"{folder.result(each.name)} is the result of {saved.get('command')}, not of "
                f"{_asked(each)}; choose another --workdir, or remove that file and "
                f"{folder_of(folder, each)}"
            )


def _asked(evidence: Evidence) -> str:
    return " && ".join(shlex.join(command) for command in evidence.commands(Path("FOLDER")))


def _machine() -> str:
    git = git_commit()
    changed = " with changes" if git["modified"] else ""
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), jax {jax.__version__}, "
        f"commit {(git['commit'] or 'unknown')[:10]}{changed}"
    )
