"""Queries, keys and values that are not finite, around kernels that must not meet them.

0 · inf is NaN: what is not finite must not enter a product at all, hidden or not.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.everywhere import everywhere


def on_finite(
    attend: Callable, sees: Callable, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKE: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(out_BTNE, lse_BNT) of ``attend(q, k, v)``, with NaN in rows that see what is not finite.

    A value spoils its rows' output alone, a key the log-sum-exp too, and so does a query its own
    row where that sees a key. Gradients pass through none of them; the reference does the same
    with keys and values, and with a query gives NaN.

    Args:
      attend: is shown queries, keys and values with 0 where they are not finite; a key and its
        value go together.
      sees: (B, S, K, 2) booleans → (B, T, N, 2), which queries see a key that is marked. Runs
        only where something is not finite.
    """
    finite_k_BSK = jnp.isfinite(k_BSKH).all(-1)
    finite_BSK = finite_k_BSK & jnp.isfinite(v_BSKE).all(-1)
    finite_BTN = jnp.isfinite(q_BTNH).all(-1)
    finite = finite_BTN, finite_BSK, finite_BSK
    out_BTNE, lse_BNT = attend(
        *(
            jnp.where(each[..., None], x, 0)
            for each, x in zip(finite, (q_BTNH, k_BSKH, v_BSKE), strict=True)
        )
    )
    B, N, T = lse_BNT.shape
    sick_BTN2 = jax.lax.cond(
        everywhere(finite_BSK),
        lambda: jnp.zeros((B, T, N, 2), bool),
        lambda: sees(~jnp.stack([finite_BSK, finite_k_BSK], -1)),
    )
    sees_key_BTN = lse_BNT.swapaxes(1, 2) != -jnp.inf
    sick_BTN2 = sick_BTN2 | (~finite_BTN & sees_key_BTN)[..., None]
    out_BTNE = jnp.where(sick_BTN2[..., :1], jnp.nan, out_BTNE)
    return out_BTNE, jnp.where(sick_BTN2[..., 1].swapaxes(1, 2), jnp.nan, lse_BNT)
