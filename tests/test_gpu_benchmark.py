"""What gpu.sh and make test-aot say of right and wrong results, as far as a CPU can tell."""

import pytest

from attention.masks import Causal
from benchmarks import aot, gpu, gpu_checks

FEW = ("seven", "full, odd lengths", "streaming, rows without a key")


@pytest.fixture
def few_cases(monkeypatch):
    monkeypatch.setattr(gpu_checks, "CASES", {name: gpu_checks.CASES[name] for name in FEW})


def test_the_dry_run_passes_and_measures_nothing(few_cases, capsys):
    assert gpu.dry_run() == 0
    printed = capsys.readouterr().out
    for name in (*FEW, "float32, precision 'highest'"):
        assert f"  {name}: ok: out " in printed
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    for case in gpu.CASES:
        row = next(row for row in rows if row.startswith(f"| {case.name} |"))
        assert row.count(gpu.NOT_MEASURED) == 6


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


def test_the_table_compares_with_the_targets_peer():
    case = gpu.CASES[0]
    times = {gpu.OURS: gpu.Times(2e-3, 8e-3), gpu.CUDNN: gpu.Times(1.9e-3, 7e-3)}
    assert "| 0.95 / 0.88 ✓ |" in gpu.row(case, times)
    times[gpu.CUDNN] = gpu.Times(1.9e-3, 6e-3)
    assert "| 0.95 / 0.75 ✗ |" in gpu.row(case, times)


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
