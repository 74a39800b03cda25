"""Additive attention against float64 NumPy, forward and gradients; its memory and its refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention import VARIANTS, Context, additive
from attention.additive import Additive, additive_attention
from attention.memory import Memory
from attention.probe import Probe
from models.pure import is_matrix, merge, split
from tests.oracles import assert_close, uniform

B, T, S, N, K, H, E, D = 2, 7, 9, 6, 3, 5, 4, 8


def context(**changes):
    return Context(**{"d_model": D, "num_heads": N, "head_width": H, "rotary": False} | changes)


def random(*shape):
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def places(batch=B, length=T, start=0):
    return np.tile(np.arange(start, start + length, dtype=np.int32), (batch, 1))


def oracle(q, k, v, a, visible, do):
    """out and the gradients of Σ out · do in q, k, v, a: row by row over the visible keys.

    With h_ij = tanh(q_i + k_j), s_ij = a·h_ij and p = softmax(s): ds_ij = p_ij do_i·(v_j − out_i),
    da = Σ ds h, and both dq_i = Σ_j g_ij and dk_j = Σ_i g_ij with g_ij = ds_ij a (1 − h_ij²).
    """
    q, k, v, a, do = (np.asarray(x, np.float64) for x in (q, k, v, a, do))
    out = np.zeros_like(do)
    dq, dk, dv, da = (np.zeros_like(x) for x in (q, k, v, a))
    for b, t, n in np.ndindex(*q.shape[:3]):
        seen, kv = np.flatnonzero(visible[b, t]), n // (q.shape[2] // k.shape[2])
        if not seen.size:
            continue
        hidden = np.tanh(q[b, t, n] + k[b, seen, kv])
        p = np.exp(hidden @ a[n])
        p /= p.sum()
        out[b, t, n] = p @ v[b, seen, kv]
        ds = p * ((v[b, seen, kv] - out[b, t, n]) @ do[b, t, n])
        g = ds[:, None] * a[n] * (1 - hidden**2)
        dq[b, t, n] = g.sum(0)
        dk[b, seen, kv] += g
        dv[b, seen, kv] += np.outer(p, do[b, t, n])
        da[n] += ds @ hidden
    return out, dq, dk, dv, da


# Compiled, for op by op takes longer.
def attend(q, k, v, a, visible):
    q, k, v, a = (np.asarray(x, np.float32) for x in (q, k, v, a))
    return np.asarray(jax.jit(additive_attention)(q, k, v, a, visible))


def evaluate(q, k, v, a, visible, do):
    out, backward = jax.vjp(lambda *x: additive_attention(*x, visible), q, k, v, a)
    return out, *backward(do)


@pytest.mark.parametrize("block", [T, 3, 1])
def test_equals_float64(block, monkeypatch):
    """All queries at once, in blocks with a ragged tail, and one by one; some rows see nothing."""
    monkeypatch.setattr(additive, "BLOCK_ELEMENTS", block * B * N * S * H)
    q, k, v = random(B, T, N, H), random(B, S, K, H), random(B, S, K, E)
    a, do = 2 * random(N, H), random(B, T, N, E)
    visible = np.random.default_rng().random((B, T, S)) < 0.6
    visible[0, 2] = False
    got = jax.jit(lambda *x: evaluate(*x))(q, k, v, a, visible, do)
    for name, actual, expected in zip(
        ("out", "dq", "dk", "dv", "da"), got, oracle(q, k, v, a, visible, do), strict=True
    ):
        assert_close(actual, expected, what=name)
    assert not got[0][0, 2].any() and not got[1][0, 2].any()


def test_scores_by_hand():
    """One channel, a = 1, q + k = (artanh ½, −artanh ½): e^½ and e^−½ share the weight."""
    k = np.arctanh([0.5, -0.5]).reshape(1, 2, 1, 1)
    v = np.array([1.0, 0.0]).reshape(1, 2, 1, 1)
    out = attend(np.zeros((1, 1, 1, 1)), k, v, np.ones((1, 1)), np.ones((1, 1, 2), bool))
    assert_close(out.ravel(), [1 / (1 + np.exp(-1))])


def test_garbage_behind_the_mask():
    """M2, M3: inf and NaN in keys and values nobody sees; a seen one is seen."""
    q, k, v, a = random(B, T, N, H), random(B, S, K, H), random(B, S, K, E), random(N, H)
    visible, do = np.ones((B, T, S), bool), random(B, T, N, E)
    visible[:, :, 4] = False
    gradient = jax.jit(lambda *x: evaluate(*x))
    clean = gradient(q, k, v, a, visible, do)
    for garbage in (1e30, np.inf, np.nan):
        k[:, 4] = v[:, 4] = garbage
        for actual, expected in zip(gradient(q, k, v, a, visible, do), clean, strict=True):
            np.testing.assert_array_equal(actual, expected)
    visible[1, 3, 4] = True
    sick = np.isnan(attend(q, k, v, a, visible)).all((2, 3))
    np.testing.assert_array_equal(np.argwhere(sick), [[1, 3]])


def test_memory_is_bounded(monkeypatch):
    """The (B, N, T, S, H) array never exists, forward or backward, where it is too large."""
    monkeypatch.setattr(additive, "BLOCK_ELEMENTS", 2**18)
    length, width = 256, 32
    q = jax.ShapeDtypeStruct((1, length, 2, width), "float32")
    a = jax.ShapeDtypeStruct((2, width), "float32")
    visible = jax.ShapeDtypeStruct((1, length, length), "bool")

    def loss(q, k, v, a, visible):
        return additive_attention(q, k, v, a, visible).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(q, q, q, a, visible).compile()
    everything = 4 * 2 * length**2 * width
    assert compiled.memory_analysis().temp_size_in_bytes < everything / 2


def built(options, **changes):
    shape = context(**changes)
    graph, params = nnx.split(nnx.eval_shape(lambda: options.build(shape, nnx.Rngs(0))))
    params = {"/".join(path): p for path, p in nnx.to_flat_state(params)}
    rng = np.random.default_rng()
    params = {name: rng.standard_normal(p.shape) / 2 for name, p in params.items()}
    return merge(graph, {name: jnp.asarray(p, "float32") for name, p in params.items()}), params


@functools.partial(jax.jit, static_argnames=("graph", "read"))
def _run(graph, params, x, positions, options, read):
    probe = Probe(read=read)
    y, cache = merge(graph, params)(x, positions, probe=probe, **options)
    return y, cache, probe.values


def run(layer, x, positions, read=(), **options):
    """Output, cache and what was read."""
    y, cache, values = _run(*split(layer), x, positions, options, read)
    return np.asarray(y), cache, values


def layer_oracle(p, x, visible):
    x = np.asarray(x, np.float64)
    q, k, v = (np.einsum("btd,dnh->btnh", x, p[name]) for name in ("w_q_DNH", "w_k_DKH", "w_v_DKH"))
    if "smear/alpha_K" in p:
        share = 1 / (1 + np.exp(-p["smear/alpha_K"][:, None]))
        k[:, 1:] = share * k[:, 1:] + (1 - share) * k[:, :-1]
    heads = oracle(q, k, v, p["score_NH"], visible, np.zeros(q.shape))[0]
    return heads, np.einsum("btne,ned->btd", heads, p["w_o_NHD"])


@pytest.mark.parametrize(("options", "sees"), [
    (Additive(), lambda i, j: i >= j),
    (
        Additive(num_kv_heads=2, mask_expression="Causal() & (Window(3) | First(1))",
                 smeared_keys=True),
        lambda i, j: (i >= j) & ((i - j < 3) | (j < 1)),
    ),
    (Additive(mask_expression="Full()"), lambda i, j: i == i),
])  # fmt: skip
def test_layer_equals_float64(options, sees):
    """Also through its cache, one token at a time; the pattern gives the heads."""
    layer, params = built(options)
    x, index = random(B, T, D), np.arange(T)
    visible = np.broadcast_to(sees(index[:, None], index[None]), (B, T, T))
    heads, expected = layer_oracle(params, x, visible)
    y, none, values = run(layer, x, places(), ("head", "pattern"))
    assert none is None
    assert_close(y, expected)
    assert_close(values["head"], heads)
    pattern_BNTS = np.asarray(values["pattern"])
    assert_close(pattern_BNTS.sum(-1), np.ones((B, N, T)))
    np.testing.assert_array_equal(pattern_BNTS > 0, np.broadcast_to(visible[:, None], (B, N, T, T)))
    if layer.mask.causal_from() is None:
        with pytest.raises(ValueError, match="a cache needs a causal mask"):
            layer.init_cache(B, T)
        return
    cache = layer.init_cache(B, T)
    for t in range(T):
        y, cache, _ = run(layer, x[:, t : t + 1], places(B, 1, t), cache=cache)
        assert_close(y, expected[:, t : t + 1], what=f"position {t}")


def test_uniform_scores_show_the_mask():
    """W1, G1: with a = 0 a row is the mean of what it sees; query heads read their own group."""
    _, _, v = uniform(6, 6)
    index = np.arange(6)
    window = (index[:, None] >= index) & (index[:, None] - index < 3)
    ones = np.ones((1, 6, 1, 1))
    out = attend(ones, ones, v, np.zeros((1, 1)), window[None])
    assert_close(out.ravel(), [0, 0.5, 1, 2, 3, 4])
    groups = np.broadcast_to(np.arange(3.0).reshape(1, 1, 3, 1), (1, 1, 3, 1))
    query = np.ones((1, 1, 6, 1))
    out = attend(query, groups, groups, np.ones((6, 1)), np.ones((1, 1, 1), bool))
    assert_close(out.ravel(), [0, 0, 1, 1, 2, 2])


def test_cache_is_a_ring_where_the_mask_forgets():
    """Claim 23: 2 · K · H numbers for each position that is kept."""
    window = "Causal() & (Window(3) | First(1))"
    layer, _ = built(Additive(num_kv_heads=2, mask_expression=window, smeared_keys=True))
    assert layer.cache_bytes_per_token() == 4 * 2 * 2 * H
    for length, slots in ((1, 1), (3, 3), (4, 4), (50, 4)):
        cache = layer.init_cache(B, length)
        assert cache.inner.position_BS.shape == (B, slots)
        assert cache.nbytes == B * layer.cache_bytes(length) == 4 * B * (slots * 4 * H + 2 * H)
    assert layer.init_cache(B, 50).limit is None
    layer, _ = built(Additive())
    assert layer.init_cache(B, 5).nbytes == B * layer.cache_bytes(5) == 4 * B * 5 * 2 * N * H
    assert layer.init_cache(B, 5).limit == 5


def test_packed_documents():
    """M7: a mask that counts from the start of the document does so in each."""
    layer, _ = built(Additive(mask_expression="Causal() & (Window(2) | First(1))"))
    document = random(1, 4, D)
    x = np.concatenate([document, document, np.full((1, 1, D), np.nan, "f")], axis=1)
    segments = np.array([[1] * 4 + [2] * 4 + [0]])
    positions = np.array([[*range(4), *range(4), 0]])
    y = run(layer, x, positions, segments_BT=segments)[0]
    alone = run(layer, document, places(1, 4))[0]
    assert_close(y[:, :4], alone)
    assert_close(y[:, 4:8], alone)
    assert not y[:, 8].any()


def test_dropout():
    """D1: only with a key, and each key drops others."""
    layer, _ = built(Additive(dropout=0.5))
    x = random(B, T, D)
    calls = [
        run(layer, x, places(), dropout_key=key)[0]
        for key in (None, jax.random.key(0), jax.random.key(0), jax.random.key(1))
    ]
    np.testing.assert_array_equal(calls[1], calls[2])
    assert not np.isclose(calls[0], calls[1]).all() and not np.isclose(calls[1], calls[3]).all()


def test_parameters():
    """Weight decay goes by names: matrices begin with w_, the vectors a_n do not."""
    _, params = split(built(Additive(num_kv_heads=2, smeared_keys=True))[0])
    assert {name: p.shape for name, p in params.items()} == {
        "w_q_DNH": (D, N, H), "w_k_DKH": (D, 2, H), "w_v_DKH": (D, 2, H), "w_o_NHD": (N, H, D),
        "score_NH": (N, H), "smear/alpha_K": (2,),
    }  # fmt: skip
    assert [name for name in params if not is_matrix(name)] == ["score_NH", "smear/alpha_K"]


@pytest.mark.parametrize(("options", "changes", "message"), [
    ({}, {"rotary": True}, "set model.position='learned'"),
    ({"num_kv_heads": 4}, {}, "num_kv_heads must divide model.num_heads, got 4 for 6 heads"),
    ({"mask_expression": "Causal"}, {}, r"write Causal\(\)"),
    ({"dropout": -0.5}, {}, "dropout must be at least 0 and below 1, got -0.5"),
    ({}, {"implementation": "fast"}, "implementation must be 'auto' or one of"),
])  # fmt: skip
def test_refusals(options, changes, message):
    options = Additive(**options)
    for refuse in (options.check, functools.partial(options.build, rngs=nnx.Rngs(0))):
        with pytest.raises(ValueError, match=message):
            refuse(context(**changes))


def test_only_the_reference(monkeypatch):
    """A named implementation runs or is refused with the reason."""
    from attention import ops

    for name in ("auto", "reference"):
        assert built(Additive(), implementation=name)[0].implementation(B, T) == "reference"
    others = ops.IMPLEMENTATIONS | {"other": ops.IMPLEMENTATIONS["reference"]}
    monkeypatch.setattr(ops, "IMPLEMENTATIONS", others)
    with pytest.raises(ValueError, match="'other', but additive attention has only 'reference'"):
        Additive().check(context(implementation="other"))


def test_no_memory():
    layer, _ = built(Additive())
    x = random(B, 2, D)
    with pytest.raises(ValueError, match="it takes no memory"):
        layer(x, places(length=2), memory=Memory(x, places(length=2), np.ones((B, 2), int)))
    assert VARIANTS["additive"] is Additive
