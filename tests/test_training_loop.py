"""The loop in this process: lines, one program, resuming bit for bit, and stopping on NaN."""

import dataclasses
import functools
import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from models import pure
from tasks import dropout_key, train_key
from tests import tiny
from tests.states import bits
from tests.test_optimizer import AdamWByHand
from training import loop, step
from training.checkpoint import CheckpointError, Checkpoints
from training.lock import locked
from training.restore import restore
from training.run_folder import RunFolder
from training.settings import OptionError, settings

CONFIG = tiny.config()
SETTINGS = settings(CONFIG)
TASKS = ("copy", "induction")


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """All runs of this file with the same numbers share their compiled programs.

    So one more trace, after a resume too, would show in the size of the one cache.
    """

    def shared(make):
        cached = functools.cache(make)
        neutral = {"checkpoint": SETTINGS.checkpoint}

        def make_shared(options):
            train = dataclasses.replace(options.train, eval_every=1)
            return cached(dataclasses.replace(options, train=train, **neutral))

        return make_shared

    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("make_interval", "make_evaluation"):
            patch.setattr(loop, name, shared(getattr(loop, name)))
        yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def train(folder, config=CONFIG):
    return loop.train(config, settings(config), RunFolder(folder))


def saved_steps(folder):
    with Checkpoints(folder / "checkpoints", keep=1, best_metric=None) as saved:
        return saved.steps()


def saved_state(folder, at):
    with Checkpoints(folder / "checkpoints", keep=1, best_metric=None) as saved:
        return saved.restore(step.state_shapes(SETTINGS), at)


def timeless(lines):
    return [
        {k: v for k, v in line.items() if "time" not in k and "per_second" not in k}
        for line in lines
    ]


