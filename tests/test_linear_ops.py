"""Linear attention's three forms against brute force in float64, and against each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.feature_maps import FEATURE_MAPS
from attention.linear_ops import LinearState, chunked, parallel, recurrent, weights
from tests.attending import OPTIMISED
from tests.oracles import chk, wave

FORMS = {
    "parallel": parallel,
    "recurrent": recurrent,
    **{f"chunk{c}": functools.partial(chunked, chunk=c) for c in (1, 4, 5, 13, 16)},
}
BOTH_WAYS = ("parallel", "chunk4", "chunk16")
EVERY = [(name, True) for name in FORMS] + [(name, False) for name in BOTH_WAYS]
# 13 tokens: padding on the left, in the middle and on the right; an id that comes back; one
# document longer than a chunk; a row of padding alone.
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


def run(form, qkv, state=None, **options):
    run = jax.jit(lambda qkv, state: form(*qkv, state, **options), compiler_options=OPTIMISED)
    return run(qkv, state)


@functools.cache
def evaluate(form, causal=True):
    """(qkv, state, segments, weight) → out, final state, five gradients of Σ out · weight + Σ sin
    of the final state. Compiled once a form, so the tests share draw()'s sizes."""

    def loss(qkv, state, segments, weight):
        out, final = form(*qkv, LinearState(*state), causal=causal, segments_BT=segments)
        total = sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(final))
        return jnp.sum(out * weight) + total, (out, final)

    def both(qkv, state, segments, weight):
        arguments = (qkv, state, segments, weight)
        gradients, (out, final) = jax.grad(loss, (0, 1), has_aux=True)(*arguments)
        return out, final, jax.tree.leaves(gradients)

    return jax.jit(both)


WEIGHT = np.random.default_rng(2).normal(size=(4, 13, 4, 3))
WHOLE = np.ones((4, 13), int)


def as_float32(tree):
    return jax.tree.map(jnp.float32, tree)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("segments", [WHOLE, SEGMENTS], ids=["whole", "packed"])
@pytest.mark.parametrize("name, causal", EVERY)
def test_output_and_state_equal_brute_force(name, causal, segments):
    """Claim 28, L2: parallel, chunked and recurrent, in float64 brute force."""
    qkv, state = draw()
    inputs = as_float32((qkv, state))
    out, final, _ = evaluate(FORMS[name], causal)(*inputs, segments, jnp.float32(WEIGHT))
    want_out, want_S, want_z, _ = brute_force(*qkv, state, causal, segments)
    close(out, want_out)
    close(final.sum_BKME, want_S)
    close(final.normaliser_BKM, want_z)
    np.testing.assert_array_equal(np.asarray(out)[segments == 0], 0)
    if segments is SEGMENTS:
        np.testing.assert_array_equal(final.sum_BKME[3], inputs[1][0][3])


@functools.cache
def directional_derivatives(causal):
    """Central differences of brute force along one random direction in each argument."""
    qkv, state = draw()
    arguments, step, result = [*qkv, *state], 1e-5, []
    for place, x in enumerate(arguments):
        direction = np.random.default_rng(place).normal(size=x.shape)
        values = []
        for sign in (1, -1):
            moved = list(arguments)
            moved[place] = x + sign * step * direction
            out, S, z, _ = brute_force(*moved[:3], moved[3:], causal, SEGMENTS)
            values.append(np.sum(out * WEIGHT) + np.sin(S).sum() + np.sin(z).sum())
        result.append((direction, (values[0] - values[1]) / (2 * step)))
    return result


@pytest.mark.parametrize("name, causal", EVERY)
def test_gradients_equal_differences_of_brute_force_and_other_forms(name, causal):
    """To all five arguments, initial state included, on packed rows."""
    inputs = *as_float32(draw()), SEGMENTS, jnp.float32(WEIGHT)
    gradients = evaluate(FORMS[name], causal)(*inputs)[2]
    derivatives = directional_derivatives(causal)
    for gradient, (direction, want) in zip(gradients, derivatives, strict=True):
        close(np.sum(np.float64(gradient) * direction), want, 1e-4)
    for gradient, other in zip(gradients, evaluate(parallel, causal)(*inputs)[2], strict=True):
        close(gradient, other)


# shared case L2: standard tensors, elu + 1


def standard_inputs():
    phi = FEATURE_MAPS["elu"]
    q, k = wave((1, 13, 2, 4), 0.7, 0.0), wave((1, 13, 2, 4), 1.3, 0.5)
    return phi(q), phi(k), jnp.asarray(wave((1, 13, 2, 3), 2.1, 1.0))


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


@pytest.mark.parametrize(
    "first, second",
    [("parallel", "chunk4"), ("chunk5", "recurrent"), ("recurrent", "parallel")],
)
def test_a_split_resumes_exactly(first, second):
    """5 + 8 = 13 with both sums carried over, and the gradient through them."""
    qkv, _ = as_float32(draw(B=1))
    weight = jnp.float32(WEIGHT[:1])

    def whole(qkv):
        return parallel(*qkv)

    def joined(qkv):
        out_head, state = FORMS[first](*(x[:, :5] for x in qkv))
        out_tail, state = FORMS[second](*(x[:, 5:] for x in qkv), state)
        return jnp.concatenate([out_head, out_tail], 1), state

    def both(function):
        loss = lambda qkv: (jnp.sum(function(qkv)[0] * weight), function(qkv))  # noqa: E731
        return jax.tree.leaves(jax.jit(jax.grad(loss, has_aux=True))(qkv))

    for got, want in zip(both(joined), both(whole), strict=True):
        close(got, want)


