"""The processes of evidence on this machine: some need it whole, the others a core each."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

from sweeps.claims.rows import Evidence
from sweeps.executor import ROOT, available_cores, how_it_ended

_PAUSE = 0.05


@dataclasses.dataclass
class _Running:
    evidence: Evidence
    commands: list[tuple[str, ...]]
    log: Path
    cores: list[int]
    begun: float
    process: subprocess.Popen


@dataclasses.dataclass(frozen=True)
class Ended:
    """Evidence whose processes have ended.

    Attributes:
      evidence: which.
      error: how they ended, where that was not well.
      seconds: that they took.
    """

    evidence: Evidence
    error: str
    seconds: float


class Pool:
    """Runs evidence as the cores allow; a context manager that ends what is still running."""

    def __init__(self):
        self._cores = available_cores()
        self._free = list(self._cores)
        self._running: list[_Running] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_) -> None:
        for running in self._running:
            running.process.stdin.close()
            running.process.wait()

    def fits(self, evidence: Evidence) -> bool:
        """Whether it can start now."""
        return not self._running if evidence.whole else bool(self._free)

    def start(self, evidence: Evidence, commands: list[tuple[str, ...]], log: Path) -> None:
        """Starts the first of its commands; the others follow while ``wait`` is called.

        Raises:
          OSError: no process can be started.
        """
        cores = list(self._free) if evidence.whole else self._free[:1]
        process = _process(commands[0], log, cores)
        self._free = [core for core in self._free if core not in cores]
        begun = time.monotonic()
        self._running.append(_Running(evidence, commands[1:], log, cores, begun, process))

    def wait(self, seconds: float) -> list[Ended]:
        """Evidence that has ended since the last call; waits for one so long at most."""
        deadline = time.monotonic() + seconds
        while True:
            ended = [each for running in list(self._running) if (each := self._look(running))]
            if ended or time.monotonic() >= deadline:
                return ended
            time.sleep(_PAUSE)

    def _look(self, running: _Running) -> Ended | None:
        code = running.process.poll()
        if code is None:
            return None
        running.process.stdin.close()
        if code == 0 and running.commands:
            try:
                running.process = _process(running.commands.pop(0), running.log, running.cores)
                return None
            except OSError as error:
                return self._end(running, f"its process could not be started: {error}")
        return self._end(running, _error(running.process, running.log) if code else "")

    def _end(self, running: _Running, error: str) -> Ended:
        self._running.remove(running)
        self._free = sorted((*self._free, *running.cores))
        return Ended(running.evidence, error, time.monotonic() - running.begun)


def _process(command: tuple[str, ...], log: Path, cores: list[int]) -> subprocess.Popen:
    with log.open("a") as file:
        file.write(f"$ python {' '.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "sweeps.leash", sys.executable, *command],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=file, stderr=file,
        )  # fmt: skip
    if hasattr(os, "sched_setaffinity"):
        # Inherited by what it starts, for it is still loading Python.
        os.sched_setaffinity(process.pid, cores)
    return process


def _error(process: subprocess.Popen, log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = f": {lines[-1].strip()}" if lines else ""
    how = how_it_ended(process) or f"its process ended with code {process.returncode}"
    return f"{how}{said} (see {log})"