def files(folder):
    """Bytes and times of all that is in a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    """A run of 10 steps without a stop: its folder, its lines, and the states it saved."""
    folder, states = tmp_path_factory.mktemp("runs") / "once", {}
    save = Checkpoints.save

    def save_and_keep(self, at, state, metrics):
        states[at] = bits(state)
        save(self, at, state, metrics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save_and_keep)
        lines = train(folder)
    return folder, lines, states


# --- What a run writes ---------------------------------------------------------------------------


def test_lines_stand_where_the_options_put_them(once):
    folder, lines, _ = once
    assert [line["step"] for line in lines] == [0, 4, 5, 8, 10]
    assert [line["step"] for line in lines if "copy/accuracy" in line] == [0, 5, 10]
    assert [line["step"] for line in lines if "loss" in line] == [4, 5, 8, 10]
    assert [line["tokens"] for line in lines] == [s * 4 * 17 for s in (0, 4, 5, 8, 10)]
    for line in lines:
        for task in TASKS:
            if f"{task}/accuracy" in line:
                assert line[f"{task}/chance"] == pytest.approx(1 / 12)
                assert 0 <= line[f"{task}/sequence_accuracy"] <= line[f"{task}/accuracy"] <= 1
        for name in ("gradient_norm", "tokens_per_second", "learning_rate"):
            assert ("loss" in line) == (name in line)
            assert line.get(name, 1) > 0
    assert lines == [
        json.loads(text) for text in (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    ]


def test_steps_against_a_loop_in_numpy(once):
    """Step i draws batch i and dropout i; loss, rate and state follow by the textbook."""
    folder, lines, _ = once
    initial = step.init_state(SETTINGS)
    graph = step.graph_of(SETTINGS)
    decayed = {name for name in initial.params if name.rsplit("/", 1)[-1].startswith("w_")}
    oracle = AdamWByHand(SETTINGS.optimizer, 10, initial.params, decayed)

    @jax.jit
    def gradients(params, index):
        def loss(params):
            batch = SETTINGS.task.sample(train_key(0, index), 4)
            key = jax.random.fold_in(dropout_key(0), index)
            logits_BTV, _ = pure.merge(graph, params)(batch.tokens_BT, dropout_key=key)
            one_hot_BTV = jax.nn.one_hot(batch.targets_BT, 16)
            nll_BT = -(jax.nn.log_softmax(logits_BTV) * one_hot_BTV).sum(-1)
            return (nll_BT * batch.weights_BT).sum() / batch.weights_BT.sum()

        return jax.value_and_grad(loss)(params)

    losses, norms = [], []
    for index in range(10):
        params = {name: jnp.asarray(value, jnp.float32) for name, value in oracle.params.items()}
        loss, grads = gradients(params, index)
        losses.append(float(loss))
        norms.append(
            math.sqrt(sum(float((np.asarray(g, np.float64) ** 2).sum()) for g in grads.values()))
        )
        oracle.step(grads)
    rates = [0.003 * (count + 1) / 4 for count in range(3)]
    rates += [0.003 * (0.1 + 0.45 * (1 + math.cos(math.pi * done / 7))) for done in range(7)]
    for begin, end, line in zip((0, 4, 5, 8), (4, 5, 8, 10), lines[1:], strict=True):
        assert line["loss"] == pytest.approx(np.mean(losses[begin:end]), rel=1e-4)
        assert line["gradient_norm"] == pytest.approx(np.mean(norms[begin:end]), rel=1e-3)
        assert line["learning_rate"] == pytest.approx(rates[end - 1], rel=1e-4)
    final = saved_state(folder, 10)
    assert int(final.step) == 10
    for name, value in oracle.params.items():
        np.testing.assert_allclose(final.params[name], value, rtol=1e-3, atol=1e-4)


def test_what_is_saved_is_the_state_of_its_step(once):
    """Case J2: the state was donated to the next interval while it was written."""
    folder, _, states = once
    assert sorted(states) == saved_steps(folder) == [5, 10]
    assert bits(saved_state(folder, 5)) == states[5] != states[10]
    assert bits(saved_state(folder, 10)) == states[10]


def test_the_last_the_best_or_any_checkpoint_can_be_read_back(once):
    """What eval.py does with --checkpoint."""
    folder, lines, _ = once
    score = {
        line["step"]: line["copy/accuracy"] + line["induction/accuracy"]
        for line in lines
        if line["step"] in (5, 10)
    }
    best = max(score, key=lambda at: (score[at], at))
    for name, at in (("last", 10), ("best", best), ("5", 5), ("10", 10)):
        found = restore(RunFolder(folder), name)
        assert found.step == at
        for path, value in saved_state(folder, at).params.items():
            assert np.array_equal(found.params[path], value)
    for name in ("7", "newest"):
        with pytest.raises(OptionError, match=rf"--checkpoint .*\[5, 10\].*{name}"):
            restore(RunFolder(folder), name)


def test_a_donated_state_is_gone_and_says_so():
    """Case J2: train, evaluate, train; then the old state."""
    interval, evaluate = loop.make_interval(SETTINGS), loop.make_evaluation(SETTINGS)
    initial = step.init_state(SETTINGS)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(initial.params)}
    assert len(pointers) == len(jax.tree.leaves(initial.params))
    state, _ = interval(initial, 4)
    evaluate(state.params)
    state, _ = interval(state, 8)
    evaluate(state.params)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(initial.params))
    with pytest.raises(Exception, match=r"[Dd]eleted|donated"):
        interval(initial, 4)


# --- One program (case J1) -----------------------------------------------------------------------


def test_one_program_serves_every_interval_and_a_resumed_run(once, tmp_path):
    interval, evaluate = loop.make_interval(SETTINGS), loop.make_evaluation(SETTINGS)
    assert interval.func._cache_size() == 1  # intervals of 4, 1, 3 and 2 steps
    assert evaluate._cache_size() == 1
    resume_at_5(once, tmp_path / "resumed")
    assert interval.func._cache_size() == 1
    assert evaluate._cache_size() == 1


def test_steps_past_the_end_are_skipped():
    interval = loop.make_interval(SETTINGS)
    state, history = interval(step.init_state(SETTINGS), 1)
    assert int(state.step) == 1
    assert history["loss"].shape == (4,) and history["loss"][0] > 0
    assert not np.any(history["loss"][1:])
    state, history = interval(state, 1)
    assert int(state.step) == 1 and not np.any(history["loss"])


# --- Resuming (case P1) --------------------------------------------------------------------------


def resume_at_5(once, folder):
    """The run as a kill between the checkpoints of 5 and 10 would have left it, continued."""
    shutil.copytree(once[0], folder)
    shutil.rmtree(folder / "checkpoints" / "10")
    assert saved_steps(folder) == [5]
    return train(folder)


def test_a_resumed_run_ends_bit_equal_without_gaps_or_repeats(once, tmp_path):
    _, lines, states = once
    resumed = resume_at_5(once, tmp_path / "resumed")
    assert timeless(resumed) == timeless(lines)
    assert bits(saved_state(tmp_path / "resumed", 10)) == states[10]
    sessions = json.loads((tmp_path / "resumed" / "environment.json").read_text())
    assert sessions["started_at_step"] == 5
    assert [old["started_at_step"] for old in sessions["earlier_sessions"]] == [0]


class Stopped(Exception):
    pass


@pytest.mark.parametrize("at", [0, 4, 5, 8, 10])
def test_a_failed_write_of_metrics_loses_no_line(once, tmp_path, monkeypatch, at):
    """The disk is full when the line of a step is due, also after that step's checkpoint."""
    append = RunFolder.append_metrics

    def stop_at(self, line):
        if line["step"] == at:
            raise Stopped
        append(self, line)

    monkeypatch.setattr(RunFolder, "append_metrics", stop_at)
    with pytest.raises(Stopped):
        train(tmp_path / "run")
    monkeypatch.undo()
    train(tmp_path / "run")
    _, lines, states = once
    assert timeless(RunFolder(tmp_path / "run").read_metrics()) == timeless(lines)
    assert bits(saved_state(tmp_path / "run", 10)) == states[10]


