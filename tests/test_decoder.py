"""The decoder: positions, ids, dropout, options; and claims on what mixes tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.context import project
from attention.masks import Window
from attention.multi_head import MultiHead
from attention.norm import RMSNorm
from attention.probe import Probe
from models.decoder import Decoder, DecoderOptions
from models.mlp import MLPS, GeluMLP, SwiGLU
from models.pure import is_matrix, merge, split
from tests.attending import same_bits
from tests.oracles import assert_close

BASE = DecoderOptions(
    vocab_size=11, num_layers=2, d_model=16, num_heads=4, d_ff=12, pattern=("a",),
    layers=(MultiHead(),),
)  # fmt: skip


def options(**changes) -> DecoderOptions:
    return dataclasses.replace(BASE, **changes)


def decoder(seed=0, **changes) -> Decoder:
    return Decoder(options(**changes), nnx.Rngs(seed))


@functools.cache
def plain() -> Decoder:
    return decoder()


def random_tokens(*shape, size=11) -> np.ndarray:
    return np.random.default_rng().integers(0, size, shape)


def places(start, stop, batch=1):
    return np.tile(np.arange(start, stop, dtype=np.int32), (batch, 1))


HEADS = ("layer0/head", "layer1/head")


@functools.partial(jax.jit, static_argnums=0)
def _compiled(graph, params, tokens, positions, arguments):
    probe = Probe(read=HEADS)
    logits, caches = merge(graph, params)(tokens, positions, probe=probe, **arguments)
    return {"logits": logits, **probe.values}, caches


def streams(model, tokens, positions=None, **arguments):
    """Logits and what the heads of every layer say. Compiled, which is cheaper than each step."""
    return jax.tree.map(np.asarray, _compiled(*split(model), tokens, positions, arguments))


def logits_of(model, tokens, positions=None, **arguments) -> np.ndarray:
    return streams(model, tokens, positions, **arguments)[0]["logits"]


# --- what it computes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"mlp": "swiglu"}, {"mlp": "none"}, {"tied_head": True}, {"position": "learned"}],
    ids=str,
)
def test_against_numpy(changes):
    """logits = norm(blocks(embedding)) W_head, in float64; attention itself is taken as it is."""
    model = decoder(**changes, **({"max_length": 9} if "position" in changes else {}))
    tokens = random_tokens(2, 5)
    graph, params = split(model)
    rng = np.random.default_rng()
    params = {k: np.asarray(v) + 0.1 * rng.standard_normal(v.shape).astype("f")
              for k, v in params.items()}  # fmt: skip
    model = merge(graph, params)
    w = {name: p.astype(np.float64) for name, p in params.items()}

    def norm(x, gain):
        return gain * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    x = w["w_embed_VD"][tokens]
    if "position" in changes:
        x = x + w["w_position_TD"][:5]
    for i in range(2):
        at = f"blocks/{i}/"
        normed = norm(x, w[at + "attention_norm/gain_D"])
        x = x + np.asarray(attention(model.blocks[i].attention, normed.astype("f")))
        if changes.get("mlp") == "none":
            continue
        normed = norm(x, w[at + "mlp_norm/gain_D"])
        hidden = normed @ w[at + "mlp/w_in_DF"]
        if changes.get("mlp") == "swiglu":
            gate = normed @ w[at + "mlp/w_gate_DF"]
            hidden = gate / (1 + np.exp(-gate)) * hidden
        else:
            inner = np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)
            hidden = 0.5 * hidden * (1 + np.tanh(inner))
        x = x + hidden @ w[at + "mlp/w_out_FD"]
    head = w["w_embed_VD"].T if changes.get("tied_head") else w["w_head_DV"]
    out, caches = streams(model, tokens)
    assert out["logits"].dtype == jnp.float32 and caches is None
    assert_close(out["logits"], norm(x, w["norm/gain_D"]) @ head)


def attention(layer, x_BTD):
    graph, params = split(layer)
    positions = places(0, x_BTD.shape[1], x_BTD.shape[0])
    call = jax.jit(lambda p, x: merge(graph, p)(x, positions)[0])
    return call(params, x_BTD)


def test_layers_follow_the_pattern():
    wide, narrow = MultiHead(), MultiHead(num_kv_heads=1)
    model = decoder(num_layers=3, pattern=("w", "n"), layers=(wide, narrow))
    assert [
        block.attention.options.kv_heads(model.options.context()) for block in model.blocks
    ] == [4, 1, 4]
    assert model.implementations(2, 5) == dict.fromkeys(
        ("layer0", "layer1", "layer2"), model.implementations(2, 5)["layer0"]
    )
    caches = model.init_caches(2, 7)
    assert [cache.k_BSKH.shape for cache in caches] == [(2, 7, 4, 4), (2, 7, 1, 4), (2, 7, 4, 4)]


def test_seeds():
    """E3: one seed, one model; another seed, another model; layers differ from each other."""
    first, again, other = (split(decoder(seed))[1] for seed in (0, 0, 1))
    for name, value in first.items():
        same_bits(value, again[name])
        assert value.dtype == jnp.float32
        if is_matrix(name):
            assert not np.isclose(value, other[name]).all()
    assert not np.isclose(first["blocks/0/mlp/w_in_DF"], first["blocks/1/mlp/w_in_DF"]).all()
    projections = [first[f"blocks/0/attention/heads/w_{p}_DKH"] for p in "kv"]
    assert not np.isclose(*projections).all()


def test_between_module_and_dict():
    """split and merge are inverse, and only matrices are called so."""
    model = decoder(layers=(MultiHead(bias=True, qk_norm=True, learned_sink=True),))
    graph, params = split(model)
    tokens = random_tokens(1, 4)
    same_bits(logits_of(merge(graph, params), tokens), logits_of(model, tokens))
    assert hash(graph) == hash(split(model)[0]) and graph == split(model)[0]
    for name, value in params.items():
        assert is_matrix(name) == (name.rsplit("/")[-1][:2] == "w_")
        assert is_matrix(name) or "norm" in name or "bias" in name or "sink" in name, name
        assert value.ndim > 1 or not is_matrix(name)


def test_bfloat16():
    """N1: activations are narrow, parameters, logits and sums are not."""
    narrow = decoder(dtype="bfloat16")
    _, params = split(narrow)
    assert {p.dtype for p in params.values()} == {jnp.dtype("float32")}
    tokens = random_tokens(2, 9)
    out, _ = streams(narrow, tokens)
    assert out["logits"].dtype == jnp.float32 and out["layer1/head"].dtype == jnp.bfloat16
    wide, _ = streams(merge(split(decoder())[0], params), tokens)
    error = np.abs(np.asarray(out["logits"] - wide["logits"])).max()
    assert error < 4e-2 * np.abs(wide["logits"]).max()
    assert narrow.init_caches(1, 3)[0].k_BSKH.dtype == jnp.bfloat16


def test_logits_of_bfloat16_are_not_rounded_to_it():
    """Logits are float32 sums: 2049 ones are 2049, and not 2048."""
    model = decoder(d_model=2052, num_heads=1, head_width=2, num_layers=1, mlp="none",
                    dtype="bfloat16", vocab_size=3)  # fmt: skip
    model.w_head_DV[...] = jnp.ones((2052, 3)).at[:3, :].set(0)
    logits = model.unembed(jnp.ones((1, 1, 2052), jnp.bfloat16))
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(logits), 2049.0)


# --- what mixes tokens ---------------------------------------------------------------------------


class _Self(MultiHead):
    def mask(self):
        return Window(1)


def test_only_attention_mixes_tokens():
    """Claim 2: a whole decoder without scores to others acts on each token alone."""
    tokens = random_tokens(1, 7)
    other = tokens.copy()
    other[:, 3] = (other[:, 3] + 1) % 11
    for layer, mixes in ((_Self(), False), (MultiHead(), True)):
        model = decoder(layers=(layer,))
        before, after = (logits_of(model, t)[0] for t in (tokens, other))
        same_bits(before[:3], after[:3])
        assert not np.isclose(before[3], after[3]).all()
        assert np.isclose(before[4:], after[4:]).all(-1).any() != mixes
        if not mixes:
            same_bits(before[4:], after[4:])


@pytest.mark.parametrize("name", ["gelu", "swiglu", "norm", "projection"])
def test_each_token_alone(name):
    """Claim 2: changing token j changes no bit of what is made of token i."""
    parts = {
        "gelu": lambda: GeluMLP(16, 12, nnx.Rngs(0)),
        "swiglu": lambda: SwiGLU(16, 12, nnx.Rngs(0)),
        "norm": lambda: RMSNorm(16),
        "projection": lambda: lambda x: project(x, plain().blocks[0].attention.heads.w_q_DNH[...]),
    }
    part = parts[name]()
    x = np.random.default_rng().standard_normal((2, 7, 16)).astype("f")
    before = np.asarray(part(x))
    x[0, 3] = np.nan
    after = np.array(part(x))
    assert np.isnan(after[0, 3]).all()
    after[0, 3] = before[0, 3]
    same_bits(before, after)
    assert set(MLPS) == {"gelu", "swiglu", "none"}


# --- positions -----------------------------------------------------------------------------------


def test_decoding_at_every_layer_and_any_offset():
    """R1: two layers, each equal to the whole; 1000 added to all positions changes nothing."""
    model, tokens = plain(), random_tokens(2, 9)
    whole, _ = streams(model, tokens)
    shifted, _ = streams(model, tokens, places(1000, 1009, 2))
    caches, steps = model.init_caches(2, 9), []
    for t in range(9):
        out, caches = streams(model, tokens[:, t : t + 1], places(t, t + 1, 2), caches=caches)
        steps.append(out)
    for name, value in whole.items():
        assert_close(np.concatenate([out[name] for out in steps], axis=1), value, what=name)
        error = np.abs(np.asarray(shifted[name] - value)).max()
        assert error < 1e-4, "angles of 1000 are rounded in float32"
    moved, _ = streams(model, tokens, places(0, 9, 2) * 2)
    assert not np.isclose(moved["logits"][:, 1:], whole["logits"][:, 1:], atol=1e-4).all()


def test_caches_need_positions():
    with pytest.raises(ValueError, match="positions_BT must say where the tokens stand"):
        plain()(random_tokens(1, 2), caches=plain().init_caches(1, 4))


def test_documents_that_are_packed_start_anew():
    """M7: without positions given, each document counts from 0, and none knows the other."""
    document = random_tokens(1, 4)
    packed = np.concatenate([document, document], axis=1)
    segments = np.array([[1] * 4 + [2] * 4], np.int32)
    smeared = MultiHead(smeared_keys=True)
    for changes in ({}, {"position": "learned", "max_length": 8}, {"layers": (smeared,)}):
        model = decoder(**changes)
        logits = logits_of(model, packed, segments_BT=segments)
        assert_close(logits[:, :4], logits_of(model, document), what=str(changes))
        assert_close(logits[:, 4:], logits[:, :4], what=str(changes))
        # Padding inside a document is not counted.
        holes = np.insert(document, (1, 3), 0, axis=1)
        there = np.array([[1, 0, 1, 1, 0, 1]], np.int32)
        spread = logits_of(model, holes, segments_BT=there)
        assert_close(spread[:, there[0] == 1], logits[:, :4], what=str(changes))


def test_learned_positions():
    """E2: a position beyond the table raises, or is NaN where it is traced; never the last one."""
    model = decoder(position="learned", max_length=5)
    tokens = random_tokens(1, 5)
    logits = logits_of(model, tokens)
    assert np.isfinite(logits).all()
    later = logits_of(model, tokens, places(0, 5)[:, ::-1].copy())
    assert not np.isclose(later, logits, atol=1e-4).all()
    for positions in (places(1, 6), places(-1, 4)):
        wrong = positions[(positions < 0) | (positions > 4)][0]
        with pytest.raises(ValueError, match=f"position {wrong} is outside 0 … 4"):
            model(tokens, positions)
        traced = logits_of(model, tokens, positions)
        assert np.isnan(traced[0, (positions[0] < 0) | (positions[0] > 4)]).all()
    with pytest.raises(ValueError, match="position 5 is outside 0 … 4"):
        model(random_tokens(1, 6))


def test_positions_matter_or_do_not():
    """The same token at each place: only positions tell the places apart."""
    tokens = np.full((1, 6), 3)
    segments = np.ones((1, 6), np.int32)
    for changes in ({"position": "none"}, {}):
        logits = logits_of(decoder(**changes), tokens, segments_BT=segments)[0]
        assert np.isclose(logits, logits[:1], atol=1e-5).all()  # values are all alike
    learned = logits_of(decoder(position="learned", max_length=6), tokens)[0]
    assert not np.isclose(learned[1:], learned[:1], atol=1e-3).all(-1).any()


# --- ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [11, 16, -1])
def test_ids_outside_the_vocabulary(wrong):
    """E2: raise where known; where traced they are NaN, and only what sees them."""
    tokens = random_tokens(2, 5)
    tokens[1, 2] = wrong
    with pytest.raises(ValueError, match=f"token id {wrong} is outside 0 … 10"):
        plain()(tokens)
    logits = logits_of(plain(), tokens)
    assert np.isfinite(logits[0]).all() and np.isfinite(logits[1, :2]).all()
    assert np.isnan(logits[1, 2:]).all()


# --- dropout -------------------------------------------------------------------------------------


def test_dropout():
    """D1: a key turns it on, the same key repeats it, and every layer drops other weights."""
    dropped, kept = decoder(layers=(MultiHead(dropout=0.5),)), plain()
    tokens = np.full((2, 9), 4)  # equal rows: what differs is dropout
    plainly = logits_of(kept, tokens)
    same_bits(logits_of(dropped, tokens), plainly)
    same_bits(logits_of(kept, tokens, dropout_key=jax.random.key(1)), plainly)
    first, again, other = (
        logits_of(dropped, tokens, dropout_key=jax.random.key(k)) for k in (1, 1, 2)
    )
    same_bits(first, again)
    assert not np.isclose(first, other).all()
    assert not np.isclose(first, plainly).all()
    assert not np.isclose(first[0], first[1]).all(), "rows of a batch share a mask"
    # Where every value is alike, a head tells how much weight was kept.
    flat = decoder(layers=(MultiHead(dropout=0.5),), mlp="none", position="none")
    for block in flat.blocks:
        block.attention.w_o_NHD[...] = jnp.zeros_like(block.attention.w_o_NHD[...])
        heads = block.attention.heads
        heads.w_v_DKH[...] = jnp.ones_like(heads.w_v_DKH[...])
    out, _ = streams(flat, tokens, dropout_key=jax.random.key(3))
    share = [np.asarray(out[name]) for name in HEADS]
    base = [np.asarray(streams(flat, tokens)[0][name]) for name in HEADS]
    layers = [np.round(a / b, 4) for a, b in zip(share, base, strict=True)]
    assert not np.isclose(layers[0], layers[1]).all(), "layers share a mask"
    for layer in layers:
        assert not np.isclose(layer[:, :, 0], layer[:, :, 1]).all(), "heads share a mask"
        row = layer[:, 1:, :, 0]
        assert ((row >= 0) & (row <= 2)).all() and row.std() > 0.2


@pytest.mark.parametrize("rate", [-0.5, float("nan"), 1.0, 1.5])
def test_rates_of_dropout(rate):
    """D1."""
    with pytest.raises(ValueError, match=f"attention.a: dropout must be .* below 1, got {rate}"):
        options(layers=(MultiHead(dropout=rate),))


# --- options that do not fit ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads must divide model.d_model, got 3 heads for 16"),
        ({"vocab_size": 0}, "model.vocab_size must be at least 1, got 0"),
        ({"num_layers": 0}, "model.num_layers must be at least 1, got 0"),
        ({"num_layers": -1}, "model.num_layers must be at least 1, got -1"),
        ({"d_ff": 0}, "model.d_ff must be at least 1, got 0"),
        ({"head_width": 0}, "model.head_width must be at least 1, got 0"),
        ({"position": "learned"}, "model.max_length must be at least 1, got 0"),
        ({"position": "sine"}, r"model.position must be one of .*, got 'sine'"),
        ({"mlp": "relu"}, r"model.mlp must be one of .*, got 'relu'"),
        ({"dtype": "float16"}, r"model.dtype must be one of .*, got 'float16'"),
        ({"pattern": (), "layers": ()}, r"model.pattern must name at least one .*, got \(\)"),
        ({"pattern": ("a", "b")}, "for 1 layers"),
        ({"layers": (MultiHead(num_kv_heads=3),)}, "must divide .*, got 3 for 4 heads"),
        ({"layers": (MultiHead(num_kv_heads=8),)}, "must divide .*, got 8 for 4 heads"),
        ({"layers": (MultiHead(num_kv_heads=0),)}, "must divide .*, got 0 for 4 heads"),
        ({"layers": (MultiHead(num_kv_heads=-4),)}, "must divide .*, got -4 for 4 heads"),
        ({"layers": (MultiHead(rope_width=3),)}, "rope_width must be even and .*, got 3"),
        ({"layers": (MultiHead(rope_width=0),)}, "rope_width must be even and .*, got 0"),
        ({"layers": (MultiHead(rope_width=6),)}, "at most the head width 4, got 6"),
        ({"head_width": 3}, "model.head_width must be even to be rotated whole, got 3"),
        ({"rope_base": 0.0}, "rope_base must be greater than 1, got 0.0"),
        ({"rope_layout": "whole"}, r"rope_layout must be one of .*, got 'whole'"),
        ({"implementation": "fast"}, r"implementation must be .*, got 'fast'"),
        ({"layers": (MultiHead(rope_width=2),), "position": "none"}, "rope_width is 2, but"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_attention_takes_no_memory():
    layer = plain().blocks[0].attention
    x = np.zeros((1, 2, 16), np.float32)
    with pytest.raises(ValueError, match="takes no memory"):
        layer(x, places(0, 2), memory=x)


# --- gradients -----------------------------------------------------------------------------------


def test_every_parameter_has_a_gradient():
    """And training does not see ids that do not occur, unless they are predicted."""
    model = decoder(layers=(MultiHead(bias=True, qk_norm=True, learned_sink=True,
                                      smeared_keys=True),))  # fmt: skip
    graph, params = split(model)
    tokens = random_tokens(2, 6, size=10)
    weight = np.random.default_rng().standard_normal((2, 6, 11))

    def loss(params):
        return jnp.sum(merge(graph, params)(tokens)[0] * weight)

    gradients = jax.jit(jax.grad(loss))(params)
    for name, gradient in gradients.items():
        assert np.isfinite(gradient).all(), name
        if not name.endswith("biases/k_KH"):
            assert np.asarray(gradient).any(), name
    assert not gradients["w_embed_VD"][10].any()
