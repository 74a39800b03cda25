"""Every run of a sweep, named, typed and checked before any of them starts."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from analysis import watch
from sweeps import fairness
from sweeps.axes import Choice, text_of
from sweeps.fairness import Bill, Equal, Solved
from sweeps.result import NUMBERS, OF_A_TASK
from sweeps.study import Study
from training.resolve import resolve
from training.run_folder import flatten, jsonable
from training.settings import OptionError, Settings, settings

LEARNING_RATE = "optimizer.learning_rate"
# Options in which the runs of a point differ.
PER_RUN = ("seed", LEARNING_RATE)
_LONGEST = 200


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
      name: of its folder and of its row.
      point: name of the point it belongs to.
      seed, learning_rate: what tells the runs of a point apart.
      config: resolved options, as ``training.settings.settings`` takes them.
      changes: dotted option → value, where the run differs from the sweep file's base config.
      settings: the options, typed.
    """

    name: str
    point: str
    seed: int
    learning_rate: float
    config: Mapping[str, Any]
    changes: Mapping[str, Any]
    settings: Settings

    def order(self) -> dict:
        """What a process needs to know to train it, as JSON."""
        return {
            "name": self.name,
            "point": self.point,
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "config": jsonable(self.config),
        }


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the comparison: all its runs differ in seed and learning rate only.

    Attributes:
      index: its place in the whole list, for ``--point``.
      name: made of its labels.
      labels: one for each axis.
      bill: what it costs.
      solved: the width that was chosen to make it equal in size; None where none was.
      runs: in the order of learning rates, then seeds.
    """

    index: int
    name: str
    labels: tuple[str, ...]
    bill: Bill
    solved: Solved | None
    runs: tuple[Run, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """All points of a sweep."""

    points: tuple[Point, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for point in self.points for run in point.runs)

    def only(self, patterns: str) -> Plan:
        """The points whose name, and else the runs whose name, matches one of several patterns.

        Args:
          patterns: shell patterns, a space between two (names have commas).

        Raises:
          OptionError: one of them matches nothing.
        """
        kept: set[str] = set()
        for pattern in patterns.split() or [patterns]:
            found = {
                run.name
                for point in self.points
                for run in point.runs
                if any(fnmatch.fnmatchcase(name, pattern) for name in (point.name, run.name))
            }
            if not found:
                names = ", ".join(point.name for point in self.points)
                raise OptionError(
                    f"--only={patterns}: no point matches {pattern!r}; there are {names}"
                )
            kept |= found
        chosen = (
            dataclasses.replace(point, runs=tuple(r for r in point.runs if r.name in kept))
            for point in self.points
        )
        return Plan(tuple(point for point in chosen if point.runs))

    def at(self, index: int) -> Plan:
        """One point of the list.

        Raises:
          OptionError: there is no such point.
        """
        if not 0 <= index < len(self.points):
            raise OptionError(f"--point must be from 0 to {len(self.points) - 1}, got {index}")
        return Plan((self.points[index],))


def make_plan(
    study: Study,
    base: Mapping,
    overridden: Iterable[str] = (),
    *,
    seeds: Sequence[int] | None = None,
    equal: Equal | None = None,
) -> Plan:
    """Expands the axes and checks every run.

    Args:
      study: what to compare.
      base: all options of the base config with the user's overrides, as plain dicts.
      overridden: dotted names of those overrides; they hold for every point.
      seeds: instead of the study's.
      equal: instead of the study's.

    Raises:
      OptionError: an unknown option, options that do not go together, an override that no point
        reads or that an axis sweeps, or two points that are the same. The message names the point.
    """
    overridden = tuple(overridden)
    seeds = tuple(study.seeds if seeds is None else seeds)
    _check_overrides(study, overridden)
    equal = study.equal if equal is None else equal
    drafts = [_Draft(base, choice, overridden) for choice in study.axes.choices]
    _check_read(drafts, overridden)
    sizes = _solve(equal, drafts) if equal else [None] * len(drafts)
    points = []
    for index, (draft, solved) in enumerate(zip(drafts, sizes, strict=True)):
        runs = tuple(
            draft.run(seed, rate, bool(study.learning_rates))
            for rate in study.learning_rates or (draft.value(LEARNING_RATE),)
            for seed in seeds
        )
        with draft.named():
            found = fairness.bill(runs[0].settings)
        points.append(Point(index, draft.name, draft.choice.labels, found, solved, runs))
    _check_distinct(points)
    if not study.measures:
        for name in (*study.metrics, *study.columns):
            _check_number(name, points)
    return Plan(tuple(points))


class _Draft:
    """A point on its way: the base config with the choice's changes."""

    def __init__(self, base: Mapping, choice: Choice, overridden: tuple[str, ...]):
        self.base, self.choice, self.name = base, choice, choice.name
        # What the user sets holds for every point, and so wins over a case's change.
        own = {k: v for k, v in choice.changes.items() if k not in overridden}
        known = dict(flatten(base))
        with self.named():
            for option, value in own.items():
                if option not in known:
                    raise OptionError(f"{option} is not an option; see configs/base.py")
                if isinstance(known[option], tuple) and not isinstance(value, tuple):
                    raise OptionError(f"{option} takes a tuple, got {value!r}")
            if "seed" in own:
                raise OptionError("seed is no axis; give the study's seeds")
            self.changes = own
            self.config = self._with({})
        self.overrides = {name: known[name] for name in overridden if self._reads(name)}

    def named(self):
        return _naming(self.name)

    def value(self, option: str):
        """What an option is, or stands for where it is unset."""
        values = dict(flatten(self.config))
        if option not in values:
            raise OptionError(f"{option} is not an option that the point reads")
        if values[option] is None and option.startswith("model."):
            return getattr(self.settings({}).model, option.removeprefix("model."))
        return values[option]

    def settings(self, changes: Mapping) -> Settings:
        with self.named():
            return settings(self._with(changes))

    def settings_at(self, option: str) -> Callable[[int], Settings]:
        return lambda value: self.settings({option: value})

    def take_over(self, solved: Solved) -> None:
        self.changes = {**self.changes, solved.option: solved.value}
        self.config = self._with({})

    def run(self, seed: int, rate: float, in_grid: bool) -> Run:
        special = {"seed": seed} | ({LEARNING_RATE: rate} if in_grid else {})
        name = f"{self.name},lr={text_of(float(rate))}" if in_grid else self.name
        name = f"{name},seed={seed}"
        with _naming(name):
            config = self._with(special)
            typed = settings(config)
            watch.check(typed)
        changes = {**self.overrides, **self.changes, **special}
        return Run(name, self.name, seed, rate, config, changes, typed)

    def _with(self, changes: Mapping) -> dict:
        tree = copy.deepcopy(dict(self.base))
        for option, value in {**self.changes, **changes}.items():
            *groups, last = option.split(".")
            holder = tree
            for group in groups:
                holder = holder[group]
            holder[last] = value
        try:
            return resolve(tree, self.changes)
        except ValueError as error:
            raise OptionError(str(error)) from None

    def _reads(self, option: str) -> bool:
        return option in dict(flatten(self.config))


