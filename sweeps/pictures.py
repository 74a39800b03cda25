"""Pictures of a sweep, for paper: the comparison, the curves, and any two numbers as a scatter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis.figures import new_figure, with_prefixes
from analysis.plots import COLOURS, STYLES
from sweeps.results import PointResult, Results, RunResult, sample

# Their number has no divisor in common with that of the colours, so that pairs repeat late.
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
# Colours with line styles: their numbers have no divisor in common either.
LOOKS = len(COLOURS) * len(STYLES)
# Wide enough for a whole dash and dot of every style.
LEGEND = {"frameon": False, "handlelength": 4}


def draw(results: Results, folder: Path) -> list[Path]:
    """The pictures that every sweep has, as far as there are results to show.

    More than ``LOOKS`` curves cannot be told apart on paper; the page has them, with hover.
    """
    drawn = []
    if any(run.metrics for run in results.runs):
        drawn.append(draw_comparison(results, folder / "comparison.png"))
    if with_curves(results) and len(results.points) <= LOOKS:
        drawn.append(draw_curves(results, folder / "curves.png"))
    return drawn


def style(index: int) -> dict:
    """Colour and line of the index-th point, told apart in print and by colour-blind readers."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)]}


def draw_comparison(results: Results, path: Path) -> Path:
    """A panel a metric, a line a point: every seed, the mean and its bootstrap interval."""
    metrics, points = results.metrics, results.points
    size = (1.2 + 3.4 * len(metrics), 1.2 + 0.28 * len(points))
    figure = new_figure(*size)
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for at, point in enumerate(points):
            found = point.sample(metric)
            if not found.values:
                axes.text(0.02, at, "no result", va="center", fontsize=7, color="0.4",
                          transform=axes.get_yaxis_transform())  # fmt: skip
                continue
            axes.plot(found.values, [at] * len(found.values), "o", ms=4, color="0.65", mew=0)
            if found.interval is not None:
                axes.plot(found.interval, [at, at], "-", color=COLOURS[0], lw=1.5)
            axes.plot(found.mean, at, "D", ms=5, color=COLOURS[0])
        if (chance := results.chance(metric)) is not None:
            axes.axvline(chance, color="0.4", linestyle=(0, (1, 1.5)), lw=1.2)
        if "accuracy" in metric:
            axes.set_xlim(-0.02, 1.02)
        axes.set(xlabel=metric)
        clean(axes)
    panels[0].set_yticks(range(len(points)), [point.name for point in points], fontsize=8)
    panels[0].set_ylim(len(points) - 0.5, -0.5)
    figure.savefig(path, dpi=150)
    return path


def draw_curves(results: Results, path: Path) -> Path:
    """A panel a metric against training tokens: the mean over seeds, and every seed thinly."""
    metrics = with_curves(results)
    # A line of the legend takes a sixth of an inch.
    size = (2.4 + 4.2 * len(metrics), max(4.2, 0.5 + len(results.points) / 6))
    figure = new_figure(*size)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for index, point in enumerate(results.points):
            seeds = [curve(run, metric) for run in point.best]
            for tokens, values in seeds:
                axes.plot(tokens, values, lw=0.6, alpha=0.4, **style(index))
            tokens, values = mean_curve(seeds)
            if tokens:
                axes.plot(tokens, values, lw=2, label=point.name, **style(index))
        if (chance := results.chance(metric)) is not None:
            axes.axhline(chance, color="0.4", linestyle=(0, (1, 1.5)), lw=1.2, label="chance")
        if "accuracy" in metric:
            axes.set_ylim(-0.02, 1.02)
        axes.set(xlabel="training tokens", ylabel=metric)
        axes.xaxis.set_major_formatter(with_prefixes())
        clean(axes)
    lines = panels[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right upper", fontsize=7, **LEGEND)
    figure.savefig(path, dpi=150)
    return path


def with_curves(results: Results) -> list[str]:
    """The metrics that were followed through training; others were measured once, at its end."""
    return [name for name in results.metrics if any(curve(run, name)[0] for run in results.runs)]


def curve(run: RunResult, metric: str) -> tuple[list[float], list[float]]:
    """Training tokens and the values of a metric, of the lines that have it."""
    lines = [line for line in run.lines if metric in line]
    return [line["tokens"] for line in lines], [line[metric] for line in lines]


def mean_curve(curves: Sequence[tuple[list[float], list[float]]]) -> tuple[list, list]:
    """The mean at the token counts that all curves have."""
    curves = [dict(zip(*one, strict=True)) for one in curves if one[0]]
    if not curves:
        return [], []
    tokens = sorted(set.intersection(*(set(one) for one in curves)))
    return tokens, [float(np.mean([one[at] for one in curves])) for at in tokens]


@dataclasses.dataclass(frozen=True)
class Scatter:
    """One number of each point against another; points with the same first label are joined.

    Attributes:
      x, y: names of numbers of a run, such as "cache_bytes" and "recall/accuracy".
      name: of the picture's file, without its ending.
      log: whether x is drawn to the base 2.
    """

    x: str
    y: str
    name: str
    log: bool = True

    def __call__(self, results: Results, folder: Path) -> list[Path]:
        series: dict[str, list[PointResult]] = {}
        for point in results.points:
            if point.sample(self.x).values and point.sample(self.y).values:
                series.setdefault(point.labels[0], []).append(point)
        if not series:
            return []
        figure = new_figure(7, 4.4)
        axes = figure.subplots()
        for index, (name, points) in enumerate(series.items()):
            points = sorted(points, key=lambda point: point.sample(self.x).mean)
            x = [point.sample(self.x).mean for point in points]
            samples = [point.sample(self.y) for point in points]
            ends = [s.interval or (s.mean, s.mean) for s in samples]
            low, high = zip(*ends, strict=True)
            mean = [s.mean for s in samples]
            marker = MARKERS[index % len(MARKERS)]
            axes.plot(x, mean, marker=marker, lw=1.5, label=name, **style(index))
            axes.vlines(x, low, high, color=style(index)["color"], lw=1)
        if (chance := results.chance(self.y)) is not None:
            axes.axhline(chance, color="0.4", linestyle=(0, (1, 1.5)), label=f"chance {chance:.3f}")
        if "accuracy" in self.y:
            axes.set_ylim(-0.02, 1.02)
        if self.log:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel=self.x.replace("_", " "), ylabel=self.y)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, **LEGEND)
        clean(axes)
        path = folder / f"{self.name}.png"
        figure.savefig(path, dpi=150)
        return [path]


