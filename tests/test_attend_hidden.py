"""What softmax attention must not see: rows without a key, garbage, padding, other documents.

Case letters (M1, W3, …) are those of the
faults that peers shipped; the numbers beside them are the right ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.masks import Causal, Full
from tests import oracles
from tests.attending import same_bits
from tests.oracles import chk, standard, uniform, visible_pairs

# --- rows without a key, and garbage behind masks -------------------------------------------------


M1 = {"q_segments": np.array([[1, 0, 1]]), "k_segments": np.array([[1, 1, 1]])}


def test_a_row_without_a_key(run):
    """M1 and M2: output 0, lse −inf, no gradient, whatever arrives from above."""
    q, k, v, do = standard(1, 3, 3, 1, 1, 2, 2)
    got = run(q, k, v, Causal(), do=do, **M1)
    np.testing.assert_allclose(
        got.out[0, :, 0],
        [[0.041580662, -0.883454656], [0, 0], [0.368643480, -0.070491267]],
        atol=1e-6,
    )
    assert (got.out[0, 1] == 0).all() and np.isneginf(got.lse[0, 0, 1])
    assert np.isfinite(got.lse[0, 0, ::2]).all()
    rows = {
        "dq": [[0, 0], [0, 0], [0.399029190, 0.201964535]],
        "dk": [
            [-0.048462711, -0.120413183],
            [0.077469651, 0.192485459],
            [-0.029006939, -0.072072275],
        ],
        "dv": [
            [0.680412136, 0.724108537],
            [-0.584379415, -0.323048312],
            [-0.160158243, -0.088536401],
        ],
    }
    for name, expected in rows.items():
        np.testing.assert_allclose(getattr(got, name)[0, :, 0], expected, atol=1e-6, err_msg=name)
    do[0, 1] *= 1e6
    louder = run(q, k, v, Causal(), do=do, dlse=np.array([[[0, 1e6, 0]]]), **M1)
    jax.tree.map(same_bits, louder, got)


def test_a_row_without_a_key_ignores_the_sink(run):
    q, k, v, do = standard(1, 3, 3, 1, 1, 2, 2)
    do[0, [0, 2]] = 0
    got = run(
        q, k, v, Causal(), do=do, dlse=np.ones((1, 1, 3)) * [0, 1, 0],
        sink_N=np.ones(1, np.float32), **M1,
    )  # fmt: skip
    assert (got.out[0, 1] == 0).all() and np.isneginf(got.lse[0, 0, 1])
    assert not any(x.any() for x in (got.dq, got.dk, got.dv, got.dsink))


def test_a_large_masked_score(run):
    """M2, variant b: scores 1, 1, 100 with the last one masked."""
    k = np.array([1.0, 1, 100]).reshape(1, 3, 1, 1)
    do = np.array([1.0, 0, 0]).reshape(1, 1, 1, 3)
    got = run(
        np.ones((1, 1, 1, 1)), k, np.eye(3).reshape(1, 3, 1, 3), Full(), do=do, scale=1.0,
        k_segments=np.array([[1, 1, 0]]),
    )  # fmt: skip
    np.testing.assert_allclose(np.ravel(got.out), [0.5, 0.5, 0], atol=1e-7)
    np.testing.assert_allclose(np.ravel(got.dk), [0.25, -0.25, 0], atol=1e-7)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("queries_too", [True, False])
def test_padding(run, side, queries_too):
    """M4: causal and padding together, for either side; claim 10."""
    q, k, v, do = standard(2, 5, 5, 2, 2, 4, 4)
    valid = slice(0, 3) if side == "right" else slice(2, 5)
    segments = np.ones((2, 5), int)
    segments[1] = 0
    segments[1, valid] = 1
    options = {"k_segments": segments} | ({"q_segments": segments} if queries_too else {})
    do[segments == 0] = 0
    got = run(q, k, v, Causal(), do=do, **options)
    visible = visible_pairs(lambda i, j: j <= i, 2, 5, 5, **options)
    run.assert_equal(got, oracles.attention(q, k, v, visible, do=do))
    if side == "right":
        assert chk(got.out[1, :3]) == pytest.approx(0.168331303, abs=1e-5)
        assert chk(got.out[0]) == pytest.approx(0.074759183, abs=1e-5)
    else:
        assert chk(got.out[1, 2:]) == pytest.approx(0.315992897, abs=1e-5)
        alone = run(*(x[1:, 2:] for x in (q, k, v)), Causal(), do=do[1:, 2:])
        np.testing.assert_allclose(got.out[1:, 2:], alone.out, atol=1e-6)
        assert (got.out[1, :2] == 0).all(), "these rows see no key at all"
    assert not got.dk[1][segments[1] == 0].any() and not got.dv[1][segments[1] == 0].any()


def test_the_weight_of_a_padded_key_is_exactly_zero(run, record_property):
    """Claim 10: 0, not 1e-9."""
    q, k, _, _ = standard(1, 5, 5, 2, 2, 4, 4)
    eye = np.broadcast_to(np.eye(5)[None, :, None], (1, 5, 2, 5))
    segments = np.array([[1, 1, 0, 1, 0]])
    weights = run(q, k, eye, Full(), k_segments=segments).out
    record_property("figures", f"largest weight {float(np.max(weights[..., [2, 4]])):g}")
    assert (weights[..., [2, 4]] == 0).all()
    assert (weights[..., [0, 1, 3]] > 0).all()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


GARBAGE = [1e30, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("side", ["right", "left"])
def test_garbage_in_padding_reaches_nothing(run, garbage, side):
    """M3: queries, keys and values of padding, forward and backward, bit for bit."""
    q, k, v, do = standard(2, 5, 5, 2, 2, 4, 4)
    segments = np.ones((2, 5), int)
    segments[1, slice(3, 5) if side == "right" else slice(0, 2)] = 0
    padding = segments == 0
    both = {"q_segments": segments, "k_segments": segments}
    for x in (q, k, v):
        x[padding] = 0
    clean = run(q, k, v, Causal(), do=do, optimise=True, **both)
    for x in (q, k, v):
        x[padding] = garbage
    dirty = run(q, k, v, Causal(), do=do, optimise=True, **both)
    jax.tree.map(same_bits, dirty, clean)
    for x in (dirty.out, dirty.dq, dirty.dk, dirty.dv):
        assert (np.asarray(x)[padding] == 0).all() and np.isfinite(x).all()


@pytest.mark.parametrize(
    ("where", "garbage"),
    # A key of 3e38 overflows its scores honestly, for the rows that see it.
    [(where, x) for where in ("k", "v", "both") for x in GARBAGE if where == "v" or x != 3e38],
)
def test_garbage_ahead_reaches_no_earlier_row(run, where, garbage):
    """M3 where some rows do see the garbage: those before it do not move by one bit."""
    q, k, v, do = standard(1, 6, 6, 2, 1, 4, 4)
    do[:, 4:] = 0
    clean = run(q, k, v, Causal(), do=do, optimise=True)
    if where != "v":
        k[:, 4] = garbage
    if where != "k":
        v[:, 4] = garbage
    dirty = run(q, k, v, Causal(), do=do, optimise=True)
    for name in ("out", "dq", "dk", "dv"):
        same_bits(getattr(dirty, name)[:, :4], getattr(clean, name)[:, :4])
    same_bits(dirty.lse[..., :4], clean.lse[..., :4])


@pytest.mark.parametrize("garbage", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_garbage_in_sight_is_not_hidden(run, garbage, where):
    """A visible inf or NaN shows in the result, instead of a plausible number."""
    q, k, v, _ = standard(1, 6, 6, 2, 1, 4, 4)
    k = np.abs(k)  # all scores of an infinite query are infinite, of one sign
    {"q": q, "k": k, "v": v}[where][:, 4] = garbage
    got = run(q, k, v, Causal())
    assert np.isfinite(got.out[:, :4]).all() and np.isfinite(got.lse[..., :4]).all()
    spoilt = slice(4, 5) if where == "q" else slice(4, 6)
    assert np.isnan(got.out[:, spoilt]).all()
    # A value that is not finite leaves the log-sum-exp alone.
    assert np.isfinite(got.lse[..., spoilt]).all() == (where == "v")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("score", [0.5, -20.0])
def test_causal_and_left_padding_in_half_precision(run, dtype, score):
    """M5: two masks combine without overflow; row 0 sees nothing, row 1 itself alone."""
    q, k, v, do = standard(1, 2, 2, 1, 1, 1, 2)
    q[:], k[:] = 1, score
    got = run(
        q, k, v, Causal(), do=do, scale=1.0, dtype=dtype,
        q_segments=np.array([[0, 1]]), k_segments=np.array([[0, 1]]),
    )  # fmt: skip
    assert (got.out[0, 0] == 0).all()
    same_bits(got.out[0, 1], v[0, 1].astype(jnp.dtype(dtype)))
    assert all(np.isfinite(x).all() for x in (got.dq, got.dk, got.dv))


# --- packed documents -----------------------------------------------------------------------------


def test_packed_documents(run):
    """M7: documents do not see each other, padding sees nothing."""
    segments = np.array([[1, 1, 1, 2, 2, 0]])
    got = run(*uniform(6, 6), Causal(), q_segments=segments, k_segments=segments)
    np.testing.assert_allclose(np.ravel(got.out), [0, 0.5, 1, 3, 3.5, 0], atol=1e-6)
    assert got.out[0, 5] == 0


def test_packed_copies_are_equal_and_independent(run):
    """M7: the same document twice gives the same rows; editing one moves no bit of the other."""
    q, k, v, do = (np.concatenate([x, x], 1) for x in standard(1, 4, 4, 2, 2, 4, 4))
    segments = np.array([[1] * 4 + [2] * 4])
    both = {"q_segments": segments, "k_segments": segments}
    got = run(q, k, v, Causal(), do=do, **both)
    for x in (got.out, got.dq, got.dk, got.dv):
        np.testing.assert_allclose(x[:, :4], x[:, 4:], atol=1e-6)
    for x in (q, k, v):
        x[:, :4] += 1
    edited = run(q, k, v, Causal(), do=do, **both)
    for name in ("out", "dq", "dk", "dv"):
        same_bits(getattr(edited, name)[:, 4:], getattr(got, name)[:, 4:])
    assert not np.allclose(edited.out[:, :4], got.out[:, :4])


# --- cross-attention ------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [6, 2])
def test_cross_attention(run, T):
    """Z1: the key mask belongs to the keys, and nothing is causal."""
    v = np.tile(np.array([1.0, 2, 3]).reshape(1, 3, 1, 1), (2, 1, 1, 1))
    q, k = np.zeros((2, T, 1, 1)), np.zeros((2, 3, 1, 1))
    do = oracles.wave((2, T, 1, 1), 0.9, 0.3)
    got = run(q, k, v, Full(), do=do, k_segments=np.array([[1, 1, 1], [1, 0, 0]]))
    np.testing.assert_allclose(np.asarray(got.out)[0].ravel(), [2.0] * T, atol=1e-6)
    np.testing.assert_allclose(np.asarray(got.out)[1].ravel(), [1.0] * T, atol=1e-6)
    assert (got.dv[1, 1:] == 0).all() and (got.dk[1, 1:] == 0).all()
    np.testing.assert_allclose(float(got.dv[1, 0, 0, 0]), do[1].sum(), atol=1e-5)