def test_chunks_of_several_spans_and_documents_across_them():
    """More chunks than one batch of products takes, with a ragged tail, forward and gradient."""
    T = 131
    qkv, state = draw(B=2, T=T, N=2, K=1, M=3, E=2, seed=4)
    rng = np.random.default_rng(5)
    segments = jnp.array(np.repeat(rng.integers(0, 3, (2, 10)), 14, axis=1)[:, :T])
    weight = jnp.float32(rng.normal(size=(2, T, 2, 2)))
    inputs = *as_float32((qkv, state)), segments, weight
    results = [
        jax.tree.leaves(evaluate(form)(*inputs))
        for form in (parallel, functools.partial(chunked, chunk=3))
    ]
    for got, want in zip(*results, strict=True):
        close(got, want, 3e-5)


# padding, documents, empty rows


@pytest.mark.parametrize("garbage", [1e30, np.inf, np.nan])
@pytest.mark.parametrize(
    "name, causal", [("parallel", True), ("recurrent", True), ("chunk4", True), ("chunk4", False)]
)
def test_garbage_in_padding_reaches_nothing(name, causal, garbage):
    qkv, state = as_float32(draw())
    padding = (SEGMENTS == 0)[..., None, None]
    results = []
    for there in (0, garbage):
        inputs = [jnp.where(padding, there, x) for x in qkv]
        result = evaluate(FORMS[name], causal)(tuple(inputs), state, SEGMENTS, jnp.float32(WEIGHT))
        results.append(jax.tree.leaves(result))
        for gradient in result[2][:3]:
            np.testing.assert_array_equal(np.asarray(gradient)[SEGMENTS == 0], 0)
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


@pytest.mark.parametrize("name, causal", EVERY)
def test_a_row_without_normaliser_is_zero_with_finite_gradients(name, causal):
    """ReLU features all zero: of the first keys, of all keys of one row, of one query."""
    (q, k, v), state = as_float32(draw())
    k, q = k.at[0, :3].set(0).at[1].set(0), q.at[0, 7].set(0)
    state = jax.tree.map(jnp.zeros_like, state)
    inputs = (q, k, v), state, WHOLE, jnp.float32(WEIGHT)
    out, _, gradients = evaluate(FORMS[name], causal)(*inputs)
    zero = [7] if not causal else [0, 1, 2, 7]
    np.testing.assert_array_equal(out[0, jnp.array(zero)], 0)
    np.testing.assert_array_equal(out[1], 0)
    assert jnp.abs(out[0, 8:]).min() > 0
    assert all(np.isfinite(g).all() for g in gradients)
    np.testing.assert_array_equal(gradients[0][0, 7], 0)
    np.testing.assert_array_equal(gradients[0][1], 0)
    assert jnp.abs(gradients[0][2, 3:]).max() > 0


@pytest.mark.parametrize("name", ["parallel", "chunk4", "recurrent"])
def test_the_future_reaches_nothing(name):
    qkv, state = as_float32(draw())
    changed = tuple(x.at[:, 6:].mul(-7) for x in qkv)
    outs = [evaluate(FORMS[name])(x, state, WHOLE, jnp.float32(WEIGHT))[0] for x in (qkv, changed)]
    np.testing.assert_array_equal(outs[0][:, :6], outs[1][:, :6])
    assert jnp.abs(outs[0][:, 6:] - outs[1][:, 6:]).max() > 0.1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
def test_weights_are_the_pattern(segments, causal):
    qkv, _ = draw()
    state = np.zeros((4, 2, 5, 3)), np.zeros((4, 2, 5))
    options = {"causal": causal, "segments_BT": segments}
    q, k, v = as_float32(qkv)
    got = jax.jit(lambda q, k: weights(q, k, **options), compiler_options=OPTIMISED)(q, k)
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


@pytest.mark.parametrize("form", [parallel, FORMS["chunk4"]], ids=["parallel", "chunk4"])
def test_tiny_features_keep_their_weights(form):
    """elu + 1 of −20: every weight is tiny, their sum is 1. Multiplying all features by one number
    changes nothing, neither gradient; a squared normaliser would underflow on the way."""
    phi = FEATURE_MAPS["elu"]
    v = jnp.float32(wave((1, 9, 1, 3), 2.1, 1.0))
    raw = jnp.float32(wave((1, 9, 1, 64), 0.7, 0.0))

    @jax.jit
    def out_and_gradients(q, k):
        def loss(q, k, v):
            out = form(phi(q), phi(k), v)[0]
            return jnp.sum(jnp.sin(3 * out)), out

        gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    mean = np.cumsum(np.asarray(v), 1) / np.arange(1.0, 10).reshape(1, 9, 1, 1)
    want = out_and_gradients(raw - 2, raw[:, ::-1] - 2)
    for x in (-20, -28, -40):
        same = jnp.full_like(raw, x)
        close(out_and_gradients(same, same)[0], mean)
        close(weights(phi(same), phi(same)).sum(-1), 1.0)
        for got, expected in zip(out_and_gradients(raw + x, raw[:, ::-1] + x), want, strict=True):
            close(got, expected, 1e-4)


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
    def temporary_bytes(T, causal):
        inputs = [jax.ShapeDtypeStruct((1, T, 1, 64), jnp.bfloat16)] * 3
        loss = lambda *x: chunked(*x, causal=causal)[0].astype(jnp.float32).sum()  # noqa: E731
        step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=OPTIMISED)
        return step.lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    whole = temporary_bytes(16384, True)
    assert whole < 2.2 * temporary_bytes(8192, True)
    assert max(whole, temporary_bytes(16384, False)) < 64 * 2**20  # T × T float32 is 1024 MiB


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
        with pytest.raises(ValueError, match=r"3 query heads .* 2 key-value heads"):
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
