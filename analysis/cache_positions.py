"""Streaming attention whose positions are those in the cache, as StreamingLLM has them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx

from attention.context import Context, documents, project_together
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
    """Query i meets pinned keys as if it stood at slot min(i, first + window − 1).

    To a key in the window the distance in the cache is that in the text. One softmax over both:
    queries hold both rotations side by side, and every key is 0 in the half that is not for it.
    Xiao et al. 2023 (arXiv 2309.17453), section 3.2. Whole sequences only, without a cache.
    """

    def _from_own(self, x_BTD, positions_BT, segments_BT, cache, memory):
        for name, value in (("segments", segments_BT), ("a cache", cache), ("a memory", memory)):
            if value is not None:
                raise NotImplementedError(f"positions in the cache are not made for {name}")
        weights = self.w_q_DNH[...], self.w_k_DKH[...], self.w_v_DKH[...]
        q_BTNH, *keys_values = project_together(x_BTD, weights)
        k_BSKH, v_BSKH, _ = self._keys_values(
            *keys_values, positions_BT, documents(x_BTD, None), None
        )
        slots_BT = jnp.minimum(positions_BT, self.options.first + self.options.window - 1)
        is_pinned = (positions_BT < self.options.first)[..., None, None]
        queries = self._queries(q_BTNH, positions_BT), self._queries(q_BTNH, slots_BT)
        keys = jnp.where(is_pinned, 0, k_BSKH), jnp.where(is_pinned, k_BSKH, 0)
        # The default scale goes by the width of what is multiplied, of which half is 0.
        factor = 2**0.5 if self.options.scale is None else 1.0
        where = {"k_segments": None}
        return factor * jnp.concatenate(queries, -1), jnp.concatenate(keys, -1), v_BSKH, where, None
