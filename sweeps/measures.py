"""Numbers of a trained run beyond those of its last evaluation.

A measure of a study is any function of (run folder, settings) that returns {name: number}; those
here are values that do so.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from analysis.evaluation import forced_accuracy
from tasks import Markov, Recall, evaluation_key
from training.restore import restore
from training.run_folder import RunFolder
from training.settings import OptionError, Settings


@dataclasses.dataclass(frozen=True)
class AccuracyAtLengths:
    """Teacher-forced accuracy on answers of given lengths, inside the training range and beyond.

    Gives ``<task>/accuracy@<length>`` and ``<task>/sequence_accuracy@<length>``, and their chance.

    Attributes:
      task: one with ``with_length``: copy or induction.
      lengths: symbols in the string that is written again.
      sequences: of each length.
    """

    task: str
    lengths: tuple[int, ...]
    sequences: int = 128

    def __call__(self, folder: RunFolder, settings: Settings) -> dict[str, float]:
        model = restore(folder).model
        task = _task(settings, self.task)
        found = {}
        for length in self.lengths:
            fixed = task.with_length(length)
            _, ratios = forced_accuracy(model, settings, fixed, fixed.length, self.sequences)
            for name in ("accuracy", "sequence_accuracy", "sequence_chance"):
                found[f"{self.task}/{name}@{length}"] = ratios[name]
            found[f"{self.task}/chance@{length}"] = task.chance
        return found


def markov_lines(folder: RunFolder, settings: Settings) -> dict[str, float]:
    """The exact losses of the strategies on a Markov run's evaluation stream, in nats.

    Gives ``markov/uniform_loss``, ``markov/unigram_loss`` and ``markov/bigram_loss`` (no model does
    better on average), and ``markov/excess``, by how much the run's loss is above the last.
    """
    task = _task(settings, Markov.name)

    @jax.jit
    def line(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = task.sample(evaluation_key(settings.eval.seed, index), settings.eval.batch_size)
        return task.unigram_loss(batch).mean(), task.bigram_loss(batch).mean()

    unigram, bigram = jax.lax.map(line, jnp.arange(settings.eval.batches))
    last = folder.read_metrics()[-1]["markov/loss"]
    return {
        "markov/uniform_loss": task.uniform_loss,
        "markov/unigram_loss": float(unigram.mean()),
        "markov/bigram_loss": float(bigram.mean()),
        "markov/excess": last - float(bigram.mean()),
    }


def recall_plateau(folder: RunFolder, settings: Settings) -> dict[str, float]:
    """``recall/plateau``: accuracy of guessing among a row's values, whose ever they are."""
    del folder
    return {"recall/plateau": _task(settings, Recall.name).plateau}


def _task(settings: Settings, name: str):
    for task in settings.evaluated:
        if task.name == name:
            return task
    names = ", ".join(task.name for task in settings.evaluated)
    raise OptionError(f"a measure asks for the task {name}; the run has {names}")
