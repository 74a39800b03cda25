"""Times taken in turns, and what is read off them: medians, ratios with spread, exponents."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from benchmarks.peers import PeerError


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median, and the quartiles around it.

    Attributes:
      median, low, high: the median, the lower and the upper quartile.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Estimate:
        """Raises ValueError where there is no sample."""
        if not samples:
            raise ValueError("an estimate needs at least one sample")
        low, median, high = np.quantile(samples, [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))

    def text(self, number: Callable[[float], str] = "{:.2f}".format) -> str:
        """``median (low–high)``."""
        return f"{number(self.median)} ({number(self.low)}–{number(self.high)})"


def ratio(peer: Sequence[float], ours: Sequence[float]) -> Estimate:
    """How many times as fast ours is: peer / ours, turn by turn.

    Raises:
      ValueError: they did not take the same number of turns.
    """
    return Estimate.of([theirs / mine for theirs, mine in zip(peer, ours, strict=True)])


def in_turns[Key](
    programs: Mapping[Key, Callable[[], float]],
    repeats: int,
    errors: dict[Key, str] | None = None,
) -> dict[Key, list[float]]:
    """Samples of every program, which returns its own seconds, in ``repeats`` rounds.

    All take part in every round, so that a slow minute of the machine is slow for all; every
    second round runs backwards, so that nobody always follows the same neighbour.

    Args:
      programs: by name.
      repeats: rounds.
      errors: is told why a program has no samples that failed in one of its turns.

    Raises:
      PeerError: a program failed, and there are no ``errors`` to tell.
    """
    samples = {key: [] for key in programs}
    for turn in range(repeats):
        for key in list(samples)[:: -1 if turn % 2 else 1]:
            try:
                samples[key].append(programs[key]())
            except PeerError as error:
                if errors is None:
                    raise
                # Ratios pair the turns of two programs, so some turns of one are of no use.
                del samples[key]
                errors[key] = str(error)
    return samples


def seconds_of(program: Callable, *arguments, calls: int = 1, pipelined: bool = False) -> float:
    """Seconds of one call, of ``calls`` in a row.

    Args:
      pipelined: only the last result is waited for. That hides the dispatch of a GPU; a CPU would
        run several calls at once.
    """
    start = time.perf_counter()
    for _ in range(calls):
        result = program(*arguments)
        if not pipelined:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls


def calls_for(seconds: float, wanted: float) -> int:
    """How many calls of so many seconds fill ``wanted`` seconds, at least one."""
    return max(1, math.ceil(wanted / max(seconds, 1e-6)))


def exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """p of the least-squares fit value = c · length^p.

    Raises:
      ValueError: fewer than two lengths, or a number that is not positive.
    """
    if len(set(lengths)) < 2 or len(lengths) != len(values):
        raise ValueError(
            f"an exponent needs as many values as lengths, at least two different ones; got "
            f"lengths {list(lengths)} and {len(values)} values"
        )
    if min(*lengths, *values) <= 0:
        raise ValueError(f"lengths and values must be positive, got {lengths}, {values}")
    return statistics.linear_regression(
        [math.log(length) for length in lengths], [math.log(value) for value in values]
    ).slope


def peak_bytes(compiled) -> int:
    """Temporaries and outputs of a compiled program, as the compiler has laid them out.

    Outputs that are written over donated arguments take nothing.
    """
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
