"""Softmax attention: every implementation against float64 NumPy and against published faults.

``run`` is ``attend`` under one implementation by name. Case letters (M1, W3, …) are those of the
faults that peers shipped; the numbers beside them are the right ones.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from attention.masks import Causal, First, Full, Global, Prefix, Window
from attention.reference import Dropout
from tests import oracles
from tests.attending import same_bits
from tests.oracles import chk, standard, uniform, visible_pairs

# What masks mean, written as formulas on arrays of positions, apart from the masks themselves.
MASKS = {
    "full": (Full(), lambda i, j: j == j),
    "causal": (Causal(), lambda i, j: j <= i),
    "window": (Causal() & Window(3), lambda i, j: (i - 3 < j) & (j <= i)),
    "symmetric window": (Window(3, ahead=2), lambda i, j: abs(i - j) < 3),
    "streaming": (
        Causal() & (Window(3) | First(2)),
        lambda i, j: (j <= i) & ((j > i - 3) | (j < 2)),
    ),
    "longformer": (
        Window(3, ahead=2) | Global((1, 6)),
        lambda i, j: (abs(i - j) < 3) | (j == 1) | (j == 6) | (i == 1) | (i == 6),
    ),
    "causal longformer": (
        (Window(3) | Global(2)) & Causal(),
        lambda i, j: (j <= i) & ((j > i - 3) | (j < 2) | (i < 2)),
    ),
    "prefix": (Causal() | Prefix(5), lambda i, j: (j <= i) | ((i < 5) & (j < 5))),
    "not causal": (~Causal(), lambda i, j: j > i),
}


def masks(*always: str):
    """A case for each mask; the default run takes the named ones."""
    return pytest.mark.parametrize(
        ("mask", "sees"),
        [
            pytest.param(*case, id=name, marks=() if name in always else pytest.mark.broad)
            for name, case in MASKS.items()
        ],
    )


# --- the computation ------------------------------------------------------------------------------


def test_worked_example(run, record_property):
    """Claim 1: weights and outputs of three tokens, as printed and to 1e-6."""
    x = np.array([[1.0, 0], [0, 1], [1, 1]]).reshape(1, 3, 1, 2)
    v = np.array([[1.0, 0], [0, 1], [0.5, 0.5]]).reshape(1, 3, 1, 2)
    weights = run(x, x, np.eye(3).reshape(1, 3, 1, 3), Full()).out[0, :, 0]
    out = run(x, x, v, Full()).out[0, :, 0]
    printed = [[0.40, 0.20, 0.40], [0.20, 0.40, 0.40], [0.25, 0.25, 0.50]]
    np.testing.assert_array_equal(np.round(np.asarray(weights, np.float64), 2), printed)
    np.testing.assert_array_equal(
        np.round(np.asarray(out, np.float64), 1), [[0.6, 0.4], [0.4, 0.6], [0.5, 0.5]]
    )
    rows = (np.round(np.asarray(x, np.float64), 2).tolist() for x in (weights, out))
    record_property("figures", "weights {}, outputs {}".format(*rows))
    e = np.exp(np.array([[1, 0, 1], [0, 1, 1], [1, 1, 2]]) / np.sqrt(2))
    exact = e / e.sum(-1, keepdims=True)
    within = run.within(1e-6)
    np.testing.assert_allclose(weights, exact, rtol=0, atol=within)
    np.testing.assert_allclose(out, exact @ v[0, :, 0], rtol=0, atol=within)


def test_the_scale_keeps_the_variance_of_scores(run, record_property):
    """Claim 4: q·k of 64 channels has deviation √64; the default scale makes it 1."""
    rng = np.random.default_rng()
    q, k = (rng.standard_normal((100, 1, 1000, 64)).astype(run.dtype) for _ in range(2))
    products = np.einsum("btnh,btnh->bnt", q, k, dtype=np.float64)
    deviation = products.std()
    record_property("figures", f"deviation {deviation:.2f}, scaled {deviation / 8:.3f}")
    assert deviation == pytest.approx(7.99, abs=0.1)
    assert (products / 8).std() == pytest.approx(1, abs=0.0125)
    # With a single key the log-sum-exp is its score.
    few = q[:2, :, :4], k[:2, :, :4], np.zeros((2, 1, 4, 1))
    lse = run(*few, Full(), scale=1.0).lse
    np.testing.assert_allclose(lse, products[:2, :4], rtol=0, atol=1e-5 * 64)
    np.testing.assert_allclose(run(*few, Full()).lse, lse / 8, rtol=0, atol=1e-5 * 8)


def test_large_scores_saturate_the_softmax(run, record_property):
    """Claim 4: softmax([1, 2, 3]) against softmax([8, 16, 24])."""
    q, k = np.ones((1, 1, 1, 1)), np.array([1.0, 2, 3]).reshape(1, 3, 1, 1)
    v = np.eye(3).reshape(1, 3, 1, 3)
    small = np.asarray(run(q, k, v, Full(), scale=1.0).out, np.float64).ravel()
    large = np.asarray(run(q, k, v, Full(), scale=8.0).out, np.float64).ravel()
    record_property("figures", f"{np.round(small, 2).tolist()}, {np.round(large, 4).tolist()}")
    np.testing.assert_allclose(small, [0.09, 0.24, 0.67], rtol=0, atol=5e-3)
    np.testing.assert_allclose(large, [0.0000, 0.0003, 0.9997], rtol=0, atol=run.within(5e-5))


T1 = [
    (1, 1, Causal(), (0.295126385, 0, 0, 0.043175011)),
    (7, 7, Causal(), (0.081170138, 0.094857367, -0.224473432, 3.412138008)),
    (127, 127, Causal(), (0.279936322, 0.138117226, -0.149796268, 4.477020224)),
    (129, 129, Causal(), (0.277087849, 0.142055630, -0.149609252, 4.456847175)),
    (192, 192, Causal(), (0.271576788, 0.126233651, -0.141691880, 4.267072109)),
    (300, 300, Causal(), (0.228822077, 0.138171060, -0.144926871, 4.236733583)),
    (96, 160, Full(), (-0.042121586, 0.043783351, 0.018387826, -0.256081286)),
    (160, 96, Full(), (0.052785454, 0.029554182, 0.000551138, 0.000077266)),
]


@pytest.mark.parametrize(("T", "S", "mask", "numbers"), T1, ids=[f"{t}x{s}" for t, s, *_ in T1])
def test_any_length(run, T, S, mask, numbers):
    """T1: lengths that no tile divides, forward and backward; the same again when repeated."""
    q, k, v, do = standard(1, T, S, 2, 2, 16, 16)
    got = run(q, k, v, mask, do=do, optimise=True)
    sees = (lambda i, j: j <= i) if mask == Causal() else (lambda i, j: j == j)
    run.assert_equal(got, oracles.attention(q, k, v, visible_pairs(sees, 1, T, S), do=do))
    assert [chk(x) for x in (got.out, got.dq, got.dk, got.dv)] == pytest.approx(
        numbers, rel=0, abs=run.within(5e-5)
    )
    for _ in range(10 if T == 129 else 0):
        jax.tree.map(same_bits, run(q, k, v, mask, do=do, optimise=True), got)


@pytest.mark.parametrize(("T", "S"), [(5, 9), (9, 5)])
def test_causal_is_aligned_at_the_end(run, T, S):
    """Query i stands at i + S − T; rows before the first key see nothing."""
    q, k, v, do = standard(2, T, S, 4, 2, 3, 5)
    got = run(q, k, v, Causal(), do=do)
    visible = visible_pairs(lambda i, j: j <= i, 2, T, S)
    assert visible[0].sum(-1).tolist() == [max(0, t + 1 + S - T) for t in range(T)]
    run.assert_equal(got, oracles.attention(q, k, v, visible, do=do))


def test_length_384(run):
    """T2, at the implementation's own tile sizes."""
    q, k, v, do = standard(1, 384, 384, 1, 1, 16, 16)
    got = run(q, k, v, Causal(), do=do, optimise=True)
    assert [chk(x) for x in (got.out, got.dq, got.dk, got.dv)] == pytest.approx(
        (0.184965909, 0.050644703, -0.046148385, 1.030521938), rel=0, abs=run.within(5e-5)
    )


