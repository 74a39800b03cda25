"""What trains jobs: the contract, the process of a job, and what a machine has to give."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Job:
    """Runs for one process.

    Attributes:
      name: of the run, or of the pack.
      file: that says what to train.
      log: file for what the process prints.
    """

    name: str
    file: Path
    log: Path


@dataclasses.dataclass(frozen=True)
class Ended:
    """A job whose process has ended.

    Attributes:
      job: which.
      died: how, where it did not end by itself: a signal, a lost node; "" where it did.
    """

    job: Job
    died: str


class Executor(Protocol):
    """Starts jobs and says when they have ended; what came of them is in the sweep folder.

    Attributes:
      slots: jobs that may be started before one has to end; a cluster has a queue of its own.
      parallel: jobs that run at the same time.
    """

    slots: int
    parallel: int

    def start(self, job: Job) -> None:
        """Starts a job; returns at once."""
        ...

    def wait(self, seconds: float) -> list[Ended]:
        """Jobs that have ended since the last call; waits for one so long at most."""
        ...

    def stop(self) -> None:
        """Ends what is still running."""
        ...


def start_process(job: Job, environment: dict[str, str], cores: list[int]) -> subprocess.Popen:
    """A process that trains the job; its standard input must stay open as long as it is wanted."""
    with job.log.open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sweeps.worker", str(job.file.absolute())],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip
    if cores and hasattr(os, "sched_setaffinity"):
        # Inherited by its threads, for it has none yet to speak of: it is still loading Python.
        os.sched_setaffinity(process.pid, cores)
    return process


def how_it_ended(process: subprocess.Popen) -> str:
    """The signal that ended a process, in words; "" where it ended by itself."""
    if process.returncode >= 0:
        return ""
    hint = ", which is what a machine without memory does" if process.returncode == -9 else ""
    return f"its process was ended by signal {-process.returncode}{hint}"


def available_cores() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
