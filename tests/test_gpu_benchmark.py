"""What gpu.sh and make test-aot say of right and wrong results, as far as a CPU can tell."""

import subprocess
import sys

import pytest

from attention.masks import Causal
from benchmarks import aot, gpu, gpu_checks, gpu_report

FEW = ("seven", "full, odd lengths", "streaming, rows without a key")


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(gpu_checks, "CASES", {name: gpu_checks.CASES[name] for name in FEW})


def test_the_dry_run_passes_and_measures_nothing(few_cases, capsys):
    assert gpu.dry_run() == 0
    printed = capsys.readouterr().out
    for name in (*FEW, "N3, the reference in float32, precision 'highest'"):
        assert f"  {name}: ok: out " in printed
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    for case in gpu.CASES:
        row = next(row for row in rows if row.startswith(f"| {case.name} |"))
        assert row.count(gpu_report.NOT_MEASURED) == 6


@pytest.mark.parametrize("wrong", gpu_checks.NAMES)
def test_a_wrong_result_is_found(few_cases, monkeypatch, wrong):
    right = gpu_checks.float64_attention

    def shifted(*arguments):
        results = right(*arguments)
        return results | {wrong: results[wrong] + 1e-3}

    monkeypatch.setattr(gpu_checks, "float64_attention", shifted)
    case = gpu_checks.Case(Causal(), T=7, S=7, dtype="float32")
    outcome = gpu_checks.check(case, "reference", repetitions=1)
    assert not outcome.passed and str(outcome).startswith("WRONG")
    assert not gpu.check_numbers("reference", {"seven": case}, repetitions=1)


@pytest.mark.parametrize("wrong", gpu_checks.NAMES)
def test_float32_on_the_card_is_gated_by_every_result(monkeypatch, capsys, wrong):
    """Case N3: the bound of the output is tighter than the tests', 5e-6."""
    assert gpu.check_float32()
    right = gpu_checks.float64_attention

    def shifted(*arguments):
        results = right(*arguments)
        return results | {wrong: results[wrong] + (7e-6 if wrong == "out" else 1e-4)}

    monkeypatch.setattr(gpu_checks, "float64_attention", shifted)
    assert not gpu.check_float32()
    assert "precision 'highest': WRONG" in capsys.readouterr().out


def test_repetitions_that_give_other_bits_fail(monkeypatch):
    right, calls = gpu_checks.results, []

    def drifting(*arguments, **options):
        calls.append(1)
        *others, dv = right(*arguments, **options)
        return *others, dv + 1e-7 * (len(calls) == 3)

    monkeypatch.setattr(gpu_checks, "results", drifting)
    case = gpu_checks.Case(Causal(), T=7, S=7, dtype="float32")
    outcome = gpu_checks.check(case, "reference", repetitions=3)
    assert not outcome.passed and str(outcome).endswith("repetition gives other bits")
    assert max(outcome.errors.values()) < 1e-5 and len(calls) == 3


def _raise(message):
    raise RuntimeError(message)


def test_compilation_fails_where_it_must():
    sound, broken = aot.Case(Causal()), aot.Case(Causal(), fails="are spilled")
    assert aot.verdict(sound, lambda: "fits") == (True, "fits")
    assert aot.verdict(sound, lambda: _raise("registers are spilled")) == (
        False,
        "registers are spilled",
    )
    assert aot.verdict(broken, lambda: _raise("registers are spilled"))[0]
    assert not aot.verdict(broken, lambda: _raise("no such device"))[0]
    assert not aot.verdict(broken, lambda: "fits")[0]


# In a process of its own too: this one has threads, which are not forked.
DYING = """
import os, signal
from benchmarks import aot

def passes(case, target):
    print(f"compiled {case} {target}", flush=True)
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return case == "good"

pairs = [(case, target) for case in ("good", "dies", "bad") for target in ("a", "b")]
print(sorted(aot.in_processes_of_their_own(passes, pairs, at_once=2)))
"""


def test_every_pair_has_a_process_of_its_own_and_a_death_is_a_failure():
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for pair in ("good a", "good b", "dies a", "dies b", "bad a", "bad b"):
        assert f"compiled {pair}" in done.stdout
    assert "dies a FAILED: its process was ended by signal 9" in done.stdout
    assert done.stdout.splitlines()[-1] == "['bad a', 'bad b', 'dies a', 'dies b']"


def test_a_case_is_compiled_for_the_targets_that_it_needs():
    everywhere, once = aot.Case(Causal()), aot.Case(Causal(), targets=("b",))
    assert aot.needed(everywhere, {"a": 1, "b": 2}) == ["a", "b"]
    assert aot.needed(once, {"a": 1, "b": 2}) == ["b"]
    with pytest.raises(AssertionError, match="the targets are"):
        aot.needed(once, {"a": 1})


# In a process of its own: the module sets variables of the environment that compilers read.
TWICE = """
from benchmarks import aot_gpu

def report(spilled, shared):
    return (
        "ptxas info    : Function properties for forward_kernel_mosaic_gpu_kernel\\n"
        f"    0 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\\n"
        "ptxas info    : Used 168 registers, used 16 barriers\\n"
        "  call void @mosaic_gpu_build_kernel_spec("
        f"ptr %0, {'i32 1, ' * 9}i32 {shared}, i32 0, i32 4, ptr %1, ptr %2)\\n"
        "  call void @forward_kernel_mosaic_gpu(ptr %0, ptr %1)\\n"
    )

print(aot_gpu.usage_by_kernel(report(8, 2048) + report(0, 4096))["forward_kernel"])
"""


def test_of_a_kernel_that_is_compiled_twice_the_worse_counts():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True)
    assert done.stdout == "168 registers, 16 bytes spilled, 4 KiB shared\n", done.stderr
