"""Flash attention on a TPU: which calls it takes, and its derivative.

After FlashAttention-2 (arXiv:2307.08691): an online softmax over key tiles, and a backward pass
that recomputes the scores from the log-sum-exp. Only the tiles of the mask's tile table are
visited, so empty ones cost neither arithmetic nor memory traffic.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from attention.pallas import tpu_calls
from attention.pallas.finite import on_finite
from attention.pallas.tpu_calls import Plan, Tile, choose_tile, folded_group
from attention.pallas.tpu_kernels import LOG2_E, Scores

# Kinds of TPU on which the numbers were checked on the device itself, with the date of the check.
CHECKED_DEVICES: dict[str, str] = {}

WIDEST = 256
# Row, column and kind of a visit take 12 bytes of 1 MiB of scalar memory.
MOST_VISITS = 65_536

_interpreter: contextvars.ContextVar = contextvars.ContextVar("tpu_interpreter", default=None)


@contextlib.contextmanager
def interpreted(parameters: pltpu.InterpretParams | None = None):
    """Within it, the kernels run in the TPU interpreter on any machine: slow, for tests.

    By default with two cores, and a race is an error.
    """
    if parameters is None:
        parameters = pltpu.InterpretParams(
            detect_races=True, on_race="raise", num_cores_or_threads=2
        )
    token = _interpreter.set(parameters)
    try:
        yield
    finally:
        _interpreter.reset(token)


def cannot(call) -> str | None:
    """Why these kernels cannot run an ``attention.ops.Call``, or None."""
    dtypes = {str(x.dtype) for x in (call.q_BTNH, call.k_BSKH, call.v_BSKE)}
    (N, H), (K, E) = call.q_BTNH.shape[2:], call.v_BSKE.shape[2:]
    if not dtypes <= {"float32", "bfloat16"}:
        other = min(dtypes - {"float32", "bfloat16"})
        return f"a TPU's matrix unit takes float32 and bfloat16, not {other}"
    if call.dropout is not None:
        return "dropout is not implemented in the kernels"
    if isinstance(call.scale, jax.Array):
        return "scale is an array; it must be a number, multiply the queries instead"
    if call.q_index is not None or call.k_index is not None:
        return "explicit indices: which tiles are empty must be known before tracing"
    if max(H, E) > WIDEST:
        return f"head widths up to {WIDEST} fit on the chip, these are {H} and {E}"
    if N // K > 128:
        return f"up to 128 query heads to a key-value head fit on the chip, these are {N // K}"
    if 0 in (call.q_BTNH.size, call.k_BSKH.size, E):
        return f"nothing to do for shapes {call.q_BTNH.shape} and {call.v_BSKE.shape}"
    if jax.default_backend() != "tpu" and _interpreter.get() is None:
        return f"it needs a TPU, this is a {jax.default_backend()}"
    visits = plan(call).num_visits
    if visits > MOST_VISITS:
        return f"its list of {visits} tiles is longer than scalar memory holds, {MOST_VISITS}"
    return None


def unwise(call) -> str | None:
    """Why "auto" passes the kernels over, or None."""
    kind = jax.devices()[0].device_kind
    if kind in CHECKED_DEVICES:
        return None
    return f"its numbers have not been checked on this device ({kind})"


def plan(call, tile: Tile | None = None) -> Plan:
    """The tile, by default ``choose_tile``, and all else that is known of a call before tracing."""
    T, N, H = call.q_BTNH.shape[1:]
    S, K, E = call.v_BSKE.shape[1:]
    item_size = jnp.result_type(call.q_BTNH, call.k_BSKH, call.v_BSKE).itemsize
    if tile is None:
        tile = choose_tile(T, S, folded_group(N // K), max(H, E), item_size)
    return Plan(Scores(call.mask, call.scale, S), T, N // K, tile, _interpreter.get())


def run(call) -> tuple[jax.Array, jax.Array]:
    """(out_BTNE, lse_BNT) of an ``attention.ops.Call`` that ``cannot`` has nothing against.

    bfloat16 weights enter the products with the values as bfloat16; all sums are float32.
    """
    return run_planned(call, plan(call))


def run_planned(call, plan: Plan) -> tuple[jax.Array, jax.Array]:
    """``run`` with a plan of one's own."""
    out_dtype = call.v_BSKE.dtype
    dtype = jnp.result_type(call.q_BTNH, call.k_BSKH, call.v_BSKE)
    q, k, v = (x.astype(dtype) for x in (call.q_BTNH, call.k_BSKH, call.v_BSKE))
    N = q.shape[2]
    sink_N = jnp.full(N, -jnp.inf) if call.sink_N is None else call.sink_N
    tags = _tags(call.q_segments, call.k_segments, q.shape[:2], k.shape[:2])

    def attend(q_BTNH, k_BSKH, v_BSKE):
        return _attention(plan, q_BTNH, k_BSKH, v_BSKE, sink_N, tags)

    def sees(marked_BSK2):
        return _sees(plan, marked_BSK2, q.shape[1], tags)

    out, lse = on_finite(attend, sees, q, k, v)
    return out.astype(out_dtype), lse


