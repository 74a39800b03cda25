"""The encoder-decoder against a float64 oracle of the whole model, its caches, and generation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.cache import KVCache
from attention.context import Context
from attention.memory import Memory
from attention.multi_head import MultiHeadCross
from attention.probe import Probe
from models import generate as generation
from models.encoder_decoder import CrossBlockCache, EncoderDecoder
from models.generate import generate
from models.pure import merge
from tests import oracles
from tests.attending import same_bits
from tests.encoder_decoders import (
    GRAPH,
    HEADS,
    LENGTHS,
    OPTIONS,
    PARAMS,
    SYMBOLS,
    WINDOW,
    B,
    H,
    N,
    S,
    T,
    V,
    backward,
    encode,
    forward,
    graph_of,
    ids,
    model,
    padded,
    places,
    random,
    shapes,
)
from tests.oracles import assert_close

# --- the whole model in float64 -------------------------------------------------------------------


class Oracle:
    """logits = norm(blocks(embedding[tokens], memory)) W_head, each row of the batch alone."""

    def __init__(self, params):
        self.params = {name: np.asarray(p, np.float64) for name, p in params.items()}

    def norm(self, path, x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * self.params[f"{path}/gain_D"]

    @staticmethod
    def rotate(x_TNH):
        half = H // 2
        angle = np.arange(len(x_TNH))[:, None] * 10_000.0 ** (-2 * np.arange(half) / H)
        z = (x_TNH[..., :half] + 1j * x_TNH[..., half:]) * np.exp(1j * angle)[:, None]
        return np.concatenate([z.real, z.imag], axis=-1)

    def attend(self, path, x_TD, y_SD, sees):
        w = {name: self.params[f"{path}/heads/w_{name}"] for name in ("q_DNH", "k_DKH", "v_DKH")}
        q, k, v = (
            np.einsum("td,dnh->tnh", a, b)
            for a, b in ((x_TD, w["q_DNH"]), (y_SD, w["k_DKH"]), (y_SD, w["v_DKH"]))
        )
        visible = np.array([[sees(i, j) for j in range(len(y_SD))] for i in range(len(x_TD))])
        q, k = self.rotate(q), self.rotate(k)
        out = oracles.attention(q[None], k[None], v[None], visible[None]).out[0]
        return np.einsum("tnh,nhd->td", out, self.params[f"{path}/w_o_NHD"])

    def mlp(self, path, x):
        x_in = self.norm(f"{path}/mlp_norm", x)
        w_gate, w_in, w_out = (
            self.params[f"{path}/mlp/w_{name}"] for name in ("gate_DF", "in_DF", "out_FD")
        )
        gate = x_in @ w_gate
        return x + (gate / (1 + np.exp(-gate)) * (x_in @ w_in)) @ w_out

    def block(self, path, x, sees, memory=None):
        y = self.norm(f"{path}/attention_norm", x)
        x = x + self.attend(f"{path}/attention", y, y, sees)
        if memory is not None:
            y = self.norm(f"{path}/cross_norm", x)
            x = x + self.attend(f"{path}/cross", y, memory, lambda i, j: True)
        return self.mlp(path, x)

    def __call__(self, tokens, source):
        embedding = self.params["w_embed_VD"]
        memory, x = embedding[source], embedding[tokens]
        for i in range(2):
            memory = self.block(f"encoder_blocks/{i}", memory, lambda i, j: True)
        memory = self.norm("encoder_norm", memory)
        x = self.block("blocks/0", x, lambda i, j: j <= i, memory)
        x = self.block("blocks/1", x, lambda i, j: i - WINDOW < j <= i, memory)
        return self.norm("norm", x) @ self.params["w_head_DV"]


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_equal_a_float64_oracle_on_sources_without_padding(side):
    """Claim 9, Z1: queries from one sequence, keys and values from another."""
    tokens, source, segments = ids(B, T), ids(B, S), padded(side)
    got, oracle = forward(PARAMS, tokens, source, segments), Oracle(PARAMS)
    for b in range(B):
        expected = oracle(tokens[b], source[b, segments[b] == 1])
        assert_close(got[b], expected, what=f"row {b}, {LENGTHS[b]} source tokens")


# --- Z1 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [6, 2])
def test_a_mask_of_keys_is_a_mask_of_keys(length):
    """Z1: T above and below S = 3; the gradient of masked memory is 0."""
    context = Context(d_model=1, num_heads=1, head_width=1, rotary=False)
    graph, by_path = shapes(lambda: MultiHeadCross().build(context, nnx.Rngs(0)))
    # No scores, and values that are the memory itself.
    values = {"w_q_DNH": 0, "w_k_DKH": 0, "w_v_DKH": 1, "w_o_NHD": 1}
    layer = merge(
        graph,
        {path: jnp.full(p, values[path.split("/")[-1]], "f") for path, p in by_path.items()},
    )
    segments = np.array([[1, 1, 1], [1, 0, 0]], np.int32)

    def output(x_BSD):
        memory = Memory(x_BSD, places(0, 3, 2), segments)
        return layer(jnp.zeros((2, length, 1)), places(0, length, 2), memory=memory)[0]

    @jax.jit
    def run(x_BSD):
        out, pull = jax.vjp(output, x_BSD)
        return out, pull(jnp.ones_like(out))[0]

    out, dx = run(np.tile(np.array([1, 2, 3], "f")[None, :, None], (2, 1, 1)))
    assert_close(out[0], np.full((length, 1), 2.0))
    assert_close(out[1], np.full((length, 1), 1.0))
    assert_close(dx[0], np.full((3, 1), length / 3))
    assert_close(dx[1], np.array([[length], [0], [0]]))
    assert not np.asarray(dx[1, 1:]).any()


@pytest.mark.parametrize("length", [7, 2])
def test_patterns_of_cross_attention_cover_the_source_alone(length):
    """Z1 in the model: with queries of 0 every row is uniform over its source."""
    params = PARAMS | {
        name: jnp.zeros_like(p) for name, p in PARAMS.items() if "cross/heads/w_q" in name
    }
    names = ("layer0/cross/pattern", "layer1/cross/pattern", "encoder1/pattern", "layer1/pattern")

    @jax.jit
    def patterns(tokens, source, segments):
        model, probe = merge(GRAPH, params), Probe(read=names)
        model(tokens, memory=model.encode(source, segments, probe=probe), probe=probe)
        return probe.values, probe.missing()

    values, missing = patterns(ids(B, length), ids(B, S), padded())
    assert missing == []
    for name in names[:2]:
        uniform = padded() / np.asarray(LENGTHS)[:, None]
        expected = np.broadcast_to(uniform[:, None, None], (B, N, length, S))
        assert_close(values[name], expected, what=name)
        assert not np.asarray(values[name])[expected == 0].any()
    assert values["encoder1/pattern"].shape == (B, N, S, S)
    assert (np.asarray(values["encoder1/pattern"])[0] > 0).all()
    own = np.asarray(values["layer1/pattern"])
    reach = np.arange(length)[:, None] - np.arange(length)[None]
    np.testing.assert_array_equal(
        own > 0, np.broadcast_to((reach >= 0) & (reach < WINDOW), own.shape)
    )


# --- who moves whom -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_of_the_source_moves_nothing(side):
    """M4: not one bit of logits or gradients, and its embeddings learn nothing from it."""
    tokens, source, segments, do = ids(B, T), ids(B, S), padded(side), random(B, T, V)
    results = []
    for _ in range(2):
        dirty = np.where(segments == 1, source, ids(B, S, low=SYMBOLS, high=V))
        results.append(backward(PARAMS, tokens, dirty, segments, do))
    jax.tree.map(same_bits, *results)
    gradients = results[0][1]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results[0]))
    moved = np.asarray(gradients["w_embed_VD"]).any(-1)
    assert not moved[SYMBOLS:].any() and moved[np.unique(source[segments == 1])].all()


def test_a_source_of_padding_alone_is_no_nan():
    segments = padded(lengths=(5, 0, 2))
    out, gradients = backward(PARAMS, ids(B, T), ids(B, S), segments, random(B, T, V))
    assert all(np.isfinite(leaf).all() for leaf in (out, *gradients.values()))


def test_masked_memory_has_no_gradient_and_its_garbage_reaches_nothing():
    tokens, do = ids(B, T), random(B, T, V)
    memory = encode(ids(B, S), padded())
    valid = padded() == 1

    @jax.jit
    def run(x_BSD):
        read = dataclasses.replace(memory, x_BSD=x_BSD)
        out, pull = jax.vjp(lambda read: model()(tokens, memory=read)[0], read)
        return out, pull(do)[0].x_BSD

    out, dx = run(memory.x_BSD)
    assert not np.asarray(dx)[~valid].any() and np.asarray(dx)[valid].any(-1).all()
    for garbage in (1e30, np.inf, np.nan):
        dirty, dirty_dx = run(jnp.where(valid[..., None], memory.x_BSD, garbage))
        same_bits(dirty, out)
        same_bits(dirty_dx, dx)


def test_the_decoder_looks_back_and_the_encoder_both_ways():
    tokens, source = ids(B, T), ids(B, S)
    other, full = tokens.copy(), np.ones((B, S), np.int32)
    other[:, 4:] = (other[:, 4:] + 1) % SYMBOLS
    before, after = (np.asarray(forward(PARAMS, x, source, full)) for x in (tokens, other))
    same_bits(before[:, :4], after[:, :4])
    assert not np.isclose(before[:, 4:], after[:, 4:]).all(-1).any()
    other = source.copy()
    other[:, -1] = (other[:, -1] + 1) % SYMBOLS
    after = np.asarray(forward(PARAMS, tokens, other, full))
    assert not np.isclose(before, after).all(-1).any()
    first, second = (encode(x, full).x_BSD[:, 0] for x in (source, other))
    assert not np.isclose(first, second).all(-1).any()


def test_rows_of_a_batch_are_independent():
    tokens, source = ids(B, T), ids(B, S)
    before = np.asarray(forward(PARAMS, tokens, source, padded()))
    for changed in ("tokens", "source"):
        inputs = {"tokens": tokens.copy(), "source": source.copy()}
        inputs[changed][1] = (inputs[changed][1] + 1) % SYMBOLS
        after = np.asarray(forward(PARAMS, inputs["tokens"], inputs["source"], padded()))
        same_bits(before[::2], after[::2])
        assert not np.isclose(before[1], after[1]).all(-1).any()


def test_padding_of_the_tokens_moves_nothing():
    segments = (np.arange(T)[None] < np.array([T, 4, 1])[:, None]).astype(np.int32)
    tokens, source, results = ids(B, T), ids(B, S), []
    for _ in range(2):
        dirty = np.where(segments == 1, tokens, ids(B, T, low=SYMBOLS, high=V))
        results.append(np.asarray(forward(PARAMS, dirty, source, padded(), segments)))
    same_bits(*(result[segments == 1] for result in results))
    assert all(np.isfinite(result).all() for result in results)


# --- caches ---------------------------------------------------------------------------------------


def decode(tokens, memory, sizes, caches, graph=GRAPH):
    """Logits and heads through caches; only the first call is shown the memory."""
    parts, start = [], 0
    for size in sizes:
        part, caches = decode_part(
            graph, PARAMS, tokens[:, start : start + size], places(start, start + size), caches,
            memory if start == 0 else None,
        )  # fmt: skip
        parts.append(part)
        start += size
    assert start == tokens.shape[1]
    return jax.tree.map(lambda *xs: np.concatenate(xs, axis=1), *parts), caches


@functools.partial(jax.jit, static_argnums=0)
def decode_part(graph, params, tokens, positions, caches, memory):
    probe = Probe(read=HEADS)
    out, caches = merge(graph, params)(tokens, positions, caches=caches, memory=memory, probe=probe)
    return {"logits": out, **probe.values}, caches


@pytest.mark.parametrize("sizes", [(1,) * T, (3, 3, 1), (T,)], ids=str)
def test_decoding_is_the_whole_at_once(sizes):
    """C1: logits and the heads of every layer, the encoder's keys and values computed once."""
    tokens, memory = ids(B, T), encode(ids(B, S), padded())
    whole, _ = decode_part(GRAPH, PARAMS, tokens, places(0, T), None, memory)
    got, caches = decode(tokens, memory, sizes, model().init_caches(B, T, S))
    assert sorted(got) == sorted(whole) == sorted(("logits", *HEADS))
    for name, expected in whole.items():
        assert_close(got[name], expected, what=name)
    # Another memory and prompt in the used caches: bit for bit what new ones give.
    second, other = ids(B, T), encode(ids(B, S), padded("left"))
    fresh, _ = decode(second, other, sizes, model().init_caches(B, T, S))
    for used in (caches, [cache.reset() for cache in caches]):
        jax.tree.map(same_bits, decode(second, other, sizes, used)[0], fresh)


