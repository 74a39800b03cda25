"""Watching heads form: scores of all heads and loss by position, recorded during training."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from analysis import emergence_table
from analysis.head_scores import (
    ScoreSequences,
    delimiter,
    delimiter_chance,
    head_scores,
    prefix_matching_chance,
    read_patterns,
    score_sequences,
)
from analysis.loss_by_position import (
    compared_positions,
    in_context_learning_score,
    loss_by_position,
    mean_or_nan,
)
from models import pure
from tasks import evaluation_key
from tasks.vocabulary import SEP
from training.checkpoint import Checkpoints
from training.run_folder import RunFolder
from training.settings import OptionError, Settings
from training.state import TrainState
from training.step import graph_of

# A snapshot is kept when the best prefix-matching score of all heads first reaches one of these.
LEVELS = (0.1, 0.25, 0.5, 0.75)


class Recorder:
    """Writes emergence.csv and snapshots of a run; an observer of ``training.loop.train``.

    Snapshots are checkpoints in ``snapshots/``, which eval.py knows by their step.

    Args:
      settings: of the run.
      folder: of the run.
      measure: what ``make_measure`` makes of these settings, or of others that differ in no more
        than seeds and learning rate; None: made here.

    Attributes:
      every: steps between two looks.

    Raises:
      OptionError: the run cannot be watched.
    """

    def __init__(self, settings: Settings, folder: RunFolder, measure: Callable | None = None):
        check(settings)
        self._measure = measure or make_measure(settings)
        self.every = settings.analysis.every
        self._folder = folder
        self._tokens_per_step = settings.train.batch_size * settings.task.length
        self._reached = 0.0
        self._seconds, self._begun = 0.0, 0.0

    def begin(self, state: TrainState) -> None:
        """Forgets what a session that was cut short has seen of later steps."""
        step = int(state.step)
        emergence_table.forget_after(self._folder.emergence, step)
        for path in self._folder.snapshots.glob("*"):
            if path.name.isdecimal() and int(path.name) > step:
                shutil.rmtree(path)
        table = emergence_table.read(self._folder.emergence)
        self._reached = 0.0 if table is None else float(table.heads("prefix_matching").max())
        if step % self.every == 0 and (table is None or step not in table["step"]):
            self.observe(state)
        # Compiling is paid once, whatever the length of the run.
        self._seconds, self._begun = 0.0, time.perf_counter()

    def observe(self, state: TrainState) -> None:
        """Adds a row, and a snapshot where a level is crossed."""
        begun = time.perf_counter()
        step = int(state.step)
        numbers, scores, loss_T = jax.tree.map(np.asarray, self._measure(state.params))
        where = {"step": step, "tokens": step * self._tokens_per_step}
        row = emergence_table.flat_row(where | numbers, scores, loss_T)
        emergence_table.append(self._folder.emergence, row)
        best = float(scores["prefix_matching"].max())
        if any(self._reached < level <= best for level in LEVELS):
            snapshots = self._folder.snapshots
            with Checkpoints(snapshots, keep=len(LEVELS), best_metric=None) as saved:
                saved.save(step, state, {})
        self._reached = max(self._reached, best)
        self._seconds += time.perf_counter() - begun

    def share(self) -> float:
        """Share of the session's time that watching took, after its first look."""
        return self._seconds / (time.perf_counter() - self._begun)


def check(settings: Settings) -> None:
    """Raises OptionError where the run is to be watched and cannot be."""
    every = settings.analysis.every
    if not every:
        return
    if settings.objective.name != "next_token":
        raise OptionError(
            f"analysis.every={every} watches next-token prediction, but train.objective is "
            f"{settings.objective.name!r}; set analysis.every=0"
        )
    try:
        sequences_of(settings)
        compared_positions(settings.task.length, settings.analysis.around)
    except ValueError as error:
        raise OptionError(f"analysis.every={every}: {error}") from None


def sequences_of(settings: Settings) -> ScoreSequences:
    """What the heads of a run are scored on.

    Raises:
      ValueError: the model is too small to be scored.
    """
    learned = settings.model.position == "learned"
    return score_sequences(
        settings.task.vocab_size,
        bos=settings.analysis.bos,
        longest=settings.model.max_length if learned else None,
    )


def make_measure(settings: Settings):
    """``measure(params) → (numbers, scores, loss_T)``: all that a row says, compiled.

    Raises:
      ValueError: the model is too small to be scored.
    """
    options, graph = settings.analysis, graph_of(settings)
    sequences = sequences_of(settings)
    task = settings.held_out
    batch = jax.jit(task.sample, static_argnums=1)(
        evaluation_key(settings.eval.seed, 0), options.sequences
    )
    ids = {i for each in task.tasks for i in getattr(each, "delimiters", (SEP,))}
    is_delimiter_BT = np.isin(np.asarray(batch.tokens_BT), list(ids))
    chance = float(prefix_matching_chance(jnp.asarray(sequences.repeated_BT)))
    delimiters = float(delimiter_chance(jnp.asarray(is_delimiter_BT)))

    @jax.jit
    def measure(params):
        model = pure.merge(graph, params)
        scores = head_scores(model, sequences)
        if is_delimiter_BT.any():
            logits_BTV, patterns = read_patterns(model, batch.tokens_BT)
            found = [delimiter(pattern, jnp.asarray(is_delimiter_BT)) for pattern in patterns]
            scores["delimiter"] = jnp.stack(found)
        else:
            logits_BTV, _ = model(batch.tokens_BT)
        loss_T, count_T = loss_by_position(logits_BTV, batch, "all")
        repeated_T, answers_T = loss_by_position(logits_BTV, batch, "answers")
        by_position_T = mean_or_nan(loss_T, count_T)
        numbers = {
            "loss": mean_or_nan(loss_T.sum(), count_T.sum()),
            "loss_repeated": mean_or_nan(repeated_T.sum(), answers_T.sum()),
            "in_context_learning": in_context_learning_score(by_position_T, options.around),
            "prefix_matching_chance": jnp.float32(chance),
        }
        if is_delimiter_BT.any():
            numbers["delimiter_chance"] = jnp.float32(delimiters)
        return numbers, scores, by_position_T

    return measure
