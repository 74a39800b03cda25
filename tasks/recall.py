"""Multi-query associative recall (MQAR), after Arora et al. 2023, arXiv:2312.04927."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from tasks.batch import Batch
from tasks.space import Stratum
from tasks.task import describe, next_token_batch
from tasks.vocabulary import NUM_SPECIAL, PAD, check_integer, check_vocabulary


@dataclasses.dataclass(frozen=True)
class Recall:
    """``k_1 v_1 … k_P v_P`` and then, between PADs, every key once more; its value is the answer.

    The P keys of a row are distinct symbols of the lower half of the symbols, the P values
    distinct symbols of the upper half. After the list come slots of two tokens, a query first and
    PAD second, ``num_slots = (length - 2 P) // 2`` of them. Key i gets slot g_i, drawn without
    replacement in the order of the list, slot g with weight ``(g + 1)^(gap_power - 1)``: as in
    language, most things are mentioned again soon and a few late.

    As in the paper's program, the value is asked for and never shown: after a query the model
    reads PAD, so ``targets`` holds the value there and the next token everywhere else. Shown
    values would tell which are still to come, and so raise the plateau of a model that binds
    nothing from `plateau` = 1 / P to (1 + 1/2 + … + 1/P) / P.

    Attributes:
      vocab_size: number of ids, special ones included; at least 2 P symbols.
      length: T, the number of tokens the model reads; at least 4 P.
      num_pairs: P.
      gap_power: exponent of the gaps plus 1; 1 spreads queries evenly, the paper takes 0.01.

    Raises:
      ValueError: an option is out of its bounds; the message names it.
    """

    name: ClassVar[str] = "recall"
    has_source: ClassVar[bool] = False

    vocab_size: int
    length: int
    num_pairs: int = 4
    gap_power: float = 0.01

    def __post_init__(self) -> None:
        check_integer("task.recall.num_pairs", self.num_pairs)
        if self.num_pairs < 1:
            raise ValueError(f"task.recall.num_pairs={self.num_pairs} must be at least 1")
        check_vocabulary(
            self.vocab_size, max(2 * self.num_pairs, 4), f"recall of {self.num_pairs} pairs"
        )
        check_integer("task.length", self.length)
        if self.length < 4 * self.num_pairs:
            raise ValueError(
                f"task.length={self.length} is too short for "
                f"task.recall.num_pairs={self.num_pairs}: listing and asking need at least "
                f"4 * num_pairs = {4 * self.num_pairs}"
            )
        if not isinstance(self.gap_power, (int, float)) or not 0 < self.gap_power < math.inf:
            raise ValueError(
                f"task.recall.gap_power={self.gap_power!r} must be a finite number above 0"
            )

    @property
    def num_keys(self) -> int:
        return (self.vocab_size - NUM_SPECIAL) // 2

    @property
    def num_values(self) -> int:
        return self.vocab_size - NUM_SPECIAL - self.num_keys

    @property
    def num_slots(self) -> int:
        return (self.length - 2 * self.num_pairs) // 2

    @property
    def chance(self) -> float:
        return 1.0 / self.num_values

    @property
    def plateau(self) -> float:
        """Accuracy of guessing among the row's values without knowing whose they are."""
        return 1.0 / self.num_pairs

    @property
    def first_answer(self) -> int:
        return 2 * self.num_pairs

    @property
    def space(self) -> tuple[Stratum, ...]:
        """Choices of keys, values and slots; slots are not equally likely, early ones more so."""
        choices = math.prod(
            math.perm(n, self.num_pairs) for n in (self.num_keys, self.num_values, self.num_slots)
        )
        return (Stratum(1.0, math.log2(choices)),)

    def at_length(self, length: int) -> Self:
        return dataclasses.replace(self, length=length)

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        key_key, value_key, slot_key = jax.random.split(key, 3)
        first_value = NUM_SPECIAL + self.num_keys
        keys_BP = NUM_SPECIAL + _distinct(key_key, batch_size, self.num_keys, self.num_pairs)
        values_BP = first_value + _distinct(value_key, batch_size, self.num_values, self.num_pairs)

        # The largest of log-weight + Gumbel noise, one after another, are a weighted draw
        # without replacement.
        slot_S = jnp.arange(self.num_slots, dtype=jnp.float32)
        noise_BS = jax.random.gumbel(slot_key, (batch_size, self.num_slots), jnp.float32)
        log_weight_1S = (self.gap_power - 1) * jnp.log1p(slot_S)[None, :]
        slot_BP = jax.lax.top_k(log_weight_1S + noise_BS, self.num_pairs)[1]

        row_B1 = jnp.arange(batch_size)[:, None]
        query_BP = 2 * self.num_pairs + 2 * slot_BP
        pairs_BL = jnp.stack([keys_BP, values_BP], axis=2).reshape(batch_size, -1)
        sequence_BU = jnp.full((batch_size, self.length + 1), PAD, jnp.int32)
        sequence_BU = sequence_BU.at[:, : 2 * self.num_pairs].set(pairs_BL)
        sequence_BU = sequence_BU.at[row_B1, query_BP].set(keys_BP)

        weights_BT = jnp.zeros((batch_size, self.length)).at[row_B1, query_BP].set(1.0)
        batch = next_token_batch(sequence_BU, weights_BT)
        targets_BT = batch.targets_BT.at[row_B1, query_BP].set(values_BP)
        return dataclasses.replace(batch, targets_BT=targets_BT)

    def describe(self, seed: int = 0) -> str:
        what = f"{self.num_pairs} pairs of key and value, then every key once"
        return describe(self, what, seed)


def _distinct(key: jax.Array, batch_size: int, among: int, count: int) -> jax.Array:
    """(batch_size, count) distinct numbers below ``among`` in random order, uniformly."""
    draw_key, order_key = jax.random.split(key)
    # Floyd's sampling: its cost follows count, where ranking all candidates took 28 ms at V = 8192.
    top_P = jnp.arange(among - count, among, dtype=jnp.int32)
    draw_BP = jax.random.randint(draw_key, (batch_size, count), 0, top_P[None, :] + 1, jnp.int32)

    def choose(place: int, chosen_BP: jax.Array) -> jax.Array:
        draw_B1 = jax.lax.dynamic_slice_in_dim(draw_BP, place, 1, axis=1)
        is_taken_B1 = (chosen_BP == draw_B1).any(axis=1, keepdims=True)
        choice_B1 = jnp.where(is_taken_B1, top_P[place], draw_B1)
        return jax.lax.dynamic_update_slice_in_dim(chosen_BP, choice_B1, place, axis=1)

    nothing_BP = jnp.full((batch_size, count), -1, jnp.int32)
    chosen_BP = jax.lax.fori_loop(0, count, choose, nothing_BP)
    # Floyd's set is uniform, its order is not.
    order_BP = jax.lax.top_k(jax.random.uniform(order_key, chosen_BP.shape, jnp.float32), count)[1]
    return jnp.take_along_axis(chosen_BP, order_BP, axis=1)
