"""Compiles the TPU kernels for real TPUs on a machine without one, and prints what they need.

    python -m benchmarks.aot_tpu --list      the cases, one a line
    python -m benchmarks.aot_tpu causal-64   one case, forward and backward, for all TPUs

It proves that the compiler takes the kernels and that they fit into VMEM; never that their numbers
are right or their speed good. Needs requirements-aot.txt; ``make test-aot`` runs all cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import time

# Without these, libtpu looks for its machine and allows one process at a time.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from attention import ops
from attention.masks import Causal, First, Full, Global, Mask, Window
from attention.pallas import tpu


@dataclasses.dataclass(frozen=True)
class Target:
    """A TPU: the smallest topology that its compiler knows, and the VMEM a kernel may use."""

    topology: str
    vmem_bytes: int


TARGETS = {
    "v5e": Target("v5e:2x2", 16 * 2**20),
    "v5p": Target("v5p:2x2x1", 16 * 2**20),
    "v6e": Target("v6e:2x2", 32 * 2**20),
}


KERNELS = {"forward", "query_gradient", "key_value_gradients"}


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call; letters as in ``attention``.

    Attributes:
      temporary_bytes: the most that forward with backward may allocate besides inputs and outputs.
    """

    mask: Mask
    T: int = 4096
    S: int = 4096
    B: int = 2
    N: int = 8
    K: int = 1
    H: int = 128
    E: int = 128
    dtype: str = "bfloat16"
    segments: bool = False
    sink: bool = False
    temporary_bytes: int | None = None


LONG = 32_768
LINEAR = 64 * 2**20  # of a T × T matrix of float32, 1024 MiB, nothing may remain
CASES = {
    "causal-64": Case(Causal(), H=64, E=64),
    "causal-128": Case(Causal()),
    "causal-256": Case(Causal(), H=256, E=256),
    "causal-80": Case(Causal(), H=80, E=80),
    "causal-72-40": Case(Causal(), N=6, K=2, H=72, E=40),
    "causal-float32-128": Case(Causal(), dtype="float32"),
    "causal-float32-256": Case(Causal(), H=256, E=256, dtype="float32"),
    "causal-71-to-1": Case(Causal(), T=1024, S=1024, N=71, H=64, E=64),
    # As many tiles as attention.pallas.tpu takes: their list must fit into scalar memory.
    "most-tiles": Case(Full(), T=131_072, S=262_144, B=1, N=1),
    "cross-odd-lengths": Case(Full(), T=1000, S=777, N=4, K=4, H=64, E=64),
    "decode-128-to-1": Case(Causal(), T=1, S=LONG, N=128),
    "window-4096": Case(Window(4096), T=LONG, S=LONG, B=1),
    "longformer": Case(Window(256, ahead=255) | Global(4), T=LONG, S=LONG, B=1),
    "streaming": Case(Causal() & (Window(4096) | First(4)), T=LONG, S=LONG, B=1),
    "segments-sink": Case(Causal(), segments=True, sink=True, dtype="float32", H=256, E=256),
    "window-128-memory": Case(
        Window(128), T=16_384, S=16_384, B=1, N=1, H=64, E=64, temporary_bytes=LINEAR
    ),
}


def compiled(case: Case, device):
    """Outputs and, from their cotangents, gradients in one program."""

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
    segments = {}
    if case.segments:
        segments["q_segments"] = array((case.B, case.T), "int32")
        segments["k_segments"] = array((case.B, case.S), "int32")
    cotangents = (
        array((case.B, case.T, case.N, case.E), case.dtype),
        array((case.B, case.N, case.T), "float32"),
    )

    def program(arrays, segments, cotangents):
        def attention(arrays):
            values = none | arrays | segments | {"mask": case.mask, "scale": case.H**-0.5}
            return tpu.run(ops.Call(**values))

        outputs, gradient = jax.vjp(attention, arrays)
        return outputs, gradient(cotangents)

    traced = jax.jit(program).trace(arrays, segments, cotangents)
    return traced.lower(lowering_platforms=("tpu",)).compile()


def vmem_of_kernels(text: str) -> dict[str, int]:
    """Bytes of VMEM that each kernel of a compiled program uses, the most where it runs twice."""
    used = {}
    for line in text.splitlines():
        name = re.search(rf"%\w*attention_({'|'.join(KERNELS)})\w*[.\d]* = .* custom-call\(", line)
        size = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', line)
        if name and size:
            used[name[1]] = max(used.get(name[1], 0), int(size[1]))
    return used


def check(case: Case, target: Target) -> str:
    """Compiles; returns what was used.

    Raises:
      RuntimeError: a kernel is missing from the program, or needs too much VMEM.
    """
    device = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices[0]
    executable = compiled(case, device)
    used = vmem_of_kernels(executable.as_text())
    if set(used) != KERNELS:
        raise RuntimeError(f"expected the kernels {sorted(KERNELS)}, found {sorted(used)}")
    if max(used.values()) > target.vmem_bytes:
        raise RuntimeError(f"VMEM: {used} bytes, {target.vmem_bytes} are there")
    temporary = executable.memory_analysis().temp_size_in_bytes
    if case.temporary_bytes is not None and temporary > case.temporary_bytes:
        raise RuntimeError(f"{temporary} temporary bytes, at most {case.temporary_bytes} allowed")
    kernels = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sorted(used.items()))
    return f"VMEM {kernels} MiB; temporary {temporary / 2**20:.0f} MiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="?", choices=list(CASES))
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES))
        return 0
    if arguments.case is None:
        parser.error("name a case, or ask for --list")
    failed = False
    for name, target in TARGETS.items():
        start = time.perf_counter()
        try:
            result = f"ok: {check(CASES[arguments.case], target)}"
        except Exception as error:  # the compiler's errors have no common type
            failed, result = True, f"FAILED: {error}"
        seconds = time.perf_counter() - start
        print(f"{name} {arguments.case} ({seconds:.1f} s) {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
