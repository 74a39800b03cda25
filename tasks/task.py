"""What a task is: a frozen value from which batches of any size can be drawn."""

from __future__ import annotations

import functools
from typing import ClassVar, Protocol, Self

import jax
import jax.numpy as jnp

from tasks.batch import Batch
from tasks.picture import draw_row
from tasks.space import Stratum, expected_overlap, log2_size

# A thousand steps of batch 100, the order of a short run.
_TRAINING_ROWS = 100_000


class Task(Protocol):
    """The contract. A task is a frozen, hashable dataclass, so it can be a static jit argument.

    A task that is not synthetic has more: ``held_out()``, the task on data that training never
    draws, ``delimiters``, the ids that end something, and ``token_name(id)``.

    Attributes:
      name: what configs and metrics call it.
      has_source: whether its batches have a source, for an encoder to read.
      vocab_size: number of ids, the special ones included; the model's V.
      length: T, the number of tokens the model reads.
      chance: accuracy of the best guesser that remembers nothing of the sequence.
      first_answer: earliest position that may carry weight.
      space: the sequences that can be drawn, see `tasks.space`.
    """

    name: ClassVar[str]
    has_source: ClassVar[bool]
    vocab_size: int
    length: int

    @property
    def chance(self) -> float: ...

    @property
    def first_answer(self) -> int: ...

    @property
    def space(self) -> tuple[Stratum, ...]: ...

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        """Draws ``batch_size`` independent rows; a pure function of its arguments, jit-able."""
        ...

    def at_length(self, length: int) -> Self:
        """The same task at another length; options left to their default follow the length.

        Raises:
          ValueError: an option that was set does not fit the new length.
        """
        ...

    def describe(self, seed: int = 0) -> str:
        """What is drawn and from how many, then one example with its answers marked."""
        ...


def next_token_batch(sequence_BU: jax.Array, weights_BT: jax.Array) -> Batch:
    """Tokens and targets as the two ends of sequences of U = T + 1 ids."""
    sequence_BU = sequence_BU.astype(jnp.int32)
    return Batch(sequence_BU[:, :-1], sequence_BU[:, 1:], weights_BT.astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=0)
def draw_one(task: Task, key: jax.Array) -> Batch:
    return task.sample(key, 1)


def describe(task: Task, what: str, seed: int) -> str:
    """The text of ``task.describe``; ``what`` says in words what is drawn."""
    example = draw_one(task, jax.random.key(seed))
    repeats = expected_overlap(task.space, _TRAINING_ROWS)
    return (
        f"{task.name}: {what}\n"
        f"{task.length} tokens, vocabulary {task.vocab_size}, chance {task.chance:.4f}, "
        f"2^{log2_size(task.space):.1f} sequences: {repeats:.1%} of fresh ones are among "
        f"{_TRAINING_ROWS:,} earlier ones\n"
        f"{draw_row(example)}"
    )
