"""Compiles the TPU kernels for real TPUs on a machine without one, and prints what they need.

    python -m benchmarks.aot_tpu                 every case, for the targets that it needs
    python -m benchmarks.aot_tpu causal-64 v5e   one of them, forward and backward

It proves that the compiler takes the kernels and that they fit into VMEM; never that their numbers
are right or their speed good. What a TPU's compiler spills of its registers cannot be seen: what
fails is a kernel that overflows VMEM. Needs requirements-aot.txt; ``make test-aot`` runs all cases.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys

# Without these, libtpu looks for its machine and allows one process at a time.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
)

from jax.experimental import topologies

from attention.masks import Causal, First, Full, Global, Window
from attention.pallas import tpu
from attention.pallas.tpu import Tile
from benchmarks import aot
from benchmarks.aot import LINEAR, LONG, Case


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


# Where v5p alone is named: of v5e and v5p, which may use the least VMEM, its kernels use more.
CASES = {
    "causal-64": Case(Causal(), H=64, E=64),
    "causal-128": Case(Causal()),
    "causal-256": Case(Causal(), H=256, E=256),
    "causal-80": Case(Causal(), H=80, E=80),
    "causal-65": Case(Causal(), H=65, E=65, targets=("v5p",)),
    "causal-72-40": Case(Causal(), N=6, K=2, H=72, E=40, targets=("v5p",)),
    "causal-float32-128": Case(Causal(), dtype="float32", targets=("v5p",)),
    "causal-float32-256": Case(Causal(), H=256, E=256, dtype="float32", targets=("v5p",)),
    "causal-71-to-1": Case(Causal(), T=1024, S=1024, N=71, H=64, E=64, targets=("v5p",)),
    # As many tiles as attention.pallas.tpu takes: their list must fit into scalar memory.
    "most-tiles": Case(Full(), T=131_072, S=262_144, B=1, N=1, targets=("v5p",)),
    "cross-odd-lengths": Case(Full(), T=1000, S=777, N=4, K=4, H=64, E=64, targets=("v5p",)),
    "decode-128-to-1": Case(Causal(), T=1, S=LONG, N=128),
    "window-4096": Case(Window(4096), T=LONG, S=LONG, B=1),
    "longformer": Case(Window(256, ahead=255) | Global(4), T=LONG, S=LONG, B=1),
    "streaming": Case(Causal() & (Window(4096) | First(4)), T=LONG, S=LONG, B=1),
    "segments-sink": Case(Causal(), segments=True, sink=True),
    "segments-sink-float32-256": Case(
        Causal(), segments=True, sink=True, dtype="float32", H=256, E=256, targets=("v5p",)
    ),
    # Case H1. Twice the length takes twice the memory.
    "window-128-memory": Case(
        Window(128),
        **dict(T=16_384, S=16_384, B=1, N=1, H=64, E=64, temporary_bytes=LINEAR),
        targets=("v5p",),
    ),
    "longformer-128-memory": Case(
        Window(128, ahead=127) | Global(4),
        **dict(T=LONG, S=LONG, B=1, N=1, H=64, E=64, temporary_bytes=2 * LINEAR),
        targets=("v5p",),
    ),
    # For the largest VMEM, too large for all.
    "too-large-a-tile": Case(
        Causal(), tile=(("tile", Tile(1024, 1024)),), fails="vmem", targets=("v6e",)
    ),
}


def vmem_of_kernels(text: str) -> dict[str, int]:
    """Bytes of VMEM that each kernel of a compiled program uses, the most where it runs twice."""
    used = {}
    for line in text.splitlines():
        name = re.search(rf"%\w*attention_({'|'.join(KERNELS)})\w*[.\d]* = .* custom-call\(", line)
        size = re.search(r'"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"', line)
        if name and size:
            used[name[1]] = max(used.get(name[1], 0), int(size[1]))
    return used


def check(case: Case, name: str) -> str:
    """Compiles; returns what was used.

    Raises:
      RuntimeError: a kernel is missing from the program, or needs too much VMEM.
    """
    target = TARGETS[name]
    device = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices[0]
    executable = aot.traced(case, tpu, device).lower(lowering_platforms=("tpu",)).compile()
    used = vmem_of_kernels(executable.as_text())
    if set(used) != KERNELS:
        raise RuntimeError(f"expected the kernels {sorted(KERNELS)}, found {sorted(used)}")
    if max(used.values()) > target.vmem_bytes:
        raise RuntimeError(f"vmem: {used} bytes, {target.vmem_bytes} are there")
    temporary = aot.check_memory(case, executable)
    kernels = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sorted(used.items()))
    return f"VMEM {kernels} MiB; temporary {temporary / 2**20:.0f} MiB"


if __name__ == "__main__":
    sys.exit(aot.main(__doc__, CASES, TARGETS, check))
