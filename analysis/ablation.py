"""What a model is without some of its heads: ablation, importance and pruning.

A set of heads is an array gate_LN: 1 keeps a head's output (before W_O), 0 removes it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from analysis.head_scores import pattern_names, read_patterns
from attention.probe import Probe
from models import pure
from tasks import Batch
from training.objective import LOSS_ON, cross_entropy


@dataclasses.dataclass(frozen=True)
class Ablated:
    """How a model does on a batch without some heads.

    Attributes:
      loss: nats per counted position.
      accuracy: share of counted positions whose likeliest token is right.
      loss_T: nats by position; NaN where nothing counts.
    """

    loss: float
    accuracy: float
    loss_T: np.ndarray


class Ablation:
    """A decoder, and the batch that it is tried on.

    Args:
      model: the decoder.
      batch: of next-token prediction.
      loss_on: which positions count, a name in ``training.objective.LOSS_ON``.
    """

    def __init__(self, model, batch: Batch, loss_on: str = "answers"):
        self._graph, self._params = pure.split(model)
        self._batch, self._weights_BT = batch, LOSS_ON[loss_on](batch)
        self.shape = (len(model.blocks), model.options.num_heads)
        self._run = jax.jit(self._measure)
        self._run_frozen = jax.jit(self._measure_frozen)

    def full(self, gate_LN) -> Ablated:
        """The outputs of the heads whose gate is 0 are 0; all that comes after sees that."""
        return self._result(self._run(self._params, self._checked(gate_LN)))

    def pattern_preserving(self, gate_LN) -> Ablated:
        """Likewise, but every head attends as it did before: only values are lost.

        The patterns of a first, whole pass are put in the place of those of a second one, so an
        induction head still finds its token where the previous-token head it needs was removed.
        Olsson et al. 2022 (arXiv 2209.11895).
        """
        return self._result(self._run_frozen(self._params, self._checked(gate_LN)))

    def importance(self) -> np.ndarray:
        """|∂loss/∂gate| of every head, (L, N), averaged over sequences.

        The loss of a sequence is its mean over the counted positions. Michel et al. 2019, Are
        Sixteen Heads Really Better than One? (arXiv 1905.10650), equation 2.
        """

        def loss_of(gate_LN, row: Batch, weights_1T):
            logits_1TV, _ = self._gated(pure.merge(self._graph, self._params), gate_LN, row)
            total, count = cross_entropy(logits_1TV, row.targets_BT, weights_1T)
            return total / jnp.maximum(count, 1)

        def of_row(row_and_weights):
            row, weights_T = row_and_weights
            row = jax.tree.map(lambda x: x[None], row)
            gradient_LN = jax.grad(loss_of)(jnp.ones(self.shape), row, weights_T[None])
            return jnp.abs(gradient_LN)

        rows = (self._batch, self._weights_BT)
        of_all = jax.jit(lambda rows: jax.lax.map(of_row, rows, batch_size=16).mean(0))
        return np.asarray(of_all(rows))

    def prune(self, order) -> list[Ablated]:
        """The model with the first 0, 1, 2, … all heads of an order removed.

        Args:
          order: every pair (layer, head) once.

        Raises:
          ValueError: a head is missing, or named twice.
        """
        order = [tuple(map(int, head)) for head in order]
        if sorted(order) != list(np.ndindex(self.shape)):
            raise ValueError(f"an order has each head of {self.shape} once, got {order}")
        gate_LN, results = np.ones(self.shape, np.float32), []
        for head in [None, *order]:
            if head is not None:
                gate_LN[head] = 0
            results.append(self.full(gate_LN))
        return results

    def _checked(self, gate_LN) -> jax.Array:
        gate_LN = jnp.asarray(gate_LN, jnp.float32)
        if gate_LN.shape != self.shape:
            raise ValueError(f"gates are one a head, {self.shape}, got {gate_LN.shape}")
        return gate_LN

    def _measure(self, params, gate_LN, patterns=None):
        model = pure.merge(self._graph, params)
        logits_BTV, _ = self._gated(model, gate_LN, self._batch, patterns)
        targets_BT, weights_BT = self._batch.targets_BT, self._weights_BT
        loss_T, count_T = jax.vmap(cross_entropy, in_axes=1)(logits_BTV, targets_BT, weights_BT)
        right_BT = (logits_BTV.argmax(-1) == targets_BT) & (weights_BT > 0)
        return loss_T, count_T, right_BT.sum()

    def _measure_frozen(self, params, gate_LN):
        _, patterns = read_patterns(pure.merge(self._graph, params), self._batch.tokens_BT)
        return self._measure(params, gate_LN, patterns)

    @staticmethod
    def _gated(model, gate_LN, batch: Batch, patterns=None):
        replace = {}
        for i, (gate_N, names) in enumerate(zip(gate_LN, pattern_names(model), strict=True)):
            replace[f"layer{i}/head"] = lambda head_BTNE, gate_N=gate_N: (
                head_BTNE * gate_N[None, None, :, None].astype(head_BTNE.dtype)
            )
            if patterns is not None:
                replace |= dict.fromkeys(names, lambda _, i=i: patterns[i])
        return model(batch.tokens_BT, probe=Probe(replace=replace))

    @staticmethod
    def _result(found) -> Ablated:
        loss_T, count_T, right = map(np.asarray, found)
        with np.errstate(invalid="ignore"):
            by_position = loss_T / count_T
        return Ablated(
            loss=float(loss_T.sum() / count_T.sum()),
            accuracy=float(right / count_T.sum()),
            loss_T=by_position,
        )


def without(shape: tuple[int, int], heads) -> np.ndarray:
    """gate_LN with the given (layer, head) pairs removed."""
    gate_LN = np.ones(shape, np.float32)
    for head in heads:
        gate_LN[tuple(head)] = 0
    return gate_LN


def least_important_first(importance_LN: np.ndarray) -> list[tuple[int, int]]:
    """Heads in the order in which Michel et al. prune them: by importance ÷ its ℓ2 norm in a layer.

    Gradients of one layer may be larger than those of another throughout; divided by the norm, as
    the paper does after Molchanov et al. 2017 (arXiv 1611.06440), every layer weighs as much.
    """
    norm_L1 = np.linalg.norm(importance_LN, axis=1, keepdims=True)
    share_LN = importance_LN / np.where(norm_L1 > 0, norm_L1, 1)
    flat = np.argsort(share_LN, axis=None, kind="stable")
    return [tuple(int(i) for i in np.unravel_index(f, share_LN.shape)) for f in flat]


def random_order(shape: tuple[int, int], seed: int) -> list[tuple[int, int]]:
    """Heads in a random order."""
    heads = list(np.ndindex(shape))
    return [heads[i] for i in np.random.default_rng(seed).permutation(len(heads))]
