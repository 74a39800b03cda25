"""What the Hopper kernels share: the static facts of a call, tile shapes, and warpgroup idioms."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from attention.masks import Mask
from attention.tile_table import TileList, TileTable, tile_table

LOG2E = math.log2(math.e)
CONSUMERS = 2
WARPGROUPS = CONSUMERS + 1  # the last one only copies
ROWS = 64  # rows of the accumulator of one warpgroup: the m64 of wgmma
BLOCK = CONSUMERS * ROWS  # rows of the tile of one thread block
# A thread block has 64 Ki registers. wgmma and softmax need nearly all; copying needs few.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 240, 24
# The outcome of a comparison takes a register where it is used again. Masks of more than the first
# number get narrower tiles for the gradient of q. At the second, and at the first where
# ``gpu.cannot`` stops there, benchmarks/aot_gpu.py sees that the compiler spills nothing.
FEW_COMPARISONS, MOST_COMPARISONS = 8, 40
WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static facts of one call; every array it goes with is padded to whole tiles.

    Attributes:
      mask: evaluated on the tiles that it cuts through.
      scale: what scores are multiplied by; positive.
      num_queries, num_keys: T and S before padding.
      interpret: build for the interpreter on the CPU. It multiplies operands in shared memory
        only, so weights take a detour there that the build for the card does not make.
      forward_keys, dq_keys: keys of a tile of the kernels whose rows are queries.
      dkv_queries: queries of a tile of the kernel whose rows are keys; scores and their gradient
        must fit in registers beside two gradients.
    """

    mask: Mask
    scale: float
    num_queries: int
    num_keys: int
    interpret: bool
    forward_keys: int = BLOCK
    dq_keys: int = BLOCK
    dkv_queries: int = ROWS

    def table(self, q_tile: int, k_tile: int) -> TileTable:
        return tile_table(self.mask, self.num_queries, self.num_keys, q_tile, k_tile)

    def allowed(self, q_start, k_start, shape: tuple[int, int], q_axis: int) -> jax.Array:
        """The mask on one tile; queries run along ``q_axis`` of ``shape``, keys along the other."""
        starts = {q_axis: q_start, 1 - q_axis: k_start}
        indices = {}
        for axis, first in starts.items():
            iota = plgpu.broadcasted_iota(
                jnp.int32, (shape[axis],), 0, layout=WGMMA.reduce(1 - axis)
            )
            # The barrier keeps the compiler from holding indices in registers between tiles.
            index = lax.optimization_barrier(iota + first)
            # Added before it, the shift makes the compiler spill registers of the last kernel.
            if axis == q_axis:
                index = index + (self.num_keys - self.num_queries)
            indices[axis] = lax.broadcast_in_dim(index, shape, [axis])
        q_index, k_index = indices[q_axis], indices[1 - q_axis]
        allowed = self.mask(q_index, k_index)
        # Where keys are rows, those past the end have rows of their own, which are cut off.
        if self.num_keys % BLOCK and q_axis == 0:
            allowed = allowed & (k_index < self.num_keys)
        return allowed

    def kernel(self, body: Callable, **options) -> Callable:
        """``plgpu.kernel`` with one producer and two consumer warpgroups."""
        return plgpu.kernel(
            body,
            num_threads=WARPGROUPS,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams(detect_races=True) if self.interpret else None,
            **options,
        )


class _Comparisons:
    """Stands for an index and for what a mask makes of it, and counts the comparisons."""

    def __init__(self):
        self.count = 0

    def _compared(self, other):
        self.count += 1
        return self

    def _combined(self, other):
        return self

    __lt__ = __ge__ = _compared
    __sub__ = __and__ = __or__ = _combined


def comparisons(mask: Mask) -> int:
    """How many comparisons the formula of a mask makes of every pair."""
    counter = _Comparisons()
    mask(counter, counter)
    return counter.count


def device_lists(tiles: TileList) -> tuple[jax.Array, jax.Array]:
    """A TileList as the kernels read it: ``rows`` (4, R) and ``columns`` (entries,).

    A column of ``rows`` holds a row's number, its first entry, the end of its full tiles and the
    end of its entries. Longest rows come first: blocks are started in order, and a long one that
    starts last would leave the card idle.
    """
    length = np.diff(tiles.start)
    order = np.argsort(-length, kind="stable").astype(np.int32)
    rows = np.stack([order, tiles.start[order], tiles.full_end[order], tiles.start[order + 1]])
    # One entry that nothing visits keeps the array from being empty.
    columns = tiles.column if len(tiles.column) else np.zeros(1, np.int32)
    return jnp.asarray(rows.astype(np.int32)), jnp.asarray(columns)


def tile_scratch(*shape: int, dtype) -> plgpu.SMEM:
    """Shared memory in the tiling and swizzle that TMA writes and wgmma reads; 64 columns each."""
    return plgpu.SMEM(
        shape, dtype, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    )


def filled(value: float, *shape: int) -> jax.Array:
    """A float32 accumulator in registers: a matrix, or a number per row of one."""
    layout = WGMMA if len(shape) == 2 else WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def per_row(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(values, shape, [0])


def per_column(values: jax.Array, shape: tuple[int, int]) -> jax.Array:
    return lax.broadcast_in_dim(values, shape, [1])


def product(a_ref, b_ref, shape: tuple[int, int]) -> jax.Array:
    """a · b, both in shared memory, into registers."""

    def multiply(acc_ref):
        plgpu.wgmma(acc_ref, a_ref, b_ref)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def accumulate(plan: Plan, acc: jax.Array, a: jax.Array, b_ref, a_ref) -> jax.Array:
    """acc + a · b with ``a`` in registers; ``a_ref`` is where the interpreter's build puts it."""
    if not plan.interpret:
        return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b_ref))(plgpu.ACC.init(acc))
    a_ref[...] = a
    plgpu.commit_smem()
    return acc + product(a_ref, b_ref, acc.shape)


def visit(step: Callable, start, full_end, end, carry):
    """Runs step(entry, carry, masked) over a row's full tiles, then over its partial ones.

    Two loops, so that the one over full tiles holds no trace of the mask.
    """
    carry = lax.fori_loop(start, full_end, functools.partial(step, masked=False), carry)
    return lax.fori_loop(full_end, end, functools.partial(step, masked=True), carry)


def ring_depth(H: int, E: int) -> int:
    """Tiles in flight: what 227 KiB of shared memory hold beside a block's own tiles."""
    return 2 if max(H, E) > 64 else 4


def slot_of(step, stages: int):
    return lax.rem(step, jnp.int32(stages))


def produce(steps, stages: int, released: tuple, fill: Callable) -> None:
    """The producer's loop: fill(step, slot) as soon as consumers have released the slot.

    It ends when all slots are released: no barrier is left with an arrival that nobody saw.
    """

    def await_release(slot):
        for barrier in released:
            plgpu.barrier_wait(barrier.at[slot])

    @pl.loop(0, steps)
    def _(step):
        slot = slot_of(step, stages)

        @pl.when(step >= stages)
        def _():
            await_release(slot)

        fill(step, slot)

    @pl.loop(lax.max(steps - stages, jnp.int32(0)), steps)
    def _(step):
        await_release(slot_of(step, stages))
