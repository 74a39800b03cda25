"""The attention that is timed: variants, and the implementations of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention import linear_ops
from attention.feature_maps import feature_map
from attention.masks import Causal, First, Global, Mask, Window
from attention.ops import attend

WINDOW, GLOBALS = 256, 4
OURS, DENSE, JAX_NN, SDPA, FLEX = "ours", "dense", "jax.nn", "SDPA", "FlexAttention"
PROGRAMS = ("forward", "both")


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is computed, by (q_BTNH, k_BTKH, v_BTKH) → out_BTNH.

    Attributes:
      mask: None for linear attention.
      torch_mask: its name in ``benchmarks/torch_peer``, where PyTorch is asked for it.
      jax_nn: options of ``jax.nn.dot_product_attention`` for the same mask, where it has it.
      N, K, H: query heads, key-value heads, width of a head.
    """

    mask: Mask | None
    torch_mask: str | None = None
    jax_nn: dict | None = None
    N: int = 4
    K: int = 4
    H: int = 64

    def implementations(self) -> dict[str, Callable]:
        """Ours and the peers in this process, by name."""
        if self.mask is None:
            return {OURS: _linear}
        known = {
            OURS: lambda q, k, v: attend(q, k, v, self.mask),
            DENSE: lambda q, k, v: attend(q, k, v, self.mask, implementation="reference"),
        }
        if self.jax_nn is not None:
            known[JAX_NN] = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **self.jax_nn)
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


_NEAR = Window(WINDOW)
VARIANTS = {
    "causal": Variant(Causal(), "causal", {"is_causal": True}),
    "window": Variant(_NEAR, "window", {"is_causal": True, "local_window_size": (WINDOW - 1, 0)}),
    "longformer": Variant(Causal() & (_NEAR | Global(GLOBALS)), "longformer"),
    "streaming": Variant(Causal() & (_NEAR | First(GLOBALS))),
    "gqa": Variant(Causal(), "causal", {"is_causal": True}, K=2),
    "mqa": Variant(Causal(), "causal", {"is_causal": True}, K=1),
    "one_head": Variant(Causal(), N=1, K=1, H=256),
    "linear": Variant(None),
}


def program(attention: Callable, name: str) -> Callable:
    """``forward``, or ``both``, forward with all gradients: of (q, k, v, output gradient)."""

    def forward(q, k, v, do):
        return attention(q, k, v)

    def both(q, k, v, do):
        out, backward = jax.vjp(attention, q, k, v)
        return out, backward(do)

    return jax.jit({"forward": forward, "both": both}[name])
