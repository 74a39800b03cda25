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

    def check(self, batch: int, cache: MemoryCache | None) -> None:
        """Raises ValueError where it does not fit itself, the rows of tokens, or the cache."""
        shape = self.x_BSD.shape[:2]
        for name in ("positions_BS", "segments_BS"):
            if getattr(self, name).shape != shape:
                raise ValueError(
                    f"memory.{name} must be (B, S) = {shape} as its activations, "
                    f"got {getattr(self, name).shape}"
                )
        if shape[0] != batch:
            raise ValueError(f"the memory has {shape[0]} rows for {batch} rows of tokens")
        if cache is not None and cache.segments_BS.shape != shape:
            raise ValueError(
                f"the memory is (B, S) = {shape}, but the caches are for {cache.segments_BS.shape}"
            )


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
