"""What a person sees while evidence runs: live bars on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console

from sweeps.bars import Bars, clock
from sweeps.claims.record import Record
from sweeps.claims.rows import Evidence

# Seconds between two plain lines on the whole.
_EVERY = 30.0


class EvidenceProgress(Bars):
    """Tells how the evidence goes, in expected minutes."""

    def __init__(self, console: Console | None = None):
        super().__init__(console)
        self._running: dict[str, tuple[object, float, float]] = {}
        self._count = self._ended = 0
        self._said = time.monotonic()

    def say(self, text: str) -> None:
        """One line, after which the next on the whole can wait."""
        super().say(text)
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
        self.say(f"started   {evidence.name} (about {clock(expected)})")

    def ended(self, evidence: Evidence, record: Record) -> None:
        """A piece has its record."""
        if evidence.name in self._running:
            self._bars.remove_task(self._running.pop(evidence.name)[0])
        self._ended += 1
        whole = f"{self._ended} of {self._count}"
        text = "done     " if record.done else "FAILED   "
        why = "" if record.done else f": {record.error}"
        self.say(f"{text} {evidence.name}{why}  ({clock(record.seconds)}; {whole})")

    def look(self) -> None:
        """Moves the bars on."""
        now, notes = time.monotonic(), []
        for name, (bar, begun, expected) in self._running.items():
            note = f"{clock(now - begun)} of about {clock(expected)}"
            self._bars.update(bar, completed=now - begun, note=note)
            notes.append(f"{name} {note}")
        if notes and not self.console.is_terminal and now - self._said >= _EVERY:
            self.say(f"          {', '.join(notes)}  ({self._ended} of {self._count})")
