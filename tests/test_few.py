"""A few queries over many keys: what one step of decoding computes on the CPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import few
from attention.masks import Causal, Full, Window
from attention.ops import attend_with_lse, explain
from attention.reference import allowed_pairs, dense_attention
from tests.attending import OPTIMISED, same_bits
from tests.oracles import assert_close

B, S, N, K, H, E = 2, 40, 4, 2, 8, 5


def _arrays(T: int, seed: int = 0):
    random = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, E)
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


def _both(q, k, v, mask, **options):
    return [
        attend_with_lse(q, k, v, mask, implementation=name, **options)
        for name in ("few", "reference")
    ]


def _is_fast(q, k, v, mask, k_index=None) -> bool:
    k_index = jnp.arange(S) if k_index is None else k_index
    allowed_BTS = allowed_pairs(mask, jnp.arange(q.shape[1]) + S - q.shape[1], k_index)
    return bool(few._products(q, k, v, allowed_BTS, H**-0.5, None, isolated=False)[1])


@pytest.mark.parametrize("T", [1, 3, pytest.param(8, marks=pytest.mark.broad)])
@pytest.mark.parametrize("mask", [Full(), Causal(), Causal() & Window(6)], ids=str)
def test_equals_float64(T, mask):
    q, k, v = _arrays(T)
    assert _is_fast(q, k, v, mask)
    sink_N = jnp.linspace(-1, 2, N)

    @jax.jit
    def attended(q, k, v, sink_N):
        return attend_with_lse(q, k, v, mask, sink_N=sink_N, implementation="few")

    @jax.jit
    def dense(q, k, v, sink_N):
        allowed_BTS = allowed_pairs(mask, jnp.arange(T) + S - T, jnp.arange(S))
        return dense_attention(q, k, v, allowed_BTS, scale=H**-0.5, sink_N=sink_N)

    found = attended(q, k, v, sink_N)
    with jax.enable_x64(True):
        exact = dense(*(jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v, sink_N)))
    assert_close(found[0], exact[0])
    assert_close(found[1], exact[1])


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["k", "v"])
def test_garbage_in_an_empty_slot_reaches_nothing(garbage, name):
    arrays = dict(zip("qkv", _arrays(1), strict=True))
    k_index = jnp.arange(S).at[7].set(-1)

    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def attended(q, k, v):
        return attend_with_lse(q, k, v, Causal(), k_index=k_index, implementation="few")

    clean = attended(**arrays)
    arrays[name] = arrays[name].at[:, 7, 0].set(garbage)
    for ours, theirs in zip(attended(**arrays), clean, strict=True):
        same_bits(ours, theirs)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_garbage_that_a_row_sees_is_what_the_reference_says(garbage, name):
    """−inf in a key included, whose weight would quietly be 0 in a plain softmax."""
    arrays = dict(zip("qkv", _arrays(2), strict=True))
    # All of one head's key: the other heads are not to notice. Seen by the last query alone.
    place = (0, 1) if name == "q" else (0, S - 1)
    arrays[name] = arrays[name].at[(*place, 0)].set(garbage)
    assert not _is_fast(*arrays.values(), Causal())
    ours, theirs = _both(*arrays.values(), Causal())
    assert np.isnan(np.asarray(theirs[0])).any() and np.isfinite(np.asarray(theirs[0])).any()
    for found, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        assert_close(np.nan_to_num(found), np.nan_to_num(expected))


def test_a_visible_score_of_minus_infinity_is_not_taken_for_a_weight_of_zero():
    """With one key-value head no zero of a block diagonal meets the key and shows it as NaN."""
    q, k, v = _arrays(1)
    q, k, v = jnp.abs(q), k[:, :, :1].at[:, 3].set(-np.inf), v[:, :, :1]
    assert not _is_fast(q, k, v, Causal())
    for found, expected in zip(*_both(q, k, v, Causal()), strict=True):
        assert np.isnan(np.asarray(expected)).all() and np.isnan(np.asarray(found)).all()


def test_a_row_without_keys_is_zero_and_stays_fast():
    q, k, v = _arrays(2)
    k_index = jnp.stack([jnp.arange(S), jnp.full(S, -1)])
    assert _is_fast(q, k, v, Causal(), k_index)
    (out, lse), _ = _both(q, k, v, Causal(), k_index=k_index)
    assert not np.asarray(out[1]).any() and np.asarray(out[0]).all()
    assert np.isneginf(np.asarray(lse[1])).all() and np.isfinite(np.asarray(lse[0])).all()


def test_derivatives_are_those_of_the_reference():
    arrays, directions = _arrays(3), _arrays(3, seed=1)

    def loss(name):
        def of(q, k, v):
            out, lse = attend_with_lse(q, k, v, Causal(), implementation=name)
            return jnp.sin(out).sum() + jnp.cos(lse).sum()

        return of

    reverse = [jax.jit(jax.grad(loss(name), (0, 1, 2)))(*arrays) for name in ("few", "reference")]
    for ours, theirs in zip(*reverse, strict=True):
        assert_close(ours, theirs)

    def along(name):
        return jax.jit(lambda *q_k_v: jax.jvp(loss(name), q_k_v, tuple(directions))[1])(*arrays)

    assert_close(along("few"), along("reference"))


def test_each_of_a_batch_of_calls():
    q, k, v = _arrays(1)

    def one(q, k, v):
        out = attend_with_lse(q[None], k[None], v[None], Causal(), implementation="few")
        return out[0][0]

    expected, _ = attend_with_lse(q, k, v, Causal(), implementation="few")
    assert_close(jax.vmap(one)(q, k, v), expected)


def test_a_step_of_decoding_takes_it_on_the_cpu():
    q, k, v = _arrays(1)
    positions = {"q_index": jnp.full((1, 1), S - 1), "k_index": jnp.arange(S)[None]}
    assert explain(q, k, v, Causal(), **positions).chosen == "few"
    q, _, _ = _arrays(few.MOST + 1)
    assert "at most 8 queries" in explain(q, k, v, Causal()).others["few"]