# tests/test_attend_sizes.py takes all of them by default, without documents and padding.
@masks("causal", "streaming", "causal longformer")
def test_every_mask(run, mask, sees):
    """B1: outputs and all gradients, with shared heads, packed documents, padding and a sink."""
    q, k, v, do = standard(2, 13, 13, 4, 2, 6, 3)
    dlse, sink = oracles.wave((2, 4, 13), 1.7, 0.4), np.array([0.5, -1.0, 2.0, -30.0])
    segments = np.array([[1] * 5 + [2] * 6 + [0] * 2, [0] * 3 + [3] * 10])
    both = {"q_segments": segments, "k_segments": segments}
    visible = visible_pairs(sees, 2, 13, 13, **both)
    expected = oracles.attention(q, k, v, visible, do=do, dlse=dlse, sink=sink)
    got = run(q, k, v, mask, do=do, dlse=dlse, sink_N=sink.astype("float32"), optimise=True, **both)
    run.assert_equal(got, expected)
    assert np.isneginf(np.asarray(got.lse)[1, :, :3]).all()


@masks("causal longformer")
def test_gradients_by_central_differences(run, mask, sees):
    """B1 in float64: each partial derivative of a loss over outputs and log-sum-exps."""
    del sees
    shapes = {"q": (2, 7, 2, 2), "k": (2, 7, 1, 2), "v": (2, 7, 1, 3), "sink": (2,)}
    rng = np.random.default_rng()
    start = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    do, dlse = rng.standard_normal((2, 7, 2, 3)), rng.standard_normal((2, 2, 7))
    segments = np.array([[1] * 7, [2, 2, 2, 1, 1, 1, 0]])

    def evaluate(q, k, v, sink):
        return run(
            q, k, v, mask, do=do, dlse=dlse, dtype="float64", sink_N=sink,
            k_segments=segments,
        )  # fmt: skip

    def loss(values):
        result = evaluate(**values)
        lse = np.asarray(result.lse)
        seen = np.isfinite(lse)
        return np.sum(np.asarray(result.out) * do) + np.sum(lse[seen] * dlse[seen])

    with jax.enable_x64(True):
        got = evaluate(**start)
        gradients = {"q": got.dq, "k": got.dk, "v": got.dv, "sink": got.dsink}
        for name, gradient in gradients.items():
            for place in np.ndindex(shapes[name]):
                ends = []
                for step in (1e-6, -1e-6):
                    moved = start[name].copy()
                    moved[place] += step
                    ends.append(loss(start | {name: moved}))
                slope = (ends[0] - ends[1]) / 2e-6
                assert gradient[place] == pytest.approx(slope, abs=1e-7), (name, place)


