"""Runs ``attend`` under a named implementation: what the tests of softmax attention share.

The kernels for TPU and GPU run in the interpreters of those devices, which check for races: the
same cases for all, wherever the tests run.
"""

from __future__ import annotations

import contextlib
import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import few
from attention.masks import EMPTY, FULL, Mask
from attention.ops import IMPLEMENTATIONS, attend_with_lse, explain
from attention.pallas import gpu, tpu
from attention.reference import Dropout
from tests import oracles
from tests.oracles import assert_close

# What each implementation refuses, and a part of its reason. A call that asks for a feature listed
# here must be refused in these words, and no other call may be.
REFUSES: dict[str, dict[str, str]] = {
    "reference": {},
    "tiled": {
        "dropout": "dropout is not made tile by tile",
        "indices": "explicit positions",
        "array scale": "scale is an array",
    },
    "few": {
        "dropout": "dropout is not made here",
        "many queries": "at most 8 queries at once",
    },
    "tpu": {
        "float16": "takes float32 and bfloat16, not float16",
        "float64": "takes float32 and bfloat16, not float64",
        "dropout": "dropout is not implemented in the kernels",
        "indices": "explicit indices",
        "array scale": "scale is an array",
    },
    "gpu": {
        "float32": "must all be bfloat16 or all float16",
        "float64": "must all be bfloat16 or all float16",
        "dropout": "dropout is not supported",
        "indices": "positions are given as arrays",
        "array scale": "scale is an array",
        "segments": "segments are not supported",
    },
}
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
INTERPRETERS = {"tpu": tpu.interpreted, "gpu": gpu.interpreted}


def chiefly(names, always: str) -> list:
    """One of the cases of an interpreter in every run, the others where interpreters are tested."""
    return [
        pytest.param(name, marks=() if name == always else pytest.mark.interpreted)
        for name in names
    ]


class Refused(Exception):
    """The implementation refuses the call, as REFUSES says: the test has passed."""


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

    with _watched() as ran:
        if do is None:
            result = oracles.Result(*forward(q, k, v, sink))
        else:
            (out, lse), backward = jax.vjp(forward, q, k, v, sink)
            cotangents = do.astype(out.dtype), dlse.astype(lse.dtype)
            result = oracles.Result(out, lse, *backward(cotangents))
    assert ran == [implementation], f"{ran} ran, not {implementation}"
    return result


@contextlib.contextmanager
def _watched():
    """The names of the implementations that run within."""
    ran = []

    def watched(name, run):
        return lambda call: ran.append(name) or run(call)

    with mock.patch.dict(
        IMPLEMENTATIONS,
        {
            name: dataclasses.replace(value, run=watched(name, value.run))
            for name, value in IMPLEMENTATIONS.items()
        },
    ):
        yield ran


jax.tree_util.register_dataclass(oracles.Result)
_STATIC = ("mask", "scale", "rate", "implementation")
# Most tests ask about formulas; those on numerics, garbage and lengths ask about code as users get
# it, and have it optimised.
_compiled = {
    True: jax.jit(_evaluate, static_argnames=_STATIC, compiler_options=OPTIMISED),
    False: jax.jit(_evaluate, static_argnames=_STATIC),
}


def features(q, v, options) -> set[str]:
    """What a call asks for, in the words of REFUSES; ``rate`` stands for dropout."""
    asked = {str(q.dtype)}
    asked |= {"dropout"} if options.get("rate") is not None else set()
    asked |= {"indices"} if {"q_index", "k_index"} & set(options) else set()
    asked |= {"segments"} if {"q_segments", "k_segments"} & set(options) else set()
    asked |= {"array scale"} if isinstance(options.get("scale"), jax.Array) else set()
    asked |= {"sink"} if "sink_N" in options else set()
    asked |= {"many queries"} if q.shape[1] > few.MOST else set()
    asked |= {"E != H"} if v.shape[-1] != q.shape[-1] else set()
    return asked


