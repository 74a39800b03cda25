"""Claims put to the results: what was expected, what was measured, and whether they agree.

A verdict of a study is any function of ``results.Results`` that returns a ``Verdict``; those here
are values that do so. What lacks a seed, because its run is missing or has failed or because what
is asked about has not happened in it, is not confirmed.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import ClassVar

from sweeps.results import Results, Sample

CONFIRMED, NOT_CONFIRMED = "CONFIRMED", "NOT CONFIRMED"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of a claim.

    Attributes:
      claim: a sentence, with the row of the claims' table or the paper it is from.
      expected: what would confirm it.
      measured: what was found.
      confirmed: whether that is what was expected.
    """

    claim: str
    expected: str
    measured: str
    confirmed: bool

    def __str__(self) -> str:
        return CONFIRMED if self.confirmed else NOT_CONFIRMED


@dataclasses.dataclass(frozen=True)
class _Bounded:
    """The mean of a point is on one side of a bound, or on it."""

    claim: str
    point: str
    metric: str
    bound: float
    sign: ClassVar[str]
    holds: ClassVar[Callable[[float, float], bool]]

    def __call__(self, results: Results) -> Verdict:
        found = results.sample(self.point, self.metric)
        expected = f"{self.metric} of {self.point} {self.sign} {self.bound:g}"
        confirmed = found.whole and self.holds(found.mean, self.bound)
        return Verdict(self.claim, expected, describe(found), confirmed)


class Above(_Bounded):
    """The mean of a point is at least a bound."""

    sign = "≥"
    holds = operator.ge


class Below(_Bounded):
    """The mean of a point is at most a bound."""

    sign = "≤"
    holds = operator.le


@dataclasses.dataclass(frozen=True)
class Between:
    """The mean of a point is between two bounds, or on one of them."""

    claim: str
    point: str
    metric: str
    low: float
    high: float

    def __call__(self, results: Results) -> Verdict:
        found = results.sample(self.point, self.metric)
        expected = f"{self.low:g} ≤ {self.metric} of {self.point} ≤ {self.high:g}"
        confirmed = found.whole and self.low <= found.mean <= self.high
        return Verdict(self.claim, expected, describe(found), confirmed)


@dataclasses.dataclass(frozen=True)
class Exceeds:
    """The mean of a point is above that of another, by at least so much."""

    claim: str
    point: str
    other: str
    metric: str
    by: float

    def __call__(self, results: Results) -> Verdict:
        ours, theirs = (results.sample(name, self.metric) for name in (self.point, self.other))
        expected = f"{self.metric} of {self.point} − {self.other} ≥ {self.by:g}"
        measured = f"{ours.mean - theirs.mean:.4g}: {describe(ours)} and {describe(theirs)}"
        confirmed = ours.whole and theirs.whole and ours.mean - theirs.mean >= self.by
        return Verdict(self.claim, expected, measured, confirmed)


@dataclasses.dataclass(frozen=True)
class Outdoes:
    """One number of a point is above another number of it, by at least so much, in the mean."""

    claim: str
    point: str
    metric: str
    other: str
    by: float

    def __call__(self, results: Results) -> Verdict:
        ours, theirs = (results.sample(self.point, name) for name in (self.metric, self.other))
        expected = f"{self.metric} − {self.other} of {self.point} ≥ {self.by:g}"
        measured = f"{ours.mean - theirs.mean:.4g}: {describe(ours)} and {describe(theirs)}"
        confirmed = ours.whole and theirs.whole and ours.mean - theirs.mean >= self.by
        return Verdict(self.claim, expected, measured, confirmed)


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The mean of a point, divided by that of another, is a number, within a share of it."""

    claim: str
    point: str
    other: str
    metric: str
    ratio: float
    within: float = 0.0

    def __call__(self, results: Results) -> Verdict:
        ours, theirs = (results.sample(name, self.metric) for name in (self.point, self.other))
        found = ours.mean / theirs.mean if theirs.mean else math.nan
        around = f" ± {self.within:.0%}" if self.within else ""
        expected = f"{self.metric} of {self.point} / {self.other} = {self.ratio:g}{around}"
        measured = f"{found:.4g}: {describe(ours)} and {describe(theirs)}"
        near = abs(found - self.ratio) <= self.within * abs(self.ratio) + 1e-9
        return Verdict(self.claim, expected, measured, near and ours.whole and theirs.whole)


@dataclasses.dataclass(frozen=True)
class AllAbove:
    """The means of several points are all at least a bound."""

    claim: str
    points: tuple[str, ...]
    metric: str
    bound: float

    def __call__(self, results: Results) -> Verdict:
        found = {point: results.sample(point, self.metric) for point in self.points}
        expected = f"{self.metric} of {', '.join(self.points)} ≥ {self.bound:g}"
        measured = "; ".join(f"{point} {describe(sample)}" for point, sample in found.items())
        confirmed = all(s.whole and s.mean >= self.bound for s in found.values())
        return Verdict(self.claim, expected, measured, confirmed)


def describe(sample: Sample) -> str:
    """A sample in words: its mean, spread and interval, as far as there are any."""
    if not sample.values:
        return "no result"
    seeds = f"{len(sample.values)} seeds" if sample.of > 1 else "one seed"
    if not sample.whole:
        seeds = f"{len(sample.values)} of {sample.of} seeds"
    if (interval := sample.interval) is None or not sample.spread:
        return f"{sample.mean:.4g} ({seeds})"
    low, high = interval
    return f"{sample.mean:.4g} ± {sample.spread:.2g} [{low:.4g}, {high:.4g}] ({seeds})"


def judge(verdicts: tuple[Callable[[Results], Verdict], ...], results: Results) -> list[Verdict]:
    """All verdicts of a study; one that cannot be judged, such as for want of a run, says so."""
    return [_judge(verdict, results) for verdict in verdicts]


def _judge(verdict: Callable[[Results], Verdict], results: Results) -> Verdict:
    try:
        return verdict(results)
    except Exception as error:  # a user's function, which must not cost the report
        claim = getattr(verdict, "claim", getattr(verdict, "__name__", str(verdict)))
        return Verdict(claim, "", f"cannot be judged: {_said(error)}", False)


def _said(error: Exception) -> str:
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    return f"{type(error).__name__}: {error}"
