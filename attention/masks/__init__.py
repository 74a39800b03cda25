"""Masks: which (query, key) pairs may meet. ``python -m attention.masks EXPRESSION`` draws one."""

from attention.masks.expression import parse
from attention.masks.values import (
    EMPTY,
    FULL,
    PARTIAL,
    Causal,
    First,
    Full,
    Global,
    Mask,
    Prefix,
    Retention,
    Window,
)

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Causal",
    "First",
    "Full",
    "Global",
    "Mask",
    "Prefix",
    "Retention",
    "Window",
    "parse",
]