def test_lse_and_its_gradient(run):
    """lse_i = log Σ_j exp(scale q_i·k_j), and its gradient alone."""
    q, k, v, _ = standard(1, 5, 5, 2, 1, 4, 4)
    dlse = oracles.wave((1, 2, 5), 0.9, 0.3)
    got = run(q, k, v, Causal(), dlse=dlse, scale=0.3)
    visible = visible_pairs(lambda i, j: j <= i, 1, 5, 5)
    run.assert_equal(got, oracles.attention(q, k, v, visible, dlse=dlse, scale=0.3))
    assert not got.dv.any()
    first = 0.3 * (q[0, 0] * k[0, 0]).sum(-1)
    np.testing.assert_allclose(got.lse[0, :, 0], first, rtol=0, atol=run.within(1e-6))


def test_sink(run):
    """A sink takes its share of the weight and carries no value."""
    q, k, v = uniform(4, 4)
    got = run(q, k, v + 1, Causal(), do=v, sink_N=np.zeros(1, np.float32))
    within = run.within(1e-6)
    np.testing.assert_allclose(np.ravel(got.out), [1 / 2, 3 / 3, 6 / 4, 10 / 5], atol=within)
    np.testing.assert_allclose(np.ravel(got.lse), np.log([2, 3, 4, 5]), atol=1e-6)
    none = run(q, k, v + 1, Causal())
    for logit, scale_of_out in ((-np.inf, 1), (-200.0, 1), (200.0, 0)):
        got = run(q, k, v + 1, Causal(), do=v, sink_N=np.full(1, logit, np.float32))
        np.testing.assert_allclose(got.out, scale_of_out * none.out, atol=within)
        assert all(np.isfinite(x).all() for x in (got.dq, got.dk, got.dv, got.dsink))


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [Causal() & Window(3), Window(3)], ids=str)
def test_window_counts_the_query(run, mask):
    """W1 and W3: with and without a causal mask beside it, and no key ahead."""
    got = run(*uniform(6, 6), mask)
    np.testing.assert_allclose(np.ravel(got.out), [0, 0.5, 1, 2, 3, 4], atol=run.within(1e-6))


