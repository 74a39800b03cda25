"""Numbers and speed of the GPU kernels on the card: what benchmarks/gpu.sh runs.

    python -m benchmarks.gpu [--torch_python=PATH]   on a machine with a Hopper GPU; < 10 minutes
    python -m benchmarks.gpu --dry_run               the parts that need no GPU, at small sizes

First the numbers against float64, with repetitions that must give equal bits; then the times of
ours beside cuDNN (through jax.nn) and, where torch can be had, PyTorch's SDPA and FlexAttention.
The Markdown table at the end is made for the README.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp

from attention.masks import Causal, Global, Mask, Window
from attention.ops import attend, explain
from benchmarks import gpu_checks, timing
from benchmarks.cases import PROGRAMS, program

OURS, CUDNN, SDPA, FLEX = "ours", "cuDNN", "SDPA", "FlexAttention"
NOT_MEASURED = "not yet measured on a card"


@dataclasses.dataclass(frozen=True)
class Target:
    """Ours must be at least this many times as fast as the peer."""

    peer: str
    forward: float
    both: float


@dataclasses.dataclass(frozen=True)
class Case:
    """A timed call, bfloat16; letters as in ``attention``."""

    name: str
    kind: str
    T: int
    target: Target
    window: int = 0
    num_global: int = 0
    B: int = 1
    N: int = 16
    K: int = 16
    H: int = 128
    calls: int = 10
    repeats: int = 7

    @property
    def mask(self) -> Mask:
        masks = {
            "causal": lambda: Causal(),
            "window": lambda: Window(self.window),
            "longformer": lambda: (
                Window(self.window, ahead=self.window - 1) | Global(self.num_global)
            ),
        }
        return masks[self.kind]()

    @property
    def for_torch(self) -> dict:
        fields = dataclasses.asdict(self)
        del fields["target"]
        return fields | {"global": self.num_global}

    def teraflops(self, seconds: float, products: int) -> float:
        """Of the pairs that the mask lets meet; forward is 2 products, the backward pass 5 more."""
        pairs = self.mask.count(self.T)
        return products * 2 * pairs * self.H * self.N * self.B / seconds / 1e12


SPARSE = Target(FLEX, 1.3, 1.3)
CASES = (
    Case("causal 8,192", "causal", 8192, Target(CUDNN, 0.9, 0.8), B=2),
    Case("causal 8,192, 16 to 2", "causal", 8192, Target(CUDNN, 0.9, 0.8), B=2, K=2),
    Case("causal 8,192, H = 64", "causal", 8192, Target(CUDNN, 0.9, 0.8), B=2, H=64),
    Case("window 1,024 in 32,768", "window", 32_768, SPARSE, window=1024),
    Case("longformer 256 + 4 in 32,768", "longformer", 32_768, SPARSE, window=256, num_global=4),
)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call, or why there are none."""

    forward: float | None = None
    both: float | None = None
    error: str = ""


def cudnn(case: Case):
    """``jax.nn``'s cuDNN attention, where it has the mask."""
    masks = {
        "causal": {"is_causal": True},
        "window": {"is_causal": True, "local_window_size": (case.window - 1, 0)},
    }
    if case.kind not in masks:
        raise NotImplementedError("cuDNN does not have this mask")
    options = masks[case.kind]
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)


def ours(case: Case):
    return lambda q, k, v: attend(q, k, v, case.mask, implementation="gpu")


