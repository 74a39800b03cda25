"""What a layer is told by the model it stands in."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attention.rope import Rope


@dataclasses.dataclass(frozen=True)
class Context:
    """Dimensions and conventions that all layers of a model share.

    Attributes:
      d_model: D.
      num_heads: N.
      head_width: H, also the value width E.
      rotary: whether positions enter by rotation of queries and keys.
      rope_base: see ``Rope``.
      rope_layout: see ``Rope``.
      dtype: of activations and products; parameters stay float32.
      implementation: of softmax attention, see ``attention.ops.attend``.
    """

    d_model: int
    num_heads: int
    head_width: int
    rotary: bool = True
    rope_base: float = 10_000.0
    rope_layout: str = "half_split"
    dtype: str = "float32"
    implementation: str = "auto"

    def rope(self, width: int) -> Rope | None:
        """The rotation of ``width`` channels, or None where positions enter otherwise."""
        return Rope(width, self.rope_base, self.rope_layout) if self.rotary else None


def matrix(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
    """Float32 weights drawn with variance 1/fan_in."""
    return jax.random.normal(key, shape, jnp.float32) * fan_in**-0.5


def silence(x_BTD: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    """x with padding set to 0: a weight's gradient is a product with x, and 0 · NaN is NaN."""
    return x_BTD if segments_BT is None else jnp.where(segments_BT[..., None] != 0, x_BTD, 0)


def documents(x_BTD: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    """The segments, or one document where none are given."""
    return jnp.ones(x_BTD.shape[:2], jnp.int32) if segments_BT is None else segments_BT


def project_together(x_BTD: jax.Array, ws: Sequence[jax.Array]) -> list[jax.Array]:
    """x · w for each w (D, …) in one product: x is read once, and so is each gradient."""
    widths = [math.prod(w.shape[1:]) for w in ws]
    together = jnp.concatenate([w.reshape(w.shape[0], -1) for w in ws], axis=1)
    products = jnp.split(project(x_BTD, together), np.cumsum(widths)[:-1], axis=-1)
    return [
        product.reshape(*x_BTD.shape[:-1], *w.shape[1:])
        for product, w in zip(products, ws, strict=True)
    ]


def project(x_BTD: jax.Array, w: jax.Array, num_in: int = 1) -> jax.Array:
    """x · w over the last ``num_in`` axes of x and the first ones of w, in the dtype of x.

    Tokens are flattened first: XLA on the CPU computes the weight gradient of a 3-D activation
    three times slower than that of the same data as a matrix.
    """
    tokens, inner = x_BTD.shape[:-num_in], math.prod(x_BTD.shape[-num_in:])
    product = _product(x_BTD.reshape(-1, inner), w.astype(x_BTD.dtype).reshape(inner, -1))
    return product.reshape(*tokens, *w.shape[num_in:])


@jax.custom_vjp
def _product(x_MI, w_IO):
    return x_MI @ w_IO


def _product_gradients(kept, dy_MO):
    x_MI, w_IO = kept
    # Transposed before and not in the product, which takes half as long again on the CPU.
    w_OI = lax.optimization_barrier(w_IO.T)
    return dy_MO @ w_OI, x_MI.T @ dy_MO


_product.defvjp(lambda x_MI, w_IO: (x_MI @ w_IO, (x_MI, w_IO)), _product_gradients)