def _tags(q_segments, k_segments, q_shape, k_shape) -> tuple[jax.Array, jax.Array] | None:
    """Numbers per query and key; those meet that are equal and not 0."""
    if q_segments is None and k_segments is None:
        return None
    if q_segments is None:
        return jnp.ones(q_shape, jnp.int32), (k_segments != 0).astype(jnp.int32)
    if k_segments is None:
        return (q_segments != 0).astype(jnp.int32), jnp.ones(k_shape, jnp.int32)
    return q_segments.astype(jnp.int32), k_segments.astype(jnp.int32)


def _sees(plan: Plan, marked_BSKM: jax.Array, num_queries: int, tags) -> jax.Array:
    """(B, T, N, M): which queries see a key with a mark, as the sign of their mean over marks."""
    B, S, K, M = marked_BSKM.shape
    q_BTK1 = jnp.zeros((B, num_queries, K, 1), jnp.float32)
    k_BSK1 = jnp.zeros((B, S, K, 1), jnp.float32)
    tile = choose_tile(num_queries, S, group=1, widest=M, item_size=4)
    alone = dataclasses.replace(plan, group=1, tile=tile)
    marks_BSKM, no_sink_K = marked_BSKM.astype(jnp.float32), jnp.full(K, -jnp.inf)
    share_BTKM = tpu_calls.forward(alone, q_BTK1, k_BSK1, marks_BSKM, no_sink_K, tags)[0]
    return jnp.repeat(share_BTKM > 0, plan.group, axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, tags):
    return tpu_calls.forward(plan, q_BTNH, k_BSKH, v_BSKE, sink_N, tags)[:2]


def _attention_forward(plan: Plan, q_BTNH, k_BSKH, v_BSKE, sink_N, tags):
    arguments = q_BTNH, k_BSKH, v_BSKE, sink_N, tags
    out_BTNE, lse_BNT, *weights = tpu_calls.forward(plan, *arguments)
    return (out_BTNE, lse_BNT), (arguments, out_BTNE, lse_BNT, weights)


def _attention_backward(plan: Plan, saved, cotangents):
    (q_BTNH, k_BSKH, v_BSKE, sink_N, tags), out_BTNE, lse_BNT, (base_BNT, share_BNT) = saved
    do_BTNE, dlse_BNT = cotangents
    # A row without a key passes nothing on, whatever it holds: its weights are 0, and 0 · 0.
    seen_BNT = lse_BNT != -jnp.inf
    seen_BTN1 = seen_BNT.transpose(0, 2, 1)[..., None]
    q_BTNH = jnp.where(seen_BTN1, q_BTNH, 0)
    do_BTNE = jnp.where(seen_BTN1, do_BTNE, 0)
    products = do_BTNE.astype(jnp.float32) * out_BTNE.astype(jnp.float32)
    centre_BNT = products.sum(-1).transpose(0, 2, 1) - jnp.where(seen_BNT, dlse_BNT, 0)
    dq, dk, dv = tpu_calls.backward(
        plan, q_BTNH, k_BSKH, v_BSKE, do_BTNE, base_BNT, share_BNT, centre_BNT, tags
    )
    sink_1N1 = sink_N.astype(jnp.float32)[None, :, None] * LOG2_E
    p_sink_BNT = jnp.exp2(sink_1N1 - base_BNT) * share_BNT
    dsink_N = -(p_sink_BNT * centre_BNT).sum((0, 2)).astype(sink_N.dtype)
    return dq, dk, dv, dsink_N, None


_attention.defvjp(_attention_forward, _attention_backward)
