"""Loss: exact numbers, what counts and what does not, and masks that would show the answer."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.masks import Causal, First, Full, Prefix, Window
from tasks import Batch
from tasks.vocabulary import PAD
from training.objective import LOSS_ON, NextToken, cross_entropy, mean_loss

NAN = float("nan")


def mean(logits_BTV, targets_BT, weights_BT):
    total, count = cross_entropy(
        jnp.asarray(logits_BTV, jnp.float32),
        jnp.asarray(targets_BT, jnp.int32),
        jnp.asarray(weights_BT, jnp.float32),
    )
    return float(total / count)


def loss_of(logits_BTV, batch, loss_on):
    """Next-token loss of a model that says the same whatever it reads."""
    model = lambda tokens_BT, **_: (jnp.asarray(logits_BTV), None)  # noqa: E731
    return mean_loss(NextToken(), model, batch, loss_on, jax.random.key(0), None)


def test_only_weighted_positions_are_averaged():
    """Case O2."""
    logits_BTV = np.zeros((1, 4, 7), np.float32)
    logits_BTV[0, 1:, 0] = 50
    targets_BT = np.array([[3, 0, 0, 0]])
    assert mean(logits_BTV, targets_BT, [[1, 0, 0, 0]]) == pytest.approx(1.945910149, rel=1e-6)
    assert mean(logits_BTV, targets_BT, [[1, 1, 1, 1]]) == pytest.approx(0.486477537, rel=1e-6)
    for pad in (5, -1, -100, 7, 10**6):
        other = np.array([[3, pad, pad, pad]])
        assert mean(logits_BTV, other, [[1, 0, 0, 0]]) == pytest.approx(1.945910149, rel=1e-6)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_what_does_not_count_may_be_anything(bad):
    """Case O2: loss and gradient stay finite, and nothing flows to the ignored logits."""
    logits_BTV = jnp.zeros((1, 4, 7)).at[0, 2].set(bad)
    targets_BT, weights_BT = jnp.array([[3, 0, 1, 0]]), jnp.array([[1.0, 0, 0, 1]])
    loss, gradient = jax.value_and_grad(
        lambda logits_BTV: cross_entropy(logits_BTV, targets_BT, weights_BT)[0]
    )(logits_BTV)
    assert float(loss) == pytest.approx(2 * math.log(7), rel=1e-6)
    assert np.all(np.isfinite(gradient))
    assert not np.any(gradient[0, 1:3])
    expected = np.full(7, 1 / 7)
    expected[3] -= 1
    np.testing.assert_allclose(gradient[0, 0], expected, atol=1e-6)


def test_nothing_counted_is_zero():
    """Case O2: all-masked batch."""
    batch = Batch(jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), jnp.int32), jnp.zeros((2, 3)))
    loss, gradient = jax.value_and_grad(lambda logits_BTV: loss_of(logits_BTV, batch, "answers"))(
        jnp.ones((2, 3, 5))
    )
    assert float(loss) == 0
    assert not np.any(gradient)


def test_targets_are_shifted_once():
    """Case O3: the model that predicts the next token has no loss, with the last one out."""
    tokens = [3, 1, 4, 1, 5]
    logits_BTV = np.zeros((1, 5, 8), np.float32)
    for t in range(4):
        logits_BTV[0, t, tokens[t + 1]] = 50
    logits_BTV[0, 4, 3] = 50  # a roll would call this right
    tokens_BT = jnp.array([tokens])
    targets_BT = jnp.array([[*tokens[1:], PAD]])
    batch = Batch(tokens_BT, targets_BT, jnp.array([[1.0, 1, 1, 1, 0]]))
    for loss_on in ("answers", "all"):
        assert float(loss_of(logits_BTV, batch, loss_on)) < 1e-6
    twice = Batch(tokens_BT, jnp.array([[4, 1, 5, PAD, PAD]]), batch.weights_BT)
    assert float(loss_of(logits_BTV, twice, "answers")) > 10


def test_labels_outside_the_vocabulary_are_never_another_class():
    """Case E2: optax reads −1 as the last class."""
    logits_BTV = np.zeros((1, 2, 5), np.float32)
    for label in (-1, -5, -100, 5, 10):
        assert math.isnan(mean(logits_BTV, [[label, 1]], [[1, 1]]))
        assert mean(logits_BTV, [[label, 1]], [[0, 1]]) == pytest.approx(math.log(5), rel=1e-6)


def test_cross_entropy_against_float64():
    rng = np.random.default_rng()
    logits_BTV = rng.normal(size=(3, 5, 11)).astype(np.float32) * 20
    targets_BT = rng.integers(0, 11, (3, 5))
    weights_BT = rng.choice([0, 1, 0.25], (3, 5)).astype(np.float32)
    expected = 0.0
    for b, t in np.ndindex(3, 5):
        row = logits_BTV[b, t].astype(np.float64)
        nll = row.max() + math.log(np.exp(row - row.max()).sum()) - row[targets_BT[b, t]]
        expected += float(weights_BT[b, t]) * nll
    total, count = cross_entropy(
        jnp.asarray(logits_BTV), jnp.asarray(targets_BT), jnp.asarray(weights_BT)
    )
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    np.testing.assert_allclose(count, weights_BT.sum(dtype=np.float64), rtol=1e-6)


def test_loss_on_answers_or_on_all_but_padding():
    targets_BT = jnp.array([[1, 2, PAD, 4], [PAD, PAD, 3, PAD]])
    weights_BT = jnp.array([[0.0, 1, 0, 0], [0, 0, 1, 0]])
    batch = Batch(targets_BT, targets_BT, weights_BT)
    assert LOSS_ON["answers"](batch).tolist() == weights_BT.tolist()
    assert LOSS_ON["all"](batch).tolist() == [[1, 1, 0, 1], [0, 0, 1, 0]]


def layer(mask):
    return types.SimpleNamespace(mask=lambda: mask)


def test_a_mask_that_shows_the_answer_is_refused():
    for mask in (Causal(), Window(3), Causal() & (Window(2) | First(1))):
        NextToken().check([layer(Causal()), layer(mask)], first_position=0)
    NextToken().check([layer(Causal() | Prefix(4))], first_position=4)
    for mask, first in ((Full(), 50), (Window(3, ahead=1), 50), (Causal() | Prefix(4), 1)):
        with pytest.raises(ValueError) as caught:
            NextToken().check([layer(Causal()), layer(mask)], first_position=first)
        message = str(caught.value)
        assert "layer 1" in message and str(mask) in message and str(first) in message
