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


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call; letters as in ``attention``."""

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


WINDOW = Window(4096)
CASES = {
    "causal-64": Case(Causal(), H=64, E=64),
    "causal-128": Case(Causal()),
    "causal-256": Case(Causal(), H=256, E=256),
    "causal-80": Case(Causal(), H=80, E=80),
    "causal-72-40": Case(Causal(), N=6, K=2, H=72, E=40),
    "causal-float32-64": Case(Causal(), H=64, E=64, dtype="float32"),
    "causal-float32-128": Case(Causal(), dtype="float32"),
    "causal-float32-256": Case(Causal(), H=256, E=256, dtype="float32"),
    "causal-heads": Case(Causal(), N=4, K=4),
    "causal-71-to-1": Case(Causal(), T=1024, S=1024, N=71, H=64, E=64),
    "causal-128-to-1": Case(Causal(), T=256, S=4096, N=128),
    "causal-131072": Case(Causal(), T=131072, S=131072, B=1, N=1),
    "cross-odd-lengths": Case(Full(), T=1000, S=777, N=4, K=4, H=64, E=64),
    "window-32768": Case(Causal() & WINDOW, T=32768, S=32768, B=1),
    "longformer-32768": Case(Window(256, ahead=255) | Global(4), T=32768, S=32768, B=1),
    "streaming-32768": Case(Causal() & (WINDOW | First(4)), T=32768, S=32768, B=1),
    "decode": Case(Causal(), T=1, S=32768),
    "segments": Case(Causal(), segments=True),
    "segments-float32": Case(Causal(), segments=True, dtype="float32", H=256, E=256),
    "sink": Case(Causal() & Window(512), sink=True),
}


def programs(case: Case, device) -> dict:
    """Forward, and forward with backward: functions and the shapes they take."""

    def array(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    q = array((case.B, case.T, case.N, case.H), case.dtype)
    k = array((case.B, case.S, case.K, case.H), case.dtype)
    v = array((case.B, case.S, case.K, case.E), case.dtype)
    options = {}
    if case.segments:
        options["q_segments"] = array((case.B, case.T), "int32")
        options["k_segments"] = array((case.B, case.S), "int32")
    if case.sink:
        options["sink_N"] = array((case.N,), "float32")
    outputs = (
        array((case.B, case.T, case.N, case.E), case.dtype),
        array((case.B, case.N, case.T), "float32"),
    )

    def forward(q, k, v, options):
        return tpu.run(ops._checked(q, k, v, case.mask, **options))

    def backward(q, k, v, options, cotangents):
        sink = options.get("sink_N")

        def of(q, k, v, sink):
            return forward(q, k, v, options if sink is None else options | {"sink_N": sink})

        return jax.vjp(of, q, k, v, sink)[1](cotangents)

    return {
        "forward": (forward, (q, k, v, options)),
        "backward": (backward, (q, k, v, options, outputs)),
    }


def vmem_of_kernels(text: str) -> dict[str, int]:
    """Bytes of VMEM that each kernel of a compiled program uses, the most where it runs twice."""
    used = {}
    for line in text.splitlines():
        name = re.search(
            r"%\w*?attention_(forward|query_gradient|key_value_gradients)\w*[.\d]* = .* custom-call\(",
            line,
        )
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
    used = {}
    for function, shapes in programs(case, device).values():
        lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
        used |= vmem_of_kernels(lowered.compile().as_text())
    kernels = {"forward", "query_gradient", "key_value_gradients"}
    if set(used) != kernels:
        raise RuntimeError(f"expected the kernels {sorted(kernels)}, found {sorted(used)}")
    if max(used.values()) > target.vmem_bytes:
        raise RuntimeError(f"VMEM: {used} bytes, {target.vmem_bytes} are there")
    return ", ".join(f"{name} {size / 2**20:.1f}" for name, size in used.items())


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
            result = f"ok, VMEM in MiB: {check(CASES[arguments.case], target)}"
        except Exception as error:  # the compiler's errors have no common type
            failed, result = True, f"FAILED: {error}"
        seconds = time.perf_counter() - start
        print(f"{name} {arguments.case} ({seconds:.1f} s) {result}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
