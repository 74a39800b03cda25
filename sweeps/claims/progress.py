"""What a person sees while evidence runs: live bars on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from sweeps.claims.record import Record
from sweeps.claims.rows import Evidence

# Seconds between two plain lines on the whole.
_EVERY = 30.0


class EvidenceProgress:
    """Tells how the evidence goes, in expected minutes; a context manager."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._running: dict[str, tuple[object, float, float]] = {}
        self._count = self._ended = 0
        self._said = time.monotonic()

    def __enter__(self) -> EvidenceProgress:
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """One line, above the bars where there are any."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._said = time.monotonic()

    def begin(self, evidence: Sequence[Evidence], missing: Sequence[Evidence]) -> None:
        """Says what is there already."""
        self._count, self._ended = len(evidence), len(evidence) - len(missing)
        before = f", {self._ended} of them done before" if self._ended else ""
        self.say(f"{self._count} pieces of evidence{before}")

    def started(self, evidence: Evidence) -> None:
        """A piece has been given to a process."""
        expected = 60 * evidence.minutes
        bar = self._bars.add_task(evidence.name, total=expected, note="")
        self._running[evidence.name] = bar, time.monotonic(), expected
        self.say(f"started   {evidence.name} (about {_clock(expected)})")

    def ended(self, evidence: Evidence, record: Record) -> None:
        """A piece has its record."""
        if evidence.name in self._running:
            self._bars.remove_task(self._running.pop(evidence.name)[0])
        self._ended += 1
        whole = f"{self._ended} of {self._count}"
        text = "done     " if record.done else "FAILED   "
        why = "" if record.done else f": {record.error}"
        self.say(f"{text} {evidence.name}{why}  ({_clock(record.seconds)}; {whole})")

    def look(self) -> None:
        """Moves the bars on."""
        now, notes = time.monotonic(), []
        for name, (bar, begun, expected) in self._running.items():
            note = f"{_clock(now - begun)} of about {_clock(expected)}"
            self._bars.update(bar, completed=now - begun, note=note)
            notes.append(f"{name} {note}")
        if notes and not self.console.is_terminal and now - self._said >= _EVERY:
            self.say(f"          {', '.join(notes)}  ({self._ended} of {self._count})")


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