@pytest.mark.broad
def test_decoding_in_bfloat16():
    graph = graph_of(dataclasses.replace(OPTIONS, dtype="bfloat16"))
    narrow, tokens = merge(graph, PARAMS), ids(B, T)
    memory = jax.jit(narrow.encode)(ids(B, S), padded())
    whole, _ = decode_part(graph, PARAMS, tokens, places(0, T), None, memory)
    caches = narrow.init_caches(B, T, S)
    got, after = decode(tokens, memory, (1,) * T, caches, graph)
    assert memory.x_BSD.dtype == whole["layer0/cross/head"].dtype == jnp.bfloat16
    for name, expected in whole.items():
        expected, actual = np.asarray(expected, "f"), np.asarray(got[name], "f")
        np.testing.assert_allclose(actual, expected, atol=2e-2 * np.abs(expected).max(), rtol=0)

    def types(tree):
        return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]

    assert types(caches) == types(after)


def test_bytes_and_limits_of_the_caches():
    caches = model().init_caches(2, 9, S)
    own = [2 * 2 * 9, 2 * 4 * WINDOW]  # keys and values: 2 heads for all, 4 for the window
    for cache, numbers in zip(caches, own, strict=True):
        assert isinstance(cache, CrossBlockCache) and isinstance(cache.own, KVCache)
        assert cache.memory.nbytes == 2 * 4 * (2 * 2 * S) * H
        assert cache.nbytes == 2 * 4 * numbers * H + cache.memory.nbytes
    assert [cache.limit for cache in caches] == [9, None]


