"""matplotlib's parts, imported when something is drawn: no start has to wait half a second."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter


def new_figure(width: float, height: float) -> Figure:
    """An empty figure whose panels make room for their labels; inches."""
    from matplotlib.figure import Figure

    # A log axis asks for a font that few machines have, and does as well without.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    return Figure(figsize=(width, height), layout="constrained")


def with_prefixes(places: int | None = None) -> EngFormatter:
    """Numbers such as 1.2M, to so many places; None: as many as it takes."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(places=places, sep="")
