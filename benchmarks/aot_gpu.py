"""Compiles the GPU kernels for real GPUs on a machine without one, and prints what they need.

    python -m benchmarks.aot_gpu                  every case, for the targets that it needs
    python -m benchmarks.aot_gpu causal-64 H100   one of them, forward and backward

It proves that the compiler takes the kernels, that they fit into shared memory and that no
register is spilled; never that their numbers are right or their speed good. Needs
requirements-aot.txt; ``make test-aot`` runs all cases.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import re
import sys
import tempfile

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    MOSAIC_GPU_DUMP_PTXAS="1",  # registers and spills, which XLA's own flag does not see
    MOSAIC_GPU_DUMP_HOST_LLVM="1",  # the launch, which names the bytes of shared memory
)

from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from attention.masks import Causal, First, Full, Global, Mask, Prefix, Window
from attention.pallas import gpu
from attention.pallas.gpu_plan import FEW_COMPARISONS, MOST_COMPARISONS, comparisons
from benchmarks import aot
from benchmarks.aot import LINEAR, LONG, Case

SHARED_MEMORY = 232_448  # bytes that a block may ask for on compute capability 9.0

# What the compiler wants to know of a device that is not there.
DESCRIPTION = """
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048 core_count: 132
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_block_limit: 65536
  registers_per_core_limit: 65536 device_memory_size: {memory}
}}
"""

MEMORY = {"H100": 84_942_979_072, "H200": 150_754_820_096}
KERNELS = {"forward_kernel", "dq_kernel", "dkv_kernel"}


def comparing(most: int) -> Mask:
    """A mask of so many comparisons a pair: four for each position that stands alone."""
    mask = Global(tuple(range(100, 100 + 50 * (most // 4), 50)))
    assert comparisons(mask) == most, f"{mask} makes {comparisons(mask)} comparisons, not {most}"
    return mask


MOST, FEW = comparing(MOST_COMPARISONS), comparing(FEW_COMPARISONS)
# Both have compute capability 9.0 and differ in memory alone: one of them suffices for variations.
ONE = ("H200",)
CASES = {
    "causal-64": Case(Causal(), K=8, H=64, E=64),
    "causal-128": Case(Causal(), K=8),
    "causal-float16-64": Case(Causal(), K=8, H=64, E=64, dtype="float16", targets=ONE),
    "causal-float16-128": Case(Causal(), K=8, dtype="float16"),
    "causal-80": Case(Causal(), K=8, H=80, E=80, targets=ONE),
    "causal-128-64": Case(Causal(), K=8, E=64, targets=ONE),
    "causal-64-128": Case(Causal(), K=8, H=64, targets=ONE),
    "causal-8-to-1": Case(Causal()),
    "full": Case(Full(), targets=ONE),
    "cross-odd-lengths": Case(Full(), T=1000, S=777, N=4, K=4, H=64, E=64, targets=ONE),
    "decode": Case(Causal(), T=1, S=LONG, targets=ONE),
    "window-1024": Case(Window(1024), T=LONG, S=LONG, B=1, K=8),
    "window-4096": Case(Window(4096), T=LONG, S=LONG, B=1),
    "longformer": Case(Window(256, ahead=255) | Global(4), T=LONG, S=LONG, B=1),
    "longformer-scattered": Case(Window(200, ahead=199) | Global((3, 100, 500)), K=2, targets=ONE),
    "streaming-sink": Case(Causal() & (Window(4096) | First(4)), T=LONG, S=LONG, B=1, sink=True),
    "many-parts": Case(Causal() & (Window(64) | First(4) | Global((100, 200))), targets=ONE),
    "many-parts-float16": Case(
        (Causal() & (Window(64) | First(4) | Global((100, 200)))) | Prefix(33) & ~Window(7),
        T=1000,
        S=1000,
        dtype="float16",
        targets=ONE,
    ),
    # As many comparisons as attention.pallas.gpu takes: their outcomes must fit in registers.
    "most-comparisons": Case(MOST, targets=ONE),
    "most-comparisons-shifted": Case(MOST, T=1000, S=777, H=64, E=64, targets=ONE),
    "few-comparisons-shifted": Case(FEW, T=1000, S=777, targets=ONE),
    "odd-lengths-128": Case(
        Causal() & (Window(64) | First(4)), T=1000, S=777, dtype="float16", targets=ONE
    ),
    # Case H1. Twice the length takes twice the memory.
    "window-128-memory": Case(
        Window(128), T=16_384, S=16_384, B=1, N=1, H=64, E=64, temporary_bytes=LINEAR, targets=ONE
    ),
    "longformer-128-memory": Case(
        Window(128, ahead=127) | Global(4),
        **dict(T=LONG, S=LONG, B=1, N=1, H=64, E=64, temporary_bytes=2 * LINEAR),
        targets=ONE,
    ),
    "too-many-registers": Case(
        Causal(), tile=(("dkv_queries", 128),), fails="are spilled", targets=ONE
    ),
    "too-large-a-tile": Case(
        Causal(), tile=(("forward_keys", 256),), fails="hared memory", targets=ONE
    ),
}


@dataclasses.dataclass(frozen=True)
class Usage:
    """What ptxas reports of one kernel, and the shared memory it is launched with."""

    registers: int
    spilled_bytes: int
    shared_bytes: int

    def most(self, other: Usage) -> Usage:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Usage(*map(max, pairs))

    def __str__(self):
        return (
            f"{self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.shared_bytes / 1024:.0f} KiB shared"
        )


def compiled(case: Case, name: str):
    """The program of a case for a GPU that is described, not present."""
    device = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=DESCRIPTION.format(name=name, memory=MEMORY[name]),
        topology="1x1x1",
    ).devices[0]
    mesh = AbstractMesh(
        (),
        (),
        abstract_device=AbstractDevice(
            device_kind=device.device_kind, num_cores=device.core_count, platform="gpu"
        ),
    )
    with use_abstract_mesh(mesh):
        lowered = aot.traced(case, gpu, device).lower(lowering_platforms=("cuda",))
    return lowered.compile()


@contextlib.contextmanager
def printed_by_compiler():
    """A list that holds, afterwards, the text that this process has printed, libraries included."""
    text = []
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        own = {number: os.dup(number) for number in (1, 2)}
        for number in own:
            os.dup2(file.fileno(), number)
        try:
            yield text
        finally:
            sys.stdout.flush()
            ctypes.CDLL(None).fflush(None)
            for number, copy in own.items():
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def usage_by_kernel(text: str) -> dict[str, Usage]:
    """Parses what the compiler has printed; the most of each where a kernel is there twice."""
    assembled = re.findall(
        r"Function properties for (\w+)_mosaic_gpu_kernel\s+\d+ bytes stack frame, "
        r"(\d+) bytes spill stores, (\d+) bytes spill loads\n.*?Used (\d+) registers",
        text,
    )
    launches = re.findall(
        r"@mosaic_gpu_build_kernel_spec\((?:[^,]*,){10} i32 (\d+),.*?"
        r"call void @(\w+)_mosaic_gpu\(",
        text,
        re.DOTALL,
    )
    usage = {}
    for kernel, stores, loads, registers in assembled:
        shared = max(int(size) for size, name in launches if name == kernel)
        here = Usage(int(registers), int(stores) + int(loads), shared)
        usage[kernel] = here.most(usage.get(kernel, here))
    return usage


def check(case: Case, name: str) -> str:
    """Compiles; returns what was used.

    Raises:
      RuntimeError: a kernel is missing, spills registers, waits after every wgmma, or needs too
        much shared memory.
    """
    with printed_by_compiler() as printed:
        executable = compiled(case, name)
    text = printed[0]
    usage = usage_by_kernel(text)
    if set(usage) != KERNELS:
        raise RuntimeError(f"expected the kernels {sorted(KERNELS)}, found {sorted(usage)}")
    if any(kernel.spilled_bytes for kernel in usage.values()) or "are spilled" in text:
        raise RuntimeError(f"registers are spilled: {_table(usage)}")
    if any(kernel.shared_bytes > SHARED_MEMORY for kernel in usage.values()):
        raise RuntimeError(f"shared memory above {SHARED_MEMORY} bytes: {_table(usage)}")
    if "serialized" in text:
        raise RuntimeError("ptxas serialises wgmma: an accumulator is touched while in flight")
    temporary = aot.check_memory(case, executable)
    return f"{_table(usage)}; temporary {temporary / 2**20:.0f} MiB"


def _table(usage: dict[str, Usage]) -> str:
    return "; ".join(f"{kernel} {used}" for kernel, used in sorted(usage.items()))


if __name__ == "__main__":
    sys.exit(aot.main(__doc__, CASES, MEMORY, check))
