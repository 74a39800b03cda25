"""Probes: reading and replacing activations by name, in one layer and through a decoder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.context import Context
from attention.multi_head import MultiHead
from attention.probe import Probe
from models.decoder import Decoder, DecoderOptions
from tests import oracles
from tests.attending import same_bits


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


NAMES = [f"layer{i}/{name}" for i in (0, 1) for name in ("pattern", "head")]


def test_every_layer_can_be_read(model, tokens):
    """Shapes, causal zeros, and heads that are the pattern times the values of their group."""
    probe = Probe(read=NAMES)
    logits, _ = model(tokens, probe=probe)
    same_bits(logits, model(tokens)[0])
    assert sorted(probe.values) == sorted(NAMES) and probe.missing() == []
    for i in (0, 1):
        pattern_BNTS, head_BTNE = (probe.values[f"layer{i}/{n}"] for n in ("pattern", "head"))
        assert pattern_BNTS.shape == (2, 4, 7, 7) and head_BTNE.shape == (2, 7, 4, 4)
        assert not np.triu(pattern_BNTS, 1).any()
        np.testing.assert_allclose(pattern_BNTS.sum(-1), 1, atol=1e-6)
    x_BTD = np.asarray(model.w_embed_VD[...])[tokens]
    normed = np.asarray(model.blocks[0].attention_norm(jnp.asarray(x_BTD)))
    v_BSKE = np.einsum("bsd,dke->bske", normed, model.blocks[0].attention.heads.w_v_DKH[...])
    expected = np.einsum("bnts,bsne->btne", probe.values["layer0/pattern"], v_BSKE.repeat(2, 2))
    oracles.assert_close(probe.values["layer0/head"], expected)


def test_reading_does_not_change_what_runs(implementation):
    """Not one bit, whichever implementation computes the heads; replacing goes by the pattern."""
    context = Context(d_model=16, num_heads=4, head_width=4, implementation=implementation)
    layer = MultiHead(num_kv_heads=2).build(context, nnx.Rngs(0))
    x = np.random.default_rng().standard_normal((2, 70, 16)).astype("f")
    positions = np.tile(np.arange(70, dtype=np.int32), (2, 1))

    def call(probe):
        try:
            return np.asarray(layer(x, positions, probe=probe)[0])
        except NotImplementedError as error:
            pytest.skip(str(error))

    plain, probe = call(None), Probe(read=("pattern", "head"))
    same_bits(call(probe), plain)
    v_BSKE = np.einsum("bsd,dke->bske", x, layer.heads.w_v_DKH[...])
    expected = np.einsum("bnts,bsne->btne", probe.values["pattern"], v_BSKE.repeat(2, 2))
    oracles.assert_close(probe.values["head"], expected)
    kept = call(Probe(replace={"pattern": lambda pattern: pattern}))
    oracles.assert_close(kept, plain)


def test_reading_inside_jit(model, tokens):
    @jax.jit
    def read(tokens):
        probe = Probe(read=NAMES)
        logits, _ = model(tokens, probe=probe)
        return logits, probe.values

    logits, values = read(tokens)
    same_bits(logits, jax.jit(lambda tokens: model(tokens)[0])(tokens))
    assert sorted(values) == sorted(NAMES)


def test_reading_through_a_cache(model, tokens):
    """The pattern of one new token lies over the slots; what is empty has no weight."""
    caches = model.init_caches(2, 9)
    positions = np.tile(np.arange(7, dtype=np.int32), (2, 1))
    _, caches = model(tokens[:, :6], positions[:, :6], caches=caches)
    whole, one = Probe(read=NAMES), Probe(read=NAMES)
    model(tokens, probe=whole)
    model(tokens[:, 6:], positions[:, 6:], caches=caches, probe=one)
    for i in (0, 1):
        pattern = np.asarray(one.values[f"layer{i}/pattern"])
        assert pattern.shape == (2, 4, 1, 9) and not pattern[..., 7:].any()
        oracles.assert_close(pattern[:, :, 0, :7], whole.values[f"layer{i}/pattern"][:, :, 6])
        oracles.assert_close(
            one.values[f"layer{i}/head"][:, 0], whole.values[f"layer{i}/head"][:, 6]
        )


def test_replacing_one_layer_leaves_the_earlier_ones(model, tokens):
    """Ablation of a head: zero its output; the layers below do not know."""
    plain = Probe(read=NAMES)
    before, _ = model(tokens, probe=plain)
    probe = Probe(read=NAMES, replace={"layer1/head": lambda h: h.at[:, :, 2].set(0)})
    after, _ = model(tokens, probe=probe)
    for name in ("layer0/pattern", "layer0/head", "layer1/pattern", "layer1/head"):
        same_bits(probe.values[name], plain.values[name])
    block = model.blocks[1]
    x_BTD = np.asarray(plain.values["layer1/head"])[:, :, 2]
    lost = np.einsum("bte,ed->btd", x_BTD, block.attention.w_o_NHD[...][2])
    assert not np.isclose(before, after, atol=1e-4).all(-1).any() and lost.any()
    zeroed = Probe(replace={"layer0/head": jnp.zeros_like})
    model(tokens, probe=zeroed)


def test_a_pattern_from_another_run(model, tokens):
    """Pattern-preserving ablation: frozen patterns give what they gave."""
    first = Probe(read=NAMES)
    logits, _ = model(tokens, probe=first)
    frozen = {
        name: (lambda _, value=value: value)
        for name, value in first.values.items() if name.endswith("pattern")
    }  # fmt: skip
    again, _ = model(tokens, probe=Probe(replace=frozen))
    oracles.assert_close(again, logits)
    other = np.random.default_rng().integers(0, 11, (2, 7))
    probe = Probe(read=("layer0/head",), replace=frozen)
    model(other, probe=probe)
    values = np.asarray(model.w_embed_VD[...])[other]
    normed = np.asarray(model.blocks[0].attention_norm(jnp.asarray(values)))
    v_BSKE = np.einsum("bsd,dke->bske", normed, model.blocks[0].attention.heads.w_v_DKH[...])
    expected = np.einsum("bnts,bsne->btne", first.values["layer0/pattern"], v_BSKE.repeat(2, 2))
    oracles.assert_close(probe.values["layer0/head"], expected)


def test_layers_that_do_not_exist(model, tokens):
    probe = Probe(read=("layer2/pattern", "pattern", "layer0/pattern"))
    model(tokens, probe=probe)
    assert probe.missing() == ["layer2/pattern", "pattern"]


def test_gradients_pass_through_what_is_read(model, tokens):
    """Reading cuts nothing; replacing by a constant does."""

    def loss(x_BTD, probe):
        layer = model.blocks[0].attention
        positions = np.tile(np.arange(7, dtype=np.int32), (2, 1))
        return layer(x_BTD, positions, probe=probe)[0].sum()

    x = np.random.default_rng().standard_normal((2, 7, 16)).astype("f")
    plain = jax.grad(loss)(x, None)
    oracles.assert_close(jax.grad(loss)(x, Probe(read=("pattern", "head"))), plain)
    assert not jax.grad(loss)(x, Probe(replace={"head": jnp.zeros_like})).any()
