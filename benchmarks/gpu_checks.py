"""Numbers on the card itself against float64: part of benchmarks/gpu.sh.

The interpreter on the CPU has run the arithmetic, and the compiler has taken the kernels; what is
left to see is that the card does what both promise: barriers, asynchronous products, tails.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention.masks import Causal, First, Full, Global, Mask, Prefix, Window
from attention.ops import attend_with_lse

NAMES = ("out", "lse", "dq", "dk", "dv")
# Largest error, relative to the largest right value or 1. Weights and score gradients are rounded
# to the operands' dtype before they are multiplied, hence the room for gradients.
TOLERANCE = {
    "bfloat16": {"out": 4e-3, "lse": 1e-5, "dq": 1.2e-2, "dk": 1.2e-2, "dv": 1.2e-2},
    "float16": {"out": 5e-4, "lse": 1e-5, "dq": 1.5e-3, "dk": 1.5e-3, "dv": 1.5e-3},
    "float32": dict.fromkeys(NAMES, 1e-5),
}
# By the precision of products. The default of a card has 11 bits, as float16 has: rounding the
# inputs to them moves the output by 5e-4, lse by 2e-5; what is multiplied again is rounded again.
N3_TOLERANCE = {
    "highest": TOLERANCE["float32"] | {"out": 5e-6},
    "default": dict.fromkeys(NAMES, 2e-3) | {"lse": 1e-4},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; letters as in ``attention``."""

    mask: Mask
    T: int = 1024
    S: int = 1024
    B: int = 2
    N: int = 4
    K: int = 2
    H: int = 128
    E: int = 128
    dtype: str = "bfloat16"


