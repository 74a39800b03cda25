"""The tables of a report, as text cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sweeps import result
from sweeps.results import PointResult, Results, Sample, chance_name

NOTE = (
    "Mean over seeds ± standard deviation, 95 % bootstrap interval of the mean in brackets. "
    "Chance is what a guesser without memory reaches."
)


def machine(results: Results) -> list[str]:
    """What the runs ran on, a line for each machine and state of the code."""
    told: dict[str, int] = {}
    for run in results.runs:
        if run.environment:
            about = run.environment
            commit = (about["git"]["commit"] or "unknown")[:10]
            changed = " with changes" if about["git"]["modified"] else ""
            text = (
                f"{about['started'][:10]}, {about['device_kind']} ({about['platform']}, "
                f"{about['cpu_count']} cores), jax {about['versions']['jax']}, "
                f"commit {commit}{changed}"
            )
            told[text] = told.get(text, 0) + 1
    return [f"{count} runs: {text}." for text, count in told.items()]


def head(results: Results) -> tuple[str, ...]:
    """Names of the columns of the table of points."""
    numbers = (*with_chance(results), *results.events, *results.columns)
    names = ("point", *numbers, "learning rate", "seeds")
    return tuple(map(spaced, names))


def with_chance(results: Results) -> list[str]:
    """The metrics, each with its chance behind it where there is one."""
    columns = []
    for metric in results.metrics:
        columns += [metric, "chance"] if results.chance(metric) is not None else [metric]
    return columns


def spaced(name: str) -> str:
    """A name with spaces, where a heading may break."""
    return name.replace("_", " ")


def body(results: Results, interval: bool = True) -> list[tuple[str, ...]]:
    """The table of points, as text; with the bootstrap interval or without."""
    return [_row(results, point, interval) for point in results.points]


def _row(results: Results, point: PointResult, interval: bool) -> tuple[str, ...]:
    cells = [point.name]
    for metric in results.metrics:
        cells.append(with_interval(point.sample(metric), interval))
        if results.chance(metric) is not None:
            chance = chance_of(point, metric)
            cells.append("–" if chance is None else f"{chance:.3f}")
    cells += [with_interval(point.sample(event), interval) for event in results.events]
    cells += [number(point.sample(column).mean) for column in results.columns]
    done = sum(run.status == result.DONE for run in point.best)
    return (*cells, f"{point.learning_rate:g}", f"{done} of {len(point.best)}")


def chance_of(point: PointResult, metric: str) -> float | None:
    """What a guesser reaches at a point; None where no run is done or the metric has no chance."""
    name = chance_name(metric)
    found = () if name is None else point.sample(name).values
    return found[0] if found else None


def rates(results: Results) -> str:
    """The whole grid of the first metric, the best of each point marked."""
    metric = results.metrics[0]
    columns = sorted({rate for point in results.points for rate in point.rates})
    rows = []
    for point in results.points:
        cells = []
        for rate in columns:
            if rate not in point.rates:
                cells.append("–")
                continue
            text = with_interval(point.sample(metric, rate))
            cells.append(f"**{text}** ★" if rate == point.learning_rate else text)
        rows.append((point.name, *cells))
    chance = results.chance(metric)
    said = "" if chance is None else f" Chance is {chance:.3f}."
    return f"{metric} by learning rate; ★ marks the best, which the tables show.{said}\n\n" + grid(
        ("point", *(f"{rate:g}" for rate in columns)), rows
    )


def with_interval(sample: Sample, interval: bool = True) -> str:
    """Mean ± spread [interval], as far as there are any."""
    if not sample.values:
        return "–"
    text = number(sample.mean)
    if sample.interval is not None:
        low, high = sample.interval
        text += f" ± {number(sample.spread)}"
        text += f" [{number(low)}, {number(high)}]" if interval else ""
    return text if sample.whole else f"{text} ({len(sample.values)} of {sample.of})"


def number(value: float) -> str:
    """A number as a table shows it."""
    if math.isnan(value):
        return "–"
    if value == int(value) and abs(value) >= 1:
        return f"{int(value):,}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
