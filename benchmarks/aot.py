"""What aot_tpu.py and aot_gpu.py share: the calls that are compiled, and the command line.

Devices are described, not present. Cases are compiled forward and backward, for each target in a
process of its own: a compiler that gives up takes its process with it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import wait

import jax
from jax.sharding import SingleDeviceSharding

from attention import ops
from attention.masks import Mask

LONG = 32_768
LINEAR = 64 * 2**20  # of a T × T matrix of float32, 1024 MiB at 16,384, nothing may remain


@dataclasses.dataclass(frozen=True)
class Case:
    """Shapes of one call; letters as in ``attention``.

    Attributes:
      temporary_bytes: the most that forward with backward may allocate besides inputs and outputs.
      tile: replaces parts of the kernels' own plan.
      fails: what the check must find wrong; a check that lets this case pass is broken.
      targets: those that suffice, for what asks most of one of them; empty: each is needed.
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
    tile: tuple[tuple[str, object], ...] = ()
    fails: str = ""
    targets: tuple[str, ...] = ()


def traced(case: Case, kernels, device):
    """Outputs and, from their cotangents, gradients in one program, traced for a device.

    Args:
      kernels: ``attention.pallas.tpu`` or ``gpu``.
    """

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
            call = ops.Call(**values)
            plan = dataclasses.replace(kernels.plan(call), **dict(case.tile))
            return kernels.run_planned(call, plan)

        outputs, gradient = jax.vjp(attention, arrays)
        return outputs, gradient(cotangents)

    return jax.jit(program).trace(arrays, segments, cotangents)


def check_memory(case: Case, executable) -> int:
    """Temporary bytes of a compiled program.

    Raises:
      RuntimeError: more than the case allows.
    """
    temporary = executable.memory_analysis().temp_size_in_bytes
    if case.temporary_bytes is not None and temporary > case.temporary_bytes:
        raise RuntimeError(f"{temporary} temporary bytes, at most {case.temporary_bytes} allowed")
    return temporary


def verdict(case: Case, check: Callable[[], str]) -> tuple[bool, str]:
    """Whether a check says of a case what it should, and what it says."""
    try:
        found = check()
    except Exception as error:  # the compilers' errors have no common type
        message = str(error)
        if case.fails and case.fails in message:
            return True, f"fails as it must: {message.splitlines()[0][:150]}"
        return False, message
    if case.fails:
        return False, f"the check lets pass what must fail with {case.fails!r}: {found}"
    return True, found


def in_processes_of_their_own(
    succeeds: Callable[[str, str], bool], pairs: Iterable[tuple[str, str]], at_once: int
) -> list[str]:
    """Calls ``succeeds(case, target)`` for every pair; returns those that failed, or died.

    The processes are forked from this one, so that none has to import anything.
    """
    # What is imported so far has started no thread, and no device of jax.
    context = multiprocessing.get_context("fork")

    def run(pair: tuple[str, str]) -> None:
        sys.exit(not succeeds(*pair))

    waiting, running, failed = collections.deque(pairs), {}, []
    while waiting or running:
        while waiting and len(running) < at_once:
            pair = waiting.popleft()
            process = context.Process(target=run, args=(pair,))
            process.start()
            running[process.sentinel] = process, " ".join(pair)
        for sentinel in wait(list(running)):
            process, name = running.pop(sentinel)
            process.join()
            if process.exitcode < 0:
                print(f"{name} FAILED: its process was ended by signal {-process.exitcode}")
            if process.exitcode:
                failed.append(name)
    return failed


def needed(case: Case, targets: Iterable[str]) -> list[str]:
    """The targets that a case has to be compiled for."""
    unknown = set(case.targets) - set(targets)
    assert not unknown, f"a case names {unknown}; the targets are {list(targets)}"
    return [target for target in targets if target in (case.targets or targets)]


def passes(case: Case, name: str, target: str, check: Callable[[Case, str], str]) -> bool:
    """Checks a case for a target and prints what came of it."""
    start = time.perf_counter()
    passed, found = verdict(case, lambda: check(case, target))
    seconds = time.perf_counter() - start
    print(f"{target} {name} ({seconds:.1f} s) {'ok' if passed else 'FAILED'}: {found}", flush=True)
    return passed


def main(doc: str, cases: dict[str, Case], targets, check: Callable[[Case, str], str]) -> int:
    """The command line of a module: all cases, or one, for the targets it needs or one."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("case", nargs="?", choices=list(cases), help="default: every case")
    parser.add_argument(
        "target", nargs="?", choices=list(targets), help="default: those that the case needs"
    )
    arguments = parser.parse_args()
    names = [arguments.case] if arguments.case else list(cases)
    pairs = [
        (name, target)
        for name in names
        for target in ([arguments.target] if arguments.target else needed(cases[name], targets))
    ]
    failed = in_processes_of_their_own(
        lambda name, target: passes(cases[name], name, target, check),
        pairs,
        len(os.sched_getaffinity(0)),
    )
    print(f"{len(pairs) - len(failed)} of {len(pairs)} compiled as they must")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return int(bool(failed))
