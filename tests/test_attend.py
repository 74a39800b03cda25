"""Softmax attention: every implementation against float64 NumPy and against published faults.

``run`` is ``attend`` under one implementation by name. Case letters (M1, W3, …) are those of the
faults that peers shipped; the numbers beside them are the right ones.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.masks import Causal, First, Full, Global, Prefix, Window
from attention.ops import IMPLEMENTATIONS, attend, attend_with_lse, explain
from attention.reference import Dropout
from tests import oracles
from tests.oracles import assert_close, chk, standard, uniform, visible_pairs

# What each implementation may refuse; nothing where it is not listed. A new refusal fails
# test_refusals, and a test is skipped only for a feature named here.
MAY_REFUSE: dict[str, set[str]] = {}

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
_run = jax.jit(_evaluate, static_argnames=_STATIC)
# For tests of formulas, not of compiled code: half the time to compile, or less.
_run_unoptimised = jax.jit(
    _evaluate,
    static_argnames=_STATIC,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
    },
)


def features(q, k, v, options) -> set[str]:
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


@pytest.fixture(params=list(IMPLEMENTATIONS))
def implementation(request) -> str:
    return request.param


@pytest.fixture
def run(implementation):
    """run(q, k, v, mask, do=, dlse=, dtype=, optimise=, **options) → a Result.

    Gradients only where ``do`` or ``dlse`` is given.
    """

    def call(
        q, k, v, mask, *, do=None, dlse=None, dtype="float32", optimise=True, **options
    ) -> oracles.Result:
        q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
        B, T, N, _ = q.shape
        if do is not None or dlse is not None:
            do = np.zeros((B, T, N, v.shape[-1])) if do is None else do
            dlse = np.zeros((B, N, T)) if dlse is None else dlse
            do = jnp.asarray(do, dtype)
            dlse = jnp.asarray(dlse, jnp.promote_types("float32", dtype))
        arrays = {name: jnp.asarray(options[name]) for name in ARRAYS if name in options}
        options |= arrays
        reason = refusal(implementation, q, k, v, mask, options)
        if reason is not None:
            asked = features(q, k, v, options)
            assert asked & MAY_REFUSE.get(implementation, set()), f"unforeseen refusal: {reason}"
            pytest.skip(reason)
        result = (_run if optimise else _run_unoptimised)(
            q, k, v, do, dlse, arrays,
            mask=mask, scale=options.get("scale"), rate=options.get("rate"),
            implementation=implementation,
        )  # fmt: skip
        # Slices of NumPy arrays compile nothing.
        return jax.tree.map(np.asarray, result)

    return call


def assert_equal_results(got, expected, dtype="float32"):
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_close(getattr(got, name), getattr(expected, name), dtype, name)
    if got.dsink is not None:
        assert_close(got.dsink, expected.dsink, dtype, "dsink")


def same_bits(a, b):
    np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


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
every_mask = pytest.mark.parametrize(("mask", "sees"), MASKS.values(), ids=MASKS)


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


# --- the computation ------------------------------------------------------------------------------


def test_worked_example(run):
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
    e = np.exp(np.array([[1, 0, 1], [0, 1, 1], [1, 1, 2]]) / np.sqrt(2))
    exact = e / e.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, exact, rtol=0, atol=1e-6)
    np.testing.assert_allclose(out, exact @ v[0, :, 0], rtol=0, atol=1e-6)


def test_the_scale_keeps_the_variance_of_scores(run):
    """Claim 4: q·k of 64 channels has deviation √64; the default scale makes it 1."""
    rng = np.random.default_rng()
    q, k = (rng.standard_normal((100, 1, 1000, 64)) for _ in range(2))
    v = np.zeros((100, 1, 1000, 1))
    # With a single key the log-sum-exp is its score.
    assert run(q, k, v, Full(), scale=1.0).lse.std() == pytest.approx(7.99, abs=0.1)
    assert run(q, k, v, Full()).lse.std() == pytest.approx(1, abs=0.0125)


def test_large_scores_saturate_the_softmax(run):
    """Claim 4: softmax([1, 2, 3]) against softmax([8, 16, 24])."""
    q, k = np.ones((1, 1, 1, 1)), np.array([1.0, 2, 3]).reshape(1, 3, 1, 1)
    v = np.eye(3).reshape(1, 3, 1, 3)
    small = np.asarray(run(q, k, v, Full(), scale=1.0).out, np.float64).ravel()
    large = np.asarray(run(q, k, v, Full(), scale=8.0).out, np.float64).ravel()
    np.testing.assert_array_equal(small.round(2), [0.09, 0.24, 0.67])
    np.testing.assert_array_equal(large.round(4), [0.0000, 0.0003, 0.9997])


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
    got = run(q, k, v, mask, do=do)
    sees = (lambda i, j: j <= i) if mask == Causal() else (lambda i, j: j == j)
    assert_equal_results(got, oracles.attention(q, k, v, visible_pairs(sees, 1, T, S), do=do))
    assert [chk(x) for x in (got.out, got.dq, got.dk, got.dv)] == pytest.approx(
        numbers, rel=0, abs=5e-5
    )
    for _ in range(10 if T == 129 else 0):
        jax.tree.map(same_bits, run(q, k, v, mask, do=do), got)


@pytest.mark.parametrize(("T", "S"), [(5, 9), (9, 5)])
def test_causal_is_aligned_at_the_end(run, T, S):
    """Query i stands at i + S − T; rows before the first key see nothing."""
    q, k, v, do = standard(2, T, S, 4, 2, 3, 5)
    got = run(q, k, v, Causal(), do=do)
    visible = visible_pairs(lambda i, j: j <= i, 2, T, S)
    assert visible[0].sum(-1).tolist() == [max(0, t + 1 + S - T) for t in range(T)]
    assert_equal_results(got, oracles.attention(q, k, v, visible, do=do))


def test_length_384(run):
    """T2, at the implementation's own tile sizes."""
    q, k, v, do = standard(1, 384, 384, 1, 1, 16, 16)
    got = run(q, k, v, Causal(), do=do)
    assert [chk(x) for x in (got.out, got.dq, got.dk, got.dv)] == pytest.approx(
        (0.184965909, 0.050644703, -0.046148385, 1.030521938), rel=0, abs=5e-5
    )


