"""How many sequences a task can draw, and how many of the evaluated ones training has shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Stratum(NamedTuple):
    """Equally likely sequences that are drawn together with ``probability``."""

    probability: float
    log2_size: float


def log2_size(space: Sequence[Stratum]) -> float:
    """log2 of the number of sequences in ``space``."""
    largest = max(stratum.log2_size for stratum in space)
    return largest + math.log2(sum(2.0 ** (stratum.log2_size - largest) for stratum in space))


def expected_overlap(space: Sequence[Stratum], draws: int) -> float:
    """Expected share of fresh sequences that are among ``draws`` earlier ones.

    ``sum_i P_i (1 - (1 - P_i / N_i)^draws)`` over strata of N_i sequences: 0 says that evaluation
    measures generalisation, close to 1 that a lookup table would pass it.
    """
    share = 0.0
    for probability, log2_count in space:
        each = probability * 2.0**-log2_count
        seen = 1.0 if each >= 1.0 else -math.expm1(draws * math.log1p(-each))
        share += probability * seen
    return share
