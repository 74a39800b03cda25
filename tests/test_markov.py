"""Markov chains: exact probabilities of short rows, and Bayes lines against plain counting."""

import functools
import itertools
import math
from fractions import Fraction

import jax
import numpy as np
import pytest

from tasks import Batch, Markov
from tasks.markov import bigram_probabilities, unigram_probabilities
from tasks.vocabulary import NUM_SPECIAL


@functools.cache
def draw(task, rows, seed=13):
    return jax.jit(functools.partial(task.sample, batch_size=rows))(jax.random.key(seed))


def probability(sequence, k):
    """Exact probability of a row, chains integrated out: a Pólya urn for every symbol."""
    counts = {pair: 0 for pair in itertools.product(range(k), repeat=2)}
    result = Fraction(1, k)
    for a, b in itertools.pairwise(sequence):
        result *= Fraction(counts[a, b] + 1, sum(counts[a, c] for c in range(k)) + k)
        counts[a, b] += 1
    return result


@pytest.mark.parametrize(("k", "length"), [(2, 4), (3, 2)])
def test_rows_have_their_exact_probabilities(k, length):
    rows = 20_000
    batch = draw(Markov(NUM_SPECIAL + k, length), rows)
    tokens_BT, targets_BT, weights_BT = (np.asarray(leaf) for leaf in jax.tree.leaves(batch))
    assert np.array_equal(tokens_BT[:, 1:], targets_BT[:, :-1]) and np.all(weights_BT == 1)
    found = np.concatenate([tokens_BT, targets_BT[:, -1:]], axis=1) - NUM_SPECIAL
    seen, counts = np.unique(found, axis=0, return_counts=True)
    counts = dict(zip(map(tuple, seen.tolist()), counts.tolist(), strict=True))
    total = 0
    for sequence in itertools.product(range(k), repeat=length + 1):
        exact = float(probability(sequence, k))
        total += exact
        assert abs(counts.get(sequence, 0) / rows - exact) < 5.5 * math.sqrt(exact / rows)
    assert total == pytest.approx(1.0)


def test_predictions_equal_plain_counting():
    task = Markov(9, 23)
    tokens_BT = np.asarray(draw(task, 7).tokens_BT)
    bigram_BTV = np.asarray(bigram_probabilities(tokens_BT, 9))
    unigram_BTV = np.asarray(unigram_probabilities(tokens_BT, 9))
    for row, tokens in enumerate(tokens_BT.tolist()):
        for t, a in enumerate(tokens):
            followers = [tokens[s + 1] for s in range(t) if tokens[s] == a]
            bigram = [(followers.count(b) + 1) / (len(followers) + 5) for b in range(4, 9)]
            unigram = [(tokens[: t + 1].count(b) + 1) / (t + 1 + 5) for b in range(4, 9)]
            np.testing.assert_allclose(bigram_BTV[row, t], [0] * 4 + bigram, rtol=1e-6)
            np.testing.assert_allclose(unigram_BTV[row, t], [0] * 4 + unigram, rtol=1e-6)


def test_predictions_see_no_later_token():
    tokens_BT = np.asarray(draw(Markov(9, 23), 7).tokens_BT)
    changed_BT = tokens_BT.copy()
    changed_BT[:, 12:] = NUM_SPECIAL + (changed_BT[:, 12:] - NUM_SPECIAL + 1) % 5
    for predict in (bigram_probabilities, unigram_probabilities):
        before, after = (np.asarray(predict(x, 9)) for x in (tokens_BT, changed_BT))
        assert np.array_equal(before[:, :12], after[:, :12])
        assert not np.array_equal(before[:, 12:], after[:, 12:])


def test_bigram_loss_is_minus_log_of_the_exact_probability():
    task = Markov(7, 23)
    batch = draw(task, 7)
    loss_BT = np.asarray(task.bigram_loss(batch), np.float64)
    for row in range(7):
        tokens = [*batch.tokens_BT[row].tolist(), int(batch.targets_BT[row, -1])]
        exact = probability([token - NUM_SPECIAL for token in tokens], 3)
        expected = -math.log(exact) - math.log(3)  # the first symbol is given
        assert loss_BT[row].sum() == pytest.approx(expected, rel=1e-5)


def test_lines_are_ordered_as_in_the_literature():
    """Three symbols, length 100: uniform 1.0986 above unigram about 1.00 above Bayes about .886."""
    task = Markov(7, 100)
    batch = draw(task, 2048)
    unigram, bigram = (float(np.mean(f(batch))) for f in (task.unigram_loss, task.bigram_loss))
    assert task.uniform_loss == pytest.approx(1.0986, abs=1e-4)
    assert unigram == pytest.approx(1.00, abs=0.02)
    assert bigram == pytest.approx(0.886, abs=0.015)


def test_losses_pick_the_target():
    task = Markov(7, 3)
    batch = Batch(*(np.array([row]) for row in ([4, 5, 4], [5, 4, 5], [1.0, 1.0, 1.0])))
    # At t = 2 the symbol 4 has been followed by 5 once: (1 + 1) / (1 + 3).
    np.testing.assert_allclose(task.bigram_loss(batch), -np.log([[1 / 3, 1 / 3, 2 / 4]]), rtol=1e-6)
    np.testing.assert_allclose(
        task.unigram_loss(batch), -np.log([[1 / 4, 2 / 5, 2 / 6]]), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((5, 9), r"^task\.vocab_size=5 .*markov: .* at least 6$"),
        ((9, 0), r"^task\.length=0 must be at least 1 for markov$"),
        ((9, "a"), r"^task\.length='a' must be a whole number$"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        Markov(*options)
