"""Root-mean-square normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class RMSNorm(nnx.Module):
    """y = g · x / √(mean(x²) + 10⁻⁶) over the last axis, computed in float32 or wider.

    Zhang and Sennrich 2019 (arXiv 1910.07467).
    """

    def __init__(self, width: int):
        self.gain_D = nnx.Param(jnp.ones(width, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(jnp.float32, x.dtype))
        power = jnp.square(wide).mean(-1, keepdims=True)
        gain = self.gain_D[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (wide * jax.lax.rsqrt(power + 1e-6) * gain).astype(x.dtype)