def interpreter(implementation: str):
    """Where its device is not at hand, its interpreter, entered by ``with``."""
    at_hand = jax.default_backend() == implementation
    if at_hand or implementation not in INTERPRETERS:
        return contextlib.nullcontext()
    return INTERPRETERS[implementation]()


def refusal(implementation: str, q, k, v, mask, options) -> str | None:
    """The reason why the implementation cannot run the call, or None if it is what runs."""
    named = {name: value for name, value in options.items() if name not in ("rate", "key")}
    if options.get("rate") is not None:
        named["dropout"] = Dropout(options["rate"], options["key"])
    try:
        explanation = explain(q, k, v, mask, implementation=implementation, **named)
    except NotImplementedError as error:
        reason = str(error)
    else:
        assert explanation.chosen == implementation
        assert implementation not in explanation.others
        reason = None
    foreseen = REFUSES[implementation]
    words = [foreseen[feature] for feature in features(q, v, options) & set(foreseen)]
    if reason is None:
        assert not words, f"{implementation} runs what it should refuse: {words}"
    else:
        assert any(part in reason for part in words), f"unforeseen refusal: {reason}"
        assert repr(implementation) in reason
    return reason


@dataclasses.dataclass(frozen=True)
class Runner:
    """``attend`` under one implementation by name."""

    implementation: str

    @property
    def dtype(self) -> str:
        """What stands for float32: the next best where an implementation refuses that."""
        return "float16" if "float32" in REFUSES[self.implementation] else "float32"

    def within(self, exact: float) -> float:
        """How far a result of order 1 may be from the right one for inputs as the test has them."""
        return exact if self.dtype == "float32" else max(exact, oracles.TOLERANCE["rounded"])

    def __call__(
        self, q, k, v, mask, *, do=None, dlse=None, dtype=None, optimise=False, **options
    ) -> oracles.Result:
        """Outputs, and gradients if do or dlse is given; ends the test where it is refused.

        Options are those of ``attend``, with ``rate`` and ``key`` for its dropout. All arrays are
        NumPy's, which converts and slices without compiling anything.
        """
        dtype = jnp.dtype(self.dtype if dtype is None else dtype)
        with np.errstate(over="ignore"):  # garbage may be inf in half precision
            q, k, v = (np.asarray(x).astype(dtype) for x in (q, k, v))
        B, T, N, _ = q.shape
        if do is not None or dlse is not None:
            do = np.zeros((B, T, N, v.shape[-1])) if do is None else do
            dlse = np.zeros((B, N, T)) if dlse is None else dlse
            do, dlse = do.astype(dtype), dlse.astype(jnp.promote_types("float32", dtype))
        with interpreter(self.implementation):
            reason = refusal(self.implementation, q, k, v, mask, options)
            if reason is not None:
                raise Refused(reason)
            arrays = {name: options[name] for name in ARRAYS if name in options}
            result = _compiled[optimise](
                q, k, v, do, dlse, arrays,
                mask=mask, scale=options.get("scale"), rate=options.get("rate"),
                implementation=self.implementation,
            )  # fmt: skip
            return jax.tree.map(np.asarray, result)

    def assert_equal(self, got: oracles.Result, expected: oracles.Result):
        """All that the two hold, the expected one for inputs as the test has them."""
        tolerance = "float32" if self.dtype == "float32" else "rounded"
        for field in dataclasses.fields(oracles.Result):
            name = field.name
            if getattr(got, name) is not None:
                assert_close(getattr(got, name), getattr(expected, name), tolerance, name)


@dataclasses.dataclass(frozen=True)
class Lying(Mask):
    """Says of each pair the contrary of what it says of tiles: shows which of the two is asked.

    In squares of ``side`` positions, those below the diagonal are FULL and all others EMPTY,
    whatever their pairs are. Tiles must lie within one square.
    """

    side: int

    def __call__(self, q_index, k_index):
        return q_index < k_index

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        return np.where(self.counted(q_lo, k_lo), FULL, EMPTY)

    def counted(self, i, j):
        """The pairs that count where no full tile is masked and no empty one visited."""
        return j // self.side < i // self.side


def same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))
