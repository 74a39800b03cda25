"""Multi-head latent attention: both forms against float64 NumPy, its cache, and its refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention import VARIANTS, Context
from attention.latent import Latent, MultiHeadLatentAttention
from attention.memory import Memory
from attention.ops import IMPLEMENTATIONS
from attention.probe import Probe
from models.pure import is_matrix, merge, split
from tests.oracles import assert_close

B, T, D, N, H = 2, 9, 10, 3, 6
OPTIONS = {
    "plain": Latent(latent_rank=5),
    "query_latent": Latent(latent_rank=7, query_rank=8, rope_width=4, scale=0.7),
    "smeared": Latent(latent_rank=5, rope_width=8, smeared_keys=True),
    "unrotated": Latent(latent_rank=5, smeared_keys=True),
}


def context(options=None, **changes):
    rotary = options is not OPTIONS["unrotated"]
    return Context(**{"d_model": D, "num_heads": N, "head_width": H, "rotary": rotary} | changes)


# Compiled, for op by op takes longer.
@functools.partial(jax.jit, static_argnames=("graph", "read"))
def _run(graph, params, x, positions, options, read):
    probe = Probe(read=read)
    y, cache = merge(graph, params)(x, positions, probe=probe, **options)
    return y, cache, probe.values


def run(layer, x, positions, read=(), **options):
    """Output, cache and what was read."""
    y, cache, values = _run(*split(layer), x, positions, options, read)
    return np.asarray(y), cache, values


def built(options, **changes) -> tuple[MultiHeadLatentAttention, dict]:
    """The layer with parameters that are all random, and these in float64."""
    shape = context(options, **changes)
    graph, params = nnx.split(nnx.eval_shape(lambda: options.build(shape, nnx.Rngs(0))))
    params = {"/".join(path): p for path, p in nnx.to_flat_state(params)}
    rng = np.random.default_rng()
    params = {name: rng.standard_normal(p.shape) / 2 for name, p in params.items()}
    return merge(graph, {name: jnp.asarray(p, "float32") for name, p in params.items()}), params


def random(*shape):
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def places(batch=B, length=T, start=0):
    return np.tile(np.arange(start, start + length, dtype=np.int32), (batch, 1))


def rms(x, gain):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain


def rotated(x, positions, base=10_000.0):
    """Pairs (i, i + P/2) as complex numbers, turned by p · base^(−2i/P)."""
    P = x.shape[-1]
    z = x[..., : P // 2] + 1j * x[..., P // 2 :]
    angle = positions[:, None] * base ** (-np.arange(0, P, 2) / P)
    z = z * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], -1)


def smeared(k, alpha):
    share = 1 / (1 + np.exp(-alpha))
    return np.concatenate([k[:1], share * k[1:] + (1 - share) * k[:-1]])


def oracle(params, options, x_TD):
    """Heads (T, N, E), patterns (N, T, T) and output (T, D) of one row, head by head."""
    p, x = params, np.asarray(x_TD, np.float64)
    length = len(x)
    positions = np.arange(length)
    u = rms(x @ p["w_dq_DR"], p["q_norm/gain_D"]) if options.query_rank is not None else x
    c = rms(x @ p["w_dkv_DR"], p["latent_norm/gain_D"])
    heads, patterns = np.zeros((length, N, H)), np.zeros((N, length, length))
    for n in range(N):
        q, k = u @ p["w_uq_RNH"][:, n], c @ p["w_uk_RNH"][:, n]
        scale = options.scale
        if options.smeared_keys:
            k = smeared(k, p["smear/alpha_K"][n])
        scores = q @ k.T
        if "w_kr_DP" in p:
            r = x @ p["w_kr_DP"]
            if options.smeared_keys:
                r = smeared(r, p["rope_smear/alpha_K"][0])
            q_rope = rotated(u @ p["w_qr_RNP"][:, n], positions)
            scores = scores + q_rope @ rotated(r, positions).T
        if scale is None:
            scale = (H + (p["w_kr_DP"].shape[1] if "w_kr_DP" in p else 0)) ** -0.5
        scores = np.where(positions[:, None] >= positions, scale * scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        patterns[n] = weights / weights.sum(-1, keepdims=True)
        heads[:, n] = patterns[n] @ c @ p["w_uv_RNE"][:, n]
    return heads, patterns, np.einsum("tne,ned->td", heads, p["w_o_NED"])


@pytest.mark.parametrize("name", OPTIONS)
def test_both_forms_equal_float64(name):
    """X2: outputs, heads and patterns; the cached ones in chunks of 4, 1 and the rest."""
    options = OPTIONS[name]
    layer, params = built(options)
    x, positions = random(B, T, D), places()
    rows = [oracle(params, options, row) for row in x]
    heads, patterns, expected = (np.stack(parts) for parts in zip(*rows, strict=True))
    read = ("head", "pattern")
    y, none, values = run(layer, x, positions, read)
    assert none is None
    assert_close(values["head"], heads, what="naive head")
    assert_close(values["pattern"], patterns, what="naive pattern")
    assert_close(y, expected, what="naive")
    cache, start = layer.init_cache(B, T), 0
    for size in (4, 1, T - 5):
        chunk = slice(start, start + size)
        y, cache, values = run(layer, x[:, chunk], positions[:, chunk], read, cache=cache)
        assert_close(values["head"], heads[:, chunk], what="absorbed head")
        assert_close(values["pattern"], patterns[:, :, chunk], what="absorbed pattern")
        assert_close(y, expected[:, chunk], what="absorbed")
        start += size


def test_gradients_of_the_absorbed_form():
    """The same products in another order have the same gradients."""
    layer, _ = built(OPTIONS["smeared"])
    graph, params = split(layer)
    x, do, positions = random(B, 5, D), random(B, 5, D), places(length=5)

    def loss(params, x, cache):
        return jnp.sum(merge(graph, params)(x, positions, cache=cache)[0] * do)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    naive, absorbed = gradient(params, x, None), gradient(params, x, layer.init_cache(B, 5))
    assert all(np.asarray(g).any() for g in naive[0].values())
    jax.tree.map(assert_close, absorbed, naive)


def test_the_rotary_key_turns_by_its_own_width():
    """X2: frequencies of P = 4 are (1, .01), on all channels; not those of the head's width."""
    layer, params = built(Latent(latent_rank=5, rope_width=4))
    x = np.repeat(random(1, 1, D), 2, axis=1)
    _, cache, _ = run(layer, x, places(1, 2), cache=layer.init_cache(1, 2))
    key = np.asarray(cache.rope_key_BSP[0], np.float64)
    raw = x[0, 0].astype(np.float64) @ params["w_kr_DP"]
    assert_close(key[0], raw)
    turned = (raw[:2] + 1j * raw[2:]) * np.exp(1j * np.array([1, 0.01]))
    assert_close(key[1], np.concatenate([turned.real, turned.imag]))


