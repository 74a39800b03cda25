"""Whole runs of the benchmarks at tiny sizes: what they leave behind, never how fast it was.

TORCH_PYTHON=PATH names an interpreter that has PyTorch; without it this one is tried.
"""

import csv
import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import attention, decode, decode_model, options, peers, train_step

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, monkeypatch):
    """Runs a benchmark with options; what it wrote: report, samples, decisions."""
    # It would stay on for the tests that follow in this process.
    monkeypatch.setattr(options, "enable_compilation_cache", lambda: None)

    def run(module, *arguments: str) -> tuple[str, list[dict], list[dict]]:
        name = module.__name__.rpartition(".")[2]
        assert options.run(module.main, module.parse([*arguments, f"--out={tmp_path}"])) == 0
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with (tmp_path / f"{name}.csv").open() as file:
            samples = list(csv.DictReader(file))
        decided = json.loads((tmp_path / f"{name}.json").read_text())
        return (tmp_path / f"{name}.md").read_text(), samples, decided

    return run


@pytest.fixture
def torch_python() -> str:
    python = os.environ.get("TORCH_PYTHON")
    if python is None and importlib.util.find_spec("torch") is None:
        pytest.skip("needs PyTorch: TORCH_PYTHON=PATH names an interpreter that has it")
    return python or sys.executable


@pytest.fixture
def one_layer(monkeypatch):
    """What is compiled for every variant and length."""
    monkeypatch.setitem(decode_model.SHAPE, "model.num_layers", 1)


@pytest.fixture
def small_steps(monkeypatch):
    small = functools.partial(train_step.options_of, train__batch_size=2, train__log_every=5)
    monkeypatch.setattr(train_step, "options_of", small)


def test_attention(run):
    said, samples, decided = run(
        attention, "--lengths=16,32", "--repeats=1", "--variants=causal,linear,additive"
    )
    keys = {(s["variant"], s["implementation"], s["T"], s["program"]) for s in samples}
    implementations = {
        "causal": ("ours", "dense", "jax.nn"), "linear": ("ours",), "additive": ("ours",)
    }  # fmt: skip
    assert keys == {
        (variant, name, T, program)
        for variant, names in implementations.items()
        for name in names
        for T in ("16", "32")
        for program in ("forward", "both")
    }
    assert all(float(s["seconds"]) > 0 and int(s["peak_bytes"]) > 0 for s in samples)
    assert [verdict["row"] for verdict in decided] == ["6", "13", "21", "22", "26", "27", "28"]
    assert {v["row"] for v in decided if v["confirmed"] is None} == {"13", "27"}
    assert f"causal, SDPA, T = 16; causal, FlexAttention, T = 16; causal, SDPA, T = 32; causal, " \
        f"FlexAttention, T = 32: {peers.WITHOUT}" in said  # fmt: skip


@pytest.mark.usefixtures("one_layer")
def test_decode(run):
    said, samples, decided = run(decode, "--lengths=16,32", "--repeats=2")
    assert {s["implementation"] for s in samples} == {"ours"}
    assert len(samples) == len(decode.VARIANTS) * 2 * 2
    assert [verdict["row"] for verdict in decided] == ["24", "25", "27", "28"]
    assert all(verdict["confirmed"] is not None for verdict in decided)
    assert next(v for v in decided if v["row"] == "25")["confirmed"]
    for variant in decode.VARIANTS:
        assert f"| {variant}, ours | 32 |" in said
    assert "| gqa, PyTorch compiled | 16 | not measured |" in said
    assert "a token costs more where there is more to read, and only there" in said


@pytest.mark.usefixtures("small_steps")
def test_train_step(run):
    said, samples, decided = run(train_step, "--short", "--repeats=2")
    assert {(s["implementation"], s["dtype"]) for s in samples} == {
        ("ours", "float32"), ("ours", "bfloat16")
    }  # fmt: skip
    assert len(samples) == 4
    assert [(goal["wanted"], goal["reached"]) for goal in decided] == [(1.1, None), (1.3, None)]
    assert "| PyTorch compiled, float32 | not measured |" in said
    assert "beside the steps, of 250 steps: drawing batches" in said
    assert "start to first step: " in said and "with a warm one" in said


@pytest.mark.usefixtures("one_layer")
def test_decoding_in_torch_writes_our_tokens(run, torch_python: str):
    said, samples, _ = run(
        decode, "--variants=gqa", "--lengths=8", "--repeats=1", f"--torch_python={torch_python}"
    )
    assert {s["implementation"] for s in samples} == {"ours", "PyTorch eager", "PyTorch compiled"}
    assert "Not measured" not in said


@pytest.mark.usefixtures("small_steps")
def test_a_step_in_torch_has_our_losses(torch_python: str):
    bfloat16 = {(name, "bfloat16"): "" for name in (train_step.EAGER, train_step.COMPILED)}
    with peers.torch_peer(torch_python) as torch:
        measured = train_step.steps_beside_torch(torch, 1, bfloat16)
    assert measured.errors == bfloat16
    assert ("PyTorch compiled", "float32") in measured.seconds
    assert all(peak >= 0 for peak in measured.peaks.values())


def test_attention_in_torch_says_why_it_does_not(run, torch_python: str):
    said, samples, _ = run(
        attention, "--variants=causal,window", "--lengths=16,32", "--repeats=1", "--short",
        f"--torch_python={torch_python}",
    )  # fmt: skip
    assert len([s for s in samples if s["implementation"] == "SDPA"]) == 2 * 2 * 2
    lacks = "; ".join(
        f"{variant}, FlexAttention, T = {T}" for T in (16, 32) for variant in ("causal", "window")
    )
    assert f"- {lacks}: not measured in the short form" in said