def test_window_of_one(run):
    q, k, v, _ = standard(1, 10, 10, 2, 1, 4, 4)
    same_bits(run(q, k, v, Window(1)).out, np.repeat(v, 2, 2).astype(run.dtype))


@pytest.mark.parametrize(
    ("window", "number"),
    [(1, 3.301473431), (3, 0.672163687), (4, 0.706089088), (10, 0.444373949)],
)
def test_window_numbers(run, window, number):
    """W1, whole and, for one of them, one query at a time, as decoding asks."""
    q, k, v, _ = standard(1, 10, 10, 2, 1, 4, 4)
    mask = Causal() & Window(window)
    whole = run(q, k, v, mask).out
    assert chk(whole) == pytest.approx(number, abs=run.within(1e-5))
    for t in range(10 if window == 3 else 0):
        row = run(q[:, t : t + 1], k, v, mask, q_index=np.array([t])).out
        np.testing.assert_allclose(row[:, 0], whole[:, t], atol=1e-6)


@pytest.mark.parametrize("window", [10, 11, 1000, 2**30])
def test_a_window_wider_than_the_text(run, window):
    """W2: bit-equal to plain causal."""
    q, k, v, do = standard(1, 10, 10, 2, 1, 4, 4)
    do = do if window == 2**30 else None
    got = run(q, k, v, Causal() & Window(window), do=do)
    jax.tree.map(same_bits, got, run(q, k, v, Causal(), do=do))


def test_a_window_and_a_users_mask_meet(run):
    """W3: the window and the padding both act."""
    got = run(*uniform(6, 6), Causal() & Window(3), k_segments=np.array([[1, 1, 0, 1, 1, 0]]))
    np.testing.assert_allclose(np.ravel(got.out), [0, 0.5, 0.5, 2, 3.5, 3.5], atol=1e-6)


# --- heads ----------------------------------------------------------------------------------------


def test_head_order(run):
    """G1: query head n reads key-value head n // G."""
    v = np.arange(3.0).reshape(1, 1, 3, 1)
    got = run(np.zeros((1, 1, 6, 4)), np.zeros((1, 1, 3, 4)), v, Full())
    assert np.ravel(got.out).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("K", [1, 3])
def test_grouped_heads(run, K):
    """G1 and B1: any number of key-value heads, gradients summed over the group."""
    q, k, v, do = standard(1, 4, 4, 6, K, 4, 4)
    got = run(q, k, v, Causal(), do=do)
    visible = visible_pairs(lambda i, j: j <= i, 1, 4, 4)
    run.assert_equal(got, oracles.attention(q, k, v, visible, do=do))
    if K == 3:
        assert chk(got.out) == pytest.approx(1.502564215, abs=run.within(1e-5))


# --- positions and caches -------------------------------------------------------------------------


def test_explicit_positions_equal_the_default(run):
    q, k, v, do = standard(2, 5, 9, 2, 2, 4, 4)
    mask = Causal() & (Window(3) | First(1))
    q_index, k_index = np.arange(5) + 4, np.arange(9)
    default = run(q, k, v, mask, do=do)
    for options in (
        {"q_index": q_index},
        {"k_index": k_index[None]},
        {"q_index": np.stack([q_index] * 2), "k_index": k_index},
    ):
        run.assert_equal(run(q, k, v, mask, do=do, **options), default)


