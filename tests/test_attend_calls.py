"""Calls of ``attend``: bad arguments, what is refused, and which implementation runs."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import few
from attention.masks import Causal
from attention.ops import IMPLEMENTATIONS, attend, attend_with_lse, explain
from attention.pallas import gpu, tpu
from tests.attending import INTERPRETERS, REFUSES, Runner, interpreter, refusal, same_bits
from tests.oracles import standard

# --- what may be refused --------------------------------------------------------------------------


FEATURES = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "float64": {"dtype": "float64"},
    "sink": {"sink_N": jax.ShapeDtypeStruct((4,), "float32")},
    "dropout": {"rate": 0.5, "key": jax.ShapeDtypeStruct((2,), "uint32")},
    "indices": {"q_index": jax.ShapeDtypeStruct((2, 7), "int32")},
    "segments": {"k_segments": jax.ShapeDtypeStruct((2, 7), "int32")},
    "array scale": {"scale": jnp.float32(0.5)},
    "E != H": {"E": 5},
    "many queries": {"T": few.MOST + 1},
}


@pytest.mark.every_run
def test_refusals(implementation):
    """Exactly what REFUSES says is refused, each time with its reason."""
    exact = Runner(implementation).dtype
    refused = set()
    with jax.enable_x64(True), interpreter(implementation):
        for feature, asked in FEATURES.items():
            options = dict(asked)
            dtype, E = options.pop("dtype", exact), options.pop("E", 8)
            q = jax.ShapeDtypeStruct((2, options.pop("T", 7), 4, 8), dtype)
            k = jax.ShapeDtypeStruct((2, 7, 2, 8), dtype)
            v = jax.ShapeDtypeStruct((2, 7, 2, E), dtype)
            if refusal(implementation, q, k, v, Causal(), options) is not None:
                refused.add(feature)
    assert refused == set(REFUSES[implementation])


def test_every_implementation_has_its_refusals():
    assert set(REFUSES) == set(IMPLEMENTATIONS)
    assert not REFUSES["reference"]


# --- bad arguments, and which implementation runs -------------------------------------------------


def _array(*shape):
    return jax.ShapeDtypeStruct(shape, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": _array(2, 5, 4)}, r"q_BTNH must have 4 axes.*\(2, 5, 4\)"),
        ({"k": _array(7, 2, 8)}, r"k_BSKH must have 4 axes.*\(7, 2, 8\)"),
        ({"v": _array(7, 2, 8)}, r"v_BSKE must have 4 axes.*\(7, 2, 8\)"),
        ({"k": _array(2, 7, 2, 6)}, r"k_BSKH \(2, 7, 2, 6\).*q_BTNH \(2, 5, 4, 8\)"),
        ({"k": _array(3, 7, 2, 8)}, r"k_BSKH \(3, 7, 2, 8\).*q_BTNH \(2, 5, 4, 8\)"),
        ({"v": _array(2, 6, 2, 3)}, r"v_BSKE \(2, 6, 2, 3\).*k_BSKH \(2, 7, 2, 8\)"),
        ({"v": _array(2, 7, 1, 3)}, r"v_BSKE \(2, 7, 1, 3\).*k_BSKH \(2, 7, 2, 8\)"),
        ({"k": _array(2, 7, 3, 8), "v": _array(2, 7, 3, 8)}, r"4 query heads.* 3 key-value heads"),
        ({"k": _array(2, 7, 8, 8), "v": _array(2, 7, 8, 8)}, r"4 query heads.* 8 key-value heads"),
        ({"k": _array(2, 7, 0, 8), "v": _array(2, 7, 0, 8)}, r"k_BSKH .*length 0"),
        ({"q": _array(2, 5, 0, 8)}, r"q_BTNH .*length 0"),
        ({"k": _array(2, 0, 2, 8), "v": _array(2, 0, 2, 8)}, r"k_BSKH .*\(2, 0, 2, 8\)"),
        ({"q": _array(2, 5, 4, 0), "k": _array(2, 7, 2, 0)}, r"\(2, 5, 4, 0\)"),
        ({"q_index": _array(7)}, r"q_index must be \(5,\) or \(2, 5\), got \(7,\)"),
        ({"k_index": _array(5)}, r"k_index must be \(7,\) or \(2, 7\), got \(5,\)"),
        ({"k_index": _array(3, 7)}, r"k_index must be .*got \(3, 7\)"),
        ({"q_segments": _array(2, 7)}, r"q_segments must be \(2, 5\), got \(2, 7\)"),
        ({"k_segments": _array(2, 5)}, r"k_segments must be \(2, 7\), got \(2, 5\)"),
        ({"k_segments": _array(7)}, r"k_segments must be \(2, 7\), got \(7,\)"),
        ({"q_segments": _array(2, 5)}, r"q_segments must hold whole numbers, got float32"),
        ({"k_index": _array(7)}, r"k_index must hold whole numbers, got float32"),
        ({"scale": np.ones(7)}, r"scale must be one number, got an array of shape \(7,\)"),
        ({"scale": jnp.ones((1, 1))}, r"scale must be one number, .*\(1, 1\)"),
        ({"sink_N": _array(2)}, r"sink_N must .*\(4,\), got \(2,\)"),
        ({"sink_N": _array()}, r"sink_N must .*\(4,\), got \(\)"),
        ({"v": jax.ShapeDtypeStruct((2, 7, 2, 3), "int32")}, r"v_BSKE.*int32"),
        ({"implementation": "flash"}, r"'auto'.*'reference'.*got 'flash'"),
        ({"implementation": ""}, r"'auto'.*'reference'.*got ''"),
    ],
)
def test_bad_arguments(changes, message):
    arguments = {"q": _array(2, 5, 4, 8), "k": _array(2, 7, 2, 8), "v": _array(2, 7, 2, 3)}
    arguments |= changes
    q, k, v = (arguments.pop(name) for name in "qkv")
    with pytest.raises(ValueError, match=message):
        explain(q, k, v, Causal(), **arguments)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda q, k, v: attend(q, k, v, Causal(), **arguments), q, k, v)


@pytest.mark.parametrize("mask", [None, True, Causal, np.ones((5, 7), bool)], ids=str)
def test_a_mask_must_be_a_mask(mask):
    with pytest.raises(TypeError, match="mask must be a Mask such as Causal"):
        explain(_array(2, 5, 4, 8), _array(2, 7, 2, 8), _array(2, 7, 2, 8), mask)


def test_unknown_options_are_not_ignored():
    q = _array(1, 2, 1, 4)
    for call in (attend, attend_with_lse, explain):
        with pytest.raises(TypeError, match="window"):
            call(q, q, q, Causal(), window=3)
        # B1: a learned bias is refused, lest its gradient be 0.
        with pytest.raises(TypeError, match="bias"):
            call(q, q, q, Causal(), bias=q)


@pytest.mark.every_run
def test_explain_a_named_implementation(implementation):
    q = jax.ShapeDtypeStruct((2, 5, 4, 8), Runner(implementation).dtype)
    with interpreter(implementation):
        explanation = explain(q, q, q, Causal(), implementation=implementation)
    others = set(IMPLEMENTATIONS) - {implementation}
    assert explanation.others == dict.fromkeys(others, f"{implementation!r} was named")
    assert str(explanation).startswith(f"{implementation} runs")


@pytest.mark.parametrize("name", INTERPRETERS)
def test_a_kernel_by_name_without_its_device(name):
    q = jax.ShapeDtypeStruct((2, 5, 4, 8), "bfloat16")
    with pytest.raises(NotImplementedError, match=f"'{name}': it needs a.* '?cpu"):
        explain(q, q, q, Causal(), implementation=name)
    with interpreter(name):  # which auto never takes: it is for tests
        assert explain(q, q, q, Causal()).chosen == "few"


class _Device:
    """As much of a device as the choice looks at."""

    def __init__(self, platform: str, kind: str, capability: str):
        self.platform, self.device_kind, self.compute_capability = platform, kind, capability
        self.client = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")


CPU = _Device("cpu", "cpu", "")
V6E = _Device("tpu", "TPU v6 lite", "")
H200 = _Device("gpu", "NVIDIA H200", "9.0")
A100 = _Device("gpu", "NVIDIA A100", "8.0")
NO_TPU, NO_GPU = "it needs a TPU, this is a {}", "it needs an NVIDIA Hopper GPU.* {!r}"
MANY = "at most 8 queries at once"
DENSE = "fewer than 32 queries or keys"
UNCHECKED = "numbers have not been checked"


@pytest.mark.parametrize(
    ("device", "checked", "T", "chosen", "others"),
    [
        (CPU, False, 300, "tiled", (NO_TPU, NO_GPU, MANY, "'tiled' comes first")),
        (CPU, False, 32, "tiled", (NO_TPU, NO_GPU, MANY, "'tiled' comes first")),
        (CPU, False, 31, "reference", (NO_TPU, NO_GPU, DENSE, MANY)),
        (CPU, False, 5, "few", (NO_TPU, NO_GPU, DENSE, "'few' comes first")),
        (
            V6E,
            False,
            300,
            "reference",
            (UNCHECKED + ".*TPU v6 lite", NO_GPU, "made for the CPU", MANY),
        ),
        (V6E, False, 5, "reference", (UNCHECKED, NO_GPU, "made for the CPU", "made for the CPU")),
        (V6E, False, 32768, "tiled", (UNCHECKED, NO_GPU, MANY, "'tiled' comes first")),
        (V6E, True, 300, "tpu", (NO_GPU, "made for the CPU", MANY, "'tpu' comes first")),
        (V6E, True, 32768, "tpu", (NO_GPU, "'tpu' comes first", MANY, "'tpu' comes first")),
        (H200, False, 300, "reference", (NO_TPU, UNCHECKED, "made for the CPU", MANY)),
        (H200, False, 32768, "tiled", (NO_TPU, UNCHECKED, MANY, "'tiled' comes first")),
        (H200, True, 32768, "gpu", (NO_TPU, "'gpu' comes first", MANY, "'gpu' comes first")),
        (
            A100,
            True,
            300,
            "reference",
            (NO_TPU, "A100' with compute capability 8.0", "made for", MANY),
        ),
    ],
)
def test_auto_on_each_platform(monkeypatch, device, checked, T, chosen, others):
    """A kernel only where its numbers were checked on a device of that kind, and why not others."""
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: device.platform)
    if checked:
        kernels = {"tpu": tpu, "gpu": gpu}[device.platform]
        monkeypatch.setitem(kernels.CHECKED_DEVICES, device.device_kind, "2026-01-01")
    q = jax.ShapeDtypeStruct((1, T, 2, 64), "bfloat16")
    explanation = explain(q, q, q, Causal())
    assert explanation.chosen == chosen
    assert list(explanation.others) == [name for name in IMPLEMENTATIONS if name != chosen]
    for reason, pattern in zip(explanation.others.values(), others, strict=True):
        assert re.search(pattern.format(device.platform), reason), reason


@pytest.mark.parametrize("kernels", [tpu, gpu], ids=["tpu", "gpu"])
def test_no_device_counts_as_checked(kernels):
    """None has been at hand. The first one to be listed changes the README's cells as well."""
    assert kernels.CHECKED_DEVICES == {}


def test_a_scale_of_numpy_is_a_number():
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in standard(1, 40, 40, 1, 1, 4, 4))
    right = attend(q, k, v, Causal(), scale=0.25)
    for scale in (np.float32(0.25), np.array(0.25)):
        same_bits(attend(q, k, v, Causal(), scale=scale), right)


@pytest.mark.parametrize("T", [5, 9, 300])
def test_auto_runs_what_explain_says(T):
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in standard(1, T, T, 2, 1, 4, 4))
    explanation = explain(q, k, v, Causal())
    assert set(explanation.others) | {explanation.chosen} == set(IMPLEMENTATIONS)
    assert explanation.chosen not in explanation.others
    lines = str(explanation).split("\n")
    assert len(lines) == len(IMPLEMENTATIONS)
    for name, reason in explanation.others.items():
        assert reason and any(name in line and reason in line for line in lines[1:])
    compiled = jax.jit(attend, static_argnames=("mask", "implementation"))
    auto = compiled(q, k, v, mask=Causal())
    same_bits(auto, compiled(q, k, v, mask=Causal(), implementation=explanation.chosen))
