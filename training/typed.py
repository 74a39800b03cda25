"""Plain dicts into frozen dataclasses, refusing unknown names and wrong types."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping


def take(cls: type, prefix: str, group: Mapping):
    """``cls(**group)``, after checking names and types.

    Args:
      cls: a dataclass whose annotations are int, float, str, bool, or one of these or None.
      prefix: how the user knows the group, such as "train".
      group: option → value. A whole number does for a float; None where the option is unset.

    Raises:
      ValueError: an unknown or missing option, a value of another type, or one that is not finite.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    known(prefix, group, *fields)
    hints = typing.get_type_hints(cls)
    for name, value in group.items():
        _check_type(f"{prefix}.{name}", value, hints[name])
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in group:
            raise ValueError(f"{prefix}.{name} is missing")
    return cls(**group)


def known(prefix: str, group: Mapping, *names: str) -> None:
    """Raises ValueError where the group has an option that is not among ``names``."""
    dot = f"{prefix}." if prefix else ""
    for name in group:
        if name not in names:
            raise ValueError(f"{dot}{name} is not an option; known are {', '.join(sorted(names))}")


def exactly(prefix: str, group: Mapping, *names: str) -> None:
    """Raises ValueError unless the group has the options ``names`` and no others."""
    known(prefix, group, *names)
    for name in names:
        if name not in group:
            raise ValueError(f"{f'{prefix}.' if prefix else ''}{name} is missing")


def at_least(prefix: str, options, bound: int, *names: str) -> None:
    """Raises ValueError where one of the named options is below ``bound``."""
    for name in names:
        value = getattr(options, name)
        if value < bound:
            raise ValueError(f"{prefix}.{name} must be at least {bound}, got {value}")


def whole_number(name: str, value) -> int:
    """``value``, which must be a whole number."""
    _check_type(name, value, int)
    return value


def _check_type(name: str, value, hint) -> None:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [kind for kind in kinds if kind in _SAID]
    if not plain:
        return
    fits = type(value) in kinds or (float in kinds and type(value) is int)
    if not fits:
        raise ValueError(
            f"{name} must be {' or '.join(_SAID[kind] for kind in plain)}, got {value!r}"
        )
    if type(value) is float and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")


_SAID = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "True or False",
    types.NoneType: "unset",
}
