"""Attention patterns of a trained model on chosen sequences, as numbers and as pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from analysis.figures import new_figure
from attention.probe import Probe
from models import pure
from tasks import Batch, evaluation_key
from tasks.vocabulary import token_name
from training.settings import Settings

# Inches of a panel, and names along its sides at most.
_PANEL, _NAMED = 3.0, 24


def draw_sequence(model, settings: Settings, index: int, folder: Path) -> list[Path]:
    """Saves the patterns of one evaluation sequence of every task; returns the paths."""
    paths = []
    for task in settings.evaluated:
        key = evaluation_key(settings.eval.seed, index)
        batch = settings.objective.prepare(task.sample(key, 1), key)
        _, patterns = read_patterns(model, settings.objective, batch)
        path = folder / f"attention_{task.name}_{index}.png"
        name = getattr(task, "token_name", token_name)
        draw_patterns(patterns, batch, f"{task.name}, sequence {index}", path, name)
        paths.append(path)
    return paths


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
    patterns = [name for name in offered if name.endswith("/pattern")]
    names = tuple(sorted(patterns, key=lambda name: name.removesuffix("/pattern")))
    logits_BTV, values = jax.jit(lambda params: run(params, names)[:2])(params)
    return logits_BTV, {name: values[name] for name in names}


def draw_patterns(
    patterns: Mapping[str, jax.Array],
    batch: Batch,
    title: str,
    path: Path,
    name_of: Callable[[int], str] = token_name,
) -> None:
    """One row of panels a layer, one panel a head; queries downwards, keys to the right.

    Of long sequences some tokens are named, so that the names can be read.

    Args:
      patterns: path of a pattern → its weights (B, N, T, S); the first sequence is drawn.
      batch: the tokens that were read.
      title: of the figure.
      path: of the PNG.
      name_of: a token's name.
    """
    columns = max(weights.shape[1] for weights in patterns.values())
    figure = new_figure(_PANEL * columns + 0.8, _PANEL * len(patterns) + 0.6)
    panels = figure.subplots(len(patterns), columns, squeeze=False)
    for row, (name, weights_BNTS) in zip(panels, patterns.items(), strict=True):
        queries, keys = _sequences(name, batch)
        for head, axes in enumerate(row):
            if head >= weights_BNTS.shape[1]:
                axes.set_axis_off()
                continue
            image = axes.imshow(np.asarray(weights_BNTS[0, head]), cmap="viridis", vmin=0, vmax=1)
            axes.set_title(f"{name.removesuffix('/pattern')} head {head}", fontsize=9)
            for axis, tokens in ((axes.xaxis, keys), (axes.yaxis, queries)):
                named = range(0, len(tokens), -(-len(tokens) // _NAMED))
                axis.set_ticks(named, [name_of(tokens[i]) for i in named], fontsize=7)
            axes.tick_params(axis="x", rotation=90, length=1, pad=1)
            axes.tick_params(axis="y", length=1, pad=1)
    figure.colorbar(image, ax=panels, shrink=0.6, label="weight")
    figure.suptitle(title, fontsize=10)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.savefig(path, dpi=130)


def _sequences(name: str, batch: Batch) -> tuple[Sequence[int], Sequence[int]]:
    """Token ids of the queries and of the keys of a pattern."""
    tokens = batch.tokens_BT[0].tolist()
    source = None if batch.source_BS is None else batch.source_BS[0].tolist()
    if name.startswith("encoder"):
        return source, source
    return tokens, source if "/cross/" in name else tokens
