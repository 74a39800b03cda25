"""Points of equal size: a width is solved for, and said.

A variant with fewer parameters, or a smaller cache, may lose for that alone. The modes here widen
or narrow each point until its quantity is that of a reference, and record what they chose.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from analysis.cost import cost
from training.settings import OptionError, Settings

# Widest model that is tried, as a multiple of the point's own width.
_MOST = 16


@dataclasses.dataclass(frozen=True)
class Bill:
    """What a point costs, by ``analysis.cost``.

    Attributes:
      parameters: numbers in the model.
      cache_bytes_per_token: what the cache grows by with a token; 0 for states of fixed size.
      cache_bytes: of one sequence of ``task.length`` tokens, states included.
      flops_per_step: of a training step, over the visible pairs.
    """

    parameters: int
    cache_bytes_per_token: int
    cache_bytes: int
    flops_per_step: int


def bill(settings: Settings) -> Bill:
    """The costs of a point; nothing is allocated."""
    found = cost(settings.model, settings.task.length, settings.train.batch_size)
    return Bill(
        parameters=found.parameters["total"],
        cache_bytes_per_token=0 if found.cache is None else found.cache.bytes_per_token,
        cache_bytes=0 if found.cache is None else found.cache.sequence_bytes,
        flops_per_step=found.forward.visible + found.backward.visible,
    )


QUANTITIES = ("parameters", "cache_bytes")


@dataclasses.dataclass(frozen=True)
class Equal:
    """All points get as many parameters, or cache bytes, as one of them has.

    Attributes:
      quantity: "parameters", or "cache_bytes" (of a sequence as long as those of the reference).
      to: name of the point that is the reference; it stays as it is.
      option: the width that is solved for; None: with parameters the feed-forward width of models
        that have one (as Llama 2 makes up for heads that share keys), else ``model.d_model``.
      within: greatest share by which a point may miss the reference.

    Raises:
      OptionError: another quantity, or no share.
    """

    quantity: str
    to: str
    option: str | None = None
    within: float = 0.1

    def __post_init__(self):
        if not 0 <= self.within < 1:
            raise OptionError(f"--equal_within is a share from 0 to 1, got {self.within:g}")
        if self.quantity not in QUANTITIES:
            raise OptionError(
                f"a sweep can be made equal in {' or '.join(QUANTITIES)}, got {self.quantity!r}"
            )

    def width(self, settings: Settings) -> str:
        """The option that is solved for at a point."""
        if self.option is not None:
            return self.option
        by_mlp = self.quantity == "parameters" and settings.model.mlp != "none"
        return "model.d_ff" if by_mlp else "model.d_model"

    def of(self, settings: Settings, length: int) -> int:
        """The quantity of a point, whose sequences count as that long."""
        found = cost(settings.model, length, settings.train.batch_size)
        if self.quantity == "parameters":
            return found.parameters["total"]
        return 0 if found.cache is None else found.cache.sequence_bytes


@dataclasses.dataclass(frozen=True)
class Solved:
    """What was chosen for a point.

    Attributes:
      option, value, before: the width and what it was.
      quantity, got, wanted: what was made equal, and how nearly.
    """

    option: str
    value: int
    before: int
    quantity: str
    got: int
    wanted: int

    def __str__(self) -> str:
        off = self.got / self.wanted - 1
        return (
            f"{self.option} {self.before} → {self.value}: {self.got:,} {self.quantity}, "
            f"the reference has {self.wanted:,} ({off:+.1%})"
        )


def solve(
    equal: Equal,
    wanted: int,
    length: int,
    option: str,
    before: int,
    unit: int,
    settings_at: Callable[[int], Settings],
) -> Solved:
    """The multiple of ``unit`` whose quantity is nearest to ``wanted``.

    Args:
      equal: the mode.
      wanted: the quantity of the reference.
      length: of the reference's sequences.
      option: the width.
      before: its value in the study.
      unit: widths are multiples of it, so that heads stay whole and their width even.
      settings_at: the point with another width.

    Raises:
      OptionError: the nearest width misses by more than ``equal.within``.
    """
    # The quantity grows with the width, so that the crossing can be halved for.
    low, high = 1, max(1, _MOST * before // unit)
    while low < high:
        middle = (low + high) // 2
        if equal.of(settings_at(middle * unit), length) < wanted:
            low = middle + 1
        else:
            high = middle
    widths = max(1, low - 1) * unit, low * unit
    near = {width: equal.of(settings_at(width), length) for width in widths}
    value = min(near, key=lambda width: (abs(near[width] - wanted), width))
    if (misses := abs(near[value] / wanted - 1)) > equal.within:
        raise OptionError(
            f"no {option} gives {wanted:,} {equal.quantity} within {equal.within:.0%}: "
            f"{value} gives {near[value]:,}; --equal_within={math.ceil(100 * misses) / 100:g} "
            "would take it"
        )
    return Solved(option, value, before, equal.quantity, near[value], wanted)
