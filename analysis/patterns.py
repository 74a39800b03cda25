"""Attention patterns of a trained model on chosen sequences, as numbers and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from matplotlib.figure import Figure

from attention.probe import Probe
from models import pure
from tasks import Batch
from tasks.vocabulary import token_name


def read_patterns(model, objective, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits of a prepared batch, and every pattern (B, N, T, S) by its path.

    The patterns come from the dense reference, the only form that holds them.
    """
    graph, params = pure.split(model)

    def run(params, read):
        probe = Probe(read=read)
        logits = objective.logits(pure.merge(graph, params), batch, None, probe)
        return logits, probe.values, sorted(probe.offered)

    offered = []

    def collect(params):
        logits, _, names = run(params, ())
        offered.extend(names)
        return logits

    jax.eval_shape(collect, params)
    names = tuple(name for name in offered if name.endswith("pattern"))
    logits_BTV, values = jax.jit(lambda params: run(params, names)[:2])(params)
    return logits_BTV, {name: values[name] for name in names}


def draw_patterns(
    patterns_NTS: Mapping[str, np.ndarray],
    queries: Sequence[int],
    keys: Mapping[str, Sequence[int]],
    title: str,
    path: Path,
) -> None:
    """One row of panels a layer, one panel a head; queries downwards, keys to the right.

    Args:
      patterns_NTS: path of a pattern → weights of one sequence.
      queries: token ids of the queries.
      keys: path of a pattern → token ids of its keys.
      title: of the figure.
      path: of the PNG.
    """
    rows, columns = len(patterns_NTS), max(len(p) for p in patterns_NTS.values())
    size = max(2.6, 0.105 * len(queries) + 0.6)
    figure = Figure(figsize=(size * columns + 0.8, size * rows + 0.6), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for row, (name, pattern_NTS) in zip(panels, patterns_NTS.items(), strict=True):
        for head, axes in enumerate(row):
            if head >= len(pattern_NTS):
                axes.set_axis_off()
                continue
            image = axes.imshow(pattern_NTS[head], cmap="viridis", vmin=0, vmax=1)
            axes.set_title(f"{name.removesuffix('/pattern')} head {head}", fontsize=8)
            for axis, tokens in ((axes.xaxis, keys[name]), (axes.yaxis, queries)):
                names = [token_name(token) for token in tokens]
                axis.set_ticks(range(len(names)), names, fontsize=4.5)
            axes.tick_params(axis="x", rotation=90, length=1, pad=1)
            axes.tick_params(axis="y", length=1, pad=1)
    figure.colorbar(image, ax=panels, shrink=0.6, label="weight")
    figure.suptitle(title, fontsize=9)
    figure.supxlabel("key", fontsize=8)
    figure.supylabel("query", fontsize=8)
    figure.savefig(path, dpi=130)
