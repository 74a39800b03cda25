"""A condition for ``lax.cond`` that stays one condition under ``vmap``."""

import jax


@jax.custom_batching.custom_vmap
def everywhere(holds: jax.Array) -> jax.Array:
    """Whether all entries hold, and under ``vmap`` those of every mapped copy too: one boolean.

    ``lax.cond`` on a condition of its own for each copy takes both branches. For a branch that is
    merely slow, and right where the condition holds as well, one copy may decide for all.
    """
    return holds.all()


@everywhere.def_vmap
def _of_all_copies(axis_size, mapped, holds):
    del axis_size, mapped
    return everywhere(holds), False
