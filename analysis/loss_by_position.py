"""Loss by position, and the in-context-learning score that is made of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tasks import Batch
from training.objective import LOSS_ON, cross_entropy

# Olsson et al. compare the losses at tokens 50 and 500 of 512.
_EARLY, _LATE, _OF = 50, 500, 512


def loss_by_position(logits_BTV: jax.Array, batch: Batch, loss_on: str) -> tuple:
    """Summed loss in nats, and what was counted, of each position: two arrays (T,).

    Args:
      logits_BTV: of the batch.
      batch: what was predicted.
      loss_on: which positions count, a name in ``training.objective.LOSS_ON``.
    """
    weights_BT = LOSS_ON[loss_on](batch)
    return jax.vmap(cross_entropy, in_axes=1)(logits_BTV, batch.targets_BT, weights_BT)


def compared_positions(length: int, around: int = 0) -> tuple[int, int]:
    """The early and the late position of the in-context-learning score, as far in as the paper's.

    Raises:
      ValueError: the sequence is too short to have both, with so many positions around them.
    """
    early, late = _EARLY * length // _OF, _LATE * length // _OF
    if early == late:
        raise ValueError(f"a sequence of {length} tokens has no early and no late position")
    if early - around < 0 or late + around >= length:
        raise ValueError(
            f"{around} positions around {(early, late)} are not all in {length} tokens"
        )
    return early, late


def in_context_learning_score(loss_T: jax.Array, around: int = 0) -> jax.Array:
    """Loss late in the sequence minus loss early in it, in nats; more negative is more.

    At 500/512 and 50/512 of the length: tokens 500 and 50 of the paper's 512. Olsson et al. 2022
    (arXiv 2209.11895).

    Args:
      loss_T: nats by position.
      around: positions on either side of both that are averaged with them. The loss of one token
        of text varies by nats from sequence to sequence; the mean of 2 · around + 1 neighbours
        varies as much less as if there were as many more sequences, nearly.

    Raises:
      ValueError: there are no such positions.
    """
    early, late = (
        loss_T[..., at - around : at + around + 1].mean(-1)
        for at in compared_positions(loss_T.shape[-1], around)
    )
    return late - early


def mean_or_nan(total, count) -> jax.Array:
    """total / count, NaN where nothing was counted."""
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), jnp.nan)
