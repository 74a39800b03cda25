"""Recall (MQAR): a dictionary reads every row back, and the gaps follow the stated law."""

import functools
import itertools

import jax
import numpy as np
import pytest

from tasks import Recall
from tasks.recall import _distinct
from tasks.vocabulary import NUM_SPECIAL, PAD

ROWS = 4096


@functools.cache
def draw(task, seed=11):
    batch = jax.jit(functools.partial(task.sample, batch_size=ROWS))(jax.random.key(seed))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]


@pytest.mark.parametrize(
    "task",
    [
        Recall(21, 23, num_pairs=3),
        Recall(12, 16, num_pairs=4),  # as many keys, values and slots as pairs
        Recall(8, 5, num_pairs=1, gap_power=2.0),
    ],
)
def test_rows_read_back(task):
    pairs, first_value = task.num_pairs, NUM_SPECIAL + task.num_keys
    for tokens, targets, weights in zip(*(x[:300].tolist() for x in draw(task)), strict=True):
        keys, values = tokens[0 : 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert all(NUM_SPECIAL <= key < first_value for key in keys)
        assert all(first_value <= value < task.vocab_size for value in values)
        asked = [t for t in range(2 * pairs, task.length) if tokens[t] != PAD]
        assert sorted(tokens[t] for t in asked) == sorted(keys)
        assert all((t - 2 * pairs) % 2 == 0 for t in asked)
        assert weights == [float(t in asked) for t in range(task.length)]
        answer = dict(zip(keys, values, strict=True))
        following = [*tokens[1:], PAD]
        expected = [answer[tokens[t]] if t in asked else following[t] for t in range(task.length)]
        assert targets == expected


def slots(task):
    """Slot of the query of each listed pair, (rows, pairs)."""
    tokens_BT = draw(task)[0]
    keys_BP, rest_BT = tokens_BT[:, : 2 * task.num_pairs : 2], tokens_BT[:, 2 * task.num_pairs :]
    return np.argmax(rest_BT[:, None, :] == keys_BP[:, :, None], axis=2) // 2


@pytest.mark.parametrize("power", [0.01, 1.0, 3.0])
def test_gaps_follow_the_power_law_without_replacement(power):
    """Exact probabilities of the first two draws, from the definition, in float64."""
    task = Recall(21, 14, num_pairs=2, gap_power=power)
    assert task.num_slots == 5
    p = (np.arange(5) + 1.0) ** (power - 1)
    p /= p.sum()
    slot_BP = slots(task)
    for first, second in itertools.permutations(range(5), 2):
        probability = p[first] * p[second] / (1 - p[first])
        found = np.mean((slot_BP[:, 0] == first) & (slot_BP[:, 1] == second))
        assert abs(found - probability) < 5.5 * np.sqrt(probability / ROWS)


def test_distinct_numbers_are_uniform_in_every_order():
    chosen = np.asarray(_distinct(jax.random.key(2), 24_000, among=4, count=3))
    counts = {order: 0 for order in itertools.permutations(range(4), 3)}
    for row in chosen.tolist():
        counts[tuple(row)] += 1
    assert max(abs(count - 1000) for count in counts.values()) < 6 * np.sqrt(1000)


def test_keys_and_values_are_not_bound_across_rows():
    """The same key goes with every value: nothing can be learnt but looking it up."""
    task = Recall(12, 16, num_pairs=4)
    tokens_BT = draw(task)[0]
    pairs = np.zeros((12, 12), int)
    np.add.at(pairs, (tokens_BT[:, 0:8:2], tokens_BT[:, 1:8:2]), 1)
    assert (
        np.abs(pairs[4:8, 8:] - ROWS / 4).max() < 6 * np.sqrt(ROWS / 4) and pairs.sum() == 4 * ROWS
    )


def test_plateau_is_what_guessing_a_listed_value_scores():
    task = Recall(21, 23, num_pairs=3)
    tokens_BT, targets_BT, weights_BT = draw(task)
    right_BT = (tokens_BT[:, 1:2] == targets_BT) * weights_BT
    assert right_BT.sum() / weights_BT.sum() == pytest.approx(task.plateau)
    assert (task.chance, task.first_answer) == (1 / 9, 6)


def test_the_paper_sizes_build():
    for length, pairs in ((64, 4), (512, 64)):
        draw_one = jax.jit(functools.partial(Recall(8192, length, pairs).sample, batch_size=1))
        batch = draw_one(jax.random.key(0))
        assert batch.weights_BT.sum() == pairs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((11, 16, 4), r"^task\.vocab_size=11 .*recall of 4 pairs: .* at least 12$"),
        ((64, 15, 4), r"^task\.length=15 .*task\.recall\.num_pairs=4: .*= 16$"),
        ((64, 15, 0), r"^task\.recall\.num_pairs=0 must be at least 1$"),
        ((64, 15, 2.5), r"^task\.recall\.num_pairs=2\.5 must be a whole number$"),
        ((64, 16, 4, 0.0), r"^task\.recall\.gap_power=0\.0 must be"),
        ((64, 16, 4, float("nan")), r"^task\.recall\.gap_power=nan must be"),
        ((64, 16, 4, "a"), r"^task\.recall\.gap_power='a' must be"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(options, message):
    with pytest.raises(ValueError, match=message):
        Recall(*options)