@pytest.mark.parametrize(("name", "numbers", "last"), [
    ("plain", 5 + 2, 0), ("query_latent", 7 + 4, 0), ("smeared", 5 + 8, 8), ("unrotated", 5, 0),
])  # fmt: skip
def test_cache_holds_rank_and_rotary_width(name, numbers, last):
    """Claims 23 and 25, X2: R + P numbers a token, whatever the heads; smeared, a raw key too."""
    layer, _ = built(OPTIONS[name])
    assert layer.cache_bytes_per_token() == 4 * numbers
    for length in (1, 7):
        cache = layer.init_cache(B, length)
        assert cache.nbytes == B * layer.cache_bytes(length) == 4 * B * (length * numbers + last)
        floats = [a for a in jax.tree.leaves(cache) if jnp.issubdtype(a.dtype, jnp.floating)]
        assert sum(a.nbytes for a in floats) == cache.nbytes
        assert layer.init_cache(B, length, "bfloat16").nbytes == cache.nbytes // 2


def test_the_cache_of_deepseek_v2(record_property):
    """128 heads of 128, rank 512, rotary width 64: 576 numbers a token, 32,768 without latents."""
    shape = context(d_model=16, num_heads=128, head_width=128, dtype="bfloat16")
    for options in (Latent(latent_rank=512), Latent(latent_rank=512, rope_width=64)):
        layer = nnx.eval_shape(lambda o=options: o.build(shape, nnx.Rngs(0)))
        assert layer.cache_bytes_per_token() == 2 * 576
        assert layer.scale == 192**-0.5
    heads = nnx.eval_shape(lambda: VARIANTS["causal"]().build(shape, nnx.Rngs(0)))
    numbers = (each.cache_bytes_per_token() // 2 for each in (layer, heads))
    record_property(
        "figures", "DeepSeek-V2: {:,} numbers a token, multi-head {:,}".format(*numbers)
    )
    assert heads.cache_bytes_per_token() == 2 * 32_768


@pytest.mark.parametrize("name", ["plain", "smeared", "unrotated"])
def test_stale_slots_reach_nothing(name):
    """M3: what an earlier prompt left in empty slots is not read, nor as a predecessor."""
    layer, _ = built(OPTIONS[name])
    x = random(B, 3, D)

    def decoded(fill, start):
        cache = jax.tree.map(
            lambda a: jnp.full_like(a, fill) if jnp.issubdtype(a.dtype, jnp.floating) else a,
            layer.init_cache(B, T),
        )
        out = []
        for t in range(3):
            y, cache, _ = run(layer, x[:, t : t + 1], places(B, 1, start + t), cache=cache)
            out.append(y)
        return np.concatenate(out, axis=1)

    clean = decoded(0, 0)
    np.testing.assert_array_equal(decoded(np.nan, 0), clean)
    assert_close(clean, run(layer, x, places(B, 3))[0])
    # A sequence that starts elsewhere: its first token has no predecessor either.
    assert_close(decoded(np.nan, 4), run(layer, x, places(B, 3, 4))[0])


def test_smeared_keys_of_a_ragged_batch():
    """R2: padding on either side, in two chunks, is nobody's predecessor."""
    layer, _ = built(OPTIONS["smeared"])
    lengths, width = (6, 4), 6
    rows = [random(1, n + 1, D) for n in lengths]
    for side in ("left", "right"):
        segments = np.zeros((B, width), np.int32)
        x, positions = np.full((B, width, D), np.nan, np.float32), np.zeros((B, width), np.int32)
        for b, n in enumerate(lengths):
            real = slice(width - n, width) if side == "left" else slice(0, n)
            segments[b, real], positions[b, real], x[b, real] = 1, np.arange(n), rows[b][0, :n]
        cache, parts = layer.init_cache(B, width + 1), []
        for part in (slice(0, 3), slice(3, width)):
            y, cache, _ = run(
                layer, x[:, part], positions[:, part], segments_BT=segments[:, part], cache=cache
            )
            parts.append(y)
        prompt = np.concatenate(parts, axis=1)
        last = np.stack([row[0, -1:] for row in rows])
        y, _, _ = run(layer, last, np.array(lengths, np.int32)[:, None], cache=cache)
        for b, row in enumerate(rows):
            alone = run(layer, row, places(1, lengths[b] + 1))[0][0]
            assert_close(prompt[b, segments[b] != 0], alone[:-1], what=side)
            assert_close(y[b], alone[-1:], what=side)


def test_dropout():
    """D1: only with a key; the same key drops the same weights in both forms."""
    layer, _ = built(Latent(latent_rank=5, dropout=0.4))
    x, positions = random(B, T, D), places()
    plain = run(layer, x, positions)[0]
    naive = {}
    for seed in (0, 1):
        key = jax.random.key(seed)
        naive[seed] = run(layer, x, positions, dropout_key=key)[0]
        cache = layer.init_cache(B, T)
        assert_close(run(layer, x, positions, cache=cache, dropout_key=key)[0], naive[seed])
        assert not np.isclose(naive[seed], plain).all(-1).any(0).any()
    assert not np.isclose(naive[0], naive[1]).all()


def test_cached_dtype_is_not_that_of_the_output():
    layer, _ = built(OPTIONS["plain"])
    x = random(B, T, D)
    y, cache, _ = run(layer, x, places(), cache=layer.init_cache(B, T, "bfloat16"))
    assert y.dtype == jnp.float32 and cache.latent_BSR.dtype == jnp.bfloat16
    expected = run(layer, x, places())[0]
    np.testing.assert_allclose(y, expected, rtol=0, atol=2e-2 * np.abs(expected).max())


def test_parameters():
    """Weight decay goes by names: matrices begin with w_, gains and α do not."""
    _, params = split(built(OPTIONS["query_latent"])[0])
    assert {name: p.shape for name, p in params.items() if is_matrix(name)} == {
        "w_dq_DR": (D, 8), "w_uq_RNH": (8, N, H), "w_qr_RNP": (8, N, 4), "w_dkv_DR": (D, 7),
        "w_kr_DP": (D, 4), "w_uk_RNH": (7, N, H), "w_uv_RNE": (7, N, H), "w_o_NED": (N, H, D),
    }  # fmt: skip
    assert {name for name in params if not is_matrix(name)} == {
        "q_norm/gain_D", "latent_norm/gain_D"
    }  # fmt: skip
    _, params = split(built(OPTIONS["unrotated"])[0])
    assert {name for name in params if not is_matrix(name)} == {
        "latent_norm/gain_D", "smear/alpha_K"
    }  # fmt: skip
    assert not {"w_kr_DP", "w_qr_RNP"} & set(params)


@pytest.mark.parametrize(("options", "changes", "message"), [
    ({"latent_rank": 0}, {}, "latent_rank must be at least 1, got 0"),
    ({"query_rank": -1}, {}, "query_rank must be at least 1, got -1"),
    ({"rope_width": 3}, {}, "rope_width must be even and at least 2, got 3"),
    ({"rope_width": 4}, {"rotary": False}, "rope_width is 4, but model.position is not 'rope'"),
    ({"dropout": 1.0}, {}, "dropout must be at least 0 and below 1, got 1.0"),
    ({}, {"implementation": "fast"}, "implementation must be 'auto' or one of"),
])  # fmt: skip
def test_refusals(options, changes, message):
    options = Latent(**{"latent_rank": 4} | options)
    for refuse in (options.check, lambda c: options.build(c, nnx.Rngs(0))):
        with pytest.raises(ValueError, match=message):
            refuse(context(**changes))


@pytest.mark.parametrize(("head_width", "expected"), [(1, 2), (6, 2), (8, 4), (128, 64)])
def test_default_rotary_width(head_width, expected):
    """Half the head, made even."""
    shape = context(head_width=head_width)
    options = Latent(latent_rank=4)
    options.check(shape)
    assert options.rotary_width(shape) == expected


def test_no_memory():
    layer, _ = built(OPTIONS["plain"])
    x = random(B, 2, D)
    with pytest.raises(ValueError, match="it takes no memory"):
        layer(x, places(length=2), memory=Memory(x, places(length=2), np.ones((B, 2), int)))


def test_implementation():
    layer, _ = built(OPTIONS["plain"], implementation="reference")
    assert layer.implementation(B, T) == "reference"
    layer, _ = built(Latent(latent_rank=4, dropout=0.1))
    assert layer.implementation(B, T) in IMPLEMENTATIONS
    assert VARIANTS["mla"] is Latent
