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
    """

    loss: jax.Array
    correct: jax.Array
    answers: jax.Array
    sequences_correct: jax.Array
    sequences: jax.Array

    @classmethod
    def of(cls, logits_BTV: jax.Array, batch: Batch) -> Counts:
        """Counts of one batch."""
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
        )

    def __add__(self, other: Counts) -> Counts:
        return jax.tree.map(lambda a, b: a + b, self, other)

    def ratios(self) -> dict[str, float]:
        """Loss per answer, accuracy and sequence accuracy; NaN where nothing was counted."""
        answers, sequences = int(self.answers), int(self.sequences)
        nan = float("nan")
        return {
            "loss": float(self.loss) / answers if answers else nan,
            "accuracy": int(self.correct) / answers if answers else nan,
            "sequence_accuracy": int(self.sequences_correct) / sequences if sequences else nan,
        }
