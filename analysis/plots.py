"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.figures import new_figure
from tasks import Task

# Okabe and Ito's palette, told apart by colour-blind readers; line styles differ too, for print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")


def draw_curves(lines: Sequence[dict], tasks: Sequence[Task], path: Path) -> None:
    """Accuracy of every task with its chance level, and the loss, against training tokens."""
    figure = new_figure(7, 6)
    accuracy, loss = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    evaluated = [line for line in lines if f"{tasks[0].name}/accuracy" in line]
    tokens = [line["tokens"] for line in evaluated]
    chances: dict[float, list[str]] = {}
    for i, task in enumerate(tasks):
        values = [line[f"{task.name}/accuracy"] for line in evaluated]
        style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)]}
        accuracy.plot(tokens, values, label=f"{task.name}: {values[-1]:.3f}", lw=2, **style)
        chances.setdefault(task.chance, []).append(task.name)
    for chance, names in chances.items():
        label = f"chance of {' and '.join(names)}: {chance:.3f}"
        accuracy.axhline(chance, color="0.4", linestyle=(0, (1, 1.5)), lw=1.2, label=label)
    accuracy.set(ylabel="accuracy on the answers", ylim=(-0.02, 1.02))
    accuracy.legend(loc="center right", frameon=False)
    trained = [line for line in lines if "loss" in line]
    loss.plot([line["tokens"] for line in trained], [line["loss"] for line in trained],
              color="black", lw=1.5)  # fmt: skip
    loss.set(ylabel="training loss (nats)", xlabel="training tokens", ylim=(0, None))
    for axes in (accuracy, loss):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def draw_accuracy_by_length(rows: Sequence, path: Path) -> None:
    """Teacher-forced and generated accuracy against sequence length, the training range shaded.

    Args:
      rows: ``analysis.evaluation.LengthResult``s.
      path: of the PNG.
    """
    names = list(dict.fromkeys(row.task for row in rows))
    figure = new_figure(4.2 * len(names), 3.8)
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    trained = max(row.length for row in rows if row.inside)
    for axes, name in zip(panels, names, strict=True):
        mine = [row for row in rows if row.task == name]
        for label, field, style, colour in (
            ("teacher-forced", "accuracy", "o-", COLOURS[0]),
            ("generated", "generated_accuracy", "s--", COLOURS[1]),
            ("generated, whole answer", "generated_sequence_accuracy", "^:", COLOURS[2]),
        ):
            points = [(row.length, getattr(row, field)) for row in mine]
            points = [point for point in points if point[1] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, color=colour, label=label)
        axes.axhline(mine[0].chance, color="0.4", linestyle=(0, (1, 1.5)),
                     label=f"chance {mine[0].chance:.3f}")  # fmt: skip
        lengths = [row.length for row in mine]
        axes.axvspan(min(lengths) * 0.85, trained * 1.15, color="0.9", zorder=0,
                     label="lengths seen in training")  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.set(title=name, xlabel="tokens in the sequence", ylim=(-0.02, 1.02))
        axes.set_xlim(min(lengths) * 0.85, max(lengths) * 1.15)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("accuracy on the answers")
    # Below the panels: on them it would lie on the shade that it explains.
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  frameon=False, fontsize=8)  # fmt: skip
    figure.savefig(path, dpi=150)
