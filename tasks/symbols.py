"""What the tasks on uniformly drawn symbols have in common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import jax
import jax.numpy as jnp

from tasks.space import Stratum
from tasks.vocabulary import NUM_SPECIAL


@dataclasses.dataclass(frozen=True)
class SymbolTask:
    """A task whose symbols, all ids but the special ones, are equally likely.

    Attributes:
      vocab_size: number of ids, special ones included.
      length: T, the number of tokens the model reads.
    """

    vocab_size: int
    length: int

    @property
    def num_symbols(self) -> int:
        return self.vocab_size - NUM_SPECIAL

    @property
    def chance(self) -> float:
        return 1.0 / self.num_symbols

    def at_length(self, length: int) -> Self:
        return dataclasses.replace(self, length=length)

    def strata(self, lengths: Sequence[int]) -> tuple[Stratum, ...]:
        """Of strings whose length is one of these, each as likely as the others."""
        return tuple(Stratum(1 / len(lengths), n * math.log2(self.num_symbols)) for n in lengths)

    def draw(
        self, key: jax.Array, batch_size: int, lengths: tuple[int, int], width: int
    ) -> tuple[jax.Array, jax.Array]:
        """Lengths n_B1, and symbols (B, width) of which the first n are the string.

        Args:
          key: decides both.
          batch_size: B.
          lengths: the shortest and the longest, uniform between.
          width: of the array.
        """
        length_key, symbol_key = jax.random.split(key)
        shortest, longest = lengths
        n_B1 = jax.random.randint(length_key, (batch_size, 1), shortest, longest + 1, jnp.int32)
        symbols = jax.random.randint(
            symbol_key, (batch_size, width), NUM_SPECIAL, self.vocab_size, jnp.int32
        )
        return n_B1, symbols
