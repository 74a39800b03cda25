"""Far past the training length: what a window needs its first tokens for.

    python -m analysis.streaming --workdir=runs/text_induction

Attention Sinks, Xiao et al. 2023 (arXiv 2309.17453).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from analysis.cache_positions import StreamingInCache
from analysis.head_scores import first_token, read_patterns
from attention.multi_head import MultiHead, MultiHeadStreaming, MultiHeadWindow
from models import pure
from models.decoder import DecoderOptions
from tasks import Task, evaluation_key
from training.objective import cross_entropy

# Sequences whose activations exist at the same time.
_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to run the same weights.

    Attributes:
      name: of the row.
      options: of the model, with other masks in its layers.
      kept: positions that a cache has to keep; None for all.
    """

    name: str
    options: DecoderOptions
    kept: int | None


def arms(options: DecoderOptions, kept: int, firsts: tuple[int, ...]) -> list[Arm]:
    """Dense attention, and windows that keep ``kept`` positions with more and more first tokens.

    Of a cache of w positions k are the first ones and w − k the last, as in the paper's table.
    The pinned tokens stand before the window, as in the paper, and for comparison also where they
    are in the text: then they grow distant.

    Raises:
      ValueError: a layer is not plain causal attention, positions are learned, or a number of
        first tokens leaves no window.
    """
    for layer in options.layers:
        if type(layer) is not MultiHead:
            raise ValueError(
                f"the masks of causal multi-head attention can be changed; a layer has {layer}"
            )
    if options.position != "rope":
        raise ValueError(f"model.position must be 'rope', got {options.position!r}")

    def arm(name: str, variant: type[MultiHead], **changes) -> Arm:
        layers = []
        for layer in options.layers:
            same = {field.name: getattr(layer, field.name) for field in dataclasses.fields(layer)}
            layers.append(variant(**same, **changes))
        return Arm(name, dataclasses.replace(options, layers=tuple(layers)), kept)

    found = [Arm("dense", options, None)]
    for first in firsts:
        if not 0 <= first < kept:
            raise ValueError(f"first tokens must be from 0 to {kept - 1}, got {first}")
        if first == 0:
            found.append(arm(f"window {kept}", MultiHeadWindow, window=kept))
            continue
        name, sizes = f"window {kept - first} + {first} first", {"window": kept - first}
        found.append(arm(name, StreamingInCache, **sizes, first=first))
        found.append(arm(f"{name}, as in the text", MultiHeadStreaming, **sizes, first=first))
    return found


def loss_by_position(options: DecoderOptions, params: dict, task: Task, key, sequences: int):
    """Mean loss in nats at every position of sequences of a task, (T,)."""
    graph = pure.graph_of(options)

    @jax.jit
    def run(params, batch):
        def one(row):
            row = jax.tree.map(lambda x: x[None], row)
            logits_1TV, _ = pure.merge(graph, params)(row.tokens_BT)
            each = jax.vmap(cross_entropy, in_axes=1)
            return each(logits_1TV, row.targets_BT, row.weights_BT)

        loss_BT, count_BT = jax.lax.map(one, batch, batch_size=_AT_ONCE)
        return loss_BT.sum(0) / count_BT.sum(0)

    return np.asarray(run(params, jax.jit(task.sample, static_argnums=1)(key, sequences)))


def spans(trained: int, length: int) -> list[tuple[int, int]]:
    """The training length, and then twice as far each time: (0, T), (T, 2T), (2T, 4T), …"""
    found = [(0, trained)]
    while found[-1][1] < length:
        found.append((found[-1][1], min(2 * found[-1][1], length)))
    return found


def table(
    options: DecoderOptions,
    params: dict,
    task: Task,
    *,
    kept: int,
    firsts: tuple[int, ...],
    multiple: int,
    sequences: int,
    seed: int,
) -> tuple[list[tuple[int, int]], dict[str, np.ndarray]]:
    """Spans of positions, and of every arm its loss in nats at every position.

    Args:
      options, params: of the trained model.
      task: at its training length.
      kept: positions in the cache of every arm but the dense one.
      firsts: how many of them are first tokens, in turn.
      multiple: length of the sequences, in training lengths.
      sequences: how many.
      seed: of the evaluation stream.
    """
    length = multiple * task.length
    key = evaluation_key(seed, 2**31 + length)
    longer = task.at_length(length)
    losses = {
        arm.name: loss_by_position(arm.options, params, longer, key, sequences)
        for arm in arms(options, kept, firsts)
    }
    return spans(task.length, length), losses


def sink_mass(model, task: Task, seed: int, sequences: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean attention to the first token of every head on a task's sequences, and to no token.

    Returns:
      Two arrays (L, N). The second is what a learned sink takes; 0 where there is none.
    """
    graph, params = pure.split(model)
    batch = task.sample(evaluation_key(seed, 0), sequences)

    @jax.jit
    def run(params):
        _, patterns = read_patterns(pure.merge(graph, params), batch.tokens_BT)
        first = jnp.stack([first_token(pattern) for pattern in patterns])
        return first, jnp.stack([1 - pattern.sum(-1).mean((0, 2)) for pattern in patterns])

    first_LN, none_LN = run(params)
    return np.asarray(first_LN), np.asarray(none_LN)


if __name__ == "__main__":
    from analysis.streaming_command import main

    main()
