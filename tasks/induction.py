"""Induction: a random block repeated to the end of the sequence."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from tasks.batch import Batch
from tasks.space import Stratum
from tasks.symbols import SymbolTask
from tasks.task import describe, next_token_batch
from tasks.vocabulary import check_integer, check_vocabulary


@dataclasses.dataclass(frozen=True)
class Induction(SymbolTask):
    """``s_1 … s_p s_1 … s_p s_1 …``; an answer is what followed the same place a period ago.

    The period p is uniform in [min_period, max_period], each symbol uniform and independent.
    Position t counts from t = p on: there token t and its continuation have both been seen,
    ``targets[t] == tokens[t + 1 - p]``. No BOS.

    Attributes:
      vocab_size: number of ids, special ones included; at least 2 symbols.
      length: T, the number of tokens the model reads.
      min_period: shortest block; None takes ceil(length / 4) (see `shortest`).
      max_period: longest block, below ``length``; None takes length // 2 (see `longest`).

    Raises:
      ValueError: an option is out of its bounds; the message names it.
    """

    name: ClassVar[str] = "induction"
    has_source: ClassVar[bool] = False

    min_period: int | None = None
    max_period: int | None = None

    def __post_init__(self) -> None:
        check_vocabulary(self.vocab_size, 2, self.name)
        check_integer("task.length", self.length)
        if self.length < 2:
            raise ValueError(
                f"task.length={self.length} is too short for induction: a block and its first "
                "repetition need at least 2"
            )
        for option in ("min_period", "max_period"):
            if getattr(self, option) is not None:
                check_integer(f"task.induction.{option}", getattr(self, option))
        if self.longest >= self.length:
            raise ValueError(
                f"task.induction.max_period={self.max_period} leaves no answer in "
                f"task.length={self.length}: it must be at most {self.length - 1}"
            )
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(
                f"task.induction.min_period={self.min_period} and max_period={self.max_period} "
                f"give periods {self.shortest} to {self.longest} at task.length={self.length}: "
                "they must satisfy 1 <= min_period <= max_period"
            )

    @property
    def shortest(self) -> int:
        """Shortest period: ``min_period``, or ceil(length / 4)."""
        return -(-self.length // 4) if self.min_period is None else self.min_period

    @property
    def longest(self) -> int:
        """Longest period: ``max_period``, or length // 2."""
        return self.length // 2 if self.max_period is None else self.max_period

    @property
    def first_answer(self) -> int:
        return self.shortest

    @property
    def space(self) -> tuple[Stratum, ...]:
        """Pairs of period and block; the few blocks that are periodic themselves count twice."""
        return self.strata(range(self.shortest, self.longest + 1))

    def with_length(self, answers: int) -> Self:
        """The task with blocks of answers + 1 symbols: as many tokens as a string copied has."""
        check_integer("answers", answers)
        period = answers + 1
        return dataclasses.replace(
            self, length=2 * answers + 1, min_period=period, max_period=period
        )

    def fixed(self, length: int) -> Self:
        """The task with all answers at the same places, half of an odd length."""
        return self.with_length((length - 1) // 2)

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        periods = self.shortest, self.longest
        p_B1, block_BP = self.draw(key, batch_size, periods, width=self.longest)
        at_1U = jnp.arange(self.length + 1)[None, :]
        sequence_BU = jnp.take_along_axis(block_BP, at_1U % p_B1, axis=1)
        return next_token_batch(sequence_BU, at_1U[:, :-1] >= p_B1)

    def describe(self, seed: int = 0) -> str:
        what = f"blocks of {self.shortest} to {self.longest} symbols, repeated to the end"
        return describe(self, what, seed)
