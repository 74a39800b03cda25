"""Keys and values that are not finite, around kernels that must not meet them.

0 · inf is NaN: what is not finite must not enter a product at all, hidden or not.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.everywhere import everywhere


def on_finite(
    attend: Callable, sees: Callable, k_BSKH: jax.Array, v_BSKE: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out_BTNE, lse_BNT) of ``attend(k, v)``, with NaN in the rows that see what is not finite.

    A value spoils its rows' output alone, a key the log-sum-exp too; gradients pass through
    neither, as in the reference.

    Args:
      attend: is shown keys and values with 0 in every row of which one is not finite.
      sees: (B, S, K, 2) booleans → (B, T, N, 2), which queries see a key that is marked. Runs
        only where something is not finite.
    """
    finite_k_BSK = jnp.isfinite(k_BSKH).all(-1)
    finite_BSK = finite_k_BSK & jnp.isfinite(v_BSKE).all(-1)
    out_BTNE, lse_BNT = attend(*(jnp.where(finite_BSK[..., None], x, 0) for x in (k_BSKH, v_BSKE)))
    B, N, T = lse_BNT.shape
    sick_BTN2 = jax.lax.cond(
        everywhere(finite_BSK),
        lambda: jnp.zeros((B, T, N, 2), bool),
        lambda: sees(~jnp.stack([finite_BSK, finite_k_BSK], -1)),
    )
    out_BTNE = jnp.where(sick_BTN2[..., :1], jnp.nan, out_BTNE)
    return out_BTNE, jnp.where(sick_BTN2[..., 1].swapaxes(1, 2), jnp.nan, lse_BNT)
