"""Streaming attention whose positions are those in the cache, as StreamingLLM has them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx

from attention import ops
from attention.context import Context, documents
from attention.heads import Heads
from attention.multi_head import MultiHeadAttention, MultiHeadStreaming


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingInCache(MultiHeadStreaming):
    """The pinned tokens stand right before the window, however far back they are in the text.

    So no distance is longer than the cache. Its parameters are those of any multi-head attention.
    """

    def build(self, context: Context, rngs: nnx.Rngs) -> MultiHeadAttention:
        layer = MultiHeadAttention(self, context, rngs)
        layer.heads = HeadsInCache(self, context, layer.mask, rngs)
        return layer


class HeadsInCache(Heads):
    """Score of query i and pinned key j as if i stood at slot min(i, first + window − 1).

    To a key in the window the distance in the cache is that in the text. One softmax over both:
    queries hold both rotations side by side, and every key is 0 in the half that is not for it.
    Xiao et al. 2023 (arXiv 2309.17453), section 3.2.
    """

    def __call__(self, x_BTD, positions_BT, *, segments_BT, cache, memory, probe, dropout_key):
        """See ``Heads``; of whole sequences of one document, with rotary positions."""
        given = {"segments_BT": segments_BT, "cache": cache, "memory": memory, "probe": probe}
        for name, value in given.items():
            if value is not None:
                raise NotImplementedError(f"positions in the cache are not made for {name}")
        q_BTNH = self._project(x_BTD, self.w_q_DNH, "q_NH")
        q_BTNH = q_BTNH if self.q_norm is None else self.q_norm(q_BTNH)
        k_BSKH, v_BSKE, _ = self._keys_values(
            x_BTD, positions_BT, documents(x_BTD, segments_BT), None
        )
        slots_BT = jnp.minimum(positions_BT, self.options.first + self.options.window - 1)
        is_pinned = (positions_BT < self.options.first)[..., None, None]
        queries = [self.rope(q_BTNH, positions_BT), self.rope(q_BTNH, slots_BT)]
        keys = [jnp.where(is_pinned, 0, k_BSKH), jnp.where(is_pinned, k_BSKH, 0)]
        scale = self.options.scale
        head_BTNE = ops.attend(
            jnp.concatenate(queries, -1),
            jnp.concatenate(keys, -1),
            v_BSKE,
            self.mask,
            scale=q_BTNH.shape[-1] ** -0.5 if scale is None else scale,
            sink_N=None if self.sink_N is None else self.sink_N[...],
            dropout=self._dropout(dropout_key),
            implementation=self.context.implementation,
        )
        return head_BTNE, None
