"""matplotlib's parts, imported when something is drawn: no start has to wait half a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter


def new_figure(width: float, height: float) -> Figure:
    """An empty figure whose panels make room for their labels; inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def with_prefixes(places: int | None = None) -> EngFormatter:
    """Numbers such as 1.2M, to so many places; None: as many as it takes."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(places=places, sep="")
