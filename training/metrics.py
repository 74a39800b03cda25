"""Accuracy on the answers of a task, as sums and counts that are divided once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from tasks import Batch
from training.objective import cross_entropy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over answers and over sequences; adding two is adding their examples.

    Attributes:
      loss: Σ −log p(answer), in nats.
      correct: answers whose likeliest token is right.
      answers: all answers.
      sequences_correct: sequences whose answers are all right.
      sequences: sequences that have an answer.
      sequence_chance: Σ chance^answers over them, what a guesser would get entirely right.
    """

    loss: jax.Array
    correct: jax.Array
    answers: jax.Array
    sequences_correct: jax.Array
    sequences: jax.Array
    sequence_chance: jax.Array

    @classmethod
    def zero(cls) -> Counts:
        """Counts of nothing."""
        whole, real = jnp.int32(0), jnp.float32(0)
        return cls(real, whole, whole, whole, whole, real)

    @classmethod
    def of(cls, logits_BTV: jax.Array, batch: Batch, chance: float) -> Counts:
        """Counts of one batch of a task whose guesser is right with probability ``chance``."""
        answer_BT = batch.weights_BT > 0
        loss, _ = cross_entropy(logits_BTV, batch.targets_BT, answer_BT.astype(jnp.float32))
        right_BT = logits_BTV.argmax(-1) == batch.targets_BT
        has_answer_B = answer_BT.any(-1)
        return cls(
            loss=loss,
            correct=(right_BT & answer_BT).sum(),
            answers=answer_BT.sum(),
            sequences_correct=((right_BT | ~answer_BT).all(-1) & has_answer_B).sum(),
            sequences=has_answer_B.sum(),
            sequence_chance=jnp.where(has_answer_B, chance ** answer_BT.sum(-1), 0).sum(),
        )

    def __add__(self, other: Counts) -> Counts:
        return jax.tree.map(lambda a, b: a + b, self, other)

    def ratios(self) -> dict[str, float]:
        """Loss per answer, accuracies and the chance of the second; NaN where none counted."""
        answers, sequences = int(self.answers), int(self.sequences)
        nan = float("nan")
        return {
            "loss": float(self.loss) / answers if answers else nan,
            "accuracy": int(self.correct) / answers if answers else nan,
            "sequence_accuracy": int(self.sequences_correct) / sequences if sequences else nan,
            "sequence_chance": float(self.sequence_chance) / sequences if sequences else nan,
        }
