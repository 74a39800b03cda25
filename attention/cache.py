"""What decoding remembers: keys and values, latents, or a recurrent state.

A cache is a registered frozen dataclass that is passed in and returned. A slot's index is derived
from the position it holds, so that left padding, right padding and any chunking of the prompt lead
to the same cache, and a cache can be used again for a second prompt without clearing it.
"""

from __future__ import annotations

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from attention.masks import Mask


def check_goes_on(positions_BT, valid_BT, last_B, what: str) -> None:
    """Refuses tokens that go back to the middle of what is remembered.

    Args:
      positions_BT, valid_BT: of the new tokens.
      last_B: the last position that is remembered, −1 where there is none.
      what: has been forgotten, in words.

    Raises:
      ValueError: a first token stands at or before ``last_B`` and not at 0. Positions that are
        being traced cannot be checked.
    """
    if any(isinstance(x, jax.core.Tracer) for x in (positions_BT, valid_BT, last_B)):
        return
    valid_BT, last_B = np.asarray(valid_BT), np.asarray(last_B)
    positions_BT = np.broadcast_to(np.asarray(positions_BT), valid_BT.shape)
    first_B = positions_BT[np.arange(len(valid_BT)), valid_BT.argmax(1)]
    back_B = valid_BT.any(1) & (first_B != 0) & (first_B <= last_B)
    if back_B.any():
        row = int(back_B.argmax())
        raise ValueError(
            f"a cache cannot go back from position {last_B[row]} to {first_B[row]}: {what}; "
            "go on, or start again at position 0"
        )


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where a position is kept: pinned positions first, then a ring of recent ones.

    Attributes:
      pinned: positions that keep a slot of their own for ever, ascending.
      ring: number of slots that the other positions share, position modulo ring.
      limit: positions at or past it have no slot; None where the ring overwrites the oldest.
      together: how many first positions see each other, so that they must come in one call.
    """

    pinned: tuple[int, ...]
    ring: int
    limit: int | None
    together: int = 1

    @classmethod
    def for_mask(cls, mask: Mask, length: int) -> Slots:
        """The fewest slots that serve ``mask`` up to ``length`` positions.

        Raises:
          ValueError: the mask lets queries see later keys for ever, so that one token at a time
            cannot equal the whole sequence at once; or length is below 1.
        """
        if length < 1:
            raise ValueError(f"a cache needs a length of at least 1, got {length}")
        if mask.causal_from() is None:
            raise ValueError(
                f"a cache needs a causal mask, and {mask} lets queries see later keys; "
                "combine it with Causal() &"
            )
        retention, together = mask.retention(), mask.causal_from() + 1
        pinned = sum(position < length for position in retention.pinned)
        if retention.last is None or retention.last + pinned >= length:
            return cls((), length, length, together)
        return cls(retention.pinned, retention.last, None, together)

    @property
    def capacity(self) -> int:
        return len(self.pinned) + self.ring

    def slot(self, position: jax.Array) -> jax.Array:
        """Index of the slot of each position; ``capacity`` where there is none."""
        nowhere = self.capacity
        slot = (
            len(self.pinned) + position % self.ring
            if self.ring
            else jnp.full_like(position, nowhere)
        )
        if self.limit is not None:
            slot = jnp.where(position < self.limit, slot, nowhere)
        if self.pinned:
            pinned = jnp.asarray(self.pinned, position.dtype)
            index = jnp.searchsorted(pinned, position)
            held = pinned[jnp.minimum(index, len(self.pinned) - 1)] == position
            slot = jnp.where(held, index.astype(slot.dtype), slot)
        return jnp.where(position >= 0, slot, nowhere)


@dataclasses.dataclass(frozen=True)
class SlotCache:
    """Base of the caches that keep one entry a position; subclasses name the entries.

    Attributes:
      position_BS: the position that each slot holds, −1 where it is empty.
      slots: the layout.
    """

    position_BS: jax.Array
    slots: Slots

    @classmethod
    def create(cls, batch: int, slots: Slots, dtype, **shapes: tuple[int, ...]) -> Self:
        """An empty cache; ``shapes`` gives each entry's shape per position."""
        entries = {
            name: jnp.zeros((batch, slots.capacity, *shape), dtype)
            for name, shape in shapes.items()
        }
        position_BS = jnp.full((batch, slots.capacity), -1, jnp.int32)
        return cls(position_BS=position_BS, slots=slots, **entries)

    @property
    def entries(self) -> dict[str, jax.Array]:
        """The stored arrays by name, each (B, S, …)."""
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in _BOOKKEEPING}

    @property
    def limit(self) -> int | None:
        """Positions at or past it do not fit; None where there is no end."""
        return self.slots.limit

    @property
    def nbytes(self) -> int:
        """Bytes of the stored entries, without the bookkeeping of positions."""
        return sum(array.nbytes for array in self.entries.values())

    def reset(self) -> Self:
        """The same cache, empty."""
        return dataclasses.replace(self, position_BS=jnp.full_like(self.position_BS, -1))

    def append(
        self, positions_BT: jax.Array, valid_BT: jax.Array, **new: jax.Array
    ) -> tuple[Self, dict[str, jax.Array], jax.Array]:
        """Takes T tokens in; whatever it held at or after their first position is forgotten.

        A ring that has let go of older positions cannot go back, but to position 0.

        Args:
          positions_BT: their positions, ascending within a row.
          valid_BT: false for padding, which is not stored.
          new: entries (B, T, …) by name.

        Returns:
          The new cache, and the entries to attend over with their positions (−1 = empty). These
          hold what the T queries may see, also what the ring no longer has room for afterwards.

        Raises:
          ValueError: more tokens, or later positions, than the cache has room for; tokens that go
            back to what a ring has let go of; or that go on within the first positions of a mask
            that lets these see each other. Positions that are being traced cannot be checked:
            whoever traces checks before.
        """
        if positions_BT.shape[1] == 0:
            raise ValueError("a cache is given at least one token at a time, got 0")
        self._check(positions_BT, valid_BT)
        positions_BT = jnp.where(valid_BT, positions_BT, -1)
        first_B1 = jnp.where(valid_BT, positions_BT, jnp.iinfo(jnp.int32).max).min(1, keepdims=True)
        past_BS = jnp.where(self.position_BS < first_B1, self.position_BS, -1)
        stored_BT = positions_BT
        if self.slots.limit is None:
            # Of the tokens that share a ring slot only the latest may be written.
            recent = positions_BT > positions_BT.max(1, keepdims=True) - self.slots.ring
            stored_BT = jnp.where(recent | self._pinned(positions_BT), positions_BT, -1)
        slot_BT = self.slots.slot(stored_BT)
        rows_B1 = jnp.arange(slot_BT.shape[0])[:, None]

        def write(old, update):
            return old.at[rows_B1, slot_BT].set(update.astype(old.dtype), mode="drop")

        # A barrier, or XLA on the CPU writes once more inside of whatever reads the entries, and
        # copies the whole cache for each of these writes.
        stored = jax.lax.optimization_barrier(
            {name: write(array, new[name]) for name, array in self.entries.items()}
        )
        cache = dataclasses.replace(self, position_BS=write(past_BS, stored_BT), **stored)
        if self.slots.limit is not None or positions_BT.shape[1] == 1:
            return cache, cache.entries, cache.position_BS
        seen = {
            name: jnp.concatenate([array, new[name].astype(array.dtype)], axis=1)
            for name, array in self.entries.items()
        }
        return cache, seen, jnp.concatenate([past_BS, positions_BT], axis=1)

    def _pinned(self, positions_BT: jax.Array) -> jax.Array:
        return jnp.isin(positions_BT, jnp.asarray(self.slots.pinned, jnp.int32))

    def _check(self, positions_BT: jax.Array, valid_BT: jax.Array) -> None:
        if any(isinstance(x, jax.core.Tracer) for x in (positions_BT, valid_BT, self.position_BS)):
            return
        places_BT = np.where(valid_BT, positions_BT, -1)
        last, limit, together = int(places_BT.max(initial=-1)), self.limit, self.slots.together
        if limit is not None and last >= limit:
            raise ValueError(f"position {last} is past the end of a cache of length {limit}")
        first_B = np.where(valid_BT, positions_BT, together).min(1, initial=together)
        within_B = (first_B > 0) & (first_B < together)
        if within_B.any():
            raise ValueError(
                f"the first {together} positions see each other and must come in one call, but "
                f"these begin at position {first_B[within_B][0]}"
            )
        if limit is None:
            held_B = np.asarray(self.position_BS).max(1, initial=-1)
            # Up to there nothing has been overwritten; and the last token may be written again.
            forgotten_B = np.where(held_B < self.slots.ring, -1, held_B - 1)
            check_goes_on(
                positions_BT, valid_BT, forgotten_B, "the ring has let go of the keys before it"
            )


