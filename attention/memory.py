"""The other sequence of cross-attention, and what decoding remembers of it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """An encoded sequence.

    Attributes:
      x_BSD: its activations.
      positions_BS: where its tokens stand, counted from 0.
      segments_BS: 1 for tokens, 0 for padding.
    """

    x_BSD: jax.Array
    positions_BS: jax.Array
    segments_BS: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MemoryCache:
    """Keys and values of a memory, computed once when decoding; all padding until then."""

    k_BSKH: jax.Array
    v_BSKE: jax.Array
    positions_BS: jax.Array
    segments_BS: jax.Array

    limit = None

    @classmethod
    def create(cls, batch: int, length: int, num_heads: int, width: int, dtype) -> MemoryCache:
        """An empty cache for a memory of ``length`` tokens."""
        entry = jnp.zeros((batch, length, num_heads, width), dtype)
        index = jnp.zeros((batch, length), jnp.int32)
        return cls(entry, entry, index, index)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.k_BSKH.nbytes + self.v_BSKE.nbytes

    def reset(self) -> MemoryCache:
        """The same cache, empty."""
        return dataclasses.replace(self, segments_BS=jnp.zeros_like(self.segments_BS))
