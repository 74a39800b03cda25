"""What a sweep file describes, and reading one."""

from __future__ import annotations

import dataclasses
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweeps.axes import Axes, AxisError, case
from sweeps.fairness import Equal
from training.settings import OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A question put to many runs. The base config is the sweep file's ``get_config()``.

    Attributes:
      question: what the sweep is to find out, one sentence; the title of the report.
      axes: the points that are compared.
      seeds: every point is trained with each of them.
      metrics: what the tables show, such as "copy/accuracy"; the first one chooses the best
        learning rate. Names ending in "loss" are better low, all others high.
      columns: further numbers of a run that the tables show: "parameters",
        "cache_bytes_per_token", "step_time_ms", or the name of a measure.
      events: numbers that only those runs have in which something happened, such as the step of a
        change: shown over these, with their interval.
      learning_rates: a grid that every point is trained on; empty: the point's own rate only.
      equal: width solved for, so that points have the same size; None: as they are.
      measures: functions of (run folder, settings) → {name: number}, called after training.
      verdicts: functions of ``results.Results`` → ``verdicts.Verdict``.
      pictures: functions of (``results.Results``, folder) → paths, beside those every sweep has.
    """

    question: str
    axes: Axes = dataclasses.field(default_factory=lambda: case("base"))
    seeds: tuple[int, ...] = (0,)
    metrics: tuple[str, ...]
    columns: tuple[str, ...] = ("parameters", "cache_bytes_per_token", "step_time_ms")
    events: tuple[str, ...] = ()
    learning_rates: tuple[float, ...] = ()
    equal: Equal | None = None
    measures: tuple[Callable, ...] = ()
    verdicts: tuple[Callable, ...] = ()
    pictures: tuple[Callable, ...] = ()

    def __post_init__(self):
        if not self.axes.choices:
            raise AxisError("the sweep has no points; its axes are empty")
        if not self.metrics:
            raise AxisError("metrics is empty; name at least one, such as 'copy/accuracy'")
        if not self.seeds:
            raise AxisError("seeds is empty; give at least one")
        _distinct("seeds", self.seeds)
        _distinct("learning_rates", self.learning_rates)


def _distinct(name: str, values: tuple) -> None:
    repeated = sorted({value for value in values if values.count(value) > 1})
    if repeated:
        raise AxisError(f"{name} {list(values)} has {', '.join(map(str, repeated))} twice")


def load(path: str | Path) -> Study:
    """The study of a sweep file.

    Raises:
      OptionError: no such file, one without ``get_sweep()``, or axes that describe no sweep.
    """
    return described(path, Study)


def described(path: str | Path, *kinds: type) -> Any:
    """What a sweep file describes, one of several kinds.

    Raises:
      OptionError: as ``load``, and where it is of no such kind.
    """
    if not Path(path).is_file():
        raise OptionError(f"--config={path}: there is no such file; see configs/sweeps/")
    try:
        names = runpy.run_path(str(path))
        if "get_sweep" not in names:
            raise OptionError(
                f"--config={path} has no get_sweep(), so it describes one run and no sweep; "
                "train.py trains it"
            )
        found = names["get_sweep"]()
    except AxisError as error:
        raise OptionError(f"{path}: {error}") from None
    if not isinstance(found, kinds):
        known = " or ".join(f"a {kind.__name__}" for kind in kinds)
        raise OptionError(f"{path}: get_sweep() must return {known}, got {type(found).__name__}")
    return found


def lower_is_better(metric: str) -> bool:
    """Whether a small value of the metric is a good one."""
    return metric.endswith("loss")
