"""What every task hands to training: tokens, what should follow, and where it counts."""

from __future__ import annotations

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of next-token examples.

    Attributes:
      tokens_BT: int32 token ids that the model reads.
      targets_BT: int32; ``targets[b, t]`` is the token that follows ``tokens[b, t]``.
      weights_BT: float32; 1 where the answer is determined by what came before, else 0.
    """

    tokens_BT: jax.Array
    targets_BT: jax.Array
    weights_BT: jax.Array
