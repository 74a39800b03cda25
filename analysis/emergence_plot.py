"""emergence.png: how heads, losses and in-context learning change while a model is trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from analysis import emergence_table
from analysis.emergence import Change, find_change, strongest_head
from analysis.figures import new_figure, with_prefixes
from analysis.plots import COLOURS, STYLES


def draw(table_path: Path, path: Path) -> str | None:
    """Draws what an emergence.csv says; returns the change in words, None where there is none.

    The change is that of the prefix-matching score of the head that ends with the highest.
    """
    table = emergence_table.read(table_path)
    tokens = table["tokens"]
    prefix_RLN = table.heads("prefix_matching")
    layer, head = strongest_head(prefix_RLN)
    change = find_change(tokens, prefix_RLN[:, layer, head]) if len(tokens) > 2 else None
    figure = new_figure(7.2, 10.4)
    panels = figure.subplots(5, 1, sharex=True, height_ratios=(1.3, 1, 1.5, 1, 1.7))
    _losses(panels[0], table)
    _learning(panels[1], table)
    _heads(panels[2], tokens, prefix_RLN, "prefix matching")
    chance = table["prefix_matching_chance"][0]
    panels[2].axhline(chance, color="0.4", linestyle=(0, (1, 1.5)), lw=1.2,
                      label=f"uniform attention: {chance:.3f}")  # fmt: skip
    _heads(panels[3], tokens, table.heads("previous_token"), "previous token")
    for axes in panels[2:4]:
        axes.set_ylim(-0.02, 1.02)
    for axes in panels[:4]:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if change is not None:
            _mark(axes, change)
    panels[2].legend(loc="upper left", frameon=False, fontsize=8)
    _heat_map(figure, panels[4], table)
    panels[4].set_xlabel("training tokens")
    panels[4].xaxis.set_major_formatter(with_prefixes())
    said = None if change is None else _in_words(change, layer, head, tokens[-1])
    title = "no head changed to prefix matching" if said is None else said.replace(": ", ":\n")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)
    return said


def _in_words(change: Change, layer: int, head: int, last: float) -> str:
    number = with_prefixes(places=2)
    return (
        f"prefix matching of layer {layer} head {head} rises from {change.low:.2f} to "
        f"{change.high:.2f}: half-way at {number(change.half)} tokens, 10 to 90 % within "
        f"{number(change.width)} ({change.width / last:.1%} of training)"
    )


def _losses(axes, table) -> None:
    losses = {"all positions": table["loss"], "repeated part": table["loss_repeated"]}
    if np.array_equal(*losses.values(), equal_nan=True):
        del losses["repeated part"]
    for (label, loss), colour, style in zip(losses.items(), COLOURS, STYLES, strict=False):
        axes.plot(table["tokens"], loss, color=colour, linestyle=style, lw=1.8, label=label)
    axes.set(ylabel="loss (nats)", ylim=(0, None))
    axes.legend(loc="upper right", frameon=False, fontsize=8)


def _learning(axes, table) -> None:
    axes.plot(table["tokens"], table["in_context_learning"], color="black", lw=1.8)
    axes.set_ylabel("in-context\nlearning (nats)")


def _heads(axes, tokens, score_RLN, what: str) -> None:
    """A curve a head: a colour and a line style a layer, a width a head."""
    for layer in range(score_RLN.shape[1]):
        colour, style = COLOURS[layer % len(COLOURS)], STYLES[layer % len(STYLES)]
        for head in range(score_RLN.shape[2]):
            label = f"layer {layer}, {score_RLN.shape[2]} heads" if head == 0 else None
            axes.plot(tokens, score_RLN[:, layer, head], color=colour, linestyle=style,
                      lw=1.4, alpha=0.9, label=label)  # fmt: skip
    axes.set_ylabel(f"{what}\nscore")


def _mark(axes, change: Change) -> None:
    axes.axvspan(change.start, change.end, color="0.88", zorder=0, lw=0, label="10 to 90 %")
    axes.axvline(change.half, color="0.35", lw=1, linestyle="--", zorder=1, label="half-way")


def _heat_map(figure, axes, table) -> None:
    loss_RT = table.loss_by_position()
    positions = np.arange(loss_RT.shape[1])
    image = axes.pcolormesh(
        table["tokens"], positions, loss_RT.T, cmap="viridis", shading="nearest", rasterized=True
    )
    axes.invert_yaxis()
    axes.set_ylabel("position")
    figure.colorbar(image, ax=axes, label="loss (nats)", shrink=0.9, pad=0.01)
