"""One layer of a decoder: attention, then the feed-forward layer, each on a normalised residual."""

from __future__ import annotations

import jax
from flax import nnx

from attention.context import Context
from attention.norm import RMSNorm
from attention.probe import Probe
from models.mlp import MLPS


class Block(nnx.Module):
    """x ← x + attention(norm(x)); x ← x + mlp(norm(x)); without an MLP only the first."""

    def __init__(self, options, context: Context, mlp: str, d_ff: int, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(context.d_model)
        self.attention = options.build(context, rngs)
        layer = MLPS[mlp]
        self.mlp_norm = None if layer is None else RMSNorm(context.d_model)
        self.mlp = None if layer is None else layer(context.d_model, d_ff, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        cache=None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ):
        """The residual stream after this layer, and the layer's cache."""
        y_BTD, cache = self.attention(
            self.attention_norm(x_BTD),
            positions_BT,
            segments_BT=segments_BT,
            cache=cache,
            probe=probe,
            dropout_key=dropout_key,
        )
        return self.feed_forward(x_BTD + y_BTD), cache

    def feed_forward(self, x_BTD: jax.Array) -> jax.Array:
        """The residual stream after the MLP, if there is one."""
        return x_BTD if self.mlp is None else x_BTD + self.mlp(self.mlp_norm(x_BTD))