@every_mask
def test_every_mask(run, mask, sees):
    """B1: outputs and all gradients, with shared heads, packed documents, padding and a sink."""
    q, k, v, do = standard(2, 13, 13, 4, 2, 6, 3)
    dlse, sink = oracles.wave((2, 4, 13), 1.7, 0.4), np.array([0.5, -1.0, 2.0, -30.0])
    segments = np.array([[1] * 5 + [2] * 6 + [0] * 2, [0] * 3 + [3] * 10])
    both = {"q_segments": segments, "k_segments": segments}
    visible = visible_pairs(sees, 2, 13, 13, **both)
    expected = oracles.attention(q, k, v, visible, do=do, dlse=dlse, sink=sink)
    got = run(q, k, v, mask, do=do, dlse=dlse, sink_N=sink.astype("float32"), **both)
    assert_equal_results(got, expected)
    assert np.isneginf(np.asarray(got.lse)[1, :, :3]).all()


@every_mask
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
            q, k, v, mask, do=do, dlse=dlse, dtype="float64", optimise=False, sink_N=sink,
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
    assert_equal_results(got, oracles.attention(q, k, v, visible, dlse=dlse, scale=0.3))
    assert not got.dv.any()
    np.testing.assert_allclose(got.lse[0, :, 0], 0.3 * (q[0, 0] * k[0, 0]).sum(-1), atol=1e-6)


def test_sink(run):
    """A sink takes its share of the weight and carries no value."""
    q, k, v = uniform(4, 4)
    got = run(q, k, v + 1, Causal(), do=v, sink_N=np.zeros(1, np.float32))
    np.testing.assert_allclose(np.ravel(got.out), [1 / 2, 3 / 3, 6 / 4, 10 / 5], atol=1e-6)
    np.testing.assert_allclose(np.ravel(got.lse), np.log([2, 3, 4, 5]), atol=1e-6)
    none = run(q, k, v + 1, Causal())
    for logit, scale_of_out in ((-np.inf, 1), (-200.0, 1), (200.0, 0)):
        got = run(q, k, v + 1, Causal(), do=v, sink_N=np.full(1, logit, np.float32))
        np.testing.assert_allclose(got.out, scale_of_out * none.out, atol=1e-6)
        assert all(np.isfinite(x).all() for x in (got.dq, got.dk, got.dv, got.dsink))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(run, dtype):
    """Results in the dtype of v, close to float64 run on the rounded inputs; lse in float32."""
    q, k, v, do = (np.asarray(jnp.asarray(x, dtype), float) for x in standard(1, 9, 9, 4, 2, 8, 6))
    got = run(q, k, v, Causal(), do=do, dtype=dtype)
    expected = oracles.attention(q, k, v, visible_pairs(lambda i, j: j <= i, 1, 9, 9), do=do)
    assert_close(got.lse, expected.lse, "float32", "lse")
    for name in ("out", "dq", "dk", "dv"):
        assert getattr(got, name).dtype == dtype
        assert_close(getattr(got, name), getattr(expected, name), dtype, name)
    assert got.lse.dtype == "float32"


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
    assert_equal_results(got, oracles.attention(q, k, v, visible, do=do))
    if side == "right":
        assert chk(got.out[1, :3]) == pytest.approx(0.168331303, abs=1e-5)
        assert chk(got.out[0]) == pytest.approx(0.074759183, abs=1e-5)
    else:
        assert chk(got.out[1, 2:]) == pytest.approx(0.315992897, abs=1e-5)
        alone = run(*(x[1:, 2:] for x in (q, k, v)), Causal(), do=do[1:, 2:])
        np.testing.assert_allclose(got.out[1:, 2:], alone.out, atol=1e-6)
        assert (got.out[1, :2] == 0).all(), "these rows see no key at all"
    assert not got.dk[1][segments[1] == 0].any() and not got.dv[1][segments[1] == 0].any()


