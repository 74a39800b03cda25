"""Copy, induction, mixtures, seeds: every batch is read back by a plain Python oracle."""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

import tasks
from tasks import Copy, Induction, Markov, Mixture, Recall
from tasks.space import Stratum, expected_overlap, log2_size
from tasks.task import draw_one
from tasks.vocabulary import BOS, NUM_SPECIAL, PAD, SEP, token_name

BATCH = 257
TASKS = (Copy(37, 19), Induction(37, 19), Recall(37, 19, num_pairs=3), Markov(9, 19))
by_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


jit_by_task = functools.partial(jax.jit, static_argnums=(0, 2))
draw = jit_by_task(lambda task, key, batch_size: task.sample(key, batch_size))


def sampler(task, batch_size=BATCH):
    return functools.partial(draw, task, batch_size=batch_size)


def rows(batch):
    """Rows of a batch as triples of Python lists."""
    arrays = (batch.tokens_BT, batch.targets_BT, batch.weights_BT)
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def leaves(batch):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(batch)]


def equal(one, other):
    return all(np.array_equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


def assert_uniform(values, choices):
    """Chi-squared within its mean and about 6 standard deviations."""
    counts = np.array([np.sum(np.asarray(values) == choice) for choice in choices])
    assert counts.sum() == len(values)
    expected = len(values) / len(choices)
    freedom = len(choices) - 1
    assert np.sum((counts - expected) ** 2) / expected < freedom + 6 * math.sqrt(2 * freedom) + 6


def check_copy_row(task, tokens, targets, weights):
    """Reads one row of copy and returns its string."""
    sequence = [*tokens, targets[-1]]
    n = sequence.index(SEP) - 1
    string = sequence[1 : n + 1]
    padding = [PAD] * (task.length + 1 - 2 * n - 2)
    assert task.min_length <= n <= task.longest
    assert all(NUM_SPECIAL <= symbol < task.vocab_size for symbol in string)
    assert sequence == [BOS, *string, SEP, *string, *padding]
    assert targets[:-1] == tokens[1:]
    assert weights == [1.0 if n + 1 <= t <= 2 * n else 0.0 for t in range(task.length)]
    # The answer stands in the input n positions before the position that has to give it.
    assert all(tokens[t - n] == targets[t] for t in range(task.length) if weights[t])
    return string


def check_induction_row(task, tokens, targets, weights):
    """Reads one row of induction and returns its block."""
    sequence = [*tokens, targets[-1]]
    p = weights.index(1.0)
    assert task.shortest <= p <= task.longest
    assert all(NUM_SPECIAL <= symbol < task.vocab_size for symbol in sequence)
    assert targets[:-1] == tokens[1:]
    assert weights == [float(t >= p) for t in range(task.length)]
    assert all(sequence[i] == sequence[i % p] for i in range(task.length + 1))
    for t in range(p, task.length):
        assert targets[t] == tokens[t + 1 - p]
        earlier = [s for s in range(t) if (tokens[s], tokens[s + 1]) == (tokens[t], targets[t])]
        assert t - p in earlier
    return sequence[:p]


# The contract of every task.


@by_task
def test_batches_have_the_shapes_and_ids_of_the_contract(task):
    batch = sampler(task)(jax.random.key(3))
    for array, dtype in zip(leaves(batch), (np.int32, np.int32, np.float32), strict=True):
        assert array.shape == (BATCH, task.length) and array.dtype == dtype
    tokens_BT, targets_BT, weights_BT = leaves(batch)
    assert tokens_BT.min() >= 0 and tokens_BT.max() == task.vocab_size - 1
    answers = targets_BT[weights_BT > 0]
    assert answers.min() >= NUM_SPECIAL and answers.max() == task.vocab_size - 1
    assert set(np.unique(weights_BT)) <= {0.0, 1.0}
    assert np.all(weights_BT.sum(axis=1) > 0)
    assert np.flatnonzero(weights_BT.any(axis=0))[0] == task.first_answer
    assert len(np.unique(tokens_BT, axis=0)) > 0.6 * BATCH


@by_task
def test_a_task_is_a_static_value_and_sampling_is_pure(task):
    batch = sampler(task)(jax.random.key(3))
    compiled = draw._cache_size()
    assert equal(batch, sampler(tasks.TASKS[task.name](**vars(task)))(jax.random.key(3)))
    assert draw._cache_size() == compiled
    assert not equal(batch, sampler(task)(jax.random.key(4)))


@by_task
def test_a_batch_does_not_depend_on_x64(task):
    batch = sampler(task)(jax.random.key(5))
    with jax.enable_x64(True):
        wide = sampler(task)(jax.random.key(5))
    assert equal(batch, wide)
    assert [x.dtype for x in leaves(wide)] == [np.int32, np.int32, np.float32]


@by_task
def test_chance_is_what_a_constant_answer_scores(task):
    """A guesser without memory can but give one symbol always; the best one scores `chance`."""
    scores = np.zeros(task.vocab_size)
    for seed in range(8):
        _, targets_BT, weights_BT = leaves(sampler(task)(jax.random.key(seed)))
        scores += np.bincount(targets_BT[weights_BT > 0], minlength=task.vocab_size)
    scores /= scores.sum()
    possible = scores[scores > 0]
    assert len(possible) == round(1 / task.chance)
    np.testing.assert_allclose(possible, task.chance, rtol=0.25)


@by_task
def test_another_length_keeps_the_task(task):
    longer = task.at_length(41)
    assert longer.length == 41 and longer.vocab_size == task.vocab_size
    assert longer.at_length(task.length) == task
    shape = jax.eval_shape(lambda: longer.sample(jax.random.key(0), 2)).tokens_BT.shape
    assert shape == (2, 41)


@by_task
def test_describe_marks_the_answers(task):
    text = task.describe()
    batch = draw_one(task, jax.random.key(0))
    lines = text.splitlines()
    read = [name for line in lines if line.startswith("reads") for name in line.split()[1:]]
    marked = [name for line in lines if line.startswith("answers") for name in line.split()[1:]]
    tokens, targets, weights = rows(batch)[0]
    assert read == [token_name(token) for token in tokens]
    assert marked == [token_name(token) for token, w in zip(targets, weights, strict=True) if w]
    assert lines[0].startswith(f"{task.name}: ")
    assert f"vocabulary {task.vocab_size}" in text and f"chance {task.chance:.4f}" in text
    assert max(map(len, lines[2:])) <= 88
    assert task.describe(seed=1) != text


def test_describe_puts_answers_below_the_tokens_that_ask():
    # Three symbols: BOS x y z SEP x y z; from SEP on, each reads one and answers the next.
    reads, answers = Copy(30, 7).with_length(3).describe().splitlines()[-2:]
    x, y, z = reads.split()[2:5]
    place = reads.index("SEP") + 3
    assert [answers[:place].split()[1:], answers.split()[1:]] == [[x], [x, y, z]]


def test_token_names_are_short_and_distinct():
    assert [token_name(i) for i in (0, 1, 2, 3, 4, 29, 30, 56)] == (
        ["PAD", "BOS", "SEP", "MASK", "a", "z", "a1", "a2"]
    )
    assert len({token_name(i) for i in range(2000)}) == 2000


# Copy.


def test_copy_rows_read_back():
    task = Copy(11, 16, min_length=2, max_length=6)
    strings = [check_copy_row(task, *row) for row in rows(sampler(task, 4096)(jax.random.key(8)))]
    assert_uniform([len(string) for string in strings], range(2, 7))
    assert_uniform([symbol for string in strings for symbol in string], range(NUM_SPECIAL, 11))
    assert_uniform([(s[0] - 4) * 7 + s[1] - 4 for s in strings], range(49))


@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(st.data())
def test_copy_of_any_size_reads_back(data):
    length = data.draw(st.integers(3, 12))
    max_length = data.draw(st.none() | st.integers(1, (length - 1) // 2))
    longest = (length - 1) // 2 if max_length is None else max_length
    task = Copy(
        data.draw(st.integers(6, 40)), length, data.draw(st.integers(1, longest)), max_length
    )
    assert task.longest == longest
    key = jax.random.key(data.draw(st.integers(0, 2**32 - 1)))
    for row in rows(sampler(task, 5)(key)):
        check_copy_row(task, *row)


def test_copy_with_length_fixes_the_string():
    task = Copy(11, 64, min_length=3, max_length=20).with_length(5)
    assert (task.length, task.longest, task.first_answer) == (11, 5, 6)
    for row in rows(sampler(task, 9)(jax.random.key(0))):
        assert len(check_copy_row(task, *row)) == 5 and sum(row[2]) == 5 and row[1][-1] != PAD


def test_only_answers_are_scored():
    """Case E1 (c): right on every prompt token and on no answer scores 0."""
    tokens_BT, targets_BT, weights_BT = leaves(
        sampler(Copy(37, 9).with_length(4), 5)(jax.random.key(1))
    )
    prompt_only_BT = np.where(weights_BT > 0, targets_BT + 1, targets_BT)
    assert np.sum((prompt_only_BT == targets_BT) * weights_BT) == 0
    assert weights_BT.sum() == 4 * len(tokens_BT)


# Induction.


def test_induction_rows_read_back():
    task = Induction(11, 18)
    assert (task.shortest, task.longest) == (5, 9)
    found = [
        check_induction_row(task, *row) for row in rows(sampler(task, 4096)(jax.random.key(8)))
    ]
    assert_uniform([len(block) for block in found], range(5, 10))
    assert_uniform([symbol for block in found for symbol in block], range(NUM_SPECIAL, 11))
    assert_uniform([(b[0] - 4) * 7 + b[4] - 4 for b in found], range(49))


def test_induction_weights_start_at_the_true_period():
    """With many symbols the shortest period of a row, found by brute force, is the drawn one."""
    task = Induction(100_000, 21)
    for tokens, targets, weights in rows(sampler(task, 65)(jax.random.key(2))):
        sequence = [*tokens, targets[-1]]
        period = next(
            p
            for p in range(1, 22)
            if all(a == b for a, b in zip(sequence, sequence[p:], strict=False))
        )
        assert weights == [float(t >= period) for t in range(21)]


@hypothesis.settings(max_examples=5, deadline=None)
@hypothesis.given(st.data())
def test_induction_of_any_size_reads_back(data):
    length = data.draw(st.integers(2, 12))
    longest = data.draw(st.integers(1, length - 1))
    shortest = data.draw(st.integers(1, longest))
    task = Induction(data.draw(st.integers(6, 40)), length, shortest, longest)
    key = jax.random.key(data.draw(st.integers(0, 2**32 - 1)))
    for row in rows(sampler(task, 5)(key)):
        check_induction_row(task, *row)


def test_defaults_follow_the_length_and_set_options_stay():
    assert [(t.shortest, t.longest) for t in map(Induction(9, 64).at_length, (2, 7, 64, 256))] == (
        [(1, 1), (2, 3), (16, 32), (64, 128)]
    )
    assert (Induction(9, 64, 3, 8).at_length(256).longest, Copy(9, 64).at_length(9).longest) == (
        8,
        4,
    )
    with pytest.raises(ValueError, match=r"task\.induction\.max_period=32 .*task\.length=16"):
        Induction(9, 64, 16, 32).at_length(16)


# Mixtures.

draw_with_source = jit_by_task(Mixture.sample_with_source)
MIXTURE = Mixture((Copy(37, 19), Induction(37, 19), Markov(37, 19)), (3, 0, 1))


def test_rows_of_a_mixture_come_from_their_tasks():
    mixture = Mixture((Copy(37, 19), Induction(37, 19)), (0.5, 0.5))
    batch, source_B = draw_with_source(mixture, jax.random.key(7), BATCH)
    checks = (check_copy_row, check_induction_row)
    for row, source in zip(rows(batch), source_B.tolist(), strict=True):
        checks[source](mixture.tasks[source], *row)
    assert_uniform(source_B, range(2))
    assert mixture.first_answer == 2 and (mixture.vocab_size, mixture.length) == (37, 19)
    assert mixture.at_length(24) == Mixture((Copy(37, 24), Induction(37, 24)), (0.5, 0.5))


def test_shares_are_kept_whatever_the_batch_size():
    """4000 batches of one row: a quarter are of the third task, none of the second."""
    keys = jax.random.split(jax.random.key(9), 4000)
    draw = jax.jit(jax.vmap(lambda key: MIXTURE.sample_with_source(key, 1)[1][0]))
    counts = np.bincount(np.asarray(draw(keys)), minlength=3)
    assert counts[1] == 0 and counts.sum() == 4000
    assert abs(counts[2] - 1000) < 6 * math.sqrt(4000 * 0.25 * 0.75)


def test_a_mixture_of_one_task_and_one_with_rounding_draw_only_tasks_with_a_share():
    batch, source_B = draw_with_source(Mixture(MIXTURE.tasks, [0, 2, 0]), jax.random.key(0), 65)
    assert set(source_B.tolist()) == {1}
    for row in rows(batch):
        check_induction_row(MIXTURE.tasks[1], *row)
    thirds = Mixture((*MIXTURE.tasks, Copy(37, 19)), (0.1, 0.1, 0.1, 0))
    assert set(draw_with_source(thirds, jax.random.key(0), 999)[1].tolist()) == {0, 1, 2}


def test_a_mixture_describes_its_tasks_with_their_shares():
    text = MIXTURE.describe()
    assert "75% copy: " in text and "0% induction: " in text and "25% markov: " in text


# Errors.


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Copy(5, 19), r"^task\.vocab_size=5 is too small for copy: .* at least 6$"),
        (lambda: Induction(4, 19), r"^task\.vocab_size=4 .* at least 6$"),
        (lambda: Copy(64.0, 19), r"^task\.vocab_size=64\.0 must be a whole number$"),
        (lambda: Copy(64, True), r"^task\.length=True must be a whole number$"),
        (lambda: Copy(64, 2), r"^task\.length=2 .* at least 3$"),
        (lambda: Copy(64, 19, max_length=10), r"^task\.copy\.max_length=10 .* at most 9$"),
        (lambda: Copy(64, 19, min_length=0), r"^task\.copy\.min_length=0 .*between 1 and .* 9"),
        (lambda: Copy(64, 19, min_length=10), r"^task\.copy\.min_length=10 .*task\.length=19"),
        (lambda: Copy(64, 19, 5, 4), r"^task\.copy\.min_length=5 .*max_length=4"),
        (lambda: Copy(64, 19, max_length=0), r"^task\.copy\.min_length=1 .*max_length=0"),
        (lambda: Copy(64, 19, 1.5), r"^task\.copy\.min_length=1\.5 must be a whole"),
        (lambda: Copy(64, 19).with_length(0), r"^string_length=0 must be at least 1$"),
        (lambda: Induction(64, 1), r"^task\.length=1 .* at least 2$"),
        (lambda: Induction(64, 19, 3, 19), r"^task\.induction\.max_period=19 .* at most 18$"),
        (lambda: Induction(64, 19, 0), r"^task\.induction\.min_period=0 .*1 <= min_period"),
        (lambda: Induction(64, 19, 7, 6), r"^task\.induction\.min_period=7 and max_period=6"),
        (lambda: Induction(64, 19, None, 4), r"give periods 5 to 4 at task\.length=19"),
        (lambda: Induction(64, 19, 2.0), r"^task\.induction\.min_period=2\.0 must be a whole"),
        (lambda: Mixture((), ()), r"^task\.shares=\(\) .*at least one"),
        (lambda: Mixture((Copy(64, 19),), (1, 1)), r"one share for each of the 1 tasks"),
        (lambda: Mixture((Copy(64, 19),), (-1,)), r"^task\.shares=\(-1,\) .*not negative"),
        (lambda: Mixture((Copy(64, 19),), (math.nan,)), r"^task\.shares=\(nan,\) .*finite"),
        (lambda: Mixture((Copy(64, 19),), (math.inf,)), r"^task\.shares=\(inf,\) .*finite"),
        (lambda: Mixture((Copy(64, 19),), ("a",)), r"^task\.shares=\('a',\) .*finite numbers"),
        (lambda: Mixture((Copy(64, 19),), (0,)), r"^task\.shares=\(0,\) .*positive"),
        (
            lambda: Mixture((Copy(64, 19), Induction(64, 20)), (1, 1)),
            r"^task\.length must be the same .*copy has 19, induction has 20$",
        ),
        (
            lambda: Mixture((Copy(64, 19), Induction(63, 19)), (1, 1)),
            r"^task\.vocab_size must be the same .*copy has 64, induction has 63$",
        ),
        (lambda: tasks.init_key(-1), r"^seed=-1 must be a whole number from 0"),
        (lambda: tasks.train_key(2**32, 0), r"^seed=4294967296 must be"),
        (lambda: tasks.dropout_key(0.5), r"^seed=0\.5 must be"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# Seeds (case E3).


def bits(key):
    return tuple(jax.random.key_data(key).tolist())


def test_streams_of_all_seeds_and_steps_are_distinct():
    keys = []
    for seed in (0, 1, 2**32 - 1):
        keys += [tasks.init_key(seed), tasks.dropout_key(seed)]
        keys += [
            make(seed, i) for make in (tasks.train_key, tasks.evaluation_key) for i in range(9)
        ]
    assert len({bits(key) for key in keys}) == len(keys) == 60


def test_batches_follow_from_seed_and_step_alone():
    task = Copy(37, 19)

    def batch(make_key, seed, index):
        return sampler(task)(make_key(seed, index))

    first = batch(tasks.train_key, 0, 1)
    assert equal(first, batch(tasks.train_key, 0, 1))
    assert not equal(first, batch(tasks.train_key, 1, 1))
    assert not equal(first, batch(tasks.train_key, 0, 2))
    evaluation = batch(tasks.evaluation_key, 0, 1)
    assert equal(evaluation, batch(tasks.evaluation_key, 0, 1))
    assert not equal(evaluation, first)


def test_traced_seed_and_step_give_the_same_keys():
    for make in (tasks.train_key, tasks.evaluation_key):
        traced = jax.jit(make)(np.uint32(3), np.int32(17))
        assert bits(traced) == bits(make(3, 17))
    assert bits(jax.jit(tasks.init_key)(np.uint32(2**32 - 1))) == bits(tasks.init_key(2**32 - 1))


# How much of what is evaluated was trained on (case E1 d).


def test_large_spaces_share_no_string_between_training_and_evaluation():
    task = Copy(64, 31, min_length=8)
    assert expected_overlap(task.space, 10**6) < 1e-7

    def strings(make_key):
        drawn = (row for i in range(8) for row in rows(sampler(task)(make_key(0, i))))
        return {tuple(row[0]) for row in drawn}

    assert not strings(tasks.train_key) & strings(tasks.evaluation_key)


def test_space_counts_sequences():
    task = Copy(6, 7)
    strings = [s for n in (1, 2, 3) for s in itertools.product(range(2), repeat=n)]
    assert log2_size(task.space) == pytest.approx(math.log2(len(strings)))
    probability = {s: 1 / 3 / 2 ** len(s) for s in strings}
    exact = sum(p * (1 - (1 - p) ** 10) for p in probability.values())
    assert expected_overlap(task.space, 10) == pytest.approx(exact)
    assert log2_size(Induction(7, 8).space) == pytest.approx(math.log2(3**2 + 3**3 + 3**4))


def test_expected_overlap_is_what_is_observed():
    task = Copy(9, 7)
    train = [tuple(row[0]) for row in rows(sampler(task)(tasks.train_key(0, 0)))]
    fresh = [
        tuple(row[0]) for i in range(8) for row in rows(sampler(task)(tasks.evaluation_key(0, i)))
    ]
    observed = np.mean([row in set(train) for row in fresh])
    assert observed == pytest.approx(expected_overlap(task.space, BATCH), abs=0.06)


def test_overlap_of_extreme_spaces():
    assert expected_overlap([Stratum(1.0, 0.0)], 1) == 1.0
    assert expected_overlap([Stratum(1.0, 5000.0)], 10**9) == 0.0
    assert expected_overlap([Stratum(1.0, 3.0)], 0) == 0.0
    assert log2_size([Stratum(0.5, 5000.0), Stratum(0.5, 5000.0)]) == 5001.0
