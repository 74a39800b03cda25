"""Markov chains learnt in context, after Edelman et al. 2024, arXiv:2402.11004."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from tasks.batch import Batch
from tasks.space import Stratum
from tasks.symbols import SymbolTask
from tasks.task import describe, next_token_batch
from tasks.vocabulary import NUM_SPECIAL, check_integer, check_vocabulary


@dataclasses.dataclass(frozen=True)
class Markov(SymbolTask):
    """Every row is a walk along its own Markov chain on k = vocab_size - 4 symbols.

    The rows of a chain's transition matrix are independent Dirichlet(1, …, 1). The first symbol is
    uniform, not stationary: then it tells nothing of the chain, and `bigram_probabilities` is
    exactly the Bayes-optimal prediction. No BOS; every position counts, the first one too.

    Attributes:
      vocab_size: number of ids, special ones included; at least 2 symbols.
      length: T, the number of tokens the model reads.

    Raises:
      ValueError: an option is out of its bounds; the message names it.
    """

    name: ClassVar[str] = "markov"
    has_source: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_vocabulary(self.vocab_size, 2, self.name)
        check_integer("task.length", self.length)
        if self.length < 1:
            raise ValueError(f"task.length={self.length} must be at least 1 for markov")

    @property
    def uniform_loss(self) -> float:
        """Loss in nats of predicting every symbol alike, ln k."""
        return math.log(self.num_symbols)

    @property
    def first_answer(self) -> int:
        return 0

    @property
    def space(self) -> tuple[Stratum, ...]:
        """All strings; they are not equally likely, so an overlap computed from it is a bound."""
        return (Stratum(1.0, (self.length + 1) * math.log2(self.num_symbols)),)

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        chain_key, start_key, walk_key = jax.random.split(key, 3)
        k = self.num_symbols
        # Normalised exponentials are Dirichlet(1, …, 1); the division is left to the threshold.
        upper_BKK = jnp.cumsum(
            jax.random.exponential(chain_key, (batch_size, k, k), jnp.float32), axis=2
        )
        start_B = jax.random.randint(start_key, (batch_size,), 0, k, jnp.int32)
        lot_TB = jax.random.uniform(walk_key, (self.length, batch_size), jnp.float32)

        def step(state_B: jax.Array, lot_B: jax.Array) -> tuple[jax.Array, jax.Array]:
            upper_BK = jnp.take_along_axis(upper_BKK, state_B[:, None, None], axis=1)[:, 0]
            threshold_B1 = lot_B[:, None] * upper_BK[:, -1:]
            # Without the last bound, which a rounded product may reach.
            next_B = jnp.sum(threshold_B1 >= upper_BK[:, :-1], axis=1, dtype=jnp.int32)
            return next_B, next_B

        _, walk_TB = jax.lax.scan(step, start_B, lot_TB, unroll=8)
        sequence_BU = NUM_SPECIAL + jnp.concatenate([start_B[None, :], walk_TB], axis=0).T
        return next_token_batch(sequence_BU, jnp.ones((batch_size, self.length)))

    def unigram_loss(self, batch: Batch) -> jax.Array:
        """Loss_BT in nats of `unigram_probabilities`: the line of a model that only counts."""
        return _loss(unigram_probabilities(batch.tokens_BT, self.vocab_size), batch)

    def bigram_loss(self, batch: Batch) -> jax.Array:
        """Loss_BT in nats of `bigram_probabilities`: no model does better on average."""
        return _loss(bigram_probabilities(batch.tokens_BT, self.vocab_size), batch)

    def describe(self, seed: int = 0) -> str:
        what = f"a walk along a random Markov chain on {self.num_symbols} symbols"
        return describe(self, what, seed)


def unigram_probabilities(tokens_BT: jax.Array, vocab_size: int) -> jax.Array:
    """Prediction_BTV from how often each symbol has occurred up to t, order ignored.

    ``P(b) = (count(b) + 1) / (t + 1 + k)``: Bayes-optimal if symbols were drawn independently
    from a Dirichlet(1) distribution, and the paper's unigram strategy. Special ids get 0.
    """
    counts_BTV = jnp.cumsum(jax.nn.one_hot(tokens_BT, vocab_size), axis=1)
    return _smoothed(counts_BTV)


def bigram_probabilities(tokens_BT: jax.Array, vocab_size: int) -> jax.Array:
    """Prediction_BTV from what followed earlier occurrences of the current token a.

    ``P(b | a) = (count(a b) + 1) / (count(a) + k)``, where count(a) leaves out the occurrence at t
    itself: the Bayes-optimal prediction under Dirichlet(1) rows. Special ids get 0.
    """
    length = tokens_BT.shape[1]
    earlier_TS = jnp.tril(jnp.ones((length, length), bool), k=-1)
    same_BTS = (tokens_BT[:, :, None] == tokens_BT[:, None, :]) & earlier_TS[None]
    # The last token's follower is unknown; it is earlier than no position, so any value will do.
    follower_BSV = jax.nn.one_hot(jnp.roll(tokens_BT, -1, axis=1), vocab_size)
    # Counts are whole numbers, which the fastest precision would round above 256.
    counts_BTV = jnp.einsum(
        "bts,bsv->btv", same_BTS.astype(jnp.float32), follower_BSV, precision="highest"
    )
    return _smoothed(counts_BTV)


def _smoothed(counts_BTV: jax.Array) -> jax.Array:
    """One more for every symbol, none for the special ids, normalised."""
    vocab_size = counts_BTV.shape[2]
    is_symbol_V = jnp.arange(vocab_size) >= NUM_SPECIAL
    total_BT1 = counts_BTV.sum(axis=2, keepdims=True) + (vocab_size - NUM_SPECIAL)
    return (counts_BTV + is_symbol_V[None, None, :]) / total_BT1


def _loss(probabilities_BTV: jax.Array, batch: Batch) -> jax.Array:
    picked_BT1 = jnp.take_along_axis(probabilities_BTV, batch.targets_BT[:, :, None], axis=2)
    return -jnp.log(picked_BT1[:, :, 0])
