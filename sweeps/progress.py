"""What a person sees of a sweep: live bars on a terminal, else a line when something happens."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import TextColumn

from sweeps.bars import Bars, clock
from sweeps.fairness import bill
from sweeps.folder import SweepFolder
from sweeps.plan import Run

# Seconds between two plain lines on the whole.
_EVERY = 15.0
# Bytes from the end of metrics.jsonl that hold its last line.
_TAIL = 8192


class SweepProgress(Bars):
    """Tells how a sweep goes.

    Work is counted in FLOPs, so that the time left allows for wide and for narrow points.
    """

    def __init__(self, console: Console | None = None):
        super().__init__(console, TextColumn("{task.percentage:>3.0f} %"))
        self._rows: dict[str, object] = {}
        self._work: dict[str, float] = {}
        self._share: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._running: list[str] = []
        self._whole = None
        self._said = self._start = time.monotonic()
        self._first = 0.0

    def begin(self, runs: Sequence[Run], missing: Sequence[Run], folder: SweepFolder) -> None:
        """Says what is there already; the clock starts."""
        work = {}
        for run in runs:
            if run.point not in work:
                work[run.point] = bill(run.settings).flops_per_step
            self._work[run.name] = work[run.point] * run.settings.train.steps
            self._steps[run.name] = run.settings.train.steps
            self._share[run.name] = 1.0
        for run in missing:
            line = _last_line(folder.run(run.name).metrics)
            self._share[run.name] = self._share_of(run.name, line)
        done = len(runs) - len(missing)
        self.say(f"{len(runs)} runs, {done} of them done before" if done else f"{len(runs)} runs")
        self._whole = self._bars.add_task("sweep", total=1.0, note="")
        self._start, self._first = time.monotonic(), self._fraction()

    def started(self, runs: Sequence[Run]) -> None:
        """Runs have been given to a process."""
        for run in runs:
            self._running.append(run.name)
            self._rows[run.name] = self._bars.add_task(run.name, total=1.0, note="starting")
        packed = f" and {len(runs) - 1} more as one program" if len(runs) > 1 else ""
        self._plain(f"started   {runs[0].name}{packed}")

    def again(self, run: Run, why: str) -> None:
        """A run will be started again."""
        self._drop(run)
        self.say(f"again     {run.name}: {why}")

    def apart(self, runs: Sequence[Run], why: str) -> None:
        """Runs of a pack will be trained each by itself."""
        for run in runs:
            self._drop(run)
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        self.say(f"apart     {runs[0].name}{more}: {why}")

    def ended(self, run: Run, error: str) -> None:
        """A run has succeeded, or failed with an error."""
        self._drop(run)
        self._share[run.name] = 1.0
        text = f"FAILED    {run.name}: {error}" if error else f"done      {run.name}"
        if error or not self.console.is_terminal:
            self.say(f"{text}  ({self._summary()})")

    def look(self, folder: SweepFolder) -> None:
        """Reads how far the runs are."""
        for name in self._running:
            line = _last_line(folder.run(name).metrics)
            if line is None:
                continue
            self._share[name] = max(self._share[name], self._share_of(name, line))
            loss = f"loss {line['loss']:.3f}" if "loss" in line else "compiling"
            note = f"step {line['step']}/{self._steps[name]}  {loss}"
            self._bars.update(self._rows[name], completed=self._share[name], note=note)
        if self._whole is not None:
            self._bars.update(self._whole, completed=self._fraction(), note=self._summary())
        if time.monotonic() - self._said >= _EVERY and self._running:
            shares = ", ".join(f"{name} {self._share[name]:.0%}" for name in self._running)
            self._plain(f"          {shares}  ({self._summary()})")

    def _share_of(self, name: str, line: dict | None) -> float:
        """How much of a run is done that has written this line last."""
        return 0.0 if line is None else line["step"] / self._steps[name]

    def _drop(self, run: Run) -> None:
        if run.name in self._running:
            self._running.remove(run.name)
            self._bars.remove_task(self._rows.pop(run.name))

    def _plain(self, text: str) -> None:
        if not self.console.is_terminal:
            self.say(text)
            self._said = time.monotonic()

    def _fraction(self) -> float:
        whole = sum(self._work.values())
        return sum(self._work[name] * self._share[name] for name in self._work) / whole

    def _summary(self) -> str:
        done, now = self._fraction(), time.monotonic()
        gained = done - self._first
        if gained <= 0:
            return f"{done:.0%} of the whole"
        left = (now - self._start) / gained * (1 - done)
        return f"{done:.0%} of the whole, {clock(left)} left"


def _last_line(path: Path) -> dict | None:
    """The last whole line of metrics.jsonl."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            text = file.read().rpartition(b"\n")[0]
        return json.loads(text.splitlines()[-1])
    return None
