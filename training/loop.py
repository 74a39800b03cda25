"""The training loop: intervals of steps, and between them lines, evaluations and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from tensorboardX import SummaryWriter

from models.pure import merge
from training import environment, optimizer
from training.checkpoint import BEST_METRIC, Checkpoints
from training.lock import locked
from training.progress import Reporter, table
from training.run_folder import RunFolder
from training.settings import OptionError, Settings
from training.state import TrainState
from training.step import graph_of, init_state, make_evaluation, make_interval, state_shapes


class Diverged(RuntimeError):
    """A loss, gradient or parameter is not finite; says at which step."""


class Observer(Protocol):
    """Looks at the state during training; it must not keep it, for the next step donates it.

    Attributes:
      every: steps between two looks; the state before the first step and after the last are shown
        as well.
    """

    every: int

    def begin(self, state: TrainState) -> None:
        """Shows where a session starts; what was seen of later steps is to be forgotten."""
        ...

    def observe(self, state: TrainState) -> None:
        """Shows a state, before a checkpoint of it is saved."""
        ...


def train(
    config: Mapping,
    settings: Settings,
    folder: RunFolder,
    programs=None,
    observer: Observer | None = None,
) -> list[dict] | None:
    """Trains until the last step, from the newest checkpoint where the folder has one.

    A line of metrics is written at the multiples of ``train.log_every`` and ``train.eval_every``,
    and wherever a checkpoint is saved. Its ``loss`` (nats per counted position) and
    ``gradient_norm`` are means over the steps since the last line; its evaluation, where it has
    one, is of the state after its ``step``. Losses and gradients of all steps are checked at
    every line. An observer is shown states between; it changes no bit of them.

    Args:
      config: resolved options.
      settings: the same, typed.
      folder: of the run.
      programs: what ``make_interval`` and ``make_evaluation`` of ``training.step`` make, or what
        does the same for many runs at once; None: those two.
      observer: is shown states on the way.

    Returns:
      The lines of metrics.jsonl; None where the run was finished already.

    Raises:
      OptionError: the folder holds something else, or another process is at work in it. Nothing
        has been written.
      Diverged: a loss or gradient is not finite. The checkpoints before it are kept.
      CheckpointError: a checkpoint could not be saved or read.
    """
    folder.check_usable_for(config)
    steps, best = settings.train.steps, BEST_METRIC
    with Checkpoints(folder.checkpoints, keep=settings.checkpoint.keep, best_metric=best) as saved:
        if steps in saved.steps():
            return None
        # What cannot run is refused before there is a folder.
        implementations = _implementations(settings)
        with locked(folder.lock, f"--workdir={folder.path}"):
            # Another process may have begun since.
            folder.check_usable_for(config)
            _session(config, settings, folder, saved, implementations, observer, programs)
            saved.wait()
    return folder.read_metrics()


def _session(config, settings, folder, saved, implementations, observer, programs) -> None:
    """From the newest checkpoint, if there is one, to the last step."""
    state = saved.restore_latest(state_shapes(settings))
    resumed = state is not None
    if not resumed:
        state = init_state(settings)
    first = int(state.step)
    folder.begin(config, environment.describe(implementations, first))
    folder.forget_metrics_after(first if resumed else -1)
    if resumed and not any(line["step"] == first for line in folder.read_metrics()):
        # A power cut may take the line of a checkpoint that is on the disk.
        line = saved.metrics(first)
        del line[BEST_METRIC]
        folder.append_metrics({"step": first, **line})
    chance = {task.name: task.chance for task in settings.evaluated}
    with (
        Reporter(first, settings.train.steps, chance) as reporter,
        SummaryWriter(str(folder.tensorboard), purge_step=first + 1) as events,
    ):
        if resumed:
            reporter.say(f"resuming {folder.path} at step {first}")
        programs = programs or (make_interval(settings), make_evaluation(settings))
        _run(settings, folder, saved, state, resumed, reporter, events, observer, *programs)


def _run(
    settings, folder, saved, state, resumed, reporter, events, observer, interval, evaluate
) -> None:
    rate = optimizer.learning_rate(settings.optimizer, settings.train.steps)
    tokens_per_step = settings.train.batch_size * settings.task.length
    steps, step, latest = settings.train.steps, int(state.step), {}
    evaluated_every = (settings.train.eval_every, settings.checkpoint.every)

    def write(line: dict[str, float]) -> None:
        latest.update(line)
        folder.append_metrics(line)
        for name, value in line.items():
            if name != "step":
                events.add_scalar(name, value, line["step"])
        # A kill must not cost more of the event file than of metrics.jsonl.
        events.flush()
        reporter.update(step, latest)

    if not resumed:
        write({"step": 0, "tokens": 0, **_evaluation(evaluate, state, settings)})
    else:
        latest.update({k: v for line in folder.read_metrics() for k, v in line.items()})
    if observer is not None:
        observer.begin(state)
    losses, norms, since, train_seconds = [], [], step, 0.0
    while step < steps:
        written = _next(step, steps, settings.train.log_every, *evaluated_every)
        watched = steps if observer is None else _next(step, steps, observer.every)
        until = min(written, watched)
        begun = time.perf_counter()
        state, history = interval(state, until)
        done = until - step
        losses.append(np.asarray(history["loss"])[:done])
        norms.append(np.asarray(history["gradient_norm"])[:done])
        train_seconds += time.perf_counter() - begun
        _check_finite(step, loss=losses[-1], gradient_norm=norms[-1])
        step = until
        if observer is not None and step == watched:
            observer.observe(state)
        if step != written:
            continue
        line = {
            "step": step,
            "tokens": step * tokens_per_step,
            "loss": float(np.concatenate(losses).mean()),
            "gradient_norm": float(np.concatenate(norms).mean()),
            "learning_rate": float(rate(step - 1)),
            "tokens_per_second": (step - since) * tokens_per_step / train_seconds,
            "time": time.time(),
        }
        losses, norms, since, train_seconds = [], [], step, 0.0
        saving = step % settings.checkpoint.every == 0 or step == steps
        if saving or step % settings.train.eval_every == 0:
            line.update(_evaluation(evaluate, state, settings))
        _check_line(line)
        # The line first: if it cannot be written, an older checkpoint takes the steps again.
        write(line)
        if saving:
            accuracies = [line[f"{task.name}/accuracy"] for task in settings.evaluated]
            saved.save(step, state, {**line, BEST_METRIC: sum(accuracies) / len(accuracies)})


def _next(step: int, last: int, *every: int) -> int:
    """The next multiple of one of ``every``, or the last step."""
    return min(last, *(step - step % n + n for n in every))


def _evaluation(evaluate, state: TrainState, settings: Settings) -> dict[str, float]:
    counts = evaluate(state.params)
    line = {}
    for task in settings.evaluated:
        ratios = counts[task.name].ratios()
        line |= {f"{task.name}/{name}": value for name, value in ratios.items()}
        line[f"{task.name}/chance"] = task.chance
    return line


def _check_finite(step: int, **histories: np.ndarray) -> None:
    """Raises Diverged at the first step of an interval where a number is not finite."""
    bad = {name: np.flatnonzero(~np.isfinite(history)) for name, history in histories.items()}
    first = {name: indices[0] for name, indices in bad.items() if indices.size}
    if first:
        name = min(first, key=first.get)
        raise _diverged(name, histories[name][first[name]], step + int(first[name]) + 1)


def _check_line(line: Mapping[str, float]) -> None:
    """Raises Diverged where an evaluation shows what no loss has shown yet."""
    for name, value in line.items():
        if not np.isfinite(value):
            raise _diverged(name, value, line["step"])


def _diverged(name: str, value: float, step: int) -> Diverged:
    return Diverged(
        f"{name} is {value} at step {step}; a lower optimizer.learning_rate or "
        "optimizer.clip_norm may help. The last good checkpoint is kept"
    )


def _implementations(settings: Settings) -> dict[str, str]:
    shapes = state_shapes(settings).params
    model = merge(graph_of(settings), shapes)
    try:
        return model.implementations(settings.train.batch_size, settings.task.length)
    except NotImplementedError as error:
        raise OptionError(f"model.implementation: {error}") from None


def summary(lines: list[dict], settings: Settings, folder: RunFolder) -> None:
    """The table at the end of a run, and what to do next."""
    last = lines[-1]
    rows = []
    for task in settings.evaluated:
        for name, guess in (("accuracy", "chance"), ("sequence_accuracy", "sequence_chance")):
            value, chance = last[f"{task.name}/{name}"], last[f"{task.name}/{guess}"]
            rows.append((f"{task.name}/{name}", f"{value:.4f}", f"{chance:.4f}"))
    rows.append(("loss (nats per answer)", f"{last['loss']:.4f}", ""))
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    rows.append(("tokens per second (median)", f"{float(np.median(rates)):,.0f}", ""))
    title = f"{folder.path} after {last['step']:,} steps, {last['tokens']:,} tokens"
    table(title, rows, ("metric", "value", "chance"))
    print(f"The curves are in {folder.curves}. Next:")
    print(f"  python eval.py --workdir={folder.path}")
