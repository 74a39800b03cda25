"""Where a person watches: live bars on a terminal, lines of text anywhere else."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class Bars:
    """Bars above which lines can be said; a context manager, so that an error closes them too.

    Args:
      console: None: standard output.
      columns: of ``rich``, between the bar and the note of a task.
    """

    def __init__(self, console: Console | None, *columns: TextColumn):
        self.console = console or Console()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            *columns,
            TextColumn("{task.fields[note]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def __enter__(self):
        self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """One line, above the bars where there are any."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
