"""Compiles the GPU kernels for real GPUs on a machine without one, and prints what they need.

    python -m benchmarks.aot_gpu --list      the cases, one a line
    python -m benchmarks.aot_gpu causal-64   one case, forward and backward, for all GPUs, each in
                                             a process of its own

It proves that the compiler takes the kernels, that they fit into shared memory and that no
register is spilled; never that their numbers are right or their speed good. Needs
requirements-aot.txt; ``make test-aot`` runs all cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import time

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    MOSAIC_GPU_DUMP_PTXAS="1",  # registers and spills, which XLA's own flag does not see
    MOSAIC_GPU_DUMP_HOST_LLVM="1",  # the launch, which names the bytes of shared memory
)

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

from attention import ops
from attention.masks import Causal, First, Full, Global, Mask, Window
from attention.pallas import gpu

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


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call; letters as in ``attention``."""

    mask: Mask
    T: int = 4096
    S: int = 4096
    B: int = 2
    N: int = 8
    K: int = 8
    H: int = 128
    E: int = 128
    dtype: str = "bfloat16"
    sink: bool = False


LONG = 32_768
CASES = {
    "causal-64": Case(Causal(), H=64, E=64),
    "causal-128": Case(Causal()),
    "causal-float16-64": Case(Causal(), H=64, E=64, dtype="float16"),
    "causal-float16-128": Case(Causal(), dtype="float16"),
    "causal-80": Case(Causal(), H=80, E=80),
    "causal-128-64": Case(Causal(), E=64),
    "causal-64-128": Case(Causal(), H=64),
    "causal-8-to-1": Case(Causal(), K=1),
    "full": Case(Full()),
    "cross-odd-lengths": Case(Full(), T=1000, S=777, N=4, K=4, H=64, E=64),
    "decode": Case(Causal(), T=1, S=LONG),
    "window-1024": Case(Window(1024), T=LONG, S=LONG, B=1),
    "window-4096": Case(Window(4096), T=LONG, S=LONG, B=1, K=1),
    "longformer": Case(Window(256, ahead=255) | Global(4), T=LONG, S=LONG, B=1),
    "longformer-scattered": Case(Window(200, ahead=199) | Global((3, 100, 500)), K=2),
    "streaming-sink": Case(Causal() & (Window(4096) | First(4)), T=LONG, S=LONG, B=1, sink=True),
}


@dataclasses.dataclass(frozen=True)
class Usage:
    """What ptxas reports of one kernel, and the shared memory it is launched with."""

    registers: int
    spilled_bytes: int
    shared_bytes: int

    def __str__(self):
        return (
            f"{self.registers} registers, {self.spilled_bytes} bytes spilled, "
            f"{self.shared_bytes / 1024:.0f} KiB shared"
        )


def compile_case(case: Case, name: str) -> None:
    """Outputs and, from their cotangents, gradients in one program."""
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

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    none = dict.fromkeys(field.name for field in dataclasses.fields(ops.Call))
    arrays = {
        "q_BTNH": array((case.B, case.T, case.N, case.H), case.dtype),
        "k_BSKH": array((case.B, case.S, case.K, case.H), case.dtype),
        "v_BSKE": array((case.B, case.S, case.K, case.E), case.dtype),
    }
    if case.sink:
        arrays["sink_N"] = array((case.N,), "float32")
    cotangents = (
        array((case.B, case.T, case.N, case.E), case.dtype),
        array((case.B, case.N, case.T), "float32"),
    )

    def program(arrays, cotangents):
        def attention(arrays):
            return gpu.run(ops.Call(**(none | arrays | {"mask": case.mask, "scale": case.H**-0.5})))

        outputs, gradient = jax.vjp(attention, arrays)
        return outputs, gradient(cotangents)

    with use_abstract_mesh(mesh):
        lowered = jax.jit(program).trace(arrays, cotangents).lower(lowering_platforms=("cuda",))
    lowered.compile()


def usage_by_kernel(text: str) -> dict[str, Usage]:
    """Parses what the compiler has printed."""
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
    shared = {kernel: int(size) for size, kernel in launches}
    return {
        kernel: Usage(int(registers), int(stores) + int(loads), shared[kernel])
        for kernel, stores, loads, registers in assembled
    }


def check(case: str, name: str) -> str:
    """Compiles; returns what was used.

    Raises:
      RuntimeError: the compiler fails, or a kernel is missing, spills registers, waits after
        every wgmma, or needs too much shared memory.
    """
    # A process per GPU: a kernel that was compiled before is taken from a cache, silently.
    command = [sys.executable, "-m", "benchmarks.aot_gpu", case, "--only", name]
    process = subprocess.run(command, capture_output=True, text=True)
    text = process.stdout + process.stderr
    if process.returncode:
        raise RuntimeError(text.strip().splitlines()[-1] if text.strip() else "no output")
    usage = usage_by_kernel(text)
    if set(usage) != KERNELS:
        raise RuntimeError(f"expected the kernels {sorted(KERNELS)}, found {sorted(usage)}")
    if any(kernel.spilled_bytes for kernel in usage.values()) or "are spilled" in text:
        raise RuntimeError(f"registers are spilled: {_table(usage)}")
    if any(kernel.shared_bytes > SHARED_MEMORY for kernel in usage.values()):
        raise RuntimeError(f"shared memory above {SHARED_MEMORY} bytes: {_table(usage)}")
    if "serialized" in text:
        raise RuntimeError("ptxas serialises wgmma: an accumulator is touched while in flight")
    return _table(usage)


def _table(usage: dict[str, Usage]) -> str:
    return "; ".join(f"{kernel} {used}" for kernel, used in sorted(usage.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", choices=list(CASES))
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--only", choices=list(MEMORY), help="compile here, check nothing")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES))
        return 0
    if arguments.case is None:
        parser.error("name a case, or ask for --list")
    if arguments.only is not None:
        compile_case(CASES[arguments.case], arguments.only)
        return 0
    failed = False
    for name in MEMORY:
        start = time.perf_counter()
        try:
            result = f"ok: {check(arguments.case, name)}"
        except RuntimeError as error:
            failed, result = True, f"FAILED: {error}"
        seconds = time.perf_counter() - start
        print(f"{name} {arguments.case} ({seconds:.1f} s) {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
