"""Sequence to sequence: an encoder reads a random string, a decoder writes it in another order."""

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
class Transduction:
    """Source ``s_1 … s_n PAD …``, decoder ``start t_1 … t_n PAD …``; all of t is the answer.

    n is uniform in [min_length, max_length], each symbol uniform and independent; t is s in the
    order of the subclass. The decoder's first token names that order, as a language token does in
    multilingual translation (Johnson et al. 2017, arXiv 1611.04558): otherwise the first answer of
    a mixture of orders could not be known.

    Attributes:
      vocab_size: number of ids, special ones included; at least 2 symbols.
      length: S = T, the number of tokens that the encoder reads, and the decoder.
      min_length: fewest symbols in the string.
      max_length: most symbols in the string; None takes as many as fit (see `longest`).

    Raises:
      ValueError: an option is out of its bounds; the message names it.
    """

    name: ClassVar[str]
    has_source: ClassVar[bool] = True
    start: ClassVar[int]
    order: ClassVar[str]

    vocab_size: int
    length: int
    min_length: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_vocabulary(self.vocab_size, 2, self.name)
        check_integer("task.length", self.length)
        if self.length < 1:
            raise ValueError(f"task.length={self.length} must be at least 1")
        check_integer(f"task.{self.name}.min_length", self.min_length)
        if self.max_length is not None:
            check_integer(f"task.{self.name}.max_length", self.max_length)
        if self.longest > self.length:
            raise ValueError(
                f"task.{self.name}.max_length={self.max_length} must be at most "
                f"task.length={self.length}"
            )
        if not 1 <= self.min_length <= self.longest:
            raise ValueError(
                f"task.{self.name}.min_length={self.min_length} must lie between 1 and the "
                f"longest string, {self.longest} (task.{self.name}.max_length={self.max_length}, "
                f"task.length={self.length})"
            )

    @staticmethod
    def place(at: jax.Array, n: jax.Array) -> jax.Array:
        """Index in s of the symbol at index ``at`` of t, for strings of n symbols."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        """Most symbols a string has: ``max_length``, or what fits."""
        return self.length if self.max_length is None else self.max_length

    @property
    def num_symbols(self) -> int:
        return self.vocab_size - NUM_SPECIAL

    @property
    def chance(self) -> float:
        return 1.0 / self.num_symbols

    @property
    def first_answer(self) -> int:
        return 0

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
            self, length=string_length, min_length=string_length, max_length=string_length
        )

    def fixed(self, length: int) -> Self:
        """The task with all answers at the same places and as long as ``length`` allows."""
        return self.with_length(length)

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        length_key, symbol_key = jax.random.split(key)
        n_B1 = jax.random.randint(
            length_key, (batch_size, 1), self.min_length, self.longest + 1, jnp.int32
        )
        symbols_BS = jax.random.randint(
            symbol_key, (batch_size, self.length), NUM_SPECIAL, self.vocab_size, jnp.int32
        )
        at_1S = jnp.arange(self.length)[None, :]
        inside_BS = at_1S < n_B1
        # Places past the end read any symbol and are overwritten.
        place_BS = jnp.clip(self.place(at_1S, n_B1), 0, self.length - 1)
        place_BS = jnp.broadcast_to(place_BS, symbols_BS.shape)
        answers_BS = jnp.take_along_axis(symbols_BS, place_BS, axis=1)
        start_B1 = jnp.full_like(n_B1, self.start)
        sequence_BU = jnp.concatenate([start_B1, jnp.where(inside_BS, answers_BS, PAD)], axis=1)
        return dataclasses.replace(
            next_token_batch(sequence_BU, inside_BS),
            source_BS=jnp.where(inside_BS, symbols_BS, PAD),
        )

    def describe(self, seed: int = 0) -> str:
        what = f"sources of {self.min_length} to {self.longest} symbols, written {self.order}"
        return describe(self, what, seed)


@dataclasses.dataclass(frozen=True)
class SourceCopy(Transduction):
    """t = s_1 … s_n; the decoder starts from BOS."""

    name: ClassVar[str] = "source_copy"
    start: ClassVar[int] = BOS
    order: ClassVar[str] = "in the same order"

    @staticmethod
    def place(at: jax.Array, n: jax.Array) -> jax.Array:
        return at


@dataclasses.dataclass(frozen=True)
class SourceReverse(Transduction):
    """t = s_n … s_1; the decoder starts from SEP."""

    name: ClassVar[str] = "source_reverse"
    start: ClassVar[int] = SEP
    order: ClassVar[str] = "backwards"

    @staticmethod
    def place(at: jax.Array, n: jax.Array) -> jax.Array:
        return n - 1 - at
