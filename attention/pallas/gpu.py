"""Flash attention for NVIDIA Hopper through Mosaic GPU, forward and backward.

The scheme of FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608): a producer warpgroup copies
key and value tiles with TMA into a ring in shared memory, two consumer warpgroups multiply with
wgmma and take turns at the softmax. Only the tiles of the table are visited, and the mask is
evaluated on partial tiles alone.

Two things are left to XLA around a kernel. Lengths are padded to whole tiles and widths to 64 or
128 columns. And queries, keys and values that are not finite are taken out, see ``finite``: who may
see one gets NaN, who may not gets what the finite ones give.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import re
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from attention.pallas import gpu_backward, gpu_forward
from attention.pallas.finite import on_finite
from attention.pallas.gpu_plan import (
    BLOCK,
    FEW_COMPARISONS,
    LOG2E,
    MOST_COMPARISONS,
    Plan,
    comparisons,
)

if TYPE_CHECKING:
    from attention.ops import Call

# Device kinds on which benchmarks/gpu.sh has checked the numbers, and when (YYYY-MM-DD).
CHECKED_DEVICES: dict[str, str] = {}

DTYPES = (jnp.bfloat16, jnp.float16)
WIDEST = 128

_interpreted = contextvars.ContextVar("interpreted", default=False)


@contextlib.contextmanager
def interpreted():
    """Calls traced inside run in the GPU interpreter on the CPU: right numbers, very slowly.

    The interpreter's build sends the weights through shared memory on their way into a product;
    all else is the kernel that runs on a card.
    """
    token = _interpreted.set(True)
    try:
        yield
    finally:
        _interpreted.reset(token)


def cannot(call: Call) -> str | None:
    """Why the kernels cannot run this call, or None."""
    return _beyond_the_kernels(call) or (None if _interpreted.get() else _wrong_device())


def unwise(call: Call) -> str | None:
    """Why "auto" should not pick the kernels for this call, or None."""
    if _interpreted.get():
        return "the interpreter is for tests"
    if jax.devices()[0].device_kind not in CHECKED_DEVICES:
        return "its numbers have not been checked on a device of this kind"
    return None


def _beyond_the_kernels(call: Call) -> str | None:
    dtypes = {array.dtype for array in (call.q_BTNH, call.k_BSKH, call.v_BSKE)}
    if len(dtypes) != 1 or dtypes.pop() not in DTYPES:
        named = ", ".join(str(array.dtype) for array in (call.q_BTNH, call.k_BSKH, call.v_BSKE))
        return f"q, k and v must all be bfloat16 or all float16 (wgmma operands), got {named}"
    widths = call.q_BTNH.shape[-1], call.v_BSKE.shape[-1]
    if max(widths) > WIDEST:
        return (
            f"head widths above {WIDEST} do not fit in registers beside the scores, got "
            f"{widths[0]} for queries and keys and {widths[1]} for values"
        )
    if call.q_index is not None or call.k_index is not None:
        return "positions are given as arrays, so the tile table cannot be built before tracing"
    if call.q_segments is not None or call.k_segments is not None:
        return "segments are not supported: the kernels load positions, not numbers of documents"
    if call.dropout is not None:
        return "dropout is not supported: the kernels draw no random numbers"
    # As the compiler reports, see benchmarks/aot_gpu.py: it spills where queries and keys are not
    # at the same positions, beside two gradients of 128 columns.
    shifted = call.q_BTNH.shape[1] != call.k_BSKH.shape[1] and min(widths) > 64
    most = FEW_COMPARISONS if shifted else MOST_COMPARISONS
    if comparisons(call.mask) > most:
        return (
            f"the outcomes of {comparisons(call.mask)} comparisons a pair, as this mask makes, do "
            f"not fit in registers, up to {most} do"
            + (" where T differs from S and both head widths exceed 64" if shifted else "")
        )
    if isinstance(call.scale, jax.Array):
        return "scale is an array; it must be a number, multiply the queries instead"
    return None


def _wrong_device() -> str | None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs an NVIDIA Hopper GPU, and this process runs on {device.platform!r}"
    capability = getattr(device, "compute_capability", "unknown")
    if capability != "9.0":
        return (
            "wgmma is Hopper's (compute capability 9.0); this device is "
            f"{device.device_kind!r} with compute capability {capability}"
        )
    version = re.search(r"cuda (\d+)", device.client.platform_version)
    if version and 12080 <= int(version.group(1)) < 12091:
        return f"ptxas of CUDA 12.8.0 to 12.9.0 miscompiles masked kernels, got {version.group(1)}"
    return None


def run(call: Call) -> tuple[jax.Array, jax.Array]:
    """(out_BTNE, lse_BNT) of a call that ``cannot`` lets pass."""
    return run_planned(call, plan(call))


def plan(call: Call) -> Plan:
    """All that is known of a call before tracing."""
    T, S = call.q_BTNH.shape[1], call.k_BSKH.shape[1]
    # The kernels take the largest product of a row for its largest score: the scale is positive
    # there, and its sign goes into the queries, exactly.
    # Positions that are shifted, and a last tile that is cut, take registers too.
    few = FEW_COMPARISONS if T == S and S % BLOCK == 0 else 1
    dq_keys = BLOCK // 2 if comparisons(call.mask) > few else BLOCK
    return Plan(call.mask, abs(call.scale) or 1.0, T, S, _interpreted.get(), dq_keys=dq_keys)


def run_planned(call: Call, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """``run`` with a plan of one's own."""
    q_BTNH = call.q_BTNH
    if call.scale <= 0:
        q_BTNH = q_BTNH * jnp.asarray(np.sign(call.scale), q_BTNH.dtype)

    def attend(q_BTNH, k_BSKH, v_BSKE):
        out_BTNE, lse_BNT = _attend(plan, q_BTNH, k_BSKH, v_BSKE)
        if call.sink_N is None:
            return out_BTNE, lse_BNT
        return _with_sink(out_BTNE, lse_BNT, call.sink_N)

    def sees(marked_BSK2):
        return _sees(plan, marked_BSK2, q_BTNH.shape[2])

    return on_finite(attend, sees, q_BTNH, call.k_BSKH, call.v_BSKE)


