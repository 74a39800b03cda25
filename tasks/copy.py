"""Copying: a random string, a separator, the string again."""

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
class Copy(StringTask):
    """``BOS s_1 … s_n SEP s_1 … s_n PAD …``; the second string is the answer.

    Whole sequences have length + 1 ids, so the longest string is (length - 1) // 2.
    """

    name: ClassVar[str] = "copy"
    has_source: ClassVar[bool] = False
    around: ClassVar[int] = 1
    written: ClassVar[int] = 2

    @property
    def first_answer(self) -> int:
        return self.min_length + 1

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        n_B1, string_BN = self.draw(
            key, batch_size, (self.min_length, self.longest), width=self.longest
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
