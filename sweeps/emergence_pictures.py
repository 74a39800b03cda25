"""Pictures of runs that were watched: curves of many runs, pruning, and variants side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from analysis import emergence_table
from analysis.emergence import strongest_head
from analysis.figures import new_figure, with_prefixes
from analysis.loss_by_position import in_context_learning_score
from analysis.plots import COLOURS, STYLES
from sweeps.folder import SweepFolder
from sweeps.pictures import MARKERS, clean, mean_curve, style
from sweeps.results import PointResult, Results


@dataclasses.dataclass(frozen=True)
class EmergenceCurves:
    """Prefix matching, previous-token attention and in-context learning against training tokens.

    A column for each group of points; the mean over seeds, and every seed thinly. Scores are those
    of the head that ends with the highest.

    Attributes:
      columns: names of points, by column.
      around: positions averaged in the in-context-learning score, as in ``analysis.around``.
      name: of the picture's file, without its ending.
    """

    columns: tuple[tuple[str, ...], ...]
    around: int = 0
    name: str = "emergence"

    def __call__(self, results: Results, folder: Path) -> list[Path]:
        sweep = SweepFolder(folder)
        points = [[results.point(name) for name in column] for column in self.columns]
        if not any(_tables(sweep, point) for column in points for point in column):
            return []
        figure = new_figure(4.4 * len(points), 7.6)
        panels = figure.subplots(3, len(points), sharex="col", sharey="row", squeeze=False)
        for column, rows in zip(points, panels.T, strict=True):
            for index, point in enumerate(column):
                tables = _tables(sweep, point)
                for axes, curve in zip(rows, (_prefix, _previous, self._learning), strict=True):
                    seeds = [(t["tokens"].tolist(), curve(t).tolist()) for t in tables]
                    _mean_and_seeds(axes, seeds, point.name, style(index))
            rows[0].legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False,
                           fontsize=8)  # fmt: skip
            rows[-1].set_xlabel("training tokens")
            rows[-1].xaxis.set_major_formatter(with_prefixes())
        names = ("prefix matching", "previous token", "in-context learning\n(nats)")
        for axes, label in zip(panels[:, 0], names, strict=True):
            axes.set_ylabel(label)
        for axes in panels[:2].flat:
            axes.set_ylim(-0.02, 1.02)
        for axes in panels.flat:
            clean(axes)
        path = folder / f"{self.name}.png"
        figure.savefig(path, dpi=150)
        return [path]

    def _learning(self, table) -> np.ndarray:
        return in_context_learning_score(table.loss_by_position(), self.around)


def _tables(sweep: SweepFolder, point: PointResult) -> list:
    found = [emergence_table.read(sweep.run(run.name).emergence) for run in point.best]
    return [table for table in found if table is not None]


def _prefix(table) -> np.ndarray:
    return _strongest(table.heads("prefix_matching"))


def _previous(table) -> np.ndarray:
    return _strongest(table.heads("previous_token"))


def _strongest(score_RLN: np.ndarray) -> np.ndarray:
    return score_RLN[:, *strongest_head(score_RLN)]


def _mean_and_seeds(axes, seeds: Sequence, label: str, look: dict) -> None:
    for x, y in seeds:
        axes.plot(x, y, lw=0.6, alpha=0.4, **look)
    x, y = mean_curve(seeds)
    if x:
        axes.plot(x, y, lw=2, label=label, **look)


@dataclasses.dataclass(frozen=True)
class PruningCurves:
    """Accuracy against the share of heads removed, by importance and at random, a panel a point.

    Attributes:
      points: names.
      name: of the picture's file, without its ending.
      chance: level drawn.
    """

    points: tuple[str, ...]
    chance: float
    name: str = "pruning"

    def __call__(self, results: Results, folder: Path) -> list[Path]:
        points = [results.point(name) for name in self.points]
        if not any(_removed(point, "importance") for point in points):
            return []
        figure = new_figure(4.4 * len(points), 3.6)
        panels = figure.subplots(1, len(points), sharey=True, squeeze=False)[0]
        for axes, point in zip(panels, points, strict=True):
            for index, (order, label) in enumerate(
                (("importance", "least important first"), ("random", "random order"))
            ):
                names = _removed(point, order)
                seeds = [
                    (sorted(names), [run.metrics[names[at]] for at in sorted(names)])
                    for run in point.best
                    if run.metrics
                ]
                look = {"color": COLOURS[index], "linestyle": STYLES[index]}
                _mean_and_seeds(axes, seeds, label, look)
            axes.axhline(self.chance, color="0.4", linestyle=(0, (1, 1.5)), lw=1.2,
                         label=f"chance {self.chance:.3f}")  # fmt: skip
            axes.set(title=point.name, xlabel="heads removed (per cent)", ylim=(-0.02, 1.02))
            clean(axes)
        panels[0].set_ylabel("accuracy on the answers")
        panels[0].legend(frameon=False, fontsize=8)
        path = folder / f"{self.name}.png"
        figure.savefig(path, dpi=150)
        return [path]


def _removed(point: PointResult, order: str) -> dict[int, str]:
    """Per cent removed → the name of the number."""
    prefix = f"pruned/{order}@"
    names = {name for run in point.best for name in run.metrics if name.startswith(prefix)}
    return {int(name.removeprefix(prefix)): name for name in names}


@dataclasses.dataclass(frozen=True)
class ByVariant:
    """A panel a number, a row a variant, a marker for each way that the variant was trained.

    The first label of a point is its variant, the others are the way. Bars are bootstrap
    intervals of the mean.

    Attributes:
      numbers: name of a number → title of its panel.
      name: of the picture's file, without its ending.
    """

    numbers: tuple[tuple[str, str], ...]
    name: str = "by_variant"

    def __call__(self, results: Results, folder: Path) -> list[Path]:
        if not any(run.metrics for run in results.runs):
            return []
        variants = list(dict.fromkeys(point.labels[0] for point in results.points))
        ways = list(dict.fromkeys(point.labels[1:] for point in results.points))
        size = (1.8 + 2.5 * len(self.numbers), 1.4 + 0.42 * len(variants))
        figure = new_figure(*size)
        panels = figure.subplots(1, len(self.numbers), sharey=True, squeeze=False)[0]
        for axes, (number, title) in zip(panels, self.numbers, strict=True):
            for point in results.points:
                way = ways.index(point.labels[1:])
                found = point.sample(number)
                if not found.values:
                    continue
                at = variants.index(point.labels[0]) + 0.18 * (way - (len(ways) - 1) / 2)
                colour = COLOURS[way % len(COLOURS)]
                if found.interval is not None:
                    axes.plot(found.interval, [at, at], "-", color=colour, lw=1.2)
                axes.plot(found.mean, at, MARKERS[way % len(MARKERS)], color=colour, ms=5)
            axes.set_title(title, fontsize=9)
            low, high = axes.get_xlim()
            # Shares, scores and accuracies are read against 0 and 1; a step is not.
            axes.set_xlim((-0.04, 1.04) if high < 1.5 else (min(0, low), high))
            clean(axes)
            for at in range(1, len(variants)):
                axes.axhline(at - 0.5, color="0.85", lw=0.8, zorder=0)
        for way, labels in enumerate(ways):
            panels[0].plot([], [], MARKERS[way % len(MARKERS)], label=", ".join(labels),
                           color=COLOURS[way % len(COLOURS)])  # fmt: skip
        panels[0].set_yticks(range(len(variants)), variants, fontsize=9)
        panels[0].set_ylim(len(variants) - 0.5, -0.5)
        figure.legend(loc="outside lower center", ncols=len(ways), frameon=False, fontsize=9)
        path = folder / f"{self.name}.png"
        figure.savefig(path, dpi=150)
        return [path]
