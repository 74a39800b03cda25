"""Sequence to sequence: an encoder reads a random string, a decoder writes it in another order."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from tasks.batch import Batch
from tasks.strings import StringTask
from tasks.task import describe, next_token_batch
from tasks.vocabulary import BOS, PAD, SEP


@dataclasses.dataclass(frozen=True)
class Transduction(StringTask):
    """Source ``s_1 … s_n PAD …``, decoder ``start t_1 … t_n PAD …``; all of t is the answer.

    t is s in the order of the subclass; encoder and decoder both read ``length`` tokens. The
    decoder's first token names the order, as a language token does in multilingual translation
    (Johnson et al. 2017, arXiv 1611.04558): otherwise the first answer of a mixture of orders
    could not be known.
    """

    has_source: ClassVar[bool] = True
    around: ClassVar[int] = 0
    written: ClassVar[int] = 1
    start: ClassVar[int]
    order: ClassVar[str]

    @staticmethod
    def place(at: jax.Array, n: jax.Array) -> jax.Array:
        """Index in s of the symbol at index ``at`` of t, for strings of n symbols."""
        raise NotImplementedError

    @property
    def first_answer(self) -> int:
        return 0

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        n_B1, symbols_BS = self.draw(
            key, batch_size, (self.min_length, self.longest), width=self.length
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
