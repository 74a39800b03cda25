"""Copying: a random string, a separator, the string again."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from tasks.batch import Batch
from tasks.space import Stratum
from tasks.task import describe, next_token_batch
from tasks.vocabulary import BOS, NUM_SPECIAL, PAD, SEP, check_integer, check_vocabulary


@dataclasses.dataclass(frozen=True)
class Copy:
    """``BOS s_1 … s_n SEP s_1 … s_n PAD …``; the second string is the answer.

    n is uniform in [min_length, max_length], each symbol uniform and independent. Whole sequences
    have length + 1 ids, so the longest string is (length - 1) // 2.

    Attributes:
      vocab_size: number of ids, special ones included; at least 2 symbols.
      length: T, the number of tokens the model reads.
      min_length: fewest symbols in the string.
      max_length: most symbols in the string; None takes as many as fit (see `longest`).

    Raises:
      ValueError: an option is out of its bounds; the message names it.
    """

    name: ClassVar[str] = "copy"
    has_source: ClassVar[bool] = False

    vocab_size: int
    length: int
    min_length: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_vocabulary(self.vocab_size, 2, self.name)
        check_integer("task.length", self.length)
        if self.length < 3:
            raise ValueError(
                f"task.length={self.length} is too short for copy: BOS, one symbol and SEP need "
                "at least 3"
            )
        check_integer("task.copy.min_length", self.min_length)
        if self.max_length is not None:
            check_integer("task.copy.max_length", self.max_length)
        fits = (self.length - 1) // 2
        if self.longest > fits:
            raise ValueError(
                f"task.copy.max_length={self.max_length} does not fit task.length={self.length}: "
                f"it must be at most (length - 1) // 2 = {fits}"
            )
        if not 1 <= self.min_length <= self.longest:
            raise ValueError(
                f"task.copy.min_length={self.min_length} must lie between 1 and the longest "
                f"string, {self.longest} (task.copy.max_length={self.max_length}, "
                f"task.length={self.length})"
            )

    @property
    def longest(self) -> int:
        """Most symbols a string has: ``max_length``, or what fits."""
        return (self.length - 1) // 2 if self.max_length is None else self.max_length

    @property
    def num_symbols(self) -> int:
        return self.vocab_size - NUM_SPECIAL

    @property
    def chance(self) -> float:
        return 1.0 / self.num_symbols

    @property
    def first_answer(self) -> int:
        return self.min_length + 1

    @property
    def space(self) -> tuple[Stratum, ...]:
        lengths = range(self.min_length, self.longest + 1)
        return tuple(Stratum(1 / len(lengths), n * math.log2(self.num_symbols)) for n in lengths)

    def at_length(self, length: int) -> Self:
        return dataclasses.replace(self, length=length)

    def with_length(self, string_length: int) -> Self:
        """The task with strings of exactly ``string_length``, in the shortest T that holds them."""
        check_integer("string_length", string_length)
        if string_length < 1:
            raise ValueError(f"string_length={string_length} must be at least 1")
        return dataclasses.replace(
            self,
            length=2 * string_length + 1,
            min_length=string_length,
            max_length=string_length,
        )

    def fixed(self, length: int) -> Self:
        """The task with all answers at the same places and as long as ``length`` allows."""
        return self.with_length((length - 1) // 2)

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        length_key, symbol_key = jax.random.split(key)
        n_B1 = jax.random.randint(
            length_key, (batch_size, 1), self.min_length, self.longest + 1, jnp.int32
        )
        string_BN = jax.random.randint(
            symbol_key, (batch_size, self.longest), NUM_SPECIAL, self.vocab_size, jnp.int32
        )
        at_1U = jnp.arange(self.length + 1)[None, :]
        # One gather lays out both copies; places without a symbol read any and are overwritten.
        source_BU = jnp.where(at_1U <= n_B1, at_1U - 1, at_1U - n_B1 - 2)
        sequence_BU = jnp.take_along_axis(
            string_BN, jnp.clip(source_BU, 0, self.longest - 1), axis=1
        )
        sequence_BU = jnp.where(at_1U == 0, BOS, sequence_BU)
        sequence_BU = jnp.where(at_1U == n_B1 + 1, SEP, sequence_BU)
        sequence_BU = jnp.where(at_1U > 2 * n_B1 + 1, PAD, sequence_BU)
        target_at_1T = at_1U[:, 1:]
        is_answer_BT = (target_at_1T >= n_B1 + 2) & (target_at_1T <= 2 * n_B1 + 1)
        return next_token_batch(sequence_BU, is_answer_BT)

    def describe(self, seed: int = 0) -> str:
        what = f"strings of {self.min_length} to {self.longest} symbols, written twice"
        return describe(self, what, seed)
