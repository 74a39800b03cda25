"""The backward kernels for Hopper: one for the gradient of q, one for those of k and v.

Both recompute the weights from the log-sum-exp, p = exp2(s · c − lse), and need no atomics, so
that equal inputs give equal bits:

  dp = do · vᵀ, ds = p · (dp − delta), dq = scale · ds · k, dk = scale · dsᵀ · q, dv = pᵀ · do

float32 rounds s · c, the log-sum-exp and its multiple of log2(e), each by up to 6e-8 of itself, so
that p is off by up to 2e-7 · |s|. At scores of ±10,000 gradients are within 1.5e-3 of the largest
one, the bound for float16 at any scores: the interpreter gives 1e-3 there, and 4e-4 at ±5.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from attention.pallas import gpu_plan
from attention.pallas.gpu_plan import BLOCK, CONSUMERS, LOG2E, ROWS, Plan, filled


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Which tiles make the scores of a step and their gradient, queries along rows or columns.

    Attributes:
      s_left, s_right: scores = s_left · s_rightᵀ.
      dp_left, dp_right: the gradient of the weights, likewise.
    """

    s_left: object
    s_right: object
    dp_left: object
    dp_right: object


def _weights(plan: Plan, operands: _Operands, lse, allowed, shape):
    """p = exp2(s · c − lse), and a function that gives dp.

    On a full tile both products run while p is made from the first. On a partial one the mask
    needs the registers that the second would occupy, so that one runs when dp is asked for.
    """

    def weights(scores):
        return jnp.exp2(scores * (plan.scale * LOG2E) - lse())

    s_right, dp_right = (x.transpose((1, 0)) for x in (operands.s_right, operands.dp_right))
    if allowed is not None:
        scores = gpu_plan.product(operands.s_left, s_right, shape)
        p = weights(jnp.where(allowed(), scores, -jnp.inf))
        return p, lambda: gpu_plan.product(operands.dp_left, dp_right, shape)

    def multiply(s_ref, dp_ref):
        plgpu.wgmma(s_ref, operands.s_left, s_right)
        plgpu.wgmma(dp_ref, operands.dp_left, dp_right)
        p = weights(plgpu.wgmma_accumulator_load(s_ref, wait_n=1))
        return p, dp_ref[...]

    acc = plgpu.ACC(shape, jnp.float32)
    p, dp = pl.run_scoped(multiply, acc, acc)
    return p, lambda: dp


def _score_gradient(p, dp, delta, masked: bool):
    ds = p * (dp - delta)
    # A hidden key may hold huge values: dp is then infinite, and 0 · inf would be NaN.
    return jnp.where(p == 0, 0.0, ds) if masked else ds


