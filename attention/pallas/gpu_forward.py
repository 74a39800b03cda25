"""The forward kernel for Hopper: out and log-sum-exp of 128 queries of a head per thread block."""

from __future__ import annotations

import dataclasses

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from attention.pallas import gpu_plan
from attention.pallas.gpu_plan import BLOCK, CONSUMERS, LOG2E, ROWS, Plan, filled, per_row

# Below every score, yet finite: a row that has seen no key yet subtracts it without making NaN.
FLOOR = -1.7e38


def forward(plan: Plan, q_BTNH, k_BSKH, v_BSKE) -> tuple[jax.Array, jax.Array]:
    """(out_BTNE, lse_BNT) of arrays padded to whole tiles; lse is a natural logarithm."""
    B, T, N, H = q_BTNH.shape
    K, E = v_BSKE.shape[2:]
    dtype, depth = q_BTNH.dtype, gpu_plan.ring_depth(H, E)
    num_keys = plan.forward_keys
    tiles = plan.table(BLOCK, num_keys).by_query
    scratch = dict(
        q_smem=gpu_plan.tile_scratch(CONSUMERS, ROWS, H, dtype=dtype),
        k_smem=gpu_plan.tile_scratch(depth, num_keys, H, dtype=dtype),
        v_smem=gpu_plan.tile_scratch(depth, num_keys, E, dtype=dtype),
        out_smem=gpu_plan.tile_scratch(CONSUMERS, ROWS, E, dtype=dtype),
        lse_smem=plgpu.SMEM((CONSUMERS, ROWS), jnp.float32),
        q_ready=plgpu.Barrier(num_barriers=CONSUMERS),
        k_ready=plgpu.Barrier(num_barriers=depth),
        v_ready=plgpu.Barrier(num_barriers=depth),
        k_done=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=depth),
        v_done=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=depth),
        turn=plgpu.Barrier(num_arrivals=CONSUMERS),
    )
    if plan.interpret:
        scratch["p_smem"] = gpu_plan.tile_scratch(CONSUMERS, ROWS, num_keys, dtype=dtype)

    def forward_kernel(rows_ref, columns_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, **smem):
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        rank, warpgroup = lax.axis_index("rank"), lax.axis_index("warpgroup")
        row, start, full_end, end = (rows_ref[i, rank] for i in range(4))

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(gpu_plan.PRODUCER_REGISTERS, action="decrease")
            kv_head = lax.div(head, jnp.int32(N // K))

            def fill(step, slot):
                keys = pl.ds(columns_ref[start + step] * num_keys, num_keys)
                for ref, buffer, ready in (
                    (k_ref, smem["k_smem"], smem["k_ready"]),
                    (v_ref, smem["v_smem"], smem["v_ready"]),
                ):
                    plgpu.copy_gmem_to_smem(
                        ref.at[batch, keys, kv_head], buffer.at[slot], ready.at[slot]
                    )

            gpu_plan.produce(end - start, depth, (smem["k_done"], smem["v_done"]), fill)

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(gpu_plan.CONSUMER_REGISTERS, action="increase")
            q_smem, out_smem, lse_smem = (
                smem[name].at[warpgroup] for name in ("q_smem", "out_smem", "lse_smem")
            )
            p_smem = smem["p_smem"].at[warpgroup] if plan.interpret else None
            first = row * BLOCK + warpgroup * ROWS
            queries = (batch, pl.ds(first, ROWS), head)
            q_ready = smem["q_ready"].at[warpgroup]
            plgpu.copy_gmem_to_smem(q_ref.at[queries], q_smem, q_ready)
            plgpu.barrier_wait(q_ready)

            def step(entry, carry, masked):
                slot = gpu_plan.slot_of(entry - start, depth)
                k_start = columns_ref[entry] * num_keys if masked else None
                tile = _Tile(first, k_start, slot)
                return _attend_tile(plan, tile, smem, q_smem, p_smem, carry)

            carry = filled(0, ROWS, E), filled(FLOOR, ROWS), filled(0, ROWS)
            # The consumers take turns: one multiplies while the other is at its softmax.
            pl.when(warpgroup == 1)(lambda: _take_turn(smem["turn"]))
            acc, top, total = gpu_plan.visit(step, start, full_end, end, carry)
            pl.when(warpgroup == 0)(lambda: _take_turn(smem["turn"]))

            seen = total != 0  # NaN, from a key that is not finite, counts as seen
            inverse = jnp.where(seen, 1 / total, 0.0)
            out_smem[...] = (acc * per_row(inverse, acc.shape)).astype(dtype)
            lse = (top + jnp.log2(total)) * (1 / LOG2E)
            lse_smem[...] = jnp.where(seen, lse, -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_ref.at[queries])
            plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[batch, head, pl.ds(first, ROWS)])
            plgpu.wait_smem_to_gmem(0)

    return plan.kernel(
        forward_kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, T, N, E), dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(N, B, tiles.num_rows),
        grid_names=("head", "batch", "rank"),
    )(*gpu_plan.device_lists(tiles), q_BTNH, k_BSKH, v_BSKE)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """One tile of a warpgroup: its first query and key (None where no mask needs it), its slot."""

    first_query: jax.Array
    first_key: jax.Array | None
    slot: jax.Array


def _take_turn(turn) -> None:
    plgpu.barrier_arrive(turn)
    plgpu.barrier_wait(turn)


def _attend_tile(plan: Plan, tile: _Tile, smem: dict, q_smem, p_smem, carry):
    """One step of online softmax; the running maximum is kept in base 2: exp2(s · c − top)."""
    acc, top, total = carry
    slot, shape = tile.slot, (ROWS, plan.forward_keys)
    plgpu.barrier_wait(smem["k_ready"].at[slot])

    def multiply(scores_ref):
        plgpu.wgmma(scores_ref, q_smem, smem["k_smem"].at[slot].transpose((1, 0)))
        _take_turn(smem["turn"])
        return scores_ref[...]

    scores = pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
    plgpu.barrier_arrive(smem["k_done"].at[slot])
    if tile.first_key is not None:
        allowed = plan.allowed(tile.first_query, tile.first_key, shape, q_axis=0)
        scores = jnp.where(allowed, scores, -jnp.inf)

    new_top = jnp.maximum(top, scores.max(axis=1) * (plan.scale * LOG2E))
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores * (plan.scale * LOG2E) - per_row(new_top, shape))
    acc = acc * per_row(shrink, acc.shape)
    total = total * shrink + weights.sum(axis=1)
    p = weights.astype(smem["v_smem"].dtype)
    # All of the softmax comes before the turn is passed on, or the compiler may move it after.
    acc, total, new_top, p = lax.optimization_barrier((acc, total, new_top, p))
    plgpu.barrier_arrive(smem["turn"])
    plgpu.barrier_wait(smem["v_ready"].at[slot])
    plgpu.barrier_wait(smem["turn"])
    acc = gpu_plan.accumulate(plan, acc, p, smem["v_smem"].at[slot], p_smem)
    plgpu.barrier_arrive(smem["v_done"].at[slot])
    return acc, new_top, total
