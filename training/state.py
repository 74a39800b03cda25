"""The whole of what a training run carries from one step to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Step, parameters, optimizer state and the key that dropout draws from: one pure pytree.

    Attributes:
      step: int32 scalar; the number of optimizer steps taken.
      params: nested dict of float32 arrays.
      opt_state: the optax state that belongs to ``params``.
      key: a typed PRNG key; the key of step i is ``fold_in(key, i)``, so it never advances.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array