# --- generation -----------------------------------------------------------------------------------


def roll_out(prompt, num_tokens, source, segments):
    """The likeliest token, one whole forward pass each, at one shape; and the least lead it had."""
    tokens, lead = np.zeros((B, T), np.int32), np.inf
    tokens[:, : prompt.shape[1]] = prompt
    for t in range(prompt.shape[1], prompt.shape[1] + num_tokens):
        row_BV = np.asarray(forward(PARAMS, tokens, source, segments))[:, t - 1]
        best = np.sort(row_BV)[:, -2:]
        lead = min(lead, (best[:, 1] - best[:, 0]).min())
        tokens[:, t] = row_BV.argmax(-1)
    return tokens[:, prompt.shape[1] : prompt.shape[1] + num_tokens], lead


@pytest.mark.broad
def test_generation_is_the_roll_out_of_the_likeliest(monkeypatch):
    encoded, memories = [], []
    inner, call = EncoderDecoder.encode, EncoderDecoder.__call__

    def counted(self, source_BS, *rest, **options):
        encoded.append(source_BS.shape)
        return inner(self, source_BS, *rest, **options)

    def noted(self, tokens_BT, *rest, memory=None, **options):
        memories.append((tokens_BT.shape[1], memory is not None))
        return call(self, tokens_BT, *rest, memory=memory, **options)

    prompt, lead = ids(B, 2), 0
    while lead < 1e-3:  # of two that are equal to rounding either may be taken
        source = ids(B, S)
        expected, lead = roll_out(prompt, 5, source, padded())
    monkeypatch.setattr(EncoderDecoder, "encode", counted)
    monkeypatch.setattr(EncoderDecoder, "__call__", noted)
    generation._generate.clear_cache()
    options = {"source_BS": source, "source_segments_BS": padded()}
    new, caches = generate(model(), prompt, 5, **options)
    np.testing.assert_array_equal(new, expected)
    assert encoded == [(B, S)] and set(memories) == {(2, True), (1, False)}
    # The caches hold the source; a source padded on the other side is the same source.
    again, _ = generate(model(), prompt, 5, caches=caches)
    np.testing.assert_array_equal(again, expected)
    left, on_left = np.full((B, S), V - 1), padded("left")
    left[on_left == 1] = source[padded() == 1]
    options = {"source_BS": left, "source_segments_BS": on_left}
    np.testing.assert_array_equal(generate(model(), prompt, 5, **options)[0], expected)
