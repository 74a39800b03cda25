"""Smeared keys: every key is mixed with its predecessor's, which gives one layer what takes two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from attention.cache import LastKey, check_goes_on


class SmearedKeys(nnx.Module):
    """k_j ← σ(α) k_j + (1 − σ(α)) k_{j−1}, one trainable α a head; position 0 is unchanged.

    Olsson et al. 2022, In-context Learning and Induction Heads (arXiv 2209.11895).
    """

    def __init__(self, num_heads: int):
        self.alpha_K = nnx.Param(jnp.zeros(num_heads, jnp.float32))

    def __call__(
        self,
        k_BTKH: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array,
        last: LastKey | None = None,
    ) -> tuple[jax.Array, LastKey]:
        """The smeared keys, and the last valid raw key of each row.

        Args:
          k_BTKH: raw keys.
          positions_BT: their positions.
          segments_BT: documents, which do not meet; 0 for padding, which is nobody's predecessor.
          last: the raw key before the first of these, from the cache.

        Raises:
          ValueError: positions that are not traced go back to one whose predecessor is forgotten.
        """
        B, T, K, H = k_BTKH.shape
        last = LastKey.none((B, K, H), k_BTKH.dtype) if last is None else last
        positions_BT = jnp.broadcast_to(positions_BT, (B, T))
        check_goes_on(
            positions_BT, segments_BT != 0, last.position_B, "the raw key before it is forgotten"
        )
        latest_BT = jax.lax.cummax(jnp.where(segments_BT != 0, jnp.arange(1, T + 1), 0), axis=1)
        history = jnp.concatenate([last.key_BKH[:, None].astype(k_BTKH.dtype), k_BTKH], axis=1)
        places = jnp.concatenate([last.position_B[:, None], positions_BT], axis=1)
        before_BT = jnp.pad(latest_BT[:, :-1], ((0, 0), (1, 0)))
        previous = jnp.take_along_axis(history, before_BT[:, :, None, None], axis=1)
        share = jax.nn.sigmoid(self.alpha_K[...])[None, None, :, None].astype(k_BTKH.dtype)
        smeared = share * k_BTKH + (1 - share) * previous
        before_document_BT = jnp.take_along_axis(segments_BT, jnp.maximum(before_BT - 1, 0), axis=1)
        at_start = (before_BT > 0) & (before_document_BT != segments_BT)
        at_start = at_start | (positions_BT == 0)
        at_start = at_start | (jnp.take_along_axis(places, before_BT, axis=1) < 0)
        latest_B1 = latest_BT[:, -1:]
        last = LastKey(
            jnp.take_along_axis(history, latest_B1[..., None, None], axis=1)[:, 0].astype(
                last.key_BKH.dtype
            ),
            jnp.take_along_axis(places, latest_B1, axis=1)[:, 0],
        )
        return jnp.where(at_start[:, :, None, None], k_BTKH, smeared), last