def test_the_weight_of_a_padded_key_is_exactly_zero(run):
    """Claim 10: 0, not 1e-9."""
    q, k, _, _ = standard(1, 5, 5, 2, 2, 4, 4)
    eye = np.broadcast_to(np.eye(5)[None, :, None], (1, 5, 2, 5))
    segments = np.array([[1, 1, 0, 1, 0]])
    weights = run(q, k, eye, Full(), k_segments=segments).out
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
    clean = run(q, k, v, Causal(), do=do, **both)
    for x in (q, k, v):
        x[padding] = garbage
    dirty = run(q, k, v, Causal(), do=do, **both)
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
    clean = run(q, k, v, Causal(), do=do)
    if where != "v":
        k[:, 4] = garbage
    if where != "k":
        v[:, 4] = garbage
    dirty = run(q, k, v, Causal(), do=do)
    for name in ("out", "dq", "dk", "dv"):
        same_bits(getattr(dirty, name)[:, :4], getattr(clean, name)[:, :4])
    same_bits(dirty.lse[..., :4], clean.lse[..., :4])


@pytest.mark.parametrize("garbage", [np.inf, np.nan])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_garbage_in_sight_is_not_hidden(run, garbage, where):
    """A visible inf or NaN shows in the result, instead of a plausible number."""
    q, k, v, _ = standard(1, 6, 6, 2, 1, 4, 4)
    {"q": q, "k": k, "v": v}[where][:, 4] = garbage
    got = run(q, k, v, Causal())
    assert not np.isfinite(got.out[:, 4]).any()
    if where != "v":
        assert not np.isfinite(got.lse[..., 4]).any()
    if where != "q":
        assert not np.isfinite(got.out[:, 5]).any()


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
    same_bits(got.out[0, 1], jnp.asarray(v[0, 1], dtype))
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


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [Causal() & Window(3), Window(3)], ids=str)
def test_window_counts_the_query(run, mask):
    """W1 and W3: with and without a causal mask beside it, and no key ahead."""
    got = run(*uniform(6, 6), mask)
    np.testing.assert_allclose(np.ravel(got.out), [0, 0.5, 1, 2, 3, 4], atol=1e-6)


def test_window_of_one(run):
    q, k, v, _ = standard(1, 10, 10, 2, 1, 4, 4)
    same_bits(run(q, k, v, Window(1)).out, np.repeat(v, 2, 2).astype(np.float32))


@pytest.mark.parametrize(
    ("window", "number"),
    [(1, 3.301473431), (3, 0.672163687), (4, 0.706089088), (10, 0.444373949)],
)
def test_window_numbers(run, window, number):
    """W1, whole and, for one of them, one query at a time, as decoding asks."""
    q, k, v, _ = standard(1, 10, 10, 2, 1, 4, 4)
    mask = Causal() & Window(window)
    whole = run(q, k, v, mask).out
    assert chk(whole) == pytest.approx(number, abs=1e-5)
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
    assert_equal_results(got, oracles.attention(q, k, v, visible, do=do))
    if K == 3:
        assert chk(got.out) == pytest.approx(1.502564215, abs=1e-5)


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "S"), [("bfloat16", 4096), ("bfloat16", 4095), ("float16", 4095)])
def test_long_sums_keep_moving(run, S, dtype):
    """N1 a: a half-precision sum of ones stops at 256 or 2048."""
    v = (np.arange(S) < 2048).astype(float).reshape(1, S, 1, 1)
    got = run(np.zeros((1, 1, 1, 8)), np.zeros((1, S, 1, 8)), v, Full(), dtype=dtype)
    assert float(got.out[0, 0, 0, 0]) == pytest.approx(2048 / S, abs=0.004)
    assert float(got.lse[0, 0, 0]) == pytest.approx(np.log(S), abs=1e-4)