CASES = {
    "causal": Case(Causal()),
    "causal, H = 64": Case(Causal(), H=64, E=64),
    "causal, float16": Case(Causal(), dtype="float16"),
    "causal, float16, H = 64": Case(Causal(), H=64, E=64, dtype="float16"),
    "full, odd lengths": Case(Full(), T=777, S=1000),
    "one query": Case(Causal(), T=1, S=2000, K=1),
    "seven": Case(Causal(), T=7, S=7),
    "window": Case(Window(300), T=2048, S=2048),
    "longformer": Case(Window(100, ahead=99) | Global((0, 700)), T=1500, S=1500),
    "streaming, rows without a key": Case(Causal() & (Window(200) | First(4)), T=1300, S=900),
    "prefix, 8 heads to one": Case(Causal() | Prefix(130), N=8, K=1),
    "H = 80, E = 40": Case(Causal(), H=80, E=40),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The largest relative error of each result, and whether repetition gave the same bits."""

    errors: dict[str, float]
    equal_bits: bool
    tolerance: dict[str, float]

    @property
    def passed(self) -> bool:
        within = all(self.errors[name] <= self.tolerance[name] for name in NAMES)
        return within and self.equal_bits

    def __str__(self):
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        bits = "" if self.equal_bits else ", repetition gives other bits"
        return f"{'ok' if self.passed else 'WRONG'}: {errors}{bits}"


def float64_attention(mask: Mask, q, k, v, do, dlse) -> dict[str, np.ndarray]:
    """Dense attention and the gradients of Σ out · do + Σ lse · dlse in float64 NumPy."""
    q, k, v, do, dlse = (np.asarray(x, np.float64) for x in (q, k, v, do, dlse))
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    k_BSNH, v_BSNE = (np.repeat(x, N // K, axis=2) for x in (k, v))
    allowed_TS = mask(np.arange(T)[:, None] + S - T, np.arange(S)[None, :])
    scale = H**-0.5
    scores = np.einsum("btnh,bsnh->bnts", q, k_BSNH, optimize=True) * scale
    scores = np.where(allowed_TS, scores, -np.inf)
    seen = allowed_TS.any(-1)
    top = np.where(seen, scores.max(-1), 0)[..., None]
    total = np.exp(scores - top).sum(-1)
    lse = np.where(seen, top[..., 0] + np.log(np.where(seen, total, 1)), -np.inf)
    p = np.exp(scores - np.where(seen, lse, 0)[..., None])
    out = np.einsum("bnts,bsne->btne", p, v_BSNE, optimize=True)
    dp = np.einsum("btne,bsne->bnts", do, v_BSNE, optimize=True)
    centre = np.einsum("btne,btne->bnt", do, out) - np.where(seen, dlse, 0)
    ds = p * (dp - centre[..., None]) * scale

    def of_groups(x_BSNX):
        return x_BSNX.reshape(B, S, K, N // K, -1).sum(3)

    return {
        "out": out,
        "lse": lse,
        "dq": np.einsum("bnts,bsnh->btnh", ds, k_BSNH, optimize=True),
        "dk": of_groups(np.einsum("bnts,btnh->bsnh", ds, q, optimize=True)),
        "dv": of_groups(np.einsum("bnts,btne->bsne", p, do, optimize=True)),
    }


@functools.partial(jax.jit, static_argnames=("mask", "implementation"))
def results(q, k, v, do, dlse, *, mask: Mask, implementation: str):
    """out, lse, dq, dk, dv of ``attend``."""

    def forward(q, k, v):
        return attend_with_lse(q, k, v, mask, implementation=implementation)

    outputs, backward = jax.vjp(forward, q, k, v)
    return *outputs, *backward((do, dlse))


def compare(
    arrays, mask: Mask, implementation: str, repetitions: int, tolerance: dict[str, float]
) -> Outcome:
    """Runs ``attend`` on arrays of one dtype and compares with float64."""
    run = functools.partial(results, *arrays, mask=mask, implementation=implementation)
    got = [np.asarray(x) for x in run()]
    equal_bits = all(
        np.array_equal(a.view(np.uint8), np.asarray(b).view(np.uint8))
        for _ in range(repetitions)
        for a, b in zip(got, run(), strict=True)
    )
    right = float64_attention(mask, *arrays)
    errors = {}
    for name, actual in zip(NAMES, got, strict=True):
        actual, expected = actual.astype(np.float64), right[name]
        finite = np.isfinite(expected)
        size = max(1.0, np.abs(expected[finite]).max(initial=0))
        difference = np.abs(actual[finite] - expected[finite]).max(initial=0) / size
        same_infinities = np.array_equal(actual[~finite], expected[~finite])
        errors[name] = float(difference) if same_infinities else float("inf")
    return Outcome(errors, equal_bits, tolerance)


def check(case: Case, implementation: str, repetitions: int = 20) -> Outcome:
    rng = np.random.default_rng(0)
    shapes = [(case.B, case.T, case.N, case.H), (case.B, case.S, case.K, case.H)]
    shapes += [(case.B, case.S, case.K, case.E), (case.B, case.T, case.N, case.E)]
    arrays = [jnp.asarray(rng.standard_normal(shape), case.dtype) for shape in shapes]
    dlse = jnp.asarray(rng.standard_normal((case.B, case.N, case.T)), jnp.float32)
    tolerance = TOLERANCE[case.dtype]
    return compare([*arrays, dlse], case.mask, implementation, repetitions, tolerance)


def float32_products(precision: str) -> Outcome:
    """Case N3: what float32 is on this device; the reference on 256 standard tokens, width 64."""

    def wave(a: float, b: float):
        return jnp.asarray(np.sin(a * np.arange(1, 256 * 64 + 1) + b).reshape(1, 256, 1, 64))

    arrays = [wave(0.7, 0.0), wave(1.3, 0.5), wave(2.1, 1.0), wave(0.9, 0.3)]
    arrays = [x.astype(jnp.float32) for x in arrays]
    arrays.append(jnp.zeros((1, 1, 256)))
    with jax.default_matmul_precision(precision):
        return compare(arrays, Causal(), "reference", 20, N3_TOLERANCE[precision])
