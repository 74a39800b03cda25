"""What an emergence.csv says of a run, as numbers: what changed, when, and what came with it."""

from __future__ import annotations

import numpy as np

from analysis.emergence import LEAST_RISE, Change, find_change, strongest_head
from analysis.emergence_table import EmergenceTable

# A previous-token score is shared by the heads of a layer, so that of one head rises less.
LEAST_PREVIOUS_RISE = 0.1
# In-context learning in nats: Olsson et al. saw it go from less than .15 to about .4.
LEAST_LEARNING_RISE = 0.25


def summary(table: EmergenceTable) -> dict[str, float]:
    """The change of prefix matching, and of what should come with it.

    Prefix matching is that of the head that ends with the highest score, previous-token attention
    that of the head of the layers below that does, and in-context learning the negative of its
    score. Steps are where a curve is half-way up (``find_change``); a lag is positive where the
    other curve comes after prefix matching.

    Returns:
      ``changed`` (1 or 0) and the scores at the end: ``prefix_matching`` and ``copying`` of the
      strongest head, ``previous_token`` the highest of all heads, ``in_context_learning`` in nats.
      Of runs that changed ``half_step``, ``half_tokens`` and ``width_share``, the 10 to 90 % rise
      as a share of training. Where the other curve has changed too ``previous_lag`` and
      ``learning_lag`` in steps, and ``previous_sum_lag``, of previous-token attention summed over
      the heads of the layers below; where the curve is not constant its Spearman correlation with
      prefix matching over all looks, ``previous_correlation`` and ``learning_correlation``.
      ``learning_inside`` is 1 where in-context learning is half-way within the 10 to 90 % of prefix
      matching. What is not finite is left out.
    """
    step = table["step"]
    prefix_RLN, previous_RLN = table.heads("prefix_matching"), table.heads("previous_token")
    layer, head = strongest_head(prefix_RLN)
    prefix = prefix_RLN[:, layer, head]
    numbers = {
        "prefix_matching": prefix[-1],
        "copying": table.heads("copying")[-1, layer, head],
        "previous_token": previous_RLN[-1].max(),
        "in_context_learning": table["in_context_learning"][-1],
    }
    change = find_change(step, prefix)
    numbers["changed"] = float(change is not None)
    if change is not None:
        numbers["half_step"] = change.half
        numbers["half_tokens"] = change.half * table["tokens"][-1] / step[-1]
        numbers["width_share"] = change.width / step[-1]
    learning = -table["in_context_learning"]
    learnt = find_change(step, learning, LEAST_LEARNING_RISE)
    numbers |= _beside("learning", prefix, change, learning, learnt)
    if change is not None and learnt is not None:
        numbers["learning_inside"] = float(change.start <= learnt.half <= change.end)
    if layer > 0:
        below_RLN = previous_RLN[:, :layer]
        previous = below_RLN[:, *strongest_head(below_RLN)]
        rise = find_change(step, previous, LEAST_PREVIOUS_RISE)
        numbers |= _beside("previous", prefix, change, previous, rise)
        of_all = find_change(step, below_RLN.sum((1, 2)), LEAST_PREVIOUS_RISE)
        if change is not None and of_all is not None:
            numbers["previous_sum_lag"] = of_all.half - change.half
    return {name: float(value) for name, value in numbers.items() if np.isfinite(value)}


def _beside(
    name: str, prefix: np.ndarray, change: Change | None, other: np.ndarray, rise: Change | None
) -> dict[str, float]:
    """The other curve's lag, where both have changed, and its rank correlation."""
    numbers = {}
    if change is not None and rise is not None:
        numbers[f"{name}_lag"] = rise.half - change.half
    if np.ptp(prefix) and np.ptp(other):
        from scipy import stats  # it takes most of a second to load

        numbers[f"{name}_correlation"] = stats.spearmanr(prefix, other).statistic
    return numbers


def induction_heads(prefix_LN: np.ndarray) -> list[tuple[int, int]]:
    """Heads whose prefix-matching score is no noise and at least half of the strongest one's."""
    return _at_least(prefix_LN, max(LEAST_RISE, prefix_LN.max() / 2))


def previous_token_heads(previous_LN: np.ndarray) -> list[tuple[int, int]]:
    """Heads whose previous-token score is no noise and at least half of the strongest one's."""
    return _at_least(previous_LN, max(LEAST_PREVIOUS_RISE, previous_LN.max() / 2))


def _at_least(score_LN: np.ndarray, level: float) -> list[tuple[int, int]]:
    return [(int(layer), int(head)) for layer, head in np.argwhere(score_LN >= level)]