def query_gradient(plan: Plan, q, k, v, do, lse2, delta) -> jax.Array:
    """dq_BTNH.

    Args:
      q, k, v, do: BTNH, BSKH, BSKE, BTNE, padded to whole tiles.
      lse2: (B, N, T), the log-sum-exp in base 2.
      delta: (B, N, T), Σ_e out · do − the gradient of the log-sum-exp.
    """
    B, _, N, H = q.shape
    K, E = v.shape[2:]
    dtype = q.dtype
    depth, num_keys = gpu_plan.ring_depth(H, E), plan.dq_keys
    shape = (ROWS, num_keys)
    tiles = plan.table(BLOCK, num_keys).by_query
    scratch = dict(
        q_smem=gpu_plan.tile_scratch(CONSUMERS, ROWS, H, dtype=dtype),
        do_smem=gpu_plan.tile_scratch(CONSUMERS, ROWS, E, dtype=dtype),
        lse_smem=plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        delta_smem=plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        k_smem=gpu_plan.tile_scratch(depth, num_keys, H, dtype=dtype),
        v_smem=gpu_plan.tile_scratch(depth, num_keys, E, dtype=dtype),
        own_ready=plgpu.Barrier(num_arrivals=4, num_barriers=CONSUMERS),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=depth),
        done=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=depth),
    )
    if plan.interpret:
        scratch["ds_smem"] = gpu_plan.tile_scratch(CONSUMERS, *shape, dtype=dtype)

    def dq_kernel(
        rows_ref, columns_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dq_ref, **smem
    ):
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        rank, warpgroup = lax.axis_index("rank"), lax.axis_index("warpgroup")
        row, start, full_end, end = (rows_ref[i, rank] for i in range(4))

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(gpu_plan.PRODUCER_REGISTERS, action="decrease")
            kv_head = lax.div(head, jnp.int32(N // K))

            def fill(step, slot):
                keys = batch, pl.ds(columns_ref[start + step] * num_keys, num_keys), kv_head
                ready = smem["ready"].at[slot]
                plgpu.copy_gmem_to_smem(k_ref.at[keys], smem["k_smem"].at[slot], ready)
                plgpu.copy_gmem_to_smem(v_ref.at[keys], smem["v_smem"].at[slot], ready)

            gpu_plan.produce(end - start, depth, (smem["done"],), fill)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(gpu_plan.CONSUMER_REGISTERS, action="increase")
            first = row * BLOCK + warpgroup * ROWS
            queries, numbers = (batch, pl.ds(first, ROWS), head), (batch, head, pl.ds(first, ROWS))
            own = {
                name: smem[name].at[warpgroup]
                for name in ("q_smem", "do_smem", "lse_smem", "delta_smem", "own_ready")
            }
            ds_smem = smem["ds_smem"].at[warpgroup] if plan.interpret else None
            for ref, index, name in (
                (q_ref, queries, "q_smem"),
                (do_ref, queries, "do_smem"),
                (lse_ref, numbers, "lse_smem"),
                (delta_ref, numbers, "delta_smem"),
            ):
                plgpu.copy_gmem_to_smem(ref.at[index], own[name], own["own_ready"])
            plgpu.barrier_wait(own["own_ready"])
            lse = plgpu.load(own["lse_smem"], layout=gpu_plan.WGMMA.reduce(1))
            delta = plgpu.load(own["delta_smem"], layout=gpu_plan.WGMMA.reduce(1))

            def step(entry, dq, masked):
                slot = gpu_plan.slot_of(entry - start, depth)
                k_smem, v_smem = smem["k_smem"].at[slot], smem["v_smem"].at[slot]

                def allowed():
                    return plan.allowed(first, columns_ref[entry] * num_keys, shape, q_axis=0)

                plgpu.barrier_wait(smem["ready"].at[slot])
                p, dp = _weights(
                    plan,
                    _Operands(own["q_smem"], k_smem, own["do_smem"], v_smem),
                    lambda: gpu_plan.per_row(lse, shape),
                    allowed if masked else None,
                    shape,
                )
                ds = _score_gradient(p, dp(), gpu_plan.per_row(delta, shape), masked)
                dq = gpu_plan.accumulate(plan, dq, ds.astype(dtype), k_smem, ds_smem)
                plgpu.barrier_arrive(smem["done"].at[slot])
                return dq

            dq = gpu_plan.visit(step, start, full_end, end, filled(0, ROWS, H))
            own["q_smem"][...] = (dq * plan.scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own["q_smem"], dq_ref.at[queries])
            plgpu.wait_smem_to_gmem(0)

    return plan.kernel(
        dq_kernel,
        out_type=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch_types=scratch,
        grid=(N, B, tiles.num_rows),
        grid_names=("head", "batch", "rank"),
    )(*gpu_plan.device_lists(tiles), q, k, v, do, lse2, delta)


def key_value_gradients(plan: Plan, q, k, v, do, lse2, delta) -> tuple[jax.Array, jax.Array]:
    """(dk_BSKH, dv_BSKE), summed in float32 over the query heads that share a key-value head.

    Arguments as in ``query_gradient``.
    """
    B, _, K, H = k.shape
    N, E = do.shape[2:]
    G = N // K
    dtype = k.dtype
    depth, num_queries = gpu_plan.ring_depth(H, E), plan.dkv_queries
    shape = (ROWS, num_queries)
    tiles = plan.table(num_queries, BLOCK).by_key
    scratch = dict(
        k_smem=gpu_plan.tile_scratch(CONSUMERS, ROWS, H, dtype=dtype),
        v_smem=gpu_plan.tile_scratch(CONSUMERS, ROWS, E, dtype=dtype),
        q_smem=gpu_plan.tile_scratch(depth, num_queries, H, dtype=dtype),
        do_smem=gpu_plan.tile_scratch(depth, num_queries, E, dtype=dtype),
        lse_smem=plgpu.SMEM((depth, num_queries), jnp.float32),
        delta_smem=plgpu.SMEM((depth, num_queries), jnp.float32),
        own_ready=plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS),
        ready=plgpu.Barrier(num_arrivals=4, num_barriers=depth),
        done=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=depth),
    )
    if plan.interpret:
        scratch["p_smem"] = gpu_plan.tile_scratch(CONSUMERS, *shape, dtype=dtype)
        scratch["ds_smem"] = gpu_plan.tile_scratch(CONSUMERS, *shape, dtype=dtype)

    def dkv_kernel(
        rows_ref,
        columns_ref,
        q_ref,
        k_ref,
        v_ref,
        do_ref,
        lse_ref,
        delta_ref,
        dk_ref,
        dv_ref,
        **smem,
    ):
        batch, kv_head = lax.axis_index("batch"), lax.axis_index("head")
        rank, warpgroup = lax.axis_index("rank"), lax.axis_index("warpgroup")
        row, start, full_end, end = (rows_ref[i, rank] for i in range(4))
        count = end - start

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(gpu_plan.PRODUCER_REGISTERS, action="decrease")

            def fill(step, slot):
                head = kv_head * G + lax.div(step, count)
                column = columns_ref[start + lax.rem(step, count)]
                queries = pl.ds(column * num_queries, num_queries)
                for ref, index, buffer in (
                    (q_ref, (batch, queries, head), smem["q_smem"]),
                    (do_ref, (batch, queries, head), smem["do_smem"]),
                    (lse_ref, (batch, head, queries), smem["lse_smem"]),
                    (delta_ref, (batch, head, queries), smem["delta_smem"]),
                ):
                    plgpu.copy_gmem_to_smem(ref.at[index], buffer.at[slot], smem["ready"].at[slot])

            gpu_plan.produce(count * G, depth, (smem["done"],), fill)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(gpu_plan.CONSUMER_REGISTERS, action="increase")
            first = row * BLOCK + warpgroup * ROWS
            keys = batch, pl.ds(first, ROWS), kv_head
            k_smem, v_smem = smem["k_smem"].at[warpgroup], smem["v_smem"].at[warpgroup]
            own_ready = smem["own_ready"].at[warpgroup]
            p_smem = smem["p_smem"].at[warpgroup] if plan.interpret else None
            ds_smem = smem["ds_smem"].at[warpgroup] if plan.interpret else None
            plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem, own_ready)
            plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem, own_ready)
            plgpu.barrier_wait(own_ready)

            def step(group, entry, carry, masked):
                dk, dv = carry
                slot = gpu_plan.slot_of(group * count + (entry - start), depth)
                q_smem, do_smem = smem["q_smem"].at[slot], smem["do_smem"].at[slot]

                def allowed():
                    return plan.allowed(columns_ref[entry] * num_queries, first, shape, q_axis=1)

                def number_per_column(name):
                    numbers = plgpu.load(smem[name].at[slot], layout=gpu_plan.WGMMA.reduce(0))
                    return gpu_plan.per_column(numbers, shape)

                plgpu.barrier_wait(smem["ready"].at[slot])
                p, dp = _weights(
                    plan,
                    _Operands(k_smem, q_smem, v_smem, do_smem),
                    lambda: number_per_column("lse_smem"),
                    allowed if masked else None,
                    shape,
                )
                dv = gpu_plan.accumulate(plan, dv, p.astype(dtype), do_smem, p_smem)
                ds = _score_gradient(p, dp(), number_per_column("delta_smem"), masked)
                dk = gpu_plan.accumulate(plan, dk, ds.astype(dtype), q_smem, ds_smem)
                plgpu.barrier_arrive(smem["done"].at[slot])
                return dk, dv

            def sum_head(group, carry):
                return gpu_plan.visit(functools.partial(step, group), start, full_end, end, carry)

            zeros = filled(0, ROWS, H), filled(0, ROWS, E)
            dk, dv = lax.fori_loop(0, G, sum_head, zeros)
            k_smem[...] = (dk * plan.scale).astype(dtype)
            v_smem[...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem, dk_ref.at[keys])
            plgpu.copy_smem_to_gmem(v_smem, dv_ref.at[keys])
            plgpu.wait_smem_to_gmem(0)

    return plan.kernel(
        dkv_kernel,
        out_type=(
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(v.shape, dtype),
        ),
        scratch_types=scratch,
        grid=(K, B, tiles.num_rows),
        grid_names=("head", "batch", "rank"),
    )(*gpu_plan.device_lists(tiles), q, k, v, do, lse2, delta)
