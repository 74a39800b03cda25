"""The terms of a model's cost, added up over its layers; ``analysis.cost`` explains them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
from flax import nnx

from attention.layer_cost import LayerCost
from models.decoder import DecoderOptions
from models.encoder_decoder import EncoderDecoderOptions
from models.pure import is_matrix, split

# Arrays T × F that exist at once in a forward pass, and those that the backward pass needs.
HIDDEN_ARRAYS = {"gelu": (2, 3), "swiglu": (3, 5), "none": (0, 0)}

_PARTS = {"w_embed_VD": "embedding", "w_position_TD": "positions", "w_head_DV": "head"}


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of all sequences of a batch, over the visible pairs and as the reference computes."""

    visible: int
    computed: int


@dataclasses.dataclass(frozen=True)
class Cache:
    """What decoding keeps.

    Attributes:
      bytes_per_token: what a sequence's cache grows by with every token that it keeps:
        2 · L · K · H · bytes of a number; with windows and states only as far as they reach.
      multi_head_bytes_per_token: 2 · L · N · H · bytes of a number, a key and a value per head.
      sequence_bytes: of one sequence of T tokens.
      total_bytes: of the batch.
    """

    bytes_per_token: int
    multi_head_bytes_per_token: int
    sequence_bytes: int
    total_bytes: int


@dataclasses.dataclass(frozen=True)
class Activations:
    """Peak bytes of what exists between arguments and results, for the whole batch.

    An estimate, for XLA chooses what to fuse and to keep: programs compiled for the CPU in float32
    ask for 0.6 to 1.4 times ``dense``, as the tests check on small models. ``tiled`` leaves out the
    scores, and the few MiB of the tiles in use; no test compares it.
    """

    dense: int
    tiled: int