_BOOKKEEPING = ("position_BS", "slots")


def _register(cls):
    arrays = [field.name for field in dataclasses.fields(cls) if field.name != "slots"]
    return jax.tree_util.register_dataclass(cls, data_fields=arrays, meta_fields=["slots"])


@_register
@dataclasses.dataclass(frozen=True)
class KVCache(SlotCache):
    """Keys and values per key-value head; keys are kept rotated to their own positions."""

    k_BSKH: jax.Array
    v_BSKE: jax.Array


@_register
@dataclasses.dataclass(frozen=True)
class LatentCache(SlotCache):
    """The latent that restores keys and values, and the rotary key all heads share (MLA)."""

    latent_BSR: jax.Array
    rope_key_BSP: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LastKey:
    """The raw key of the last token, which the next one is mixed with.

    Attributes:
      key_BKH: the key.
      position_B: where it stands, −1 where there is none.
    """

    key_BKH: jax.Array
    position_B: jax.Array

    @classmethod
    def none(cls, shape_BKH: tuple[int, ...], dtype) -> LastKey:
        """No token yet."""
        return cls(jnp.zeros(shape_BKH, dtype), jnp.full(shape_BKH[0], -1, jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SmearedCache:
    """A cache of smeared keys, and the last raw key."""

    inner: KVCache
    last: LastKey

    @property
    def limit(self) -> int | None:
        """See ``SlotCache.limit``."""
        return self.inner.limit

    @property
    def nbytes(self) -> int:
        """Bytes of the stored entries and of the last raw key."""
        return self.inner.nbytes + self.last.key_BKH.nbytes

    def reset(self) -> SmearedCache:
        """The same cache, empty."""
        nothing = jnp.full_like(self.last.position_B, -1)
        last = dataclasses.replace(self.last, position_B=nothing)
        return SmearedCache(self.inner.reset(), last)
