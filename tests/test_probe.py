"""Probes: reading and replacing activations by name, in one layer and through a decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention import few
from attention.context import Context
from attention.multi_head import MultiHead
from attention.probe import Probe
from models.decoder import Decoder, DecoderOptions
from tests import oracles
from tests.attending import REFUSES, interpreter, same_bits


def test_paths():
    """A view of a part shares what was read and offered with the whole."""
    probe = Probe(read=("layer1/head",), replace={"layer0/head": lambda a: a + 1})
    first, second = probe.at("layer0"), probe.at("layer1")
    assert first.replaces("head") and not first.replaces("pattern")
    assert not second.replaces("head") and second.wants("head") and not second.wants("pattern")
    assert first("head", 1) == 2
    assert second("head", 5) == 5
    assert probe.values == {"layer1/head": 5}
    assert probe.missing() == []
    assert probe.at("a").at("b").wants("c") is False
    assert probe.offered == {"layer0/head", "layer1/head", "layer1/pattern", "a/b/c"}


def test_what_is_read_is_what_was_there_before():
    probe = Probe(read=("x",), replace={"x": lambda a: a * 10})
    assert probe("x", 3) == 30
    assert probe.values == {"x": 3}


def test_missing_names():
    probe = Probe(read=("x", "why"), replace={"zed": abs})
    assert probe.missing() == ["why", "x", "zed"]
    probe("x", 1)
    assert probe.missing() == ["why", "zed"]


def test_a_name_alone_is_not_a_list_of_names():
    """A string is a collection of its characters, and every one of them is in it."""
    with pytest.raises((TypeError, ValueError), match="layer0/pattern"):
        Probe(read="layer0/pattern")


def test_probes_do_not_share_what_they_read():
    Probe(read=("x",))("x", 1)
    assert Probe(read=("x",)).values == {}
    assert Probe().offered == set()


@pytest.fixture(scope="module")
def model():
    options = DecoderOptions(
        vocab_size=11, num_layers=2, d_model=16, num_heads=4, d_ff=12, pattern=("gqa",),
        layers=(MultiHead(num_kv_heads=2),),
    )  # fmt: skip
    return Decoder(options, nnx.Rngs(3))


@pytest.fixture
def tokens():
    return np.random.default_rng().integers(0, 11, (2, 7))


def call(model, tokens, *, read=(), replace=None, positions=None, caches=None):
    """Logits, what was read, and the caches. Compiled, which is cheaper than step by step."""

    def run(tokens, positions, caches):
        probe = Probe(read=read, replace=replace or {})
        logits, caches = model(tokens, positions, caches=caches, probe=probe)
        assert probe.missing() == []
        return logits, probe.values, caches

    run = jax.jit(run)
    return jax.tree.map(np.asarray, run(tokens, positions, caches))


NAMES = [f"layer{i}/{name}" for i in (0, 1) for name in ("pattern", "head")]


def test_every_layer_can_be_read(model, tokens):
    """Shapes, causal zeros, and heads that are the pattern times the values of their group."""
    logits, values, _ = call(model, tokens, read=NAMES)
    same_bits(logits, call(model, tokens)[0])
    assert sorted(values) == sorted(NAMES)
    for i in (0, 1):
        pattern_BNTS, head_BTNE = (values[f"layer{i}/{n}"] for n in ("pattern", "head"))
        assert pattern_BNTS.shape == (2, 4, 7, 7) and head_BTNE.shape == (2, 7, 4, 4)
        assert not np.triu(pattern_BNTS, 1).any()
        np.testing.assert_allclose(pattern_BNTS.sum(-1), 1, atol=1e-6)
    x_BTD = np.asarray(model.w_embed_VD[...])[tokens]
    normed = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + 1e-6)
    v_BSKE = np.einsum("bsd,dke->bske", normed, model.blocks[0].attention.heads.w_v_DKH[...])
    expected = np.einsum("bnts,bsne->btne", values["layer0/pattern"], v_BSKE.repeat(2, 2))
    oracles.assert_close(values["layer0/head"], expected)


def test_reading_does_not_change_what_runs(implementation):
    """Not one bit, whichever implementation computes the heads; replacing goes by the pattern."""
    context = Context(d_model=16, num_heads=4, head_width=4, implementation=implementation)
    layer = MultiHead(num_kv_heads=2).build(context, nnx.Rngs(0))
    T = few.MOST if implementation == "few" else 70
    x = np.random.default_rng().standard_normal((2, T, 16)).astype("f")
    positions = np.tile(np.arange(T, dtype=np.int32), (2, 1))

    def output(probe):
        with interpreter(implementation):
            return np.asarray(layer(x, positions, probe=probe)[0])

    if "float32" in REFUSES[implementation]:
        with pytest.raises(NotImplementedError, match=REFUSES[implementation]["float32"]):
            output(None)
        return
    plain, probe = output(None), Probe(read=("pattern", "head"))
    same_bits(output(probe), plain)
    v_BSKE = np.einsum("bsd,dke->bske", x, layer.heads.w_v_DKH[...])
    expected = np.einsum("bnts,bsne->btne", probe.values["pattern"], v_BSKE.repeat(2, 2))
    oracles.assert_close(probe.values["head"], expected)
    kept = output(Probe(replace={"pattern": lambda pattern: pattern}))
    oracles.assert_close(kept, plain)


def test_reading_through_a_cache(model, tokens):
    """The pattern of one new token lies over the slots; what is empty has no weight."""
    positions = np.tile(np.arange(7, dtype=np.int32), (2, 1))
    _, whole, _ = call(model, tokens, read=NAMES)
    caches = model.init_caches(2, 9)
    *_, caches = call(model, tokens[:, :6], positions=positions[:, :6], caches=caches)
    _, one, _ = call(model, tokens[:, 6:], read=NAMES, positions=positions[:, 6:], caches=caches)
    for i in (0, 1):
        pattern = one[f"layer{i}/pattern"]
        assert pattern.shape == (2, 4, 1, 9) and not pattern[..., 7:].any()
        oracles.assert_close(pattern[:, :, 0, :7], whole[f"layer{i}/pattern"][:, :, 6])
        oracles.assert_close(one[f"layer{i}/head"][:, 0], whole[f"layer{i}/head"][:, 6])


def test_replacing_one_layer_leaves_the_earlier_ones(model, tokens):
    """Ablation of a head: what is above it changes, by what the head had to say."""
    before, plain, _ = call(model, tokens, read=NAMES)
    ablate = {"layer1/head": lambda head_BTNE: head_BTNE.at[:, :, 2].set(0)}
    after, values, _ = call(model, tokens, read=NAMES, replace=ablate)
    for name in NAMES:  # what was read is what was there before
        same_bits(values[name], plain[name])
    assert not np.isclose(before, after, atol=1e-4).all(-1).any()
    lower = {"layer0/head": jnp.zeros_like}
    _, values, _ = call(model, tokens, read=NAMES, replace=lower)
    same_bits(values["layer0/head"], plain["layer0/head"])
    assert not np.isclose(values["layer1/head"], plain["layer1/head"], atol=1e-4).all()


def test_a_pattern_from_another_run(model, tokens):
    """Pattern-preserving ablation: frozen patterns give what they gave, and nothing else."""
    logits, first, _ = call(model, tokens, read=NAMES)
    frozen = {
        name: (lambda _, value=value: value)
        for name, value in first.items() if name.endswith("pattern")
    }  # fmt: skip
    oracles.assert_close(call(model, tokens, replace=frozen)[0], logits)
    other = (tokens + 1) % 11
    _, values, _ = call(model, other, read=("layer0/head",), replace=frozen)
    x_BTD = np.asarray(model.w_embed_VD[...])[other]
    normed = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + 1e-6)
    v_BSKE = np.einsum("bsd,dke->bske", normed, model.blocks[0].attention.heads.w_v_DKH[...])
    expected = np.einsum("bnts,bsne->btne", first["layer0/pattern"], v_BSKE.repeat(2, 2))
    oracles.assert_close(values["layer0/head"], expected)


def test_layers_that_do_not_exist(model, tokens):
    probe = Probe(read=("layer2/pattern", "pattern", "layer0/pattern"))
    jax.eval_shape(lambda tokens: model(tokens, probe=probe)[0], tokens)
    assert probe.missing() == ["layer2/pattern", "pattern"]


def test_gradients_pass_through_what_is_read(model):
    """Reading cuts nothing; replacing by a constant does."""
    positions = np.tile(np.arange(7, dtype=np.int32), (2, 1))
    x = np.random.default_rng().standard_normal((2, 7, 16)).astype("f")
    layer = model.blocks[0].attention

    @jax.jit
    def gradients(x):
        def gradient(probe):
            return jax.grad(lambda x: layer(x, positions, probe=probe)[0].sum())(x)

        read, cut = Probe(read=("pattern", "head")), Probe(replace={"head": jnp.zeros_like})
        return gradient(None), gradient(read), gradient(cut)

    plain, read, cut = gradients(x)
    oracles.assert_close(read, plain)
    assert np.asarray(plain).any() and not np.asarray(cut).any()
