"""What a person sees of a run: a live bar on a terminal, else plain lines; a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

_WIDTH = 240


class Reporter:
    """Tells how training goes; a context manager, so that the bar is closed on an error too."""

    def __init__(self, step: int, steps: int, chance: Mapping[str, float]):
        self.console = Console()
        self._first, self._step, self._steps = step, step, steps
        self._chance = chance
        self._start = time.monotonic()
        self._bar = Progress(
            TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=steps, completed=step)

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """One line, above the bar where there is one."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self, step: int, latest: Mapping[str, float]) -> None:
        """Shows the latest known value of every metric."""
        parts = [f"loss {latest['loss']:.3f}"] if "loss" in latest else []
        for task, chance in self._chance.items():
            accuracy = latest[f"{task}/accuracy"]
            parts.append(f"{task} {accuracy:.3f} (chance {chance:.3f})")
        if "tokens_per_second" in latest:
            parts.append(f"{latest['tokens_per_second']:,.0f} tokens/s")
        self._step = step
        self._bar.update(self._task, completed=step, description="  ".join(parts))
        if not self.console.is_terminal:
            self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  {'  '.join(parts)}"
                     f"  {self._time_left()}")  # fmt: skip

    def _time_left(self) -> str:
        done = self._step - self._first
        if not done:
            return "compiling"
        seconds = (time.monotonic() - self._start) / done * (self._steps - self._step)
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} left"


def table(title: str, rows: list[tuple[str, ...]], header: tuple[str, ...]) -> None:
    """Prints a table; the first column is text, the others are numbers."""
    grid = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        grid.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    # A file or a pipe has no width to fit.
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(grid)