class _naming:
    """Puts the point's name before what is wrong with it."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, OptionError | NotImplementedError):
            raise OptionError(f"point {self.name}: {error}") from None


def _check_overrides(study: Study, overridden: tuple[str, ...]) -> None:
    swept = {option for choice in study.axes.choices for option in choice.swept}
    swept |= {LEARNING_RATE} if study.learning_rates else set()
    for option in overridden:
        if option == "seed":
            raise OptionError("--config.seed: a sweep has many; set --seeds")
        if option in swept:
            raise OptionError(
                f"--config.{option} is what this sweep varies; choose among its points with --only"
            )


def _check_read(drafts: list[_Draft], overridden: tuple[str, ...]) -> None:
    for option in overridden:
        if not any(option in draft.overrides for draft in drafts):
            raise OptionError(f"--config.{option} would do nothing: no point of the sweep reads it")


def _solve(equal: Equal, drafts: list[_Draft]) -> list[Solved | None]:
    """Widths that make the points equal in size; the drafts take them over."""
    by_name = {draft.name: draft for draft in drafts}
    if equal.to not in by_name:
        raise OptionError(
            f"the sweep is made equal to the point {equal.to!r}, which it does not have; "
            f"it has {', '.join(by_name)}"
        )
    reference = by_name[equal.to].settings({})
    length = reference.task.length
    wanted = equal.of(reference, length)
    if not wanted:
        raise OptionError(f"the reference {equal.to} has no {equal.quantity} to be equal to")
    solved = []
    for draft in drafts:
        if draft.name == equal.to:
            solved.append(None)
            continue
        with draft.named():
            option = equal.width(draft.settings({}))
            if option in draft.choice.swept:
                raise OptionError(
                    f"to be equal in {equal.quantity} it would get another {option}, which is what "
                    "this sweep varies; make other points equal, or another quantity"
                )
            unit = 2 * draft.value("model.num_heads") if option == "model.d_model" else 1
            before = draft.value(option)
            settings_at = draft.settings_at(option)
            found = fairness.solve(equal, wanted, length, option, before, unit, settings_at)
        draft.take_over(found)
        solved.append(found)
    return solved


def _check_number(name: str, points: Sequence[Point]) -> None:
    """Raises OptionError where no run will have a number of that name, without any measures."""
    for point in points:
        settings = point.runs[0].settings
        known = {*NUMBERS, *(field.name for field in dataclasses.fields(Bill))}
        known |= {f"{task.name}/{kind}" for task in settings.evaluated for kind in OF_A_TASK}
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise OptionError(
                f"point {point.name}: the study asks for {name!r}, which a run does not have "
                f"without a measure{hint}"
            )


def _check_distinct(points: list[Point]) -> None:
    names, same, runs = {}, {}, set()
    for point in points:
        if point.name in names:
            raise OptionError(
                f"points {names[point.name]} and {point.index} are both named {point.name}"
            )
        names[point.name] = point.index
        for run in point.runs:
            if run.name in runs:
                raise OptionError(f"two runs are named {run.name}; their values are too near")
            if len(run.name) > _LONGEST:
                raise OptionError(
                    f"the name of a run must have at most {_LONGEST} characters, for it names "
                    f"files; give the axes shorter labels: {run.name}"
                )
            runs.add(run.name)
            if run.settings in same:
                raise OptionError(f"{same[run.settings]} and {run.name} are the same run")
            same[run.settings] = run.name