class Terms:
    """Of a model of abstract arrays, which has one block for each that differs."""

    def __init__(self, options: DecoderOptions, length: int, source_length: int | None):
        self.options, self.T, self.S = options, length, source_length
        few = {"num_layers": min(options.num_layers, len(options.pattern))}
        repeats = {"blocks": _repeats(options.num_layers, options.pattern)}
        if isinstance(options, EncoderDecoderOptions):
            L = options.encoder_num_layers
            few["encoder_num_layers"] = min(L, len(options.encoder_pattern))
            repeats["encoder_blocks"] = _repeats(L, options.encoder_pattern)
        reduced = dataclasses.replace(options, **few)
        self.repeats = repeats
        self.built = nnx.eval_shape(lambda: reduced.build(nnx.Rngs(0)))
        self.shapes = jax.eval_shape(lambda: split(reduced.build(nnx.Rngs(0)))[1])

    def parameters(self) -> dict[str, int]:
        """Numbers by part, and "total"."""
        parts: dict[str, int] = {}
        for path, array in self.shapes.items():
            part = _part(path)
            parts[part] = parts.get(part, 0) + self._repeat(path) * array.size
        return {**parts, "total": sum(parts.values())}

    def flops(self, batch: int) -> tuple[Flops, Flops]:
        """Forward and backward, of the batch."""
        visible = computed = self._token_flops(self.T, self.S or 0)
        recomputed = 0
        for block, repeat, T in self._blocks():
            for layer in self._layer_costs(block, T):
                visible += repeat * (layer.weights + layer.visible)
                computed += repeat * (layer.weights + layer.computed)
                recomputed += repeat * layer.recomputed
        forward = Flops(batch * visible, batch * computed)
        return forward, Flops(2 * forward.visible, 2 * forward.computed + batch * recomputed)

    def decode_flops(self) -> int | None:
        """Of one more token; None where the model cannot decode."""
        if not self._decodes():
            return None
        total = self._token_flops(1, 0)
        for block, repeat in zip(self.built.blocks, self.repeats["blocks"], strict=True):
            total += repeat * block.attention.decode_flops(self.T)
            if self.S is not None:
                total += repeat * block.cross.decode_flops(self.S)
        return total

    def cache(self, batch: int, itemsize: int) -> Cache | None:
        """None where the model cannot decode."""
        if not self._decodes():
            return None
        per_token = sequence = 0
        for block, repeat in zip(self.built.blocks, self.repeats["blocks"], strict=True):
            per_token += repeat * block.attention.cache_bytes_per_token()
            sequence += repeat * block.attention.cache_bytes(self.T)
            if self.S is not None:
                sequence += repeat * block.cross.cache_bytes(self.S)
        context = self.options.context()
        numbers = 2 * self.options.num_layers * context.num_heads * context.head_width
        return Cache(per_token, numbers * itemsize, sequence, batch * sequence)

    def activations(self, batch: int, itemsize: int) -> tuple[Activations, Activations]:
        """In a forward pass, and with its gradient."""
        dense, tiled = self._activations(itemsize, True), self._activations(itemsize, False)
        inference, training = (
            Activations(batch * d, batch * t) for d, t in zip(dense, tiled, strict=True)
        )
        return inference, training

    def _activations(self, itemsize: int, dense: bool) -> tuple[int, int]:
        """Of one sequence, forward: the residual stream and the most that a layer needs. With the
        gradient: what all layers keep, and the scores, the hidden arrays or the logits once more,
        whichever are largest.
        """
        D, F = self.options.d_model, self.options.d_ff
        at_once, needed = HIDDEN_ARRAYS[self.options.mlp]
        forward, kept = 0, 0
        backward = 2 * 4 * self.T * self.options.vocab_size
        for block, repeat, T in self._blocks():
            stream, hidden = itemsize * T * D, itemsize * T * F
            forward = max(forward, stream + at_once * hidden)
            backward = max(backward, stream + at_once * hidden)
            kept += repeat * ((0 if block.mlp is None else stream) + needed * hidden)
            for layer in self._layer_costs(block, T):
                scores = layer.scores if dense else 0
                forward = max(forward, stream + layer.in_forward + scores)
                backward = max(backward, stream + scores + layer.in_backward)
                kept += repeat * (2 * stream + layer.kept + scores)
        return forward, kept + backward

    def _blocks(self) -> Iterator[tuple[nnx.Module, int, int]]:
        """Every block that differs, how often there is one like it, and the tokens it reads."""
        for name, length in (("blocks", self.T), ("encoder_blocks", self.S)):
            if name in self.repeats:
                for block, repeat in zip(
                    getattr(self.built, name), self.repeats[name], strict=True
                ):
                    yield block, repeat, length

    def _layer_costs(self, block, length: int) -> list[LayerCost]:
        _check_layer(block.attention)
        costs = [block.attention.cost(length)]
        if hasattr(block, "cross"):
            costs.append(block.cross.cost(length, self.S))
        return costs

    def _token_flops(self, tokens: int, source: int) -> int:
        """Of what treats every token alone: MLPs and the head."""
        head = 2 * tokens * self.options.d_model * self.options.vocab_size
        lengths = {"blocks": tokens, "encoder_blocks": source}
        return head + sum(
            2 * lengths[path.split("/")[0]] * self._repeat(path) * array.size
            for path, array in self.shapes.items()
            if "/mlp/" in path and is_matrix(path)
        )

    def _repeat(self, path: str) -> int:
        names = path.split("/")
        return self.repeats[names[0]][int(names[1])] if names[0] in self.repeats else 1

    def _decodes(self) -> bool:
        return all(block.attention.mask.causal_from() is not None for block in self.built.blocks)


def _repeats(num_layers: int, pattern: tuple) -> list[int]:
    """How many layers are like the first, the second, … of the pattern."""
    return [len(range(i, num_layers, len(pattern))) for i in range(min(num_layers, len(pattern)))]


def _check_layer(layer) -> None:
    for method in ("cost", "decode_flops", "cache_bytes", "cache_bytes_per_token"):
        if not hasattr(layer, method):
            raise NotImplementedError(
                f"{type(layer).__name__} does not say what it costs: it has no method {method}"
            )


def _part(path: str) -> str:
    names = path.split("/")
    if names[0] in ("blocks", "encoder_blocks"):
        return "norms" if names[2].endswith("norm") else names[2]
    return _PARTS.get(names[0], "norms")
