"""Numbers of a run that was watched: its change, and what it is without some of its heads."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from analysis import emergence_table, watch
from analysis.ablation import Ablation, least_important_first, random_order, without
from analysis.emergence_summary import induction_heads, previous_token_heads, summary
from analysis.emergence_table import EmergenceTable
from analysis.head_scores import attended_logits, copying
from analysis.loss_by_position import (
    in_context_learning_score,
    loss_by_position,
)
from models.pure import merge, split
from tasks import Batch, evaluation_key
from training.restore import restore
from training.run_folder import RunFolder
from training.settings import OptionError, Settings


def emergence(folder: RunFolder, settings: Settings) -> dict[str, float]:
    """``analysis.emergence_summary.summary`` of the run."""
    del settings
    return summary(_table(folder))


@dataclasses.dataclass(frozen=True)
class LateLessEarly:
    """``late_less_early``: the in-context-learning score of a trained run, on more sequences.

    For data on which the loss of one token says little, such as text.

    Attributes:
      sequences: of the held-out task, a multiple of 16.
      around: positions on either side that are averaged.

    Raises:
      ValueError: not such a number of sequences.
    """

    sequences: int = 512
    around: int = 11

    def __post_init__(self):
        if self.sequences < 16 or self.sequences % 16:
            raise ValueError(f"sequences={self.sequences} must be a multiple of 16")

    def __call__(self, folder: RunFolder, settings: Settings) -> dict[str, float]:
        graph, params = split(restore(folder).model)

        @jax.jit
        def loss_T(params):
            def of_some(index):
                batch = settings.held_out.sample(evaluation_key(settings.eval.seed, index), 16)
                logits_BTV, _ = merge(graph, params)(batch.tokens_BT)
                return loss_by_position(logits_BTV, batch, "all")

            of_each = jax.lax.map(of_some, jnp.arange(self.sequences // 16))
            return jnp.divide(*(found.sum(0) for found in of_each))

        return {"late_less_early": float(in_context_learning_score(loss_T(params), self.around))}


def copied(folder: RunFolder, settings: Settings) -> dict[str, float]:
    """What the ``induction_heads`` of a run copy together; nothing of a run without any.

    ``copying_together`` is the copying score of the sum of their outputs, and ``copied_first`` the
    share of attended tokens whose own logit it raises most, of all tokens of the sequence.
    """
    chosen = induction_heads(_table(folder).heads("prefix_matching")[-1])
    if not chosen:
        return {}
    graph, params = split(restore(folder).model)
    sequences = watch.sequences_of(settings)

    @jax.jit
    def added(params):
        by_layer = attended_logits(merge(graph, params), sequences)
        return sum(by_layer[layer][:, :, head] for layer, head in chosen)

    logits_BTU = added(params)
    first = logits_BTU.argmax(-1) == jnp.arange(logits_BTU.shape[1])[None]
    score_N = copying(logits_BTU[:, :, None])
    return {"copying_together": float(score_N[0]), "copied_first": float(first.mean())}


@dataclasses.dataclass(frozen=True)
class HeadsRemoved:
    """The share of in-context learning that is kept without the induction heads, and others.

    Of ``induction_heads``, of as many drawn at random from the other heads, and of as many drawn
    from those that are no previous-token heads either. Each fully (``kept/WHICH_full``) and with
    all patterns preserved (``kept/WHICH_preserving``), WHICH one of ``induction``, ``random`` and
    ``idle``; the number of heads is ``induction_heads``. Runs without induction heads have none of
    these; where fewer heads are left than are to be drawn, all of them are removed.

    Olsson et al. 2022 (arXiv 2209.11895).

    Attributes:
      sequences: of the held-out task.
      draws: of random heads, averaged.
    """

    sequences: int = 128
    draws: int = 12

    def __call__(self, folder: RunFolder, settings: Settings) -> dict[str, float]:
        table = _table(folder)
        removed = induction_heads(table.heads("prefix_matching")[-1])
        if not removed:
            return {}
        previous = previous_token_heads(table.heads("previous_token")[-1])
        ablation = Ablation(restore(folder).model, _batch(settings, self.sequences), "all")
        others = [head for head in np.ndindex(ablation.shape) if head not in removed]
        idle = [head for head in others if head not in previous]
        return {"induction_heads": float(len(removed))} | self.kept(
            ablation, removed, {"random": others, "idle": idle}
        )

    def kept(self, ablation: Ablation, removed: list, among: dict[str, list]) -> dict[str, float]:
        """Shares of in-context learning that are left.

        Args:
          ablation: of the model.
          removed: the induction heads.
          among: name → the heads of which as many are drawn; none: the name is left out.
        """
        whole = in_context_learning_score(ablation.full(np.ones(ablation.shape)).loss_T)
        ways = {"full": ablation.full, "preserving": ablation.pattern_preserving}
        random, found = np.random.default_rng(0), {}
        sets = {"induction": [removed]}
        for name, heads in among.items():
            draws = range(self.draws) if len(heads) > len(removed) else range(min(1, len(heads)))
            size = min(len(removed), len(heads))
            sets[name] = [
                [heads[i] for i in random.choice(len(heads), size, replace=False)] for _ in draws
            ]
        for name, drawn in sets.items():
            for way, ablate in ways.items() if drawn else ():
                scores = [
                    in_context_learning_score(ablate(without(ablation.shape, heads)).loss_T)
                    for heads in drawn
                ]
                found[f"kept/{name}_{way}"] = float(np.mean(scores) / whole)
        return found


@dataclasses.dataclass(frozen=True)
class Pruning:
    """Accuracy on the answers against the share of heads removed.

    ``pruned/importance@P`` in order of |∂loss/∂gate| ÷ its norm in the layer (see
    ``analysis.ablation.least_important_first``), ``pruned/random@P`` in random orders, P in
    per cent of all heads. ``pruned/importance_free`` and ``pruned/random_free`` are the largest
    shares that cost no more than ``tolerance``.

    Heads are ranked on other sequences than those that accuracy is measured on.

    Michel et al. 2019 (arXiv 1905.10650).

    Attributes:
      sequences: of the held-out task, of each kind.
      orders: random ones, averaged.
      tolerance: accuracy that counts as little.
    """

    sequences: int = 128
    orders: int = 10
    tolerance: float = 0.02

    def __call__(self, folder: RunFolder, settings: Settings) -> dict[str, float]:
        model = restore(folder).model
        ranked, tried = (Ablation(model, _batch(settings, self.sequences, at)) for at in (1, 0))
        return self.prune(tried, ranked.importance())

    def prune(self, ablation: Ablation, importance_LN: np.ndarray) -> dict[str, float]:
        """The numbers of a model whose heads are of that importance."""
        by_importance = [least_important_first(importance_LN)]
        at_random = [random_order(ablation.shape, seed) for seed in range(self.orders)]
        found = {}
        for name, orders in (("importance", by_importance), ("random", at_random)):
            accuracies = [[one.accuracy for one in ablation.prune(order)] for order in orders]
            mean = np.mean(accuracies, axis=0)
            total = len(mean) - 1
            for removed, accuracy in enumerate(mean):
                found[f"pruned/{name}@{round(100 * removed / total)}"] = float(accuracy)
            found[f"pruned/{name}_free"] = free_share(mean, self.tolerance)
        return found


def free_share(accuracies, tolerance: float) -> float:
    """Largest share of heads up to which every removal keeps accuracy, from 0 to all removed."""
    costly = np.flatnonzero(np.asarray(accuracies) < accuracies[0] - tolerance)
    total = len(accuracies) - 1
    return float((costly[0] - 1 if len(costly) else total) / total)


def _table(folder: RunFolder) -> EmergenceTable:
    table = emergence_table.read(folder.emergence)
    if table is None:
        raise OptionError(
            f"{folder.emergence} is missing: a study that measures emergence has to set "
            "analysis.every"
        )
    return table


def _batch(settings: Settings, sequences: int, at: int = 0) -> Batch:
    """Sequences of the held-out task, others for every ``at``."""
    sample = jax.jit(settings.held_out.sample, static_argnums=1)
    return sample(evaluation_key(settings.eval.seed, at), sequences)
