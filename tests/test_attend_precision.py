"""Softmax attention in half precision and with large logits (cases N1 and N2)."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from attention.masks import Causal, Full
from tests import oracles
from tests.oracles import assert_close, standard, visible_pairs


@pytest.mark.parametrize(
    ("dtype", "S"), [("bfloat16", 4096), ("bfloat16", 4095), ("float16", 4095)]
)
def test_long_sums_keep_moving(run, S, dtype):
    """N1 a: a half-precision sum of ones stops at 256 or 2048."""
    v = (np.arange(S) < 2048).astype(float).reshape(1, S, 1, 1)
    got = run(np.zeros((1, 1, 1, 8)), np.zeros((1, S, 1, 8)), v, Full(), dtype=dtype, optimise=True)
    assert float(got.out[0, 0, 0, 0]) == pytest.approx(2048 / S, abs=0.004)
    assert float(got.lse[0, 0, 0]) == pytest.approx(np.log(S), abs=1e-4)


def test_bfloat16_against_float64(run):
    """N1 b: long rows of bfloat16 inputs."""
    q, k, v, _ = (
        x.astype(jnp.bfloat16).astype(float) for x in standard(1, 1024, 1024, 1, 1, 64, 64)
    )
    got = run(q, k, v, Causal(), dtype="bfloat16", optimise=True)
    expected = oracles.attention(q, k, v, visible_pairs(lambda i, j: j <= i, 1, 1024, 1024))
    assert np.abs(np.asarray(got.out, float) - expected.out).max() <= 4e-3 * np.abs(v).max()


@pytest.mark.parametrize(
    ("dtype", "size"), [("float16", 256.0), ("bfloat16", 256.0), ("float32", 30.0)]
)
def test_large_logits(run, dtype, size):
    """N2: products beyond float16, logits of ±1e4 and more, and a finite gradient."""
    q = np.full((1, 1, 1, 128), size)
    k = np.stack([np.full((1, 1, 128), size), np.full((1, 1, 128), -size)], 1)
    v = np.array([1.0, 100]).reshape(1, 2, 1, 1)
    got = run(q, k, v, Full(), do=np.ones((1, 1, 1, 1)), dtype=dtype, optimise=True)
    assert float(got.out[0, 0, 0, 0]) == 1
    assert all(np.isfinite(x).all() for x in (got.lse, got.dq, got.dk, got.dv))
    np.testing.assert_allclose(np.ravel(got.dv), [1, 0], atol=1e-6)
    np.testing.assert_allclose(got.lse[0, 0, 0], size**2 * 128**0.5, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(run, dtype):
    """Results in the dtype of v, close to float64 run on the rounded inputs; lse in float32."""
    q, k, v, do = (x.astype(jnp.dtype(dtype)).astype(float) for x in standard(1, 9, 9, 4, 2, 8, 6))
    got = run(q, k, v, Causal(), do=do, dtype=dtype, optimise=True)
    expected = oracles.attention(q, k, v, visible_pairs(lambda i, j: j <= i, 1, 9, 9), do=do)
    assert_close(got.lse, expected.lse, "float32", "lse")
    for name in ("out", "dq", "dk", "dv"):
        assert getattr(got, name).dtype == dtype
        assert_close(getattr(got, name), getattr(expected, name), dtype, name)
    assert got.lse.dtype == "float32"
