"""The ids every task shares: four special tokens first, then the symbols.

A task's ``vocab_size`` counts all ids, special ones included, so it is also the model's V.
"""

from __future__ import annotations

PAD = 0
BOS = 1
SEP = 2
MASK = 3
NUM_SPECIAL = 4

_SPECIAL_NAMES = {PAD: "PAD", BOS: "BOS", SEP: "SEP", MASK: "MASK"}
_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def token_name(token: int) -> str:
    """Short printable name: special tokens in capitals, symbols as a, b, …, z, a1, b1, …"""
    if token in _SPECIAL_NAMES:
        return _SPECIAL_NAMES[token]
    cycle, letter = divmod(token - NUM_SPECIAL, len(_ALPHABET))
    return _ALPHABET[letter] + (str(cycle) if cycle else "")


def check_vocabulary(vocab_size: int, min_symbols: int, task_name: str) -> None:
    """Raises ValueError unless ``vocab_size`` leaves the task at least ``min_symbols`` symbols."""
    smallest = NUM_SPECIAL + min_symbols
    check_integer("task.vocab_size", vocab_size)
    if vocab_size < smallest:
        raise ValueError(
            f"task.vocab_size={vocab_size} is too small for {task_name}: {NUM_SPECIAL} special ids "
            f"and {min_symbols} symbols need at least {smallest}"
        )


def check_integer(option: str, value: int) -> None:
    """Raises ValueError naming ``option`` unless ``value`` is a whole number (a bool is not)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{option}={value!r} must be a whole number")