def test_a_line_cut_short_is_taken_again(once, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(once[0], folder)
    shutil.rmtree(folder / "checkpoints" / "10")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text[: text.rindex('"loss"')])
    assert timeless(train(folder)) == timeless(once[1])


def test_a_line_cut_short_at_the_checkpoint_is_not_lost(once, tmp_path):
    """Killed while the line of the checkpoint's own step was on its way to the disk."""
    folder = tmp_path / "run"
    shutil.copytree(once[0], folder)
    shutil.rmtree(folder / "checkpoints" / "10")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:40])
    assert [line["step"] for line in train(folder)] == [0, 4, 5, 8, 10]


def test_options_that_change_no_result_may_differ(once, tmp_path):
    shutil.copytree(once[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "10")
    other = tiny.config(
        train__log_every=3, train__eval_every=2, checkpoint__every=3, checkpoint__keep=1
    )
    lines = train(tmp_path / "run", other)
    assert [line["step"] for line in lines] == [0, 4, 5, 6, 8, 9, 10]
    assert bits(saved_state(tmp_path / "run", 10)) == once[2][10]
    for name in ("copy/accuracy", "copy/loss", "induction/accuracy", "induction/loss"):
        assert lines[-1][name] == once[1][-1][name]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["checkpoint"]["every"] == 3


def test_a_finished_run_does_nothing(once, monkeypatch):
    before = files(once[0])
    assert train(once[0]) is None
    assert files(once[0]) == before


# --- Folders that are not ours -------------------------------------------------------------------


def test_another_run_is_refused_with_what_differs(once):
    before = files(once[0])
    other = tiny.config(optimizer__learning_rate=0.5, train__steps=20, model__pattern=("mha",))
    with pytest.raises(OptionError) as caught:
        train(once[0], other)
    message = str(caught.value)
    for piece in (
        "optimizer.learning_rate was 0.003, now 0.5", "train.steps was 10, now 20",
        "model.pattern", "gqa", "mha", str(once[0]), "workdir",
    ):  # fmt: skip
        assert piece in message
    for same in ("train.batch_size", "checkpoint.every", "model.d_model"):
        assert same not in message
    assert files(once[0]) == before


@pytest.mark.parametrize(
    "content",
    [
        {"notes.txt": b"mine"},
        {"config.json": b"[1, 2]"},
        {"config.json": b'{"name": "another project"}'},
        {"config.json": b"{"},
        {"config.json": b"\xff\xfe"},
        {"config.json": b""},
    ],
    ids=["files", "list", "other", "cut", "bytes", "empty"],
)
def test_a_foreign_folder_is_refused_and_untouched(tmp_path, content):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    before = files(tmp_path)
    with pytest.raises(OptionError, match=str(tmp_path)):
        train(tmp_path)
    assert files(tmp_path) == before


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(OptionError, match=f"{tmp_path / 'run'} is a file"):
        train(tmp_path / "run")


def test_what_a_full_disk_left_of_a_first_start_is_no_foreign_folder(once, tmp_path, monkeypatch):
    """The write of config.json failed half-way; with room again, the same command works."""
    replace = Path.replace

    def full(self, target):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "run")
    monkeypatch.setattr(Path, "replace", replace)
    assert timeless(train(tmp_path / "run")) == timeless(once[1])


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    said = r"--workdir=.*run is in use by process \d+ on .*lock: .*wait for it, or end it"
    with locked(folder.lock, "the run"):
        with pytest.raises(OptionError, match=said):
            train(folder.path)
        assert [path.name for path in folder.path.iterdir()] == ["lock"]
    assert train(folder.path)[-1]["step"] == SETTINGS.train.steps