def test_bfloat16_against_float64(run):
    """N1 b: long rows of bfloat16 inputs."""
    q, k, v, _ = (
        np.asarray(jnp.asarray(x, "bfloat16"), float) for x in standard(1, 1024, 1024, 1, 1, 64, 64)
    )
    got = run(q, k, v, Causal(), dtype="bfloat16")
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
    got = run(q, k, v, Full(), do=np.ones((1, 1, 1, 1)), dtype=dtype)
    assert float(got.out[0, 0, 0, 0]) == 1
    assert all(np.isfinite(x).all() for x in (got.lse, got.dq, got.dk, got.dv))
    np.testing.assert_allclose(np.ravel(got.dv), [1, 0], atol=1e-6)
    np.testing.assert_allclose(got.lse[0, 0, 0], size**2 * 128**0.5, rtol=1e-6)


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
        assert_equal_results(run(q, k, v, mask, do=do, **options), default)


def test_each_row_of_a_batch_has_its_own_positions(run):
    """A ragged batch: other offsets, empty slots and order of slots in each row."""
    q, k, v, do = standard(2, 3, 8, 4, 2, 4, 4)
    index = {
        "q_index": np.array([[5, 6, 7], [2, 3, 4]]),
        "k_index": np.array([[8, 7, 6, 5, 4, 3, 2, 1], [-1, 3, 0, 1, -1, 2, 4, -1]]),
    }
    got = run(q, k, v, Causal() & (Window(3) | First(1)), do=do, **index)
    visible = visible_pairs(lambda i, j: (j <= i) & ((j > i - 3) | (j < 1)), 2, 3, 8, **index)
    assert_equal_results(got, oracles.attention(q, k, v, visible, do=do))


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


def test_permutation_equivariance(run):
    """Claim 11: without positions, shuffling tokens shuffles rows, no more."""
    q, k, v, _ = standard(1, 11, 11, 2, 2, 4, 4)
    order = np.random.default_rng().permutation(11)
    plain = run(q, k, v, Full()).out
    np.testing.assert_allclose(
        run(q[:, order], k[:, order], v[:, order], Full()).out, plain[:, order], atol=1e-6
    )
    np.testing.assert_allclose(run(q, k[:, order], v[:, order], Full()).out, plain, atol=1e-6)


# --- dropout --------------------------------------------------------------------------------------


def test_dropout_statistics(run):
    """D1: the mean stays, rows, heads and batch rows differ."""
    zeros, ones = np.zeros((2, 1000, 2, 1)), np.ones((2, 1000, 2, 1))
    key = jax.random.key(3)
    out = np.asarray(run(zeros, zeros, ones, Full(), rate=0.5, key=key, optimise=False).out)
    rows = out[..., 0].transpose(0, 2, 1).reshape(4, 1000)
    assert rows.mean() == pytest.approx(1, abs=0.005)
    np.testing.assert_allclose(rows.std(-1), 0.032, atol=0.004)
    correlation = np.corrcoef(rows) - np.eye(4)
    assert np.abs(correlation).max() < 0.2, "batch rows and heads share a mask"


def test_dropout_forward_and_backward_share_a_mask(run):
    """D1: out is linear in v, so Σ out · do = Σ v · dv."""
    q, k, v, do = standard(2, 9, 9, 4, 2, 4, 4)
    seed = int(np.random.default_rng().integers(2**31 - 1))
    call = functools.partial(run, q, k, v, Window(3, ahead=2), do=do, optimise=False)
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
        ({"k": _array(2, 7, 0, 8), "v": _array(2, 7, 0, 8)}, r"4 query heads.* 0 key-value heads"),
        ({"q": _array(2, 5, 0, 8)}, r"0 query heads"),
        ({"k": _array(2, 0, 2, 8), "v": _array(2, 0, 2, 8)}, r"k_BSKH \(2, 0, 2, 8\)"),
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
        jax.eval_shape(
            lambda q, k, v: attend(q, k, v, Causal(), **arguments), q, k, v
        )


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
