"""Calls of ``attend``: bad arguments, what is refused, and which implementation runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.masks import Causal
from attention.ops import IMPLEMENTATIONS, attend, attend_with_lse, explain
from tests.attending import MAY_REFUSE, refusal, same_bits
from tests.oracles import standard

# --- what may be refused --------------------------------------------------------------------------


FEATURES = {
    "plain": {},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "float64": {"dtype": "float64"},
    "sink": {"sink_N": jax.ShapeDtypeStruct((4,), "float32")},
    "dropout": {"rate": 0.5, "key": jax.ShapeDtypeStruct((2,), "uint32")},
    "indices": {"q_index": jax.ShapeDtypeStruct((2, 7), "int32")},
    "segments": {"k_segments": jax.ShapeDtypeStruct((2, 7), "int32")},
    "E != H": {"E": 5},
}


def test_refusals(implementation):
    """Exactly what MAY_REFUSE says is refused, each time with a reason."""
    reasons = {}
    with jax.enable_x64(True):
        for feature, asked in FEATURES.items():
            options = dict(asked)
            dtype, E = options.pop("dtype", "float32"), options.pop("E", 8)
            q = jax.ShapeDtypeStruct((2, 7, 4, 8), dtype)
            k = jax.ShapeDtypeStruct((2, 7, 2, 8), dtype)
            v = jax.ShapeDtypeStruct((2, 7, 2, E), dtype)
            reason = refusal(implementation, q, k, v, Causal(), options)
            if reason is not None:
                reasons[feature] = reason
                assert implementation in reason
    assert set(reasons) == MAY_REFUSE.get(implementation, set()), reasons


def test_the_reference_refuses_nothing():
    assert "reference" not in MAY_REFUSE
    assert set(MAY_REFUSE) <= set(IMPLEMENTATIONS)


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


def test_explain_a_named_implementation(implementation):
    q = _array(2, 5, 4, 8)
    if refusal(implementation, q, q, q, Causal(), {}) is not None:
        pytest.skip("refuses plain calls, see test_refusals")
    explanation = explain(q, q, q, Causal(), implementation=implementation)
    assert set(explanation.others) == set(IMPLEMENTATIONS) - {implementation}
    assert str(explanation).startswith(f"{implementation} runs")


@pytest.mark.parametrize("T", [5, 300])
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
