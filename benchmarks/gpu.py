"""Numbers and speed of the GPU kernels on the card: what benchmarks/gpu.sh runs.

    python -m benchmarks.gpu [--torch_python=PATH]   on a machine with a Hopper GPU; < 10 minutes
    python -m benchmarks.gpu --dry_run               the parts that need no GPU, at small sizes

First the numbers against float64, with repetitions that must give equal bits; then the times of
ours beside cuDNN (through jax.nn) and, where torch can be had, PyTorch's SDPA and FlexAttention.
The Markdown table is made for the README; it is saved after each row, --out=FILE says where.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib.util
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from attention.ops import attend, explain
from benchmarks import gpu_checks, gpu_peer, timing
from benchmarks.cases import PROGRAMS, program
from benchmarks.gpu_cases import CASES, CUDNN, OURS, Case
from benchmarks.gpu_report import Report, Times, table
from benchmarks.peers import PeerError

# From the start until PyTorch, the last, is ended; gpu.sh ends everything after 600.
SECONDS = 560


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
            times[name] = Times(error=_first_line(error))
    try:
        samples = timing.in_turns(
            {
                key: functools.partial(
                    timing.seconds_of, run, *arrays, calls=case.calls, pipelined=True
                )
                for key, run in ready.items()
            },
            case.repeats,
        )
    except Exception as error:  # the other cases are still worth measuring
        return times | {name: Times(error=_first_line(error)) for name, _ in ready}
    for name, _ in ready:
        times[name] = Times(*(statistics.median(samples[name, what]) for what in PROGRAMS))
    return times


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def check_numbers(implementation: str, cases: dict[str, gpu_checks.Case], repetitions: int) -> bool:
    passed = True
    for name, case in cases.items():
        try:
            outcome = gpu_checks.check(case, implementation, repetitions)
            passed &= outcome.passed
        except Exception as error:  # the others are still worth knowing
            passed, outcome = False, f"FAILED: {_first_line(error)}"
        print(f"  {name}: {outcome}", flush=True)
    return passed


def check_float32() -> bool:
    """Case N3: the reference in float32 on this device."""
    passed = True
    for precision in gpu_checks.N3_TOLERANCE:
        outcome = gpu_checks.float32_products(precision)
        passed &= outcome.passed
        print(f"  N3, the reference in float32, precision {precision!r}: {outcome}", flush=True)
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
    passed &= check_float32()
    for case in CASES:
        shape = jax.ShapeDtypeStruct((case.B, case.T, case.N, case.H), jnp.bfloat16)
        kv = jax.ShapeDtypeStruct((case.B, case.T, case.K, case.H), jnp.bfloat16)
        why = explain(shape, kv, kv, case.mask).others.get("gpu", "picked by auto")
        print(f"  {case.name}: {case.mask.count(case.T):,} pairs a head; gpu: {why}")
    print(table({}))
    return int(not passed)


def measure(torch_python: str | None, report: Report, deadline: float) -> int:
    """All numbers, then all times.

    Args:
      deadline: by ``time.perf_counter``, when PyTorch is ended.
    """
    print("Ours against float64 on the card, 20 repetitions:")
    passed = check_numbers("gpu", gpu_checks.CASES, repetitions=20)
    passed &= check_float32()
    print("Milliseconds, in the columns of the table at the end:")
    for case in CASES:
        report.add(case, in_turns(case, {OURS: ours, CUDNN: cudnn}))
    if torch_python is None:
        print("No torch here and no --torch_python: its columns stay empty.")
    else:
        by_name = {case.name: case for case in CASES}
        left = max(1.0, deadline - time.perf_counter())
        for name, peer, times in gpu_peer.answers(torch_python, CASES, left):
            report.add(by_name[name], {peer: times})
    print(table(report.times))
    kind = jax.devices()[0].device_kind
    if passed:
        today = datetime.date.today().isoformat()
        print("The numbers are right. To let 'auto' pick the kernels on this kind of device, in")
        print("attention/pallas/gpu.py:")
        print(f'    CHECKED_DEVICES = {{"{kind}": "{today}"}}')
    else:
        print("Some numbers are WRONG: CHECKED_DEVICES must stay without this device.")
    return int(not passed)


def main(argv: list[str] | None = None) -> int:
    deadline = time.perf_counter() + SECONDS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry_run", action="store_true", help="only what needs no GPU")
    parser.add_argument("--torch_python", help="an interpreter that has torch; default: this one")
    parser.add_argument(
        "--out",
        metavar="FILE",
        default="runs/bench/gpu.md",
        type=pathlib.Path,
        help="where the table is saved with each time on a card, default %(default)s",
    )
    arguments = parser.parse_args(argv)
    torch_python = arguments.torch_python
    if torch_python is not None:
        try:
            gpu_peer.check_torch(torch_python)
        except PeerError as error:
            return _refused(str(error))
    elif importlib.util.find_spec("torch") is not None:
        torch_python = sys.executable
    device = jax.devices()[0]
    if arguments.dry_run or device.platform != "gpu":
        if not arguments.dry_run:
            print("There is no GPU here, so nothing is measured.")
        return max(dry_run(), int(not arguments.dry_run))
    named = f"{device.device_kind}, {device.client.platform_version.splitlines()[-1]}"
    print(named)
    try:
        report = Report(arguments.out, named)
    except OSError as error:
        return _refused(f"--out={arguments.out}: {error.strerror}; it must be a file to write")
    return measure(torch_python, report, deadline)


def _refused(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
