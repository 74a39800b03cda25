"""What a benchmark leaves behind: a Markdown report, a CSV of all samples, a picture."""

from __future__ import annotations

import csv
import dataclasses
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax

from analysis.figures import new_figure
from analysis.plots import COLOURS, STYLES
from benchmarks.timing import Estimate
from training.run_folder import write_json

CPUINFO = Path("/proc/cpuinfo")
# Flags there of instructions that decide which of two libraries is faster.
WIDE = {"avx512f": "AVX-512", "amx_bf16": "AMX bfloat16"}
MARKERS = "os^Dv<>*"
# Of what was claimed; None: it was not measured, or what was measured is too uncertain.
WORDS = {True: "CONFIRMED", False: "NOT CONFIRMED", None: "NOT DECIDED"}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a measurement says about a row of the table of claims.

    Attributes:
      row: its number.
      claim: in short.
      confirmed: None where it could not be decided.
      figures: what was measured, or why it was not.
    """

    row: str
    claim: str
    confirmed: bool | None
    figures: str

    def __str__(self):
        return f"row {self.row} {WORDS[self.confirmed]}: {self.claim} — {self.figures}"


@dataclasses.dataclass(frozen=True)
class Goal:
    """How many times as fast as a peer ours is to be, and how many times it is; None: not known."""

    name: str
    wanted: float
    reached: float | None

    def __str__(self):
        if self.reached is None:
            return f"goal {self.name}: at least {self.wanted} ×, not measured"
        word = "reached" if self.reached >= self.wanted else "NOT reached"
        return f"goal {self.name}: at least {self.wanted} ×, {word} with {self.reached:.2f} ×"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def items(lines: Iterable[object]) -> str:
    """A list."""
    return "\n".join(f"- {line}" for line in lines)


def missing(errors: Mapping[str, str]) -> list[str]:
    """A section on what was not measured and why, each reason once, where there is such."""
    by_reason: dict[str, list[str]] = {}
    for what, why in errors.items():
        by_reason.setdefault(why, []).append(what)
    lines = items(f"{'; '.join(whats)}: {why}" for why, whats in by_reason.items())
    return [f"Not measured:\n\n{lines}"] if errors else []


def machine(torch: str) -> str:
    """One line on what was measured on; ``torch`` says which, or why there is none."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kind = f"{cores} CPU cores" if device.platform == "cpu" else device.device_kind
    about = ", ".join([platform.machine(), *processor(CPUINFO)])
    return f"{kind} ({about}), jax {jax.__version__}; {torch}"


def processor(path: Path) -> list[str]:
    """Its model, and whether it has the wide instructions of ``WIDE``; nothing where unknown.

    Args:
      path: a file like Linux's /proc/cpuinfo.
    """
    if not path.exists():
        return []
    fields = {}
    for line in path.read_text().splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    said = [fields["model name"]] if "model name" in fields else []
    if "flags" in fields:
        has = fields["flags"].split()
        said += [name if flag in has else f"no {name}" for flag, name in WIDE.items()]
    return said


def write(
    folder: Path,
    name: str,
    sections: Sequence[str],
    samples: Iterable[Mapping],
    decided: Iterable[Verdict | Goal],
) -> None:
    """Writes ``<name>.md``, ``.csv`` and ``.json`` (what was decided), and prints the first."""
    path = folder / f"{name}.md"
    path.write_text("\n\n".join(sections) + "\n")
    write_json(folder / f"{name}.json", [dataclasses.asdict(one) for one in decided])
    samples = list(samples)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(samples[0]) if samples else ["seconds"])
        writer.writeheader()
        writer.writerows(samples)
    print("\n\n".join(sections), f"\n\nsaved {path}", sep="")


def draw(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    path: Path,
    xlabel: str,
    ylabel: str,
) -> None:
    """Lines of (x, y) points by name in panels side by side, on logarithmic axes.

    A name looks the same in every panel.
    """
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    figure = new_figure(5.5 * len(panels), 5.2)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, lines) in zip(grid, panels.items(), strict=True):
        for name, points in lines.items():
            i = names.index(name)
            axes.plot(
                *zip(*points, strict=True),
                label=name,
                color=COLOURS[i % len(COLOURS)],
                linestyle=STYLES[i // len(COLOURS) % len(STYLES)],
                marker=MARKERS[i % len(MARKERS)],
                markersize=4,
                lw=1.5,
            )
        xs = sorted({x for points in lines.values() for x, _ in points})
        axes.set(title=title, xlabel=xlabel, xscale="log", yscale="log")
        axes.set_xticks(xs, [f"{x:,.0f}" for x in xs])
        axes.xaxis.minorticks_off()  # those of y label a range of less than a decade
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0].set_ylabel(ylabel)
    figure.legend(*_entries(grid), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def bars(estimates: Mapping[str, Estimate], path: Path, xlabel: str) -> None:
    """A bar for each name, as long as its median, with its quartiles; the first one is on top."""
    figure = new_figure(7.0, 1.0 + 0.45 * len(estimates))
    axes = figure.subplots()
    medians = [estimate.median for estimate in estimates.values()]
    spread = [
        [estimate.median - estimate.low for estimate in estimates.values()],
        [estimate.high - estimate.median for estimate in estimates.values()],
    ]
    drawn = axes.barh(list(estimates), medians, xerr=spread, color=COLOURS[0], capsize=3)
    axes.bar_label(drawn, fmt="%.1f", padding=6)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _entries(grid):
    """Handles and labels of all panels, each name once."""
    entries = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    return list(entries.values()), list(entries)
