"""Rotary position embedding: a rotation by position, so that q·k depends on the distance alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


def _half_split(x, width):
    """Pairs (i, i + width/2), as in GPT-NeoX and Llama checkpoints of Hugging Face."""
    return x[..., : width // 2], x[..., width // 2 :]


def _join_half_split(first, second):
    return jnp.concatenate([first, second], axis=-1)


def _interleaved(x, width):
    """Pairs (2i, 2i + 1), as in the paper and DeepSeek."""
    return x[..., 0::2], x[..., 1::2]


def _join_interleaved(first, second):
    return jnp.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)


LAYOUTS = {
    "half_split": (_half_split, _join_half_split),
    "interleaved": (_interleaved, _join_interleaved),
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotates the first ``width`` channels of every head; the others pass unchanged.

    Pair i of a head at position p turns by the angle p · base^(−2i/width):
    (a, b) → (a cos − b sin, b cos + a sin). Angles are float32 whatever the dtype of x.
    Su et al. 2021, RoFormer (arXiv 2104.09864).

    Attributes:
      width: P, even, at most the head width.
      base: wavelength base; 10,000 in the paper.
      layout: which channels form a pair: "half_split" or "interleaved".
    """

    width: int
    base: float = 10_000.0
    layout: str = "half_split"

    def __post_init__(self):
        if self.width < 2 or self.width % 2:
            raise ValueError(f"rope_width must be even and at least 2, got {self.width}")
        if not self.base > 1:
            raise ValueError(f"rope_base must be greater than 1, got {self.base}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"rope_layout must be one of {list(LAYOUTS)}, got {self.layout!r}")

    def __call__(self, x_BTNH: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """x rotated to its positions; positions are (T,) or (B, T); the dtype of x is kept."""
        if self.width > x_BTNH.shape[-1]:
            raise ValueError(
                f"rope_width {self.width} is wider than the head, {x_BTNH.shape[-1]} channels"
            )
        B, T = x_BTNH.shape[:2]
        if positions_BT.shape not in ((T,), (1, T), (B, T)):
            raise ValueError(f"positions must be ({T},) or ({B}, {T}), got {positions_BT.shape}")
        dtype = jnp.promote_types(jnp.float32, x_BTNH.dtype)
        frequency_P = self.base ** (-jnp.arange(0, self.width, 2, dtype=dtype) / self.width)
        positions_BT11 = jnp.atleast_2d(positions_BT)[:, :, None, None].astype(dtype)
        angle_BT1P = positions_BT11 * frequency_P[None, None, None, :]
        # Else they are computed again for every element of every head, and in the gradient too.
        cos, sin = lax.optimization_barrier((jnp.cos(angle_BT1P), jnp.sin(angle_BT1P)))
        split, join = LAYOUTS[self.layout]
        a, b = split(x_BTNH[..., : self.width].astype(dtype), self.width)
        rotated = join(a * cos - b * sin, b * cos + a * sin).astype(x_BTNH.dtype)
        return jnp.concatenate([rotated, x_BTNH[..., self.width :]], axis=-1)
