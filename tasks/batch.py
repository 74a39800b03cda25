"""What every task hands to training: tokens, what should follow, and where it counts."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from tasks.vocabulary import PAD


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of examples.

    Attributes:
      tokens_BT: int32 token ids that the model reads.
      targets_BT: int32; ``targets[b, t]`` is the token that follows ``tokens[b, t]``.
      weights_BT: float32; 1 where the answer is determined by what came before, else 0.
      source_BS: int32; what the encoder reads, padded on the right; None where the task has no
        source.
    """

    tokens_BT: jax.Array
    targets_BT: jax.Array
    weights_BT: jax.Array
    source_BS: jax.Array | None = None

    @property
    def source_segments_BS(self) -> jax.Array:
        """int32; 1 for the tokens of the source, 0 for its padding."""
        return (self.source_BS != PAD).astype(jnp.int32)

    def source_arguments(self) -> dict[str, jax.Array]:
        """The source as arguments of ``models.generate``; nothing where there is none."""
        if self.source_BS is None:
            return {}
        return {"source_BS": self.source_BS, "source_segments_BS": self.source_segments_BS}