def test_each_row_of_a_batch_has_its_own_positions(run):
    """A ragged batch: other offsets, empty slots and order of slots in each row."""
    q, k, v, do = standard(2, 3, 8, 4, 2, 4, 4)
    index = {
        "q_index": np.array([[5, 6, 7], [2, 3, 4]]),
        "k_index": np.array([[8, 7, 6, 5, 4, 3, 2, 1], [-1, 3, 0, 1, -1, 2, 4, -1]]),
    }
    got = run(q, k, v, Causal() & (Window(3) | First(1)), do=do, **index)
    visible = visible_pairs(lambda i, j: (j <= i) & ((j > i - 3) | (j < 1)), 2, 3, 8, **index)
    run.assert_equal(got, oracles.attention(q, k, v, visible, do=do))


@pytest.mark.parametrize("garbage", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
def test_empty_slots_of_a_cache(run, garbage, mask):
    """C1: prefill of 5 into 8 slots, then one more; what lies in empty slots does not matter."""
    _, k, v = uniform(8, 8)
    filled = np.where(np.arange(8) < 5, np.arange(8), -1)
    k[:, 5:], v[:, 5:] = garbage, garbage
    prefill = run(np.zeros((1, 5, 1, 1)), k, v, mask, q_index=np.arange(5), k_index=filled)
    expected = [2.0] * 5 if mask == Full() else [0, 0.5, 1, 1.5, 2]
    np.testing.assert_allclose(np.ravel(prefill.out), expected, atol=1e-6)
    k[:, 5], v[:, 5], filled[5] = 0, 5, 5
    decode = run(np.zeros((1, 1, 1, 1)), k, v, mask, q_index=np.array([5]), k_index=filled)
    np.testing.assert_allclose(np.ravel(decode.out), [2.5], atol=1e-6)


def test_an_empty_cache(run):
    """No slot filled yet: the row has no key."""
    q, k, v, do = standard(1, 1, 4, 2, 2, 4, 4)
    got = run(q, k, v, Causal(), do=do, q_index=np.array([0]), k_index=np.full(4, -1))
    assert not got.out.any() and np.isneginf(got.lse).all()
    assert not any(x.any() for x in (got.dq, got.dk, got.dv))


def test_slots_of_a_ring_in_any_order(run):
    """C2: positions 8, 9, 6, 7 in four slots."""
    v = np.array([8.0, 9, 6, 7]).reshape(1, 4, 1, 1)
    got = run(
        np.zeros((1, 1, 1, 1)), np.zeros((1, 4, 1, 1)), v, Causal() & Window(4),
        q_index=np.array([9]), k_index=np.array([8, 9, 6, 7]),
    )  # fmt: skip
    assert float(got.out[0, 0, 0, 0]) == pytest.approx(7.5)


# --- who moves whom -------------------------------------------------------------------------------


def test_later_tokens_move_nothing(run):
    """Claim 8, by perturbation and by gradient: rows up to t depend on keys up to t alone."""
    q, k, v, do = standard(1, 9, 9, 2, 1, 4, 4)
    t = 4
    do[:, t + 1 :] = 0
    before = run(q, k, v, Causal(), do=do)
    assert not before.dk[:, t + 1 :].any() and not before.dv[:, t + 1 :].any()
    assert before.dk[:, t].any() and before.dv[:, t].any()
    rng = np.random.default_rng()
    for x in (q, k, v):
        x[:, t + 1 :] = rng.standard_normal(x[:, t + 1 :].shape)
    same_bits(run(q, k, v, Causal(), do=do).out[:, : t + 1], before.out[:, : t + 1])


def test_batch_rows_are_independent(run):
    q, k, v, do = standard(3, 6, 6, 2, 1, 4, 4)
    before = run(q, k, v, Causal(), do=do)
    for x in (q, k, v, do):
        x[1] = np.random.default_rng().standard_normal(x[1].shape)
    after = run(q, k, v, Causal(), do=do)
    for name in ("out", "lse", "dq", "dk", "dv"):
        same_bits(getattr(after, name)[::2], getattr(before, name)[::2])


def test_permutation_equivariance(run, record_property):
    """Claim 11: without positions, shuffling tokens shuffles rows, no more."""
    q, k, v, _ = standard(1, 11, 11, 2, 2, 4, 4)
    order = np.random.default_rng().permutation(11)
    plain, within = run(q, k, v, Full()).out, run.within(1e-6)
    moved = run(q[:, order], k[:, order], v[:, order], Full()).out
    largest = np.abs(np.asarray(moved, np.float64) - np.asarray(plain[:, order], np.float64)).max()
    record_property("figures", f"largest difference {largest:.0e}")
    np.testing.assert_allclose(moved, plain[:, order], atol=within)
    np.testing.assert_allclose(run(q, k[:, order], v[:, order], Full()).out, plain, atol=within)


def test_several_softmaxes_look_at_several_places_at_once(run, record_property):
    """Claim 14: one half of the output from each of two places, which no single softmax gives."""
    places, first, second = 4, 1, 3
    eye = np.eye(places)
    target = np.concatenate([eye[first], eye[second]])

    def error(out):
        squares = (np.asarray(out, np.float64) - target) ** 2
        return squares.sum(-1) / (target**2).sum()

    k = np.stack([eye, eye], 1)[None]  # two heads, which read the same places
    q = 40 * np.stack([eye[first], eye[second]])[None, None]
    two = error(np.asarray(run(q, k, k, Full(), scale=1.0).out).reshape(-1)).item()
    # One head of the whole width. Its weights are all those on a grid of steps of a tenth.
    grid = np.indices((11,) * places).reshape(places, -1).T
    weights = grid[grid.sum(-1) == 10] / 10
    q = np.log(np.maximum(weights, 1e-9))[None, :, None]
    whole = np.concatenate([eye, eye], -1)[None, :, None]
    one = error(run(q, eye[None, :, None], whole, Full(), scale=1.0).out[0, :, 0])
    best = weights[one.argmin()]
    record_property("figures", f"error of two softmaxes {two:.0e}, of one {one.min():.2f} at best")
    within = run.within(1e-5)
    np.testing.assert_allclose(two, 0, atol=within)
    np.testing.assert_allclose(one.min(), 0.5, atol=within)
    np.testing.assert_array_equal(best, (eye[first] + eye[second]) / 2)
    exact = ((weights - eye[first]) ** 2 + (weights - eye[second]) ** 2).sum(-1) / 2
    np.testing.assert_allclose(one, exact, atol=within)


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_statistics(run):
    """D1: the mean stays, rows, heads and batch rows differ."""
    zeros, ones = np.zeros((2, 1000, 2, 1)), np.ones((2, 1000, 2, 1))
    key = jax.random.key(3)
    out = np.asarray(run(zeros, zeros, ones, Full(), rate=0.5, key=key).out)
    rows = out[..., 0].transpose(0, 2, 1).reshape(4, 1000)
    assert rows.mean() == pytest.approx(1, abs=0.005)
    np.testing.assert_allclose(rows.std(-1), 0.032, atol=0.004)
    correlation = np.corrcoef(rows) - np.eye(4)
    assert np.abs(correlation).max() < 0.2, "batch rows and heads share a mask"


def test_dropout_forward_and_backward_share_a_mask(run):
    """D1: out is linear in v, so Σ out · do = Σ v · dv."""
    q, k, v, do = standard(2, 9, 9, 4, 2, 4, 4)
    seed = int(np.random.default_rng().integers(2**31 - 1))
    call = functools.partial(run, q, k, v, Window(3, ahead=2), do=do)
    got = call(rate=0.5, key=jax.random.key(seed))
    assert np.sum(got.out * do) == pytest.approx(float(np.sum(v * got.dv)), rel=1e-5)
    jax.tree.map(same_bits, call(rate=0.5, key=jax.random.key(seed)), got)
    assert not np.allclose(call(rate=0.5, key=jax.random.key(seed + 1)).out, got.out)
    none = call()
    assert not np.allclose(none.out, got.out)
    jax.tree.map(same_bits, call(rate=0.0, key=jax.random.key(seed)), none)
    np.testing.assert_allclose(got.lse, none.lse, atol=1e-6, err_msg="dropout changes no lse")


@pytest.mark.parametrize("rate", [-0.5, 1.0, 1.5, float("nan")])
def test_bad_dropout_rates(rate):
    """D1."""
    with pytest.raises(ValueError, match=f"dropout must be at least 0 and below 1, got {rate}"):
        Dropout(rate, jax.random.key(0))
