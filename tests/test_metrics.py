"""Accuracies are sums and counts over answers, divided once; a plain Python loop agrees."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks import Batch
from training.metrics import Counts

CHANCE = 0.25


def random_batch(rng, rows):
    """Logits that are right about half the time; row 0 has no answer."""
    targets_BT = rng.integers(0, 7, (rows, 5))
    weights_BT = (rng.random((rows, 5)) < 0.4).astype(np.float32)
    weights_BT[0] = 0
    logits_BTV = rng.normal(size=(rows, 5, 7)).astype(np.float32)
    right_BT = rng.random((rows, 5)) < 0.7
    logits_BTV[right_BT, targets_BT[right_BT]] += 20
    return logits_BTV, targets_BT, weights_BT


@jax.jit
def counts(logits_BTV, targets_BT, weights_BT):
    targets_BT = targets_BT.astype(jnp.int32)
    return Counts.of(logits_BTV, Batch(targets_BT, targets_BT, weights_BT), CHANCE)


def by_hand(logits_BTV, targets_BT, weights_BT):
    loss, correct, answers, whole, sequences, chance = 0.0, 0, 0, 0, 0, 0.0
    for logits_TV, targets_T, weights_T in zip(logits_BTV, targets_BT, weights_BT, strict=True):
        hits = []
        for logits_V, target, weight in zip(logits_TV, targets_T, weights_T, strict=True):
            if weight:
                exact = [float(x) for x in logits_V]
                loss += math.log(sum(math.exp(x) for x in exact)) - exact[target]
                hits.append(max(range(7), key=exact.__getitem__) == target)
        correct, answers = correct + sum(hits), answers + len(hits)
        if hits:
            whole, sequences, chance = (
                whole + all(hits),
                sequences + 1,
                chance + CHANCE ** len(hits),
            )
    return {
        "loss": loss / answers,
        "accuracy": correct / answers,
        "sequence_accuracy": whole / sequences,
        "sequence_chance": chance / sequences,
    }


def test_counts_against_a_python_loop_and_sums_of_batches():
    rng = np.random.default_rng()
    one, other = random_batch(rng, 23), random_batch(rng, 9)
    both = [np.concatenate(pair) for pair in zip(one, other, strict=True)]
    expected = by_hand(*both)
    # The mean of the two means would be something else: the batches differ in size.
    summed = (Counts.zero() + counts(*one) + counts(*other)).ratios()
    for found in (summed, counts(*both).ratios()):
        assert found == pytest.approx(expected, rel=1e-5)
    assert summed["accuracy"] == expected["accuracy"]


def test_right_prompts_and_wrong_answers_score_nothing():
    """Case E1 (c): 28 prompt tokens right, 4 answers wrong; and the other way round."""
    targets_BT = np.arange(32)[None] % 6
    weights_BT = np.zeros((1, 32), np.float32)
    weights_BT[0, 28:] = 1
    for answers_right in (False, True):
        says = np.where((weights_BT > 0) == answers_right, targets_BT, 6)
        found = counts(np.eye(7, dtype=np.float32)[says] * 9, targets_BT, weights_BT).ratios()
        assert found["accuracy"] == found["sequence_accuracy"] == float(answers_right)
        assert found["sequence_chance"] == CHANCE**4


def test_nothing_counted_is_not_a_number():
    logits_BTV, targets_BT, weights_BT = random_batch(np.random.default_rng(), 2)
    found = counts(logits_BTV, targets_BT, weights_BT * 0)
    assert int(found.answers) == int(found.sequences) == 0
    assert all(math.isnan(value) for value in found.ratios().values())


def test_garbage_where_no_answer_is_changes_nothing():
    logits_BTV, targets_BT, weights_BT = random_batch(np.random.default_rng(), 8)
    expected = counts(logits_BTV, targets_BT, weights_BT)
    logits_BTV[weights_BT == 0], targets_BT[weights_BT == 0] = np.nan, -1
    found = counts(logits_BTV, targets_BT, weights_BT)
    assert jax.tree.leaves(found) == jax.tree.leaves(expected)
