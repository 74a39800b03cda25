"""The specification: dense softmax attention, which every faster implementation must equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.masks import Mask


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Attention dropout: each weight is dropped with probability ``rate``, the others grow.

    Raises:
      ValueError: the rate is not in [0, 1).
    """

    rate: float
    key: jax.Array

    def __post_init__(self):
        if not 0 <= self.rate < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.rate}")

    def __call__(self, weights: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(self.key, 1 - self.rate, weights.shape)
        return jnp.where(keep, weights / (1 - self.rate), 0)


def allowed_pairs(
    mask: Mask,
    q_index: jax.Array,
    k_index: jax.Array,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
) -> jax.Array:
    """Which pairs may meet, (B or 1, T, S): mask, not an empty slot, same non-zero segment.

    Args:
      mask: evaluated on the positions.
      q_index: positions of the queries, (T,) or (B, T).
      k_index: positions of the keys, (S,) or (B, S); −1 marks an empty cache slot.
      q_segments: (B, T), 0 for padding. With ``k_segments`` also given, only equal ones meet.
      k_segments: (B, S), 0 for padding.
    """
    q_BT1 = jnp.atleast_2d(q_index)[:, :, None]
    k_B1S = jnp.atleast_2d(k_index)[:, None, :]
    allowed = mask(q_BT1, k_B1S) & (k_B1S >= 0)
    if q_segments is not None:
        allowed = allowed & (q_segments[:, :, None] != 0)
    if k_segments is not None:
        allowed = allowed & (k_segments[:, None, :] != 0)
    if q_segments is not None and k_segments is not None:
        allowed = allowed & (q_segments[:, :, None] == k_segments[:, None, :])
    return allowed


def masked_softmax(
    scores_BNTS: jax.Array, allowed_BTS: jax.Array, sink_N: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Softmax over the allowed keys: weights (B, N, T, S) and log-sum-exp (B, N, T).

    weights = exp(scores − lse), lse = log(Σ_allowed exp(scores) + exp(sink)). A row with no
    allowed key has weights 0 and lse −inf, and no gradient passes through it.
    """
    allowed_B1TS = allowed_BTS[:, None]
    scores = jnp.where(allowed_B1TS, scores_BNTS, -jnp.inf)
    sink = None if sink_N is None else sink_N[None, :, None, None]
    top = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    if sink is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sink))
    top = jnp.where(top == -jnp.inf, 0, top)
    numerator = jnp.exp(scores - top)
    total = numerator.sum(-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(sink - top)
    seen = allowed_B1TS.any(-1, keepdims=True)
    total = jnp.where(seen, total, 1)
    lse = jnp.where(seen, top + jnp.log(total), -jnp.inf)
    # Selected again, so that an infinite cotangent behind the mask meets no product.
    return jnp.where(allowed_B1TS, numerator / total, 0), lse[..., 0]


def isolate(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKE: jax.Array, allowed_BTS: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Selects to 0 what no product may touch, so that garbage behind a mask reaches nothing.

    0 · inf is NaN, so a zero weight alone does not isolate a query from a masked key. Keys and
    values that are not finite, or that nobody sees, become 0, and so do queries without a key.

    Returns:
      q, k, v, and two (B, T, K) arrays: the rows that do see a key that is not finite, and those
      that see a key or a value. The log-sum-exp of the first is NaN, the output of the second.
    """
    allowed_BTS = jnp.broadcast_to(allowed_BTS, (q_BTNH.shape[0], *allowed_BTS.shape[1:]))
    finite_k_BSK = jnp.isfinite(k_BSKH).all(-1)
    finite_BSK = finite_k_BSK & jnp.isfinite(v_BSKE).all(-1)
    usable = (finite_BSK & allowed_BTS.any(-2)[:, :, None])[..., None]
    q_BTNH = jnp.where(allowed_BTS.any(-1)[:, :, None, None], q_BTNH, 0)

    def sees(key_BSK: jax.Array) -> jax.Array:
        number = jnp.float32
        return jnp.einsum("bts,bsk->btk", allowed_BTS.astype(number), key_BSK.astype(number)) > 0

    k_BSKH, v_BSKE = jnp.where(usable, k_BSKH, 0), jnp.where(usable, v_BSKE, 0)
    return q_BTNH, k_BSKH, v_BSKE, sees(~finite_k_BSK), sees(~finite_BSK)


def dense_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKE: jax.Array,
    allowed_BTS: jax.Array,
    *,
    scale: float,
    sink_N: jax.Array | None = None,
    dropout: Dropout | None = None,
    observe: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """out = softmax(scale · q kᵀ) v over the allowed pairs, in float32 or wider.

    ``observe`` is shown the weights_BNTS, and what it returns takes their place.

    Returns:
      out_BTNE in the dtype of v, and lse_BNT.
    """
    dtype = jnp.promote_types(jnp.float32, q_BTNH.dtype)
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    q_BTNH, k_BSKH, v_BSKE, bad_key_BTK, bad_BTK = isolate(q_BTNH, k_BSKH, v_BSKE, allowed_BTS)
    q_BTKGH = q_BTNH.astype(dtype).reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH.astype(dtype)) * scale
    sink = None if sink_N is None else sink_N.astype(dtype)
    weights_BNTS, lse_BNT = masked_softmax(scores.reshape(B, N, T, S), allowed_BTS, sink)
    if observe is not None:
        weights_BNTS = observe(weights_BNTS)
    if dropout is not None:
        weights_BNTS = dropout(weights_BNTS)
    kept_BKGTS = weights_BNTS.reshape(B, K, N // K, T, S)
    out = jnp.einsum("bkgts,bske->btkge", kept_BKGTS, v_BSKE.astype(dtype))
    out = jnp.where(bad_BTK[..., None, None], jnp.nan, out)
    bad_key_BNT = jnp.repeat(bad_key_BTK, N // K, axis=2).transpose(0, 2, 1)
    lse_BNT = jnp.where(bad_key_BNT, jnp.nan, lse_BNT)
    return out.reshape(B, T, N, -1).astype(v_BSKE.dtype), lse_BNT
