"""Watching a run: what is recorded, that it changes no bit, and what a resumed run keeps."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis import emergence_table, head_scores, watch
from models import pure
from tasks import evaluation_key
from tasks.vocabulary import SEP
from tests import tiny
from tests.states import bits
from training import loop, step
from training.checkpoint import Checkpoints
from training.restore import restore
from training.run_folder import RunFolder
from training.settings import OptionError, settings

WATCHED = {
    "task__vocab_size": 32,
    "train__loss_on": "all",
    "analysis__every": 3,
    "analysis__sequences": 4,
}
CONFIG = tiny.config(**WATCHED)
SETTINGS = settings(CONFIG)


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """All runs are of the same numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for room, make in (
            (loop, loop.make_interval),
            (loop, loop.make_evaluation),
            (watch, watch.make_measure),
        ):
            patch.setattr(room, make.__name__, functools.cache(make))
        yield


def train(path, watched=True):
    folder = RunFolder(path)
    recorder = watch.Recorder(SETTINGS, folder) if watched else None
    loop.train(CONFIG, SETTINGS, folder, observer=recorder)
    return folder, recorder


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "once")


def state_of(folder, at):
    with Checkpoints(folder.checkpoints, keep=1, best_metric=None) as saved:
        return saved.restore(step.state_shapes(SETTINGS), at)


def test_rows_stand_at_the_multiples_and_at_both_ends(once):
    table = emergence_table.read(once[0].emergence)
    assert table["step"].tolist() == [0, 3, 6, 9, 10]
    assert table["tokens"].tolist() == [s * 4 * 17 for s in (0, 3, 6, 9, 10)]
    assert table.heads("prefix_matching").shape == (5, 1, 2)
    assert {name.partition("/")[0] for name in table.names if "/layer" in name} == {
        "prefix_matching", "copying", "previous_token", "first_token", "entropy", "delimiter",
    }  # fmt: skip
    # Copying has separators; behind the first of them every query has one.
    assert (table.heads("delimiter") > 0).all()
    assert 0 <= once[1].share() < 1


def test_the_lines_of_the_run_do_not_move(once, tmp_path):
    """Rows come between the lines and add none."""
    assert [line["step"] for line in once[0].read_metrics()] == [0, 4, 5, 8, 10]
    plain, _ = train(tmp_path / "plain", watched=False)
    for line, other in zip(once[0].read_metrics(), plain.read_metrics(), strict=True):
        for name in line:
            if "time" not in name and "per_second" not in name:
                assert line[name] == other[name], name


def test_watching_changes_no_bit(once, tmp_path):
    plain, _ = train(tmp_path / "plain", watched=False)
    assert not plain.emergence.exists()
    for at in (5, 10):
        assert bits(state_of(plain, at)) == bits(state_of(once[0], at))


def test_a_row_says_what_the_model_does(once):
    """The last row from the last checkpoint, in NumPy where the model's logits are given."""
    folder, _ = once
    table = emergence_table.read(folder.emergence)
    graph, params = pure.split(restore(folder).model)
    batch = SETTINGS.task.sample(evaluation_key(SETTINGS.eval.seed, 0), 4)
    logits, _ = jax.jit(lambda params: pure.merge(graph, params)(batch.tokens_BT))(params)
    logits = np.asarray(logits, np.float64)
    nll = (
        np.log(np.exp(logits).sum(-1))
        - np.take_along_axis(logits, np.asarray(batch.targets_BT)[..., None], -1)[..., 0]
    )
    counted = np.asarray(batch.targets_BT) != 0
    answers = np.asarray(batch.weights_BT) > 0
    assert table["loss"][-1] == pytest.approx(nll[counted].mean(), rel=1e-4)
    assert table["loss_repeated"][-1] == pytest.approx(nll[answers].mean(), rel=1e-4)
    by_position = np.array([nll[:, t][counted[:, t]].mean() for t in range(17)])
    np.testing.assert_allclose(table.loss_by_position()[-1], by_position, atol=1e-4)
    expected = by_position[16] - by_position[1]
    assert table["in_context_learning"][-1] == pytest.approx(expected, abs=1e-4)
    sequences = head_scores.score_sequences(32, bos=True)
    scored = jax.jit(lambda p: head_scores.head_scores(pure.merge(graph, p), sequences))(params)
    for name, score_LN in scored.items():
        np.testing.assert_allclose(table.heads(name)[-1], score_LN, atol=1e-4)
    chance = head_scores.prefix_matching_chance(jnp.asarray(sequences.repeated_BT))
    assert table["prefix_matching_chance"][0] == pytest.approx(float(chance), rel=1e-5)
    is_delimiter = jnp.asarray(np.asarray(batch.tokens_BT) == SEP)
    chance = head_scores.delimiter_chance(is_delimiter)
    assert table["delimiter_chance"][0] == pytest.approx(float(chance), rel=1e-5)


