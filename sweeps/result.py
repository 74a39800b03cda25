"""The record of a run that has ended: one file, written in one step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from sweeps.fairness import bill
from training.run_folder import RunFolder
from training.settings import Settings

DONE, FAILED = "done", "failed"
# What every run has at its end, beside its ``fairness.Bill`` and what the study measures.
NUMBERS = ("step", "tokens", "time", "loss", "gradient_norm", "learning_rate",
           "tokens_per_second", "step_time_ms")  # fmt: skip
# And of each task that it is evaluated on, ``<task>/<name>``.
OF_A_TASK = ("accuracy", "sequence_accuracy", "loss", "chance", "sequence_chance")


class NoResult(RuntimeError):
    """A run ended without what the study asks of it."""


def done(
    job: Mapping,
    settings: Settings,
    folder: RunFolder,
    measures: Sequence[Callable],
    asked: Sequence[str],
    step_time_ms: float | None = None,
) -> dict:
    """The record of a run that has trained to its end.

    Args:
      job: ``plan.Run.order()`` of the run.
      settings: its options, typed.
      folder: where it trained.
      measures: of the study; each is called with (folder, settings).
      asked: names of numbers that the record must have.
      step_time_ms: of a training step, where it was measured apart; None: the median over the
        lines, the first of which compiles.

    Raises:
      NoResult: the run has not reached its last step, or a number is missing or not finite.
    """
    lines = folder.read_metrics()
    if not lines or lines[-1]["step"] != settings.train.steps:
        at = lines[-1]["step"] if lines else "none"
        raise NoResult(f"metrics end at step {at}, not at {settings.train.steps}")
    numbers = dict(lines[-1]) | dataclasses.asdict(bill(settings))
    numbers["step_time_ms"] = step_time_ms or _step_time_ms(lines, settings)
    for measure in measures:
        numbers |= measure(folder, settings)
    for name in asked:
        if name not in numbers:
            raise NoResult(f"the run has no {name!r}; it has {', '.join(sorted(numbers))}")
        if not math.isfinite(numbers[name]):
            raise NoResult(f"{name} is {numbers[name]}")
    # JSON has no others.
    numbers = {name: value for name, value in numbers.items() if math.isfinite(value)}
    environment = json.loads(folder.environment.read_text())
    return {**_head(job, DONE), "metrics": numbers, "environment": environment}


def failed(job: Mapping, error: str) -> dict:
    """The record of a run that has failed."""
    return {**_head(job, FAILED), "error": " ".join(error.split())}


def _head(job: Mapping, status: str) -> dict:
    names = ("name", "point", "seed", "learning_rate", "config")
    return {"status": status, **{name: job[name] for name in names}}


def _step_time_ms(lines: Sequence[Mapping], settings: Settings) -> float:
    rates = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    tokens = settings.train.batch_size * settings.task.length
    return 1000 * tokens / float(np.median(rates))
