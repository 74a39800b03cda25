"""Feed-forward layers: what a block does to each token alone."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from attention.context import matrix, project


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """x/2 · (1 + tanh(√(2/π) (x + .044715 x³))), as ``jax.nn.gelu``.

    Its slope is kept for the backward pass: on the CPU that reads one array instead of working out
    the tanh's derivative from three. Hendrycks and Gimpel 2016 (arXiv 1606.08415).
    """
    return _gelu(x)[0]


def _gelu(x):
    c, cubic = math.sqrt(2 / math.pi), 0.044715
    square = x * x
    tanh = jnp.tanh(c * x * (1 + cubic * square))
    half = 0.5 * (1 + tanh)
    return x * half, half + 0.5 * x * (1 - tanh * tanh) * c * (1 + 3 * cubic * square)


gelu.defvjp(_gelu, lambda slope, dy: (dy * slope,))


class GeluMLP(nnx.Module):
    """y = gelu(x W_in) W_out."""

    def __init__(self, d_model: int, d_ff: int, rngs: nnx.Rngs):
        self.w_in_DF = nnx.Param(matrix(rngs.params(), (d_model, d_ff), d_model))
        self.w_out_FD = nnx.Param(matrix(rngs.params(), (d_ff, d_model), d_ff))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return project(gelu(project(x_BTD, self.w_in_DF[...])), self.w_out_FD[...])


class SwiGLU(nnx.Module):
    """y = (silu(x W_gate) · x W_in) W_out. Shazeer 2020 (arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, rngs: nnx.Rngs):
        self.w_gate_DF = nnx.Param(matrix(rngs.params(), (d_model, d_ff), d_model))
        self.w_in_DF = nnx.Param(matrix(rngs.params(), (d_model, d_ff), d_model))
        self.w_out_FD = nnx.Param(matrix(rngs.params(), (d_ff, d_model), d_ff))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate = jax.nn.silu(project(x_BTD, self.w_gate_DF[...]))
        return project(gate * project(x_BTD, self.w_in_DF[...]), self.w_out_FD[...])


MLPS = {"gelu": GeluMLP, "swiglu": SwiGLU, "none": None}
