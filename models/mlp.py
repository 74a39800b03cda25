"""Feed-forward layers: what a block does to each token alone."""

from __future__ import annotations

import jax
from flax import nnx

from attention.context import matrix, project


class GeluMLP(nnx.Module):
    """y = gelu(x W_in) W_out."""

    def __init__(self, d_model: int, d_ff: int, rngs: nnx.Rngs):
        self.w_in_DF = nnx.Param(matrix(rngs.params(), (d_model, d_ff), d_model))
        self.w_out_FD = nnx.Param(matrix(rngs.params(), (d_ff, d_model), d_ff))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return project(jax.nn.gelu(project(x_BTD, self.w_in_DF[...])), self.w_out_FD[...])


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
