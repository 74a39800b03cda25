"""What varies between the points of a sweep, as plain data: axes, and their combinations.

product(axis("model.pattern", ("mha",), ("gqa",)), axis("task.length", 32, 64))   4 points
zipped(axis("model.d_model", 32, 64), axis("model.num_heads", 2, 4))              2 points
chain(case("mha"), case("wide", {"model.d_model": 128}))                          2 points
"""

from __future__ import annotations

import builtins
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any


class AxisError(ValueError):
    """Axes that describe no sweep; says which."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One value of an axis, or several chosen together.

    Attributes:
      labels: what names the choice, one for each axis.
      changes: dotted option → value.
      swept: the options among them whose value is in a label; an override would belie it.
    """

    labels: tuple[str, ...]
    changes: Mapping[str, Any]
    swept: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The labels as one word that can name a file."""
        return ",".join(label for label in self.labels if label) or "base"

    def __add__(self, other: Choice) -> Choice:
        both = self.changes.keys() & other.changes.keys()
        if both:
            raise AxisError(f"{', '.join(sorted(both))} is set by two axes that are combined")
        return Choice(
            self.labels + other.labels,
            {**self.changes, **other.changes},
            self.swept | other.swept,
        )


@dataclasses.dataclass(frozen=True)
class Axes:
    """A list of choices: what ``axis``, ``case``, ``product``, ``zipped`` and ``chain`` make."""

    choices: tuple[Choice, ...]


def axis(option: str, *values: Any, label: str | None = None) -> Axes:
    """One option, a point for every value.

    Args:
      option: dotted name, such as "optimizer.learning_rate".
      values: at least one, each different.
      label: what stands before the value in a point's name; default the last part of the option.

    Raises:
      AxisError: no value, or one of them twice.
    """
    if not values:
        raise AxisError(f"the axis {option} has no values; give at least one")
    for i, value in enumerate(values):
        if value in values[:i]:
            raise AxisError(f"the axis {option} has the value {value!r} twice")
    label = option.rpartition(".")[2] if label is None else label
    before = f"{label}=" if label else ""
    return Axes(
        tuple(
            Choice((before + text_of(value),), {option: value}, frozenset({option}))
            for value in values
        )
    )


def case(name: str, changes: Mapping[str, Any] | None = None) -> Axes:
    """One named point that changes any number of options, or none."""
    return Axes((Choice((_safe(name),), dict(changes or {})),))


def product(*parts: Axes) -> Axes:
    """Every choice of the first with every choice of the next; the last varies fastest."""
    _some("product", parts)
    combined = itertools.product(*(part.choices for part in parts))
    return Axes(tuple(_sum(choices) for choices in combined))


def zipped(*parts: Axes) -> Axes:
    """The first choices of all together, then the second ones, and so on.

    Raises:
      AxisError: the parts have not the same number of choices.
    """
    _some("zipped", parts)
    lengths = [len(part.choices) for part in parts]
    if len(set(lengths)) > 1:
        raise AxisError(f"zipped axes must have the same number of values, got {lengths}")
    return Axes(
        tuple(
            _sum(choices)
            for choices in builtins.zip(*(part.choices for part in parts), strict=True)
        )
    )


# Its name elsewhere, for sweep files that write axes.zip.
zip = zipped


def chain(*parts: Axes) -> Axes:
    """The choices of the first, then those of the next, and so on."""
    _some("chain", parts)
    return Axes(tuple(choice for part in parts for choice in part.choices))


def _some(what: str, parts: Sequence[Axes]) -> None:
    if not parts:
        raise AxisError(f"{what}() has no axes; give at least one")


def _sum(choices: Sequence[Choice]) -> Choice:
    first, *others = choices
    for other in others:
        first = first + other
    return first


def text_of(value: Any) -> str:
    """A value as it stands in a name: short, and without what file names do not bear."""
    if isinstance(value, tuple | list):
        return "+".join(text_of(item) for item in value)
    return _safe(f"{value:g}" if isinstance(value, float) else str(value))


def _safe(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-+=()& " else "-" for c in text).replace(" ", "")
