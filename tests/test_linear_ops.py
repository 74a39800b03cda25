"""Linear attention's three forms against brute force in float64, and against each other."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.feature_maps import FEATURE_MAPS
from attention.linear_ops import LinearState, chunked, parallel, recurrent, weights

FORMS = {
    "parallel": parallel,
    "recurrent": recurrent,
    **{f"chunk{c}": functools.partial(chunked, chunk=c) for c in (1, 4, 5, 13, 16)},
}
BOTH_WAYS = {"parallel": parallel, "chunk4": FORMS["chunk4"], "chunk16": FORMS["chunk16"]}
# 13 tokens: padding on the left, in the middle and on the right; an id that comes back; one document
# longer than a chunk; a row of padding alone.
SEGMENTS = np.array(
    [
        [0, 0, 1, 1, 0, 1, 2, 2, 0, 0, 1, 1, 0],
        [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 7, 7],
        [0, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5],
        [0] * 13,
    ]
)


def brute_force(q, k, v, state, causal=True, segments=None):
    """Sums by definition, one token pair at a time. Returns out, S, z, pattern."""
    B, T, N, _ = q.shape
    K, E = v.shape[2:]
    S, z = (np.array(x, np.float64) for x in state)
    out, pattern = np.zeros((B, T, N, E)), np.zeros((B, N, T, T))
    for b in range(B):
        ids = [1] * T if segments is None else list(segments[b])
        document, current, last_id = [], 0, None
        for one in ids:
            if one and last_id not in (None, one):
                current += 1
            last_id = one or last_id
            document.append(current if one else None)
        for n in range(N):
            h = n // (N // K)
            for i in range(T):
                if document[i] is None:
                    continue
                sees = [
                    j for j in range(T) if document[j] == document[i] and (j <= i or not causal)
                ]
                score = {j: float(q[b, i, n] @ k[b, j, h]) for j in sees}
                top = sum((s * v[b, j, h] for j, s in score.items()), np.zeros(E))
                bottom = sum(score.values())
                for j, s in score.items():
                    pattern[b, n, i, j] = s / bottom if bottom else 0
                if document[i] == 0:
                    top = top + q[b, i, n] @ state[0][b, h]
                    bottom += q[b, i, n] @ state[1][b, h]
                out[b, i, n] = top / bottom if bottom else 0
        if current:
            S[b], z[b] = 0, 0
        for j in range(T):
            if document[j] is not None and document[j] == current:
                S[b] += k[b, j, :, :, None] * v[b, j, :, None, :]
                z[b] += k[b, j]
    return out, S, z, pattern


def draw(B=4, T=13, N=4, K=2, M=5, E=3, seed=0):
    """Positive features, values, an initial state as (S, z); float64."""
    rng = np.random.default_rng(seed)
    q, k = rng.uniform(0.1, 2, (B, T, N, M)), rng.uniform(0.1, 2, (B, T, K, M))
    return (
        (q, k, rng.normal(size=(B, T, K, E))),
        (rng.normal(size=(B, K, M, E)), rng.uniform(0.1, 3, (B, K, M))),
    )


def run(form, qkv, state, **options):
    return jax.jit(lambda qkv, state: form(*qkv, state, **options))(qkv, state)


def as_float32(tree):
    return jax.tree.map(jnp.float32, tree)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize(
    "name, causal", [(n, True) for n in FORMS] + [(n, False) for n in BOTH_WAYS]
)
def test_output_and_state_equal_brute_force(name, causal, segments):
    qkv, state = draw()
    options = {"causal": causal, "segments_BT": None if segments is None else jnp.array(segments)}
    out, final = run(FORMS[name], as_float32(qkv), LinearState(*as_float32(state)), **options)
    want_out, want_S, want_z, _ = brute_force(*qkv, state, causal, segments)
    close(out, want_out)
    close(final.sum_BKME, want_S)
    close(final.normaliser_BKM, want_z)
    if segments is not None:
        np.testing.assert_array_equal(final.sum_BKME[3], as_float32(state[0])[3])
        np.testing.assert_array_equal(out[segments == 0], 0)


def loss_of(form, weight, **options):
    def loss(qkv, state):
        out, final = form(*qkv, LinearState(*state), **options)
        total = sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(final))
        return jnp.sum(out * weight) + total

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_equal_differences_of_brute_force(causal):
    """All five arguments, through the output and the final state, on packed rows, in every form."""
    qkv, state = draw(B=2, N=2, K=1, M=2, E=3, seed=1)
    segments = SEGMENTS[:2]
    weight = np.random.default_rng(2).normal(size=(2, 13, 2, 3))

    def loss(arguments):
        out, S, z, _ = brute_force(*arguments[:3], arguments[3:], causal, segments)
        return np.sum(out * weight) + np.sin(S).sum() + np.sin(z).sum()

    arguments, step = [*qkv, *state], 1e-5
    want = [np.zeros_like(x) for x in arguments]
    rng = np.random.default_rng(3)
    for x, gradient in zip(arguments, want, strict=True):
        gradient[...] = np.nan
        for index in {tuple(rng.integers(0, x.shape)) for _ in range(14)}:
            kept = x[index]
            x[index] = kept + step
            above = loss(arguments)
            x[index] = kept - step
            gradient[index] = (above - loss(arguments)) / (2 * step)
            x[index] = kept

    forms = FORMS if causal else BOTH_WAYS
    results = []
    for form in forms.values():
        gradient = loss_of(form, jnp.float32(weight), causal=causal, segments_BT=segments)
        results.append(jax.tree.leaves(gradient(as_float32(qkv), as_float32(state))))
    for got, expected in zip(results[0], want, strict=True):
        checked = ~np.isnan(expected)
        close(np.asarray(got)[checked], expected[checked], 1e-4)
    for other in results[1:]:
        for got, expected in zip(other, results[0], strict=True):
            close(got, expected)


# shared case L2: standard tensors, elu + 1


def standard(shape, a, b):
    return np.sin(a * np.arange(1, math.prod(shape) + 1) + b).reshape(shape)


def chk(x):
    x = np.asarray(x, np.float64)
    return np.sum(x * standard(x.shape, 0.31, 0.2))


def standard_inputs():
    phi = FEATURE_MAPS["elu"]
    q, k = standard((1, 13, 2, 4), 0.7, 0.0), standard((1, 13, 2, 4), 1.3, 0.5)
    return phi(q), phi(k), jnp.asarray(standard((1, 13, 2, 3), 2.1, 1.0))


@pytest.mark.parametrize("name", FORMS)
def test_published_numbers(name):
    with jax.enable_x64(True):
        out, state = run(FORMS[name], standard_inputs(), None)
        assert state.sum_BKME.dtype == state.normaliser_BKM.dtype == out.dtype == jnp.float64
    close(chk(out), -0.318872088, 2e-9)
    close(out[0, 12, 0], [-0.159190298, -0.765329315, 0.931937345], 2e-9)
    close(out[0, 12, 1], [-0.173947036, -0.754984369, 0.936248871], 2e-9)
    close(chk(state.sum_BKME), 3.973294761, 2e-9)
    close(chk(state.normaliser_BKM), 87.491376445, 2e-9)


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_published_number_without_causality(name):
    with jax.enable_x64(True):
        out, _ = run(FORMS[name], standard_inputs(), None, causal=False)
    close(chk(out), -0.344649697, 2e-9)


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", ["parallel", "chunk4"])
def test_a_split_resumes_exactly(first, second):
    qkv, _ = draw(B=1)
    qkv = as_float32(qkv)
    head, tail = ([x[:, s] for x in qkv] for s in (slice(0, 5), slice(5, 13)))

    def joined(tail, head):
        out_head, state = FORMS[first](*head)
        out_tail, state = FORMS[second](*tail, state)
        return jnp.concatenate([out_head, out_tail], 1), state

    def whole(tail, head):
        return parallel(*(jnp.concatenate(x, 1) for x in zip(head, tail, strict=True)))

    for got, want in zip(*(jax.tree.leaves(jax.jit(f)(tail, head)) for f in (joined, whole))):
        close(got, want)
    weight = jnp.float32(standard((1, 13, 4, 3), 0.9, 0.3))
    gradients = [
        jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x)[0] * weight), (0, 1)))(tail, head)
        for f in (joined, whole)
    ]
    for got, want in zip(*map(jax.tree.leaves, gradients), strict=True):
        close(got, want)


def test_chunks_of_several_spans_and_documents_across_them():
    """More chunks than one batch of products takes, with a ragged tail, forward and gradient."""
    T = 131
    qkv, state = draw(B=2, T=T, N=2, K=1, M=3, E=2, seed=4)
    rng = np.random.default_rng(5)
    segments = jnp.array(np.repeat(rng.integers(0, 3, (2, 10)), 14, axis=1)[:, :T])
    weight = jnp.float32(rng.normal(size=(2, T, 2, 2)))
    qkv, state = as_float32(qkv), as_float32(state)
    results = []
    for form in (parallel, functools.partial(chunked, chunk=3)):
        out = run(form, qkv, LinearState(*state), segments_BT=segments)
        gradient = loss_of(form, weight, segments_BT=segments)(qkv, state)
        results.append(jax.tree.leaves((out, gradient)))
    for got, want in zip(*results, strict=True):
        close(got, want, 3e-5)


# padding, documents, empty rows


@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
@pytest.mark.parametrize(
    "name, causal", [("parallel", True), ("recurrent", True), ("chunk4", True), ("chunk4", False)]
)
def test_garbage_in_padding_reaches_nothing(name, causal, garbage):
    qkv, state = as_float32(draw())
    segments = jnp.array(SEGMENTS)
    weight = jnp.float32(np.random.default_rng(6).normal(size=(4, 13, 4, 3)))
    padding = (segments == 0)[..., None, None]
    dirty = [jnp.where(padding, garbage, x) for x in qkv]
    clean = [jnp.where(padding, 0, x) for x in qkv]
    options = {"causal": causal, "segments_BT": segments}
    results = []
    for inputs in (clean, dirty):
        forward = run(FORMS[name], inputs, LinearState(*state), **options)
        gradient = loss_of(FORMS[name], weight, **options)(inputs, state)
        results.append(jax.tree.leaves((forward, gradient)))
        for x in gradient[0]:
            np.testing.assert_array_equal(x[SEGMENTS == 0], 0)
    for got, want in zip(*results, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["parallel", "recurrent", "chunk4"])
def test_packed_documents(name):
    """Uniform features: each row is the mean of what it sees. Editing one document leaves the other
    bit-equal."""
    segments = jnp.array([[1, 1, 1, 2, 2, 0]])
    ones = jnp.ones((1, 6, 1, 2))
    v = jnp.arange(6.0).reshape(1, 6, 1, 1)
    out, state = run(FORMS[name], (ones, ones, v), None, segments_BT=segments)
    close(out[0, :, 0, 0], [0, 0.5, 1, 3, 3.5, 0], 1e-6)
    close(state.sum_BKME[0, 0, :, 0], [7, 7], 1e-6)
    edited = (ones, ones.at[:, :3].mul(3.7), v.at[:, :3].set(-99.0))
    out_edited, state_edited = run(FORMS[name], edited, None, segments_BT=segments)
    np.testing.assert_array_equal(out_edited[:, 3:], out[:, 3:])
    np.testing.assert_array_equal(state_edited.sum_BKME, state.sum_BKME)


@pytest.mark.parametrize("name", FORMS)
def test_a_row_without_normaliser_is_zero_with_finite_gradients(name):
    """ReLU features all zero: of the first keys, then of one query."""
    (q, k, v), _ = as_float32(draw(B=1))
    k, q = k.at[:, :3].set(0), q.at[:, 7].set(0)
    out, _ = run(FORMS[name], (q, k, v), None)
    rows = np.asarray(jnp.abs(out).max((0, 2, 3)))
    np.testing.assert_array_equal(rows[[0, 1, 2, 7]], 0)
    assert (rows[[3, 6, 8, 12]] > 0).all()
    loss = lambda q, k, v: jnp.sum(jnp.sin(FORMS[name](q, k, v)[0] + 1))  # noqa: E731
    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    assert all(np.isfinite(g).all() for g in gradients)
    np.testing.assert_array_equal(gradients[0][:, 7], 0)
    assert jnp.abs(gradients[2][:, 3:]).min() > 0


@pytest.mark.parametrize("name", ["parallel", "chunk4", "recurrent"])
def test_the_future_reaches_nothing(name):
    qkv, state = as_float32(draw(B=1))
    changed = [x.at[:, 6:].mul(-7) for x in qkv]
    outs = [run(FORMS[name], x, LinearState(*state))[0] for x in (qkv, changed)]
    np.testing.assert_array_equal(outs[0][:, :6], outs[1][:, :6])
    assert jnp.abs(outs[0][:, 6:] - outs[1][:, 6:]).max() > 0.1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
def test_weights_are_the_pattern(segments, causal):
    qkv, _ = draw()
    state = np.zeros((4, 2, 5, 3)), np.zeros((4, 2, 5))
    options = {"causal": causal, "segments_BT": segments}
    q, k, v = as_float32(qkv)
    got = jax.jit(lambda q, k: weights(q, k, **options))(q, k)
    out, _, _, pattern = brute_force(*qkv, state, causal, segments)
    close(got, pattern)
    close(got.sum(-1), 1 if segments is None else np.repeat(SEGMENTS[:, None] != 0, 4, 1), 1e-6)
    close(jnp.einsum("bnts,bsne->btne", got, jnp.repeat(v, 2, axis=2)), out)


def test_query_heads_are_grouped_in_order():
    """Shared case G1: 6 query heads on 3 key-value heads read 0 0 1 1 2 2."""
    v = jnp.arange(3.0).reshape(1, 1, 3, 1)
    for name in ("parallel", "recurrent", "chunk4"):
        out, _ = run(FORMS[name], (jnp.ones((1, 1, 6, 2)), jnp.ones((1, 1, 3, 2)), v), None)
        np.testing.assert_array_equal(out.ravel(), [0, 0, 1, 1, 2, 2])


# precision: shared cases L3 and N1


@pytest.mark.parametrize("x", [-20.0, -28.0, -40.0])
@pytest.mark.parametrize("name", ["parallel", "recurrent", "chunk4"])
def test_tiny_features_keep_their_weights(name, x):
    """elu + 1 of −20: every weight is tiny, their sum is 1; a squared normaliser would underflow."""
    features = FEATURE_MAPS["elu"](jnp.full((1, 9, 2, 64), x))
    v = jnp.float32(standard((1, 9, 2, 3), 2.1, 1.0))
    out, _ = run(FORMS[name], (features, features, v), None)
    close(out, np.cumsum(v, 1) / np.arange(1, 10)[:, None, None])
    close(weights(features, features).sum(-1), 1.0)

    def loss(x, y, v):
        phi = FEATURE_MAPS["elu"]
        return jnp.sum(jnp.sin(3 * FORMS[name](phi(x), phi(y), v)[0]))

    raw = x + jnp.float32(standard((1, 9, 2, 64), 0.7, 0.0))
    got = jax.jit(jax.grad(loss, (0, 1, 2)))(raw, raw[:, ::-1], v)
    # Weights do not change when every feature is multiplied by the same number.
    want = jax.jit(jax.grad(loss, (0, 1, 2)))(raw - x - 2, raw[:, ::-1] - x - 2, v)
    for g, w in zip(got, want, strict=True):
        close(g, w, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", [chunked, recurrent])
def test_long_sums_do_not_stall_in_16_bits(form, dtype):
    """Keys all alike, v = 1 then 0: the mean is a half. A bfloat16 sum stops at 256."""
    T = 4095
    features = FEATURE_MAPS["elu"](jnp.zeros((1, T, 1, 1), dtype)).astype(dtype)
    v = (jnp.arange(T) < 2048).astype(dtype).reshape(1, T, 1, 1)
    out, state = run(form, (features, features, v), None)
    assert out.dtype == dtype
    assert state.sum_BKME.dtype == state.normaliser_BKM.dtype == jnp.float32
    close(out[0, -1], 2048 / 4095, 4e-3)
    close(state.sum_BKME.item(), 2048, 0)
    close(state.normaliser_BKM.item(), 4095, 0)


def test_denominators_beyond_float16():
    ones = jnp.ones((1, 65536, 1, 64), jnp.float16)
    out, _ = run(chunked, (ones, ones, ones[..., :1]), None)
    close(out[0, -1].astype(jnp.float32), 1.0, 1e-3)


# memory, state object, errors


def test_memory_is_linear_forward_and_backward():
    def temporary_bytes(T, gradient, causal):
        inputs = [jax.ShapeDtypeStruct((1, T, 1, 64), jnp.bfloat16)] * 3
        function = lambda *x: chunked(*x, causal=causal)[0].astype(jnp.float32).sum()  # noqa: E731
        function = jax.grad(function, (0, 1, 2)) if gradient else function
        analysis = jax.jit(function).lower(*inputs).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    for gradient, causal in ((False, True), (True, True), (True, False)):
        sizes = [temporary_bytes(T, gradient, causal) for T in (4096, 8192, 16384)]
        assert sizes[2] < 64 * 2**20
        assert sizes[1] < 2.2 * sizes[0] and sizes[2] < 2.2 * sizes[1]


def test_state_bytes_do_not_depend_on_the_length():
    state = LinearState.zeros(2, 3, 5, 7)
    assert state.nbytes == 4 * 2 * 3 * 5 * (7 + 1)
    assert [x.shape for x in jax.tree.leaves(state)] == [(2, 3, 5, 7), (2, 3, 5)]
    (q, k, v), _ = as_float32(draw())
    for T in (1, 13):
        _, final = run(chunked, (q[:, :T], k[:, :T], v[:, :T]), None)
        assert final.nbytes == LinearState.zeros(4, 2, 5, 3).nbytes
    with pytest.raises(ValueError, match="bfloat16"):
        LinearState.zeros(2, 3, 5, 7, jnp.bfloat16)


def test_user_errors():
    (q, k, v), state = as_float32(draw())
    state = LinearState(*state)
    for form in (parallel, recurrent, chunked):
        with pytest.raises(ValueError, match="3 query heads .* 2 key-value heads"):
            form(q[:, :, :3], k, v)
        with pytest.raises(ValueError, match="shapes do not fit"):
            form(q, k[:, :12], v)
        with pytest.raises(ValueError, match="shapes do not fit"):
            form(q[:, :0], k[:, :0], v[:, :0])
        with pytest.raises(ValueError, match=r"segments_BT has shape \(4, 12\)"):
            form(q, k, v, segments_BT=jnp.ones((4, 12), int))
        with pytest.raises(ValueError, match="state has shapes"):
            form(q[:1], k[:1], v[:1], state)
    with pytest.raises(ValueError, match="chunk=0"):
        chunked(q, k, v, chunk=0)
    with pytest.raises(NotImplementedError, match="causal=False"):
        recurrent(q, k, v, causal=False)
