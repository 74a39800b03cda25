"""The attention that is timed: variants, and the implementations of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention import linear_ops
from attention.additive import additive_attention
from attention.feature_maps import feature_map
from attention.masks import Causal, First, Global, Mask, Window
from attention.ops import attend
from attention.reference import allowed_pairs
from benchmarks import products

WINDOW, GLOBALS = 256, 4
OURS, DENSE, JAX_NN, SDPA, FLEX = "ours", "dense", "jax.nn", "SDPA", "FlexAttention"
PRODUCTS = "products"
PROGRAMS = ("forward", "both")
CAUSAL = Causal()


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is computed, by (q_BTNH, k_BTKH, v_BTKH) → out_BTNH.

    Attributes:
      mask: what softmax attention may see.
      other: the whole computation, where it is not softmax attention.
      longest: tokens beyond which it is not measured; None: no limit.
      torch_mask: its name in ``benchmarks/torch_peer``, where PyTorch is asked for it.
      jax_nn: options of ``jax.nn.dot_product_attention`` for the same mask, where it has it.
      products: whether the products of its tiles are timed alone as well.
      N, K, H: query heads, key-value heads, width of a head.
    """

    mask: Mask = CAUSAL
    other: Callable | None = None
    longest: int | None = None
    torch_mask: str | None = None
    jax_nn: dict | None = None
    products: bool = False
    N: int = 4
    K: int = 4
    H: int = 64

    def implementations(self) -> dict[str, Callable]:
        """Ours and the peers in this process, by name."""
        if self.other is not None:
            return {OURS: self.other}
        known = {
            OURS: lambda q, k, v: attend(q, k, v, self.mask),
            DENSE: lambda q, k, v: attend(q, k, v, self.mask, implementation="reference"),
        }
        if self.jax_nn is not None:
            known[JAX_NN] = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **self.jax_nn)
        if self.products:
            known[PRODUCTS] = lambda q, k, v: products.alone(self.mask, q, k, v)
        return known

    def shapes(self, T: int) -> list[jax.ShapeDtypeStruct]:
        """Of q, k, v and the gradient of the output, at batch 1, float32."""
        heads = self.N, self.K, self.K, self.N
        return [jax.ShapeDtypeStruct((1, T, n, self.H), jnp.float32) for n in heads]

    def for_torch(self, T: int) -> dict:
        """The request to ``benchmarks/torch_peer``."""
        return {
            "kind": "attention", "mask": self.torch_mask, "window": WINDOW, "num_global": GLOBALS,
            "B": 1, "T": T, "N": self.N, "K": self.K, "H": self.H, "dtype": "float32",
        }  # fmt: skip


def _linear(q_BTNH, k_BTKH, v_BTKH):
    phi = feature_map("elu")
    return linear_ops.chunked(phi(q_BTNH), phi(k_BTKH), v_BTKH)[0]


def _additive(q_BTNH, k_BTKH, v_BTKH):
    index = jnp.arange(q_BTNH.shape[1])
    allowed_1TS = allowed_pairs(Causal(), index, index)
    return additive_attention(q_BTNH, k_BTKH, v_BTKH, jnp.ones(q_BTNH.shape[2:]), allowed_1TS)


_NEAR = Window(WINDOW)
VARIANTS = {
    "causal": Variant(torch_mask="causal", jax_nn={"is_causal": True}, products=True),
    "window": Variant(
        _NEAR,
        torch_mask="window",
        jax_nn={"is_causal": True, "local_window_size": (WINDOW - 1, 0)},
        products=True,
    ),
    "longformer": Variant(Causal() & (_NEAR | Global(GLOBALS)), torch_mask="longformer"),
    "streaming": Variant(Causal() & (_NEAR | First(GLOBALS))),
    "gqa": Variant(torch_mask="causal", jax_nn={"is_causal": True}, K=2),
    "mqa": Variant(torch_mask="causal", jax_nn={"is_causal": True}, K=1),
    "one_head": Variant(N=1, K=1, H=256),
    "linear": Variant(other=_linear),
    # 64 hyperbolic tangents a pair: seconds where dot products take milliseconds.
    "additive": Variant(other=_additive, longest=1024),
}


def program(attention: Callable, name: str) -> Callable:
    """``forward``, or ``both``, forward with all gradients: of (q, k, v, output gradient)."""

    def forward(q, k, v, do):
        return attention(q, k, v)

    def both(q, k, v, do):
        out, backward = jax.vjp(attention, q, k, v)
        return out, backward(do)

    return jax.jit({"forward": forward, "both": both}[name])