def in_turns(case: Case, peers: dict) -> dict[str, Times]:
    """Median seconds of a call of every peer; peers take turns, so that all see the same clock."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = case.N, case.K, case.K, case.N
    arrays = [
        jax.random.normal(key, (case.B, case.T, n, case.H), jnp.bfloat16)
        for key, n in zip(keys, heads, strict=True)
    ]
    ready, times = {}, {}
    for name, peer in peers.items():
        try:
            programs = {what: program(peer(case), what) for what in PROGRAMS}
            for run in programs.values():
                jax.block_until_ready(run(*arrays))
            ready |= {(name, what): run for what, run in programs.items()}
        except Exception as error:  # reported in the table instead of a number
            times[name] = Times(error=f"{type(error).__name__}: {error}".splitlines()[0])
    samples = timing.in_turns(
        {
            key: functools.partial(
                timing.seconds_of, run, *arrays, calls=case.calls, pipelined=True
            )
            for key, run in ready.items()
        },
        case.repeats,
    )
    for name, _ in ready:
        times[name] = Times(*(statistics.median(samples[name, what]) for what in PROGRAMS))
    return times


def with_torch(python: str | None, cases) -> dict[tuple[str, str], Times]:
    """Times by case and peer from benchmarks/gpu_torch.py, in an interpreter of its own."""
    if python is None:
        print("No torch here and no --torch_python: its columns stay empty.")
        return {}
    script = pathlib.Path(__file__).with_name("gpu_torch.py")
    process = subprocess.run(
        [python, str(script)],
        input=json.dumps([case.for_torch for case in cases]),
        stdout=subprocess.PIPE,
        text=True,
    )
    times = {}
    for line in process.stdout.splitlines():
        fields = json.loads(line)
        times[fields.pop("case"), fields.pop("peer")] = Times(**fields)
    if process.returncode:
        print(f"torch ended with exit code {process.returncode}; its columns may be incomplete.")
    return times


def row(case: Case, times: dict[str, Times]) -> str:
    """A line of the table: milliseconds forward / with backward, ours also in TFLOP/s; targets."""

    def cell(name: str) -> str:
        taken = times.get(name, Times())
        if taken.forward is None:
            return "—" if taken.error else NOT_MEASURED
        return f"{taken.forward * 1e3:.2f} / {taken.both * 1e3:.2f}"

    mine, peer = times.get(OURS, Times()), times.get(case.target.peer, Times())
    rate, verdict = NOT_MEASURED, NOT_MEASURED
    if mine.forward is not None:
        rate = f"{case.teraflops(mine.forward, 2):.0f} / {case.teraflops(mine.both, 7):.0f}"
    if mine.forward is not None and peer.forward is not None:
        ratios = peer.forward / mine.forward, peer.both / mine.both
        wanted = case.target.forward, case.target.both
        met = all(r >= w for r, w in zip(ratios, wanted, strict=True))
        verdict = f"{ratios[0]:.2f} / {ratios[1]:.2f} {'✓' if met else '✗'}"
    target = f"≥ {case.target.forward} / {case.target.both} × {case.target.peer}"
    cells = case.name, *map(cell, (OURS, CUDNN, SDPA, FLEX)), rate, target, verdict
    return "| " + " | ".join(cells) + " |"


def table(results: dict[str, dict[str, Times]]) -> str:
    heads = (
        "mask, bfloat16, forward / forward + backward",
        *(f"{name}, ms" for name in (OURS, CUDNN, SDPA, FLEX)),
        "ours, TFLOP/s",
        "target",
        "speed-up over the target's peer",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + [row(case, results.get(case.name, {})) for case in CASES])


def check_numbers(implementation: str, cases: dict[str, gpu_checks.Case], repetitions: int) -> bool:
    passed = True
    for name, case in cases.items():
        try:
            outcome = gpu_checks.check(case, implementation, repetitions)
            passed &= outcome.passed
        except Exception as error:  # the others are still worth knowing
            passed, outcome = False, f"FAILED: {type(error).__name__}: {error}".splitlines()[0]
        print(f"  {name}: {outcome}", flush=True)
    return passed


def dry_run() -> int:
    """The oracle against the reference on the CPU at small sizes, and the table without numbers."""
    print("No number below comes from a GPU. The oracle beside the reference on this device:")
    small = {
        name: dataclasses.replace(
            case, T=min(case.T, 96), S=min(case.S, 80 if case.S != case.T else 96), dtype="float32"
        )
        for name, case in gpu_checks.CASES.items()
    }
    passed = check_numbers("reference", small, repetitions=1)
    print(f"  float32, precision 'highest': {gpu_checks.float32_products('highest')}")
    for case in CASES:
        shape = jax.ShapeDtypeStruct((case.B, case.T, case.N, case.H), jnp.bfloat16)
        kv = jax.ShapeDtypeStruct((case.B, case.T, case.K, case.H), jnp.bfloat16)
        why = explain(shape, kv, kv, case.mask).others.get("gpu", "picked by auto")
        print(f"  {case.name}: {case.mask.count(case.T):,} pairs a head; gpu: {why}")
    print(table({}))
    return int(not passed)


def measure(torch_python: str | None) -> int:
    device = jax.devices()[0]
    print(f"{device.device_kind}, {device.client.platform_version.splitlines()[-1]}")
    print("Ours against float64 on the card, 20 repetitions:")
    passed = check_numbers("gpu", gpu_checks.CASES, repetitions=20)
    for precision in ("highest", "default"):
        outcome = gpu_checks.float32_products(precision)
        print(f"  N3, the reference in float32, precision {precision!r}: {outcome}")
        if precision == "highest":
            passed &= outcome.errors["out"] <= 5e-6
    results = {case.name: in_turns(case, {OURS: ours, CUDNN: cudnn}) for case in CASES}
    for (case, peer), times in with_torch(torch_python, CASES).items():
        results[case][peer] = times
    for case, times in results.items():
        for peer, taken in times.items():
            if taken.error:
                print(f"{case}, {peer}: {taken.error}")
    print(table(results))
    if passed:
        today = datetime.date.today().isoformat()
        print("The numbers are right. To let 'auto' pick the kernels on this kind of device, in")
        print("attention/pallas/gpu.py:")
        print(f'    CHECKED_DEVICES = {{"{device.device_kind}": "{today}"}}')
    else:
        print("Some numbers are WRONG: CHECKED_DEVICES must stay without this device.")
    return int(not passed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry_run", action="store_true", help="only what needs no GPU")
    parser.add_argument("--torch_python", help="an interpreter that has torch; default: this one")
    arguments = parser.parse_args()
    if arguments.dry_run:
        return dry_run()
    if jax.devices()[0].platform != "gpu":
        print("There is no GPU here, so nothing is measured.")
        dry_run()
        return 1
    torch_python = arguments.torch_python
    if torch_python is None and importlib.util.find_spec("torch") is not None:
        torch_python = sys.executable
    return measure(torch_python)


if __name__ == "__main__":
    sys.exit(main())