@dataclasses.dataclass(frozen=True)
class Series:
    """Numbers whose names end in a length, one line a point, against that length.

    Attributes:
      prefix: the names are ``<prefix><length>``.
      name: of the picture's file, without its ending.
      trained: the greatest length seen in training, marked; None: no mark.
      chance: level drawn; None: none.
    """

    prefix: str
    name: str
    trained: int | None = None
    chance: float | None = None

    def __call__(self, results: Results, folder: Path) -> list[Path]:
        figure = new_figure(7, 4.4)
        axes = figure.subplots()
        lengths: set[int] = set()
        for index, point in enumerate(results.points):
            names = {
                int(name.removeprefix(self.prefix)): name
                for run in point.best
                for name in run.metrics
                if name.startswith(self.prefix) and name.removeprefix(self.prefix).isdigit()
            }
            mean = [(at, point.sample(names[at]).mean) for at in sorted(names)]
            mean = [(at, value) for at, value in mean if not math.isnan(value)]
            if mean:
                lengths |= {at for at, _ in mean}
                marker = MARKERS[index % len(MARKERS)]
                axes.plot(*zip(*mean, strict=True), marker=marker, label=point.name, **style(index))
        if not lengths:
            return []
        if self.trained is not None:
            axes.axvspan(min(lengths) * 0.9, self.trained * 1.05, color="0.92", zorder=0,
                         label="lengths seen in training")  # fmt: skip
        if self.chance is not None:
            axes.axhline(self.chance, color="0.4", linestyle=(0, (1, 1.5)),
                         label=f"chance {self.chance:.3f}")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted(lengths), [str(length) for length in sorted(lengths)])
        axes.minorticks_off()
        axes.set(xlabel="length", ylabel=self.prefix.rstrip("@"), ylim=(-0.02, 1.02))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, **LEGEND)
        clean(axes)
        path = folder / f"{self.name}.png"
        figure.savefig(path, dpi=150)
        return [path]


@dataclasses.dataclass(frozen=True)
class Levels:
    """A metric against training tokens, with the levels that others reach in it.

    Attributes:
      metric: followed through training, such as "markov/loss".
      levels: numbers of a run → what they are called, drawn as lines across.
      name: of the picture's file, without its ending.
    """

    metric: str
    levels: tuple[tuple[str, str], ...]
    name: str = "levels"

    def __call__(self, results: Results, folder: Path) -> list[Path]:
        if self.metric not in with_curves(results):
            return []
        figure = new_figure(7, 4.4)
        axes = figure.subplots()
        for index, point in enumerate(results.points):
            tokens, values = mean_curve([curve(run, self.metric) for run in point.best])
            if tokens:
                axes.plot(tokens, values, lw=2, label=point.name, **style(index))
        for shade, (number, label) in enumerate(self.levels):
            found = sample(results.runs, number)
            if found.values:
                look = {"color": f"{0.1 + 0.2 * shade:.2f}", "linestyle": (0, (1, 1 + shade))}
                axes.axhline(found.mean, lw=1.2, label=f"{label}: {found.mean:.3f}", **look)
        axes.set(xlabel="training tokens", ylabel=self.metric)
        axes.xaxis.set_major_formatter(with_prefixes())
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, **LEGEND)
        clean(axes)
        path = folder / f"{self.name}.png"
        figure.savefig(path, dpi=150)
        return [path]


def clean(axes) -> None:
    """A faint grid, and no frame on two sides."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