def test_a_resumed_run_has_the_rows_of_an_unbroken_one(once, tmp_path, monkeypatch):
    """Killed after the row of step 9, it goes on from the checkpoint of step 5."""

    class Killed(Exception):
        pass

    observe = watch.Recorder.observe

    def die_at_9(self, state):
        observe(self, state)
        if int(state.step) == 9:
            raise Killed

    monkeypatch.setattr(watch.Recorder, "observe", die_at_9)
    with pytest.raises(Killed):
        train(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert emergence_table.read(folder.emergence)["step"][-1] == 9
    monkeypatch.setattr(watch.Recorder, "observe", observe)
    train(tmp_path / "run")
    assert folder.emergence.read_bytes() == once[0].emergence.read_bytes()
    assert bits(state_of(folder, 10)) == bits(state_of(once[0], 10))


# --- Snapshots ------------------------------------------------------------------------------------


@pytest.fixture
def rising(monkeypatch):
    """Prefix-matching scores by step, in place of what the model does."""
    scores = {0: 0.05, 3: 0.15, 6: 0.6, 9: 0.55, 10: 0.8}
    append = emergence_table.append

    def observe_as(self, state):
        measured = self._measure

        def measure(params):
            numbers, found, loss_T = measured(params)
            found["prefix_matching"] = jnp.full((1, 2), scores.get(int(state.step), 0.0))
            return numbers, found, loss_T

        self._measure = measure
        observe(self, state)
        self._measure = measured

    observe = watch.Recorder.observe
    monkeypatch.setattr(watch.Recorder, "observe", observe_as)
    return append


def snapshots(folder):
    return sorted(int(path.name) for path in folder.snapshots.iterdir() if path.name.isdecimal())


def test_a_snapshot_is_kept_where_a_level_is_first_reached(rising, tmp_path, once):
    folder, _ = train(tmp_path / "run")
    assert snapshots(folder) == [3, 6, 10]
    assert restore(folder, "6").step == 6
    # A snapshot is a checkpoint of that step: the steps after it follow from it.
    assert bits(restored_state(folder, 10)) == bits(state_of(once[0], 10))
    with pytest.raises(OptionError, match=r"one of the steps \[3, 5, 6, 10\], got '7'"):
        restore(folder, "7")


def restored_state(folder, at):
    with Checkpoints(folder.snapshots, keep=1, best_metric=None) as saved:
        return saved.restore(step.state_shapes(SETTINGS), at)


def test_a_resumed_run_has_the_snapshots_of_an_unbroken_one(rising, tmp_path, monkeypatch):
    save = Checkpoints.save

    def fail_at_10(self, at, state, metrics):
        if at == 10 and metrics:
            raise KeyboardInterrupt
        save(self, at, state, metrics)

    monkeypatch.setattr(Checkpoints, "save", fail_at_10)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    assert snapshots(folder) == [3, 6, 10]
    monkeypatch.setattr(Checkpoints, "save", save)
    recorder = watch.Recorder(SETTINGS, folder)
    recorder.begin(state_of(folder, 5))
    assert snapshots(folder) == [3]
    train(tmp_path / "run")
    assert snapshots(folder) == [3, 6, 10]


# --- What cannot be watched -----------------------------------------------------------------------


def test_what_cannot_be_watched_is_refused(tmp_path):
    small = settings(tiny.config(analysis__every=3))
    with pytest.raises(OptionError, match=r"analysis\.every=3.*vocab_size must be at least 29"):
        make_recorder(small, tmp_path)
    masked = dict(WATCHED) | {
        "train__objective": "masked_token", "train__mask_rate": 0.2, "model__pattern": ("full",),
    }  # fmt: skip
    with pytest.raises(OptionError, match=r"train\.objective is 'masked_token'"):
        make_recorder(settings(tiny.config(**masked)), tmp_path)
    assert not any(tmp_path.iterdir())


def make_recorder(options, path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "make_measure", MAKE_MEASURE)
        return watch.Recorder(options, RunFolder(path / "run"))


MAKE_MEASURE = watch.make_measure


@pytest.mark.parametrize(
    ("option", "value", "match"),
    [("every", -1, "at least 0, got -1"), ("sequences", 0, "at least 1, got 0")],
)
def test_options_of_watching(option, value, match):
    with pytest.raises(OptionError, match=rf"analysis\.{option} must be {match}"):
        settings(tiny.config(**{f"analysis__{option}": value}))


def test_an_option_of_watching_that_nothing_reads_is_refused():
    from training.resolve import resolve

    with pytest.raises(ValueError, match=r"analysis\.bos would do nothing: analysis\.every is 0"):
        resolve(tiny.options(), ["analysis.bos"])
    resolve(tiny.options(**WATCHED), ["analysis.bos"])