def _sees(plan: Plan, marked_BSKM: jax.Array, num_heads: int) -> jax.Array:
    """(B, T, N, M): which queries see a key with a mark, as the sign of their mean over marks."""
    B, S, K, M = marked_BSKM.shape
    q_BTKM, k_BSKM = (
        jnp.zeros((B, length, K, M), jnp.bfloat16) for length in (plan.num_queries, S)
    )
    operands = map(_padded, (q_BTKM, k_BSKM, marked_BSKM.astype(jnp.bfloat16)))
    share_BTKM, _ = gpu_forward.forward(plan, *operands)
    seen_BTKM = share_BTKM[:, : plan.num_queries, :, :M] > 0
    return jnp.repeat(seen_BTKM, num_heads // K, axis=2)


def _with_sink(out_BTNE, lse_BNT, sink_N) -> tuple[jax.Array, jax.Array]:
    """A logit that takes part in the softmax only grows the sum: out · exp(lse − lse')."""
    seen = lse_BNT != -jnp.inf
    lse = jnp.where(seen, lse_BNT, 0)  # selected before, so that no gradient is NaN · 0
    total = jnp.logaddexp(lse, sink_N.astype(jnp.float32)[None, :, None])
    factor_BTN1 = jnp.exp(lse - total).swapaxes(1, 2)[..., None]
    return (out_BTNE * factor_BTN1).astype(out_BTNE.dtype), jnp.where(seen, total, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q_BTNH, k_BSKH, v_BSKE) -> tuple[jax.Array, jax.Array]:
    T, E = q_BTNH.shape[1], v_BSKE.shape[-1]
    out, lse = gpu_forward.forward(plan, _padded(q_BTNH), _padded(k_BSKH), _padded(v_BSKE))
    return out[:, :T, :, :E], lse[:, :, :T]


def _attend_forward(plan, q_BTNH, k_BSKH, v_BSKE):
    out, lse = _attend(plan, q_BTNH, k_BSKH, v_BSKE)
    return (out, lse), (q_BTNH, k_BSKH, v_BSKE, out, lse)


def _attend_backward(plan, residuals, cotangents):
    q_BTNH, k_BSKH, v_BSKE, out_BTNE, lse_BNT = residuals
    dout_BTNE, dlse_BNT = cotangents
    # Rows without a key take part with zeros: whatever they hold reaches no gradient, as in the
    # reference.
    seen_BNT = jnp.isfinite(lse_BNT)
    seen_BTN1 = seen_BNT.swapaxes(1, 2)[..., None]
    q = jnp.where(seen_BTN1, q_BTNH, 0)
    dout = jnp.where(seen_BTN1, dout_BTNE, 0).astype(q.dtype)
    delta_BTN = (out_BTNE.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    delta_BNT = delta_BTN.swapaxes(1, 2) - jnp.where(seen_BNT, dlse_BNT, 0)
    lse2_BNT = jnp.where(seen_BNT, lse_BNT, 0) * LOG2E
    numbers = [_to_multiple(x, 2, BLOCK) for x in (lse2_BNT, delta_BNT)]
    operands = *map(_padded, (q, k_BSKH, v_BSKE, dout)), *numbers
    dq = gpu_backward.query_gradient(plan, *operands)
    dk, dv = gpu_backward.key_value_gradients(plan, *operands)
    return tuple(
        gradient[:, : x.shape[1], :, : x.shape[3]]
        for gradient, x in ((dq, q_BTNH), (dk, k_BSKH), (dv, v_BSKE))
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _padded(x: jax.Array) -> jax.Array:
    """(B, length, heads, width) with zeros up to whole tiles."""
    return _to_multiple(_to_multiple(x, 1, BLOCK), 3, 64)


def _to_multiple(x: jax.Array, axis: int, multiple: int) -> jax.Array:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)
