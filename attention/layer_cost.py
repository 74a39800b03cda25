"""What a layer of attention costs: the terms of which ``analysis.cost`` makes a model's bill."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from attention.context import Context
from attention.masks import Mask


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """One sequence through one layer, without a cache.

    A multiplication and an addition are two FLOPs. Products are counted, and the score network of
    additive attention; what is done to single numbers (norms, rotation, softmax, feature maps) is
    not, and is 1 to 5% more at a head width of 64.

    Attributes:
      weights: FLOPs of the products with parameters.
      visible: FLOPs of the products of tokens with tokens, over the pairs that the mask allows.
      computed: the same as the implementation without tiles does them, masked pairs too.
      recomputed: FLOPs of the forward pass that the backward pass does again.
      kept: bytes of activations that the backward pass needs, apart from ``scores``.
      scores: bytes held for all pairs by an implementation without tiles, and by no other.
      in_forward: bytes held at once in a forward pass alone, apart from ``scores``.
      in_backward: bytes besides ``kept``, held while the backward pass of the layer runs.
    """

    weights: int = 0
    visible: int = 0
    computed: int = 0
    recomputed: int = 0
    kept: int = 0
    scores: int = 0
    in_forward: int = 0
    in_backward: int = 0

    def __add__(self, other: LayerCost) -> LayerCost:
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return LayerCost(*(a + b for a, b in zip(mine, others, strict=True)))


def softmax_pairs(mask: Mask, num_heads: int, widths: int, T: int, S: int) -> LayerCost:
    """Scores and weighted sums: 2 · N · widths FLOPs a pair, ``widths`` being H + E.

    Without tiles T · S pairs are computed, and two float32 numbers a pair and head are held: the
    score and the weight.
    """
    per_pair = 2 * num_heads * widths
    return LayerCost(
        visible=per_pair * mask.count(T, S),
        computed=per_pair * T * S,
        scores=2 * 4 * num_heads * T * S,
    )


def projected_heads(context: Context, kv_heads: int, T: int, S: int) -> LayerCost:
    """q, k, v = x W_Q, x W_K, x W_V: 2 · D · H · (N · T + 2 · K · S) FLOPs, without the output.

    Kept are q, k, v, the heads and one more array of their size; half of it exists at once.
    """
    D, N, H = context.d_model, context.num_heads, context.head_width
    kept = itemsize(context) * H * (3 * N * T + 2 * kv_heads * S)
    weights = 2 * D * H * (N * T + 2 * kv_heads * S)
    return LayerCost(weights=weights, kept=kept, in_forward=kept // 2)


def output_flops(context: Context, T: int) -> int:
    """Of the heads through W_O: 2 · T · N · H · D."""
    return 2 * T * context.num_heads * context.head_width * context.d_model


def itemsize(context: Context) -> int:
    """Bytes of a number of the activations."""
    return jnp.dtype(context.dtype).itemsize
