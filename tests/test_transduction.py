"""Sequence-to-sequence tasks: every row is read back by a plain Python oracle."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tasks
from tasks import Copy, Induction, Markov, Mixture, Recall, SourceCopy, SourceReverse
from tasks.space import log2_size
from tasks.task import draw_one
from tasks.vocabulary import BOS, NUM_SPECIAL, PAD, SEP, token_name
from tests.test_tasks import assert_uniform

BATCH = 513
START = {"source_copy": BOS, "source_reverse": SEP}
TASKS = (SourceCopy(11, 9), SourceReverse(11, 9))
by_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)

jit_by_task = functools.partial(jax.jit, static_argnums=(0, 2))
draw = jit_by_task(lambda task, key, batch_size: task.sample(key, batch_size))
draw_with_source = jit_by_task(Mixture.sample_with_source)


def rows(batch):
    """Rows as tuples of Python lists: source, tokens, targets, weights."""
    arrays = (batch.source_BS, batch.tokens_BT, batch.targets_BT, batch.weights_BT)
    return list(zip(*(np.asarray(array).tolist() for array in arrays), strict=True))


def check_row(task, source, tokens, targets, weights):
    """Reads one row and returns its string."""
    n = sum(1 for token in source if token != PAD)
    string = source[:n]
    assert task.min_length <= n <= task.longest
    assert all(NUM_SPECIAL <= symbol < task.vocab_size for symbol in string)
    written = {"source_copy": string, "source_reverse": string[::-1]}[task.name]
    padding = [PAD] * (task.length - n)
    assert source == string + padding
    assert [*tokens, targets[-1]] == [START[task.name], *written, *padding]
    assert targets == written + padding
    assert weights == [1.0] * n + [0.0] * (task.length - n)
    return string


@by_task
def test_rows_read_back(task):
    task = dataclasses.replace(task, min_length=2, max_length=7)
    batch = draw(task, jax.random.key(8), 4 * BATCH)
    dtypes = [np.int32, np.int32, np.float32, np.int32]
    assert [x.dtype for x in jax.tree.leaves(batch)] == dtypes
    assert {x.shape for x in jax.tree.leaves(batch)} == {(4 * BATCH, 9)}
    strings = [check_row(task, *row) for row in rows(batch)]
    assert_uniform([len(string) for string in strings], range(2, 8))
    assert_uniform([symbol for string in strings for symbol in string], range(NUM_SPECIAL, 11))
    assert_uniform([(s[0] - 4) * 7 + s[1] - 4 for s in strings], range(49))
    expected = np.array([[1] * len(s) + [0] * (9 - len(s)) for s in strings])
    np.testing.assert_array_equal(batch.source_segments_BS, expected)


@by_task
@pytest.mark.parametrize(("length", "min_length", "max_length"), [(1, 1, None), (2, 1, 2)])
def test_short_rows_read_back(task, length, min_length, max_length):
    task = type(task)(6, length, min_length, max_length)
    strings = [check_row(task, *row) for row in rows(draw(task, jax.random.key(1), 64))]
    assert len({tuple(string) for string in strings}) == sum(2**n for n in range(1, length + 1))
    assert log2_size(task.space) == pytest.approx(np.log2(sum(2**n for n in (1, 2)[:length])))


@by_task
def test_sampling_is_pure_and_the_same_under_x64(task):
    def leaves(key):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(draw(task, key, 9))]

    first = leaves(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, first, leaves(jax.random.key(3)))
    assert any((a != b).any() for a, b in zip(first, leaves(jax.random.key(4)), strict=True))
    with jax.enable_x64(True):
        wide = leaves(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, first, wide)
    assert [x.dtype for x in wide] == [x.dtype for x in first]


@by_task
def test_the_contract_of_tasks(task):
    assert tasks.TASKS[task.name] is type(task) and task.has_source
    assert (task.first_answer, task.chance, task.longest) == (0, 1 / 7, 9)
    longer = task.at_length(41)
    assert (longer.length, longer.longest, longer.at_length(9)) == (41, 41, task)
    fixed = task.with_length(5)
    assert (fixed.length, fixed.min_length, fixed.longest) == (5, 5, 5)
    assert all(len(check_row(fixed, *row)) == 5 for row in rows(draw(fixed, jax.random.key(0), 3)))
    assert TASKS[0] != TASKS[1] and hash(task) == hash(tasks.TASKS[task.name](**vars(task)))


def test_tasks_without_a_source_say_so():
    for task in (Copy(37, 9), Induction(37, 9), Recall(37, 19, num_pairs=3), Markov(9, 19)):
        assert not task.has_source
        assert jax.eval_shape(lambda task=task: task.sample(jax.random.key(0), 2)).source_BS is None


@by_task
def test_describe_shows_the_source_and_marks_the_answers(task):
    text = task.at_length(40).describe()
    read = {"source": [], "reads": [], "answers": []}
    for line in text.splitlines()[2:]:
        label, *names = line.split()
        read[label] += names
        assert len(line) <= 88
    source, tokens, targets, weights = rows(draw_one(task.at_length(40), jax.random.key(0)))[0]
    assert read["source"] == [token_name(token) for token in source]
    assert read["reads"] == [token_name(token) for token in tokens]
    answers = [token_name(t) for t, weight in zip(targets, weights, strict=True) if weight]
    assert read["answers"] == answers
    assert text.startswith(f"{task.name}: sources of 1 to 40 symbols, written ")


def test_rows_of_a_mixture_come_from_their_tasks_with_their_sources():
    mixture = Mixture(TASKS, (1, 1))
    batch, source_B = draw_with_source(mixture, jax.random.key(7), BATCH)
    for row, source in zip(rows(batch), source_B.tolist(), strict=True):
        check_row(TASKS[source], *row)
    assert_uniform(source_B, range(2))


def test_a_mixture_combines_tasks_that_all_have_a_source_or_none():
    pattern = r"^source_copy cannot be mixed with copy, induction: .* share of one kind to 0$"
    mixed = (Copy(11, 9), TASKS[0], Induction(11, 9))
    with pytest.raises(ValueError, match=pattern):
        Mixture(mixed, (1, 2, 1))
    with_source = Mixture(mixed, (0, 2, 0))
    assert draw(with_source, jax.random.key(0), 3).source_BS.shape == (3, 9)
    assert draw(Mixture(mixed, (1, 0, 1)), jax.random.key(0), 3).source_BS is None


def test_a_batch_is_a_tree_with_and_without_a_source():
    batch = draw(TASKS[0], jax.random.key(0), 3)
    first = jax.tree.map(lambda x: x[:1], batch)
    assert first.source_BS.shape == (1, 9)
    plain = dataclasses.replace(batch, source_BS=None)
    doubled = jax.jit(lambda batch: jax.tree.map(lambda x: 2 * x, batch))(plain)
    assert doubled.source_BS is None and jnp.array_equal(doubled.tokens_BT, 2 * plain.tokens_BT)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SourceCopy(5, 9), r"^task\.vocab_size=5 is too small for source_copy: .* 6$"),
        (
            lambda: SourceCopy(64, 0),
            r"^task\.length=0 is too short for source_copy: .* at least 1$",
        ),
        (lambda: SourceCopy(64, 9.0), r"^task\.length=9\.0 must be a whole number$"),
        (lambda: SourceReverse(64, 9, 0), r"^task\.source_reverse\.min_length=0 .*1 and .* 9"),
        (lambda: SourceReverse(64, 9, 5, 4), r"^task\.source_reverse\.min_length=5 .*_length=4"),
        (
            lambda: SourceCopy(64, 9, max_length=10),
            r"^task\.source_copy\.max_length=10 does not fit task\.length=9: .* at most 9$",
        ),
        (lambda: SourceCopy(64, 9, True), r"^task\.source_copy\.min_length=True must be a whole"),
        (lambda: SourceCopy(64, 9, 1, 2.5), r"^task\.source_copy\.max_length=2\.5 must be"),
        (lambda: SourceCopy(64, 9).with_length(0), r"^string_length=0 must be at least 1$"),
        (lambda: SourceCopy(64, 9, 8).at_length(7), r"min_length=8 .* longest string, 7"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()
