"""Runs ``attend`` under a named implementation: what the tests of softmax attention share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.ops import attend_with_lse, explain
from attention.reference import Dropout
from tests import oracles
from tests.oracles import assert_close

# What each implementation may refuse; nothing where it is not listed. A new refusal fails
# test_attend_calls.py, and a test is skipped only for a feature named here.
MAY_REFUSE: dict[str, set[str]] = {
    "tiled": {"dropout", "indices"},
    # Everything off a TPU; tests/test_pallas_tpu.py runs it in the interpreter.
    "tpu": {
        *("plain", "float16", "bfloat16", "float64", "sink"),
        *("dropout", "indices", "segments", "E != H"),
    },
    # Everything off a GPU; tests/test_pallas_gpu.py runs it in the interpreter.
    "gpu": {
        *("plain", "float16", "bfloat16", "float64", "sink"),
        *("dropout", "indices", "segments", "E != H"),
    },
}

ARRAYS = ("q_index", "k_index", "q_segments", "k_segments", "sink_N", "key")


def _evaluate(q, k, v, do, dlse, arrays, mask, scale, rate, implementation):
    arrays = dict(arrays)
    sink = arrays.pop("sink_N", None)
    dropout = None if rate is None else Dropout(rate, arrays.pop("key"))

    def forward(q, k, v, sink):
        return attend_with_lse(
            q, k, v, mask, scale=scale, sink_N=sink, dropout=dropout,
            implementation=implementation, **arrays,
        )  # fmt: skip

    if do is None:
        return oracles.Result(*forward(q, k, v, sink))
    (out, lse), backward = jax.vjp(forward, q, k, v, sink)
    return oracles.Result(out, lse, *backward((do.astype(out.dtype), dlse.astype(lse.dtype))))


jax.tree_util.register_dataclass(oracles.Result)
_STATIC = ("mask", "scale", "rate", "implementation")
# Most tests ask about formulas and take half the time to compile without optimisation; those on
# numerics, garbage and lengths ask about compiled code as users get it.
_compiled = {
    True: jax.jit(_evaluate, static_argnames=_STATIC),
    False: jax.jit(
        _evaluate,
        static_argnames=_STATIC,
        compiler_options={
            "xla_backend_optimization_level": 0,
            "xla_llvm_disable_expensive_passes": True,
        },
    ),
}


def features(q, v, options) -> set[str]:
    """What a call asks for, in the words of MAY_REFUSE."""
    asked = {"plain", str(q.dtype)}
    asked |= {"sink"} if "sink_N" in options else set()
    asked |= {"dropout"} if options.get("rate") is not None else set()
    asked |= {"indices"} if {"q_index", "k_index"} & set(options) else set()
    asked |= {"segments"} if {"q_segments", "k_segments"} & set(options) else set()
    asked |= {"E != H"} if v.shape[-1] != q.shape[-1] else set()
    return asked


def refusal(implementation, q, k, v, mask, options) -> str | None:
    """The reason why the implementation cannot run the call, or None if it is what runs."""
    named = {name: value for name, value in options.items() if name not in ("rate", "key")}
    if options.get("rate") is not None:
        named["dropout"] = Dropout(options["rate"], options["key"])
    try:
        explanation = explain(q, k, v, mask, implementation=implementation, **named)
    except NotImplementedError as error:
        return str(error)
    assert explanation.chosen == implementation
    assert implementation not in explanation.others
    return None


def run(
    implementation, q, k, v, mask, *, do=None, dlse=None, dtype="float32", optimise=False, **options
) -> oracles.Result:
    """``attend`` under one implementation by name, and its gradients if do or dlse is given.

    Options are those of ``attend``, with ``rate`` and ``key`` for its dropout. Skips the test when
    the implementation refuses for a feature that MAY_REFUSE names. All arrays are NumPy's, which
    converts and slices without compiling anything.
    """
    dtype = jnp.dtype(dtype)
    q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
    B, T, N, _ = q.shape
    if do is not None or dlse is not None:
        do = np.zeros((B, T, N, v.shape[-1])) if do is None else do
        dlse = np.zeros((B, N, T)) if dlse is None else dlse
        do, dlse = do.astype(dtype), dlse.astype(jnp.promote_types("float32", dtype))
    reason = refusal(implementation, q, k, v, mask, options)
    if reason is not None:
        asked = features(q, v, options)
        assert asked & MAY_REFUSE.get(implementation, set()), f"unforeseen refusal: {reason}"
        pytest.skip(reason)
    arrays = {name: options[name] for name in ARRAYS if name in options}
    result = _compiled[optimise](
        q, k, v, do, dlse, arrays,
        mask=mask, scale=options.get("scale"), rate=options.get("rate"),
        implementation=implementation,
    )  # fmt: skip
    return jax.tree.map(np.asarray, result)


def assert_equal_results(got, expected, dtype="float32"):
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_close(getattr(got, name), getattr(expected, name), dtype, name)
    if got.dsink is not None:
        assert_close(got.dsink, expected.dsink, dtype, "dsink")


def same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
