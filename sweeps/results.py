"""The results of a sweep, read from its folder alone, and summed up by point."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sweeps.folder import SweepFolder
from sweeps.study import lower_is_better

PARTIAL, MISSING = "partial", "missing"
_RESAMPLES = 10_000


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What is known of one run.

    Attributes:
      name, point, seed, learning_rate: which run.
      status: "done", "failed", "partial" (has begun) or "missing".
      error: why it failed, or how far it has come.
      metrics: numbers at the end of a run that is done, by name.
      lines: metrics.jsonl, for curves; of runs that have begun.
      config, environment: as recorded; empty where the run has not begun.
      command: trains the same run alone.
    """

    name: str
    point: str
    seed: int
    learning_rate: float
    status: str
    error: str
    metrics: Mapping[str, float]
    lines: Sequence[Mapping[str, float]]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    command: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """A number measured with several seeds.

    Attributes:
      values: one for each seed that is done and has it.
      of: how many seeds were asked for.
    """

    values: tuple[float, ...]
    of: int

    @property
    def whole(self) -> bool:
        """Whether every seed has it."""
        return len(self.values) == self.of > 0

    @property
    def mean(self) -> float:
        return float(np.mean(self.values)) if self.values else float("nan")

    @property
    def spread(self) -> float:
        """Standard deviation over seeds, n − 1 in the denominator; NaN below two seeds."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else float("nan")

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % percentile bootstrap interval of the mean; None below two seeds."""
        if len(self.values) < 2:
            return None
        if len(set(self.values)) == 1:
            return self.values[0], self.values[0]
        from scipy import stats  # it takes most of a second to load

        found = stats.bootstrap(
            (self.values,), np.mean, n_resamples=_RESAMPLES, method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        return float(found.low), float(found.high)


@dataclasses.dataclass(frozen=True)
class PointResult:
    """What is known of one point.

    Attributes:
      name, labels: which point.
      changes: dotted option → value where it differs from the base config.
      solved: the width chosen to make it equal in size, in words; "" where none was.
      runs: all of them, the whole grid.
      learning_rate: the best of the grid by the mean of the study's first metric; of points
        without results the first.
      command: trains and measures the point again, in another folder.
    """

    name: str
    labels: tuple[str, ...]
    changes: Mapping[str, Any]
    solved: str
    runs: tuple[RunResult, ...]
    learning_rate: float
    command: str

    def at(self, rate: float) -> tuple[RunResult, ...]:
        """The runs at one learning rate."""
        return tuple(run for run in self.runs if run.learning_rate == rate)

    @property
    def best(self) -> tuple[RunResult, ...]:
        """The runs at the best learning rate."""
        return self.at(self.learning_rate)

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rates of the grid."""
        return tuple(dict.fromkeys(run.learning_rate for run in self.runs))

    def sample(self, metric: str, rate: float | None = None) -> Sample:
        """A number over the seeds that are done, at the best learning rate or another."""
        return sample(self.best if rate is None else self.at(rate), metric)


@dataclasses.dataclass(frozen=True)
class Results:
    """All points of a sweep.

    Attributes:
      name: of the sweep.
      description: sweep.json.
      points: in the order of the plan.
    """

    name: str
    description: Mapping[str, Any]
    points: tuple[PointResult, ...]

    @property
    def runs(self) -> tuple[RunResult, ...]:
        return tuple(run for point in self.points for run in point.runs)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.description["metrics"])

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.description["columns"])

    @property
    def events(self) -> tuple[str, ...]:
        return tuple(self.description.get("events", ()))

    def point(self, name: str) -> PointResult:
        """The point of that name. Raises KeyError, with the names there are."""
        for point in self.points:
            if point.name == name:
                return point
        names = ", ".join(point.name for point in self.points)
        raise KeyError(f"the sweep has no point {name!r}; it has {names}")

    def sample(self, point: str, metric: str) -> Sample:
        """A number of a point, at its best learning rate, over its seeds."""
        return self.point(point).sample(metric)

    def chance(self, metric: str) -> float | None:
        """What a guesser reaches in a metric, by what the runs say; None where that is not known.

        Where the points differ, that of the best guesser.
        """
        name = chance_name(metric)
        best = min if lower_is_better(metric) else max
        return best((run.metrics[name] for run in self.runs if name in run.metrics), default=None)


def chance_name(metric: str) -> str | None:
    """The number of a run that says what a guesser reaches in a metric; None where none does.

    A loss has one where a measure gives ``<task>/uniform_loss``.
    """
    task, _, kind = metric.rpartition("/")
    if task and kind == "loss":
        return f"{task}/uniform_loss"
    return f"{task}/{kind.replace('accuracy', 'chance')}" if "accuracy" in kind else None


def sample(runs: Iterable[RunResult], metric: str) -> Sample:
    """A number over the runs that are done and have it."""
    runs = tuple(runs)
    return Sample(tuple(run.metrics[metric] for run in runs if metric in run.metrics), len(runs))


def read(folder: SweepFolder) -> Results:
    """What a sweep folder holds, whatever state its runs are in.

    Raises:
      OptionError: it is no sweep folder, or one of its files cannot be read.
    """
    description = folder.read_description()
    points = []
    for point in description["points"]:
        runs = tuple(_read_run(folder, run | {"point": point["name"]}) for run in point["runs"])
        best = _best_rate(runs, description["metrics"][0])
        name, labels, command = point["name"], tuple(point["labels"]), point.get("command", "")
        points.append(
            PointResult(name, labels, point["changes"], point["solved"], runs, best, command)
        )
    return Results(description["name"], description, tuple(points))


def _read_run(folder: SweepFolder, run: Mapping[str, Any]) -> RunResult:
    lines = folder.run(run["name"]).read_metrics()
    record = folder.read_result(run["name"])
    if record is None:
        status = PARTIAL if lines else MISSING
        error = f"at step {lines[-1]['step']} of {run['steps']}" if lines else "has not run"
        record = {}
    else:
        status, error = record["status"], record.get("error", "")
    begun = folder.run(run["name"])
    return RunResult(
        run["name"],
        run["point"],
        run["seed"],
        run["learning_rate"],
        status,
        error,
        record.get("metrics", {}),
        lines,
        record.get("config") or _read(begun.config),
        record.get("environment") or _read(begun.environment),
        run["command"],
    )


def _read(path: Path) -> dict:
    """What a run that has no result says of itself; nothing where it has not begun, or not well."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return {}


def _best_rate(runs: Sequence[RunResult], metric: str) -> float:
    """The learning rate with the best mean; one that lacks a seed loses to one that has all."""
    rates = list(dict.fromkeys(run.learning_rate for run in runs))

    def merit(rate: float) -> tuple[bool, float]:
        mine = [run for run in runs if run.learning_rate == rate]
        found = sample(mine, metric)
        mean = found.mean if found.values else -float("inf")
        return found.whole, -mean if lower_is_better(metric) and found.values else mean

    return max(rates, key=merit)