# --- Not finite (case O4) ------------------------------------------------------------------------

SAVES_AT_2 = tiny.config(checkpoint__every=2)


def poison(value):
    def put(state):
        name = sorted(state.params)[0]
        params = {
            **state.params,
            name: state.params[name].at[(0,) * state.params[name].ndim].set(value),
        }
        return dataclasses.replace(state, params=params)

    return put


def poisoned(monkeypatch, *, value, before=None, after=None):
    """Puts ``value`` into the parameters before step ``before``, or once step ``after`` is done."""
    make, put = loop.make_interval, poison(value)

    def make_poisoned(options):
        interval = make(options)

        def run(state, until):
            if int(state.step) + 1 == before:
                state = put(state)
            state, history = interval(state, until)
            return (put(state) if int(state.step) == after else state), history

        return run

    monkeypatch.setattr(loop, "make_interval", make_poisoned)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parameters_that_are_not_finite_stop_the_run(tmp_path, monkeypatch, value):
    """NaN in the parameters at step 3: the run says where, and keeps what was saved before."""
    poisoned(monkeypatch, value=value, before=3)
    with pytest.raises(loop.Diverged, match=r"(loss|gradient_norm) is -?(nan|inf) at step 3\b"):
        train(tmp_path / "run", SAVES_AT_2)
    assert saved_steps(tmp_path / "run") == [2]
    assert all(
        np.all(np.isfinite(p)) for p in jax.tree.leaves(saved_state(tmp_path / "run", 2).params)
    )
    assert [line["step"] for line in RunFolder(tmp_path / "run").read_metrics()] == [0, 2]
    # Without the fault, the same command goes on from there.
    monkeypatch.undo()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("config", ["evaluates", "saves"])
def test_an_update_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, value, config):
    """The last update before a line, so that no loss or gradient has shown it yet."""
    poisoned(monkeypatch, value=value, after=5)
    chosen = tiny.config(checkpoint__every={"evaluates": 3, "saves": 5}[config])
    with pytest.raises((loop.Diverged, CheckpointError), match=r"step 5\b") as caught:
        train(tmp_path / "run", chosen)
    assert "nan" in str(caught.value) or "inf" in str(caught.value) or "finite" in str(caught.value)
    assert saved_steps(tmp_path / "run") == {"evaluates": [3], "saves": []}[config]


def test_gradients_that_are_not_finite_stop_the_run(tmp_path, monkeypatch):
    """The loss stays finite; only the gradient of step 3 is NaN."""
    taken, mean_loss = [], step.mean_loss

    @jax.custom_vjp
    def spoil(loss, bad):
        return loss

    spoil.defvjp(lambda loss, bad: (loss, bad), lambda bad, g: (jnp.where(bad, jnp.nan, g), None))

    def note(seed, index):
        taken.append(index)
        return train_key(seed, index)

    monkeypatch.setattr(step, "train_key", note)
    monkeypatch.setattr(
        step, "mean_loss", lambda *args, **kw: spoil(mean_loss(*args, **kw), taken[-1] == 2)
    )
    monkeypatch.setattr(loop, "make_interval", step.make_interval)
    with pytest.raises(loop.Diverged, match=r"gradient_norm is nan at step 3\b"):
        train(tmp_path / "run", SAVES_AT_2)
    assert saved_steps(tmp_path / "run") == [2]


# --- Evaluation (case E3) ------------------------------------------------------------------------


def test_the_evaluation_stream_is_fixed_and_does_not_move_training(once):
    """The same sequences for every seed of training, and for every step."""
    state = step.init_state(SETTINGS)
    first = loop.make_evaluation(SETTINGS)(state.params)
    assert jax.tree.leaves(loop.make_evaluation(SETTINGS)(state.params)) == jax.tree.leaves(first)
    found = {name: counts.ratios() for name, counts in first.items()}
    assert found["copy"]["accuracy"] == once[1][0]["copy/accuracy"]
    other = settings(tiny.config(train__data_seed=7, model__init_seed=7))
    elsewhere = step.make_evaluation(other)(state.params)
    assert {name: counts.ratios() for name, counts in elsewhere.items()} == found
