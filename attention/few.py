"""Softmax attention of a few queries over many keys: a step of decoding, in plain XLA.

One query reads every key once and does little with it, so the time is that of moving keys and
values. In (B, S, K·H), as a cache lies in memory, all key-value heads are columns of one matrix:
their scores are one product with the queries on a block diagonal, and the output is the block
diagonal of another. Nothing is transposed, and the zeros multiplied on the way cost less than the
copies they save.

A zero times infinity is NaN, so garbage would cross from head to head and out of hidden keys.
Where anything is not finite that a row sees or that reaches an output, the call is computed once
more with its arguments isolated as the reference does it, and to the same bits elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from attention import reference
from attention.everywhere import everywhere

if TYPE_CHECKING:
    from attention.ops import Call

# Beyond, the block diagonals multiply more zeros than the reference moves numbers.
MOST = 8


def _products(q_BTNH, k_BSKH, v_BSKE, allowed_BTS, scale, sink_N, isolated: bool):
    """out_BTNE, lse_BNT, and whether they are what the reference would have found.

    ``isolated``: what is not finite has been taken out of keys and values.
    """
    (B, T, N, H), (S, K), E = q_BTNH.shape, k_BSKH.shape[1:3], v_BSKE.shape[-1]
    dtype = jnp.promote_types(jnp.float32, q_BTNH.dtype)
    G = N // K
    own_KJ = jnp.eye(K, dtype=dtype)
    q_BTKGH = q_BTNH.astype(dtype).reshape(B, T, K, G, H)
    # Letters: J is K once more, of the columns; M = T · N rows of the block diagonal.
    q_BCM = jnp.einsum("btkgh,kj->bjhtkg", q_BTKGH, own_KJ).reshape(B, K * H, T * N)
    s_BSM = jnp.einsum("bsc,bcm->bsm", k_BSKH.astype(dtype).reshape(B, S, K * H), q_BCM) * scale
    allowed_BST1 = jnp.broadcast_to(allowed_BTS, (B, T, S)).swapaxes(1, 2)[..., None]
    s_BSTN = s_BSM.reshape(B, S, T, N)
    most_BTN = jnp.where(allowed_BST1, s_BSTN, -jnp.inf).max(1)
    seen_BT1 = allowed_BST1.any(1)
    # Also where a row sees scores of −inf alone: its sum is 0, and its output NaN.
    top_BTN = jnp.where(most_BTN == -jnp.inf, 0, most_BTN)
    if sink_N is not None:
        sink_N = sink_N.astype(dtype)[None, None]
        top_BTN = jnp.maximum(top_BTN, sink_N)
    p_BSTN = jnp.exp(s_BSTN - top_BTN[:, None])
    if not isolated:
        # NaN where a score is infinite; the sums below collect it at no cost.
        p_BSTN = p_BSTN + 0 * s_BSTN
    p_BSTN = jnp.where(allowed_BST1, p_BSTN, 0)
    total_BTN = p_BSTN.sum(1)
    if sink_N is not None:
        total_BTN = total_BTN + jnp.exp(sink_N - top_BTN)
    out_BMC = jnp.einsum(
        "bsm,bsc->bmc", p_BSTN.reshape(B, S, T * N), v_BSKE.astype(dtype).reshape(B, S, K * E)
    )
    right = everywhere(jnp.isfinite(out_BMC)) & everywhere(jnp.isfinite(total_BTN))
    out_BTKGE = jnp.einsum("btkgje,kj->btkge", out_BMC.reshape(B, T, K, G, K, E), own_KJ)
    total_BTN = jnp.where(seen_BT1, total_BTN, 1)
    lse_BTN = jnp.where(seen_BT1, top_BTN + jnp.log(total_BTN), -jnp.inf)
    out_BTNE = out_BTKGE.reshape(B, T, N, E) / total_BTN[..., None]
    return (out_BTNE.astype(v_BSKE.dtype), lse_BTN.swapaxes(1, 2)), right


def _isolated(q_BTNH, k_BSKH, v_BSKE, allowed_BTS, scale, sink_N):
    """out_BTNE and lse_BNT whatever the arguments hold."""
    (B, T, N, _), K, E = q_BTNH.shape, k_BSKH.shape[2], v_BSKE.shape[-1]
    *arrays, bad_key_BTK, bad_BTK = reference.isolate(q_BTNH, k_BSKH, v_BSKE, allowed_BTS)
    (out_BTNE, lse_BNT), _ = _products(*arrays, allowed_BTS, scale, sink_N, isolated=True)
    out_BTKGE = out_BTNE.reshape(B, T, K, N // K, E)
    out_BTKGE = jnp.where(bad_BTK[..., None, None], jnp.nan, out_BTKGE)
    bad_key_BNT = jnp.repeat(bad_key_BTK, N // K, axis=2).swapaxes(1, 2)
    return out_BTKGE.reshape(B, T, N, E), jnp.where(bad_key_BNT, jnp.nan, lse_BNT)


@jax.custom_jvp
def _attention(arrays, allowed_BTS):
    q_BTNH, k_BSKH, v_BSKE, scale, sink_N = arrays
    everything = q_BTNH, k_BSKH, v_BSKE, allowed_BTS, scale, sink_N
    found, right = _products(*everything, isolated=False)
    return lax.cond(right, lambda *_: found, _isolated, *everything)


@_attention.defjvp
def _tangents(primals, tangents):
    arrays, allowed_BTS = primals

    def dense(arrays):
        q_BTNH, k_BSKH, v_BSKE, scale, sink_N = arrays
        return reference.dense_attention(
            q_BTNH, k_BSKH, v_BSKE, allowed_BTS, scale=scale, sink_N=sink_N
        )

    return _attention(arrays, allowed_BTS), jax.jvp(dense, (arrays,), tangents[:1])[1]


def run(call: Call) -> tuple[jax.Array, jax.Array]:
    """out_BTNE and lse_BNT; equal to the reference but for the order of sums."""
    arrays = (call.q_BTNH, call.k_BSKH, call.v_BSKE, jnp.asarray(call.scale), call.sink_N)
    return _attention(arrays, call.allowed_pairs())


def cannot(call: Call) -> str | None:
    """Why this call is beyond it, or None."""
    if call.q_BTNH.shape[1] > MOST:
        return f"made for at most {MOST} queries at once, not {call.q_BTNH.shape[1]}"
    if call.dropout is not None:
        return "dropout is not made here; the reference drops weights"
    return None


def unwise(call: Call) -> str | None:
    """Why "auto" should pass it over although it could run the call, or None."""
    platform = jax.default_backend()
    if platform != "cpu":
        return f"made for the CPU; on a {platform} dense scores of so few queries are one product"
    return None
