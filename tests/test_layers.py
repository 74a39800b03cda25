"""Every attention variant through the contract; softmax attention against float64 NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention import VARIANTS as REGISTERED
from attention.additive import Additive
from attention.context import Context
from attention.latent import Latent
from attention.linear import Linear
from attention.multi_head import (
    MultiHead,
    MultiHeadFull,
    MultiHeadLongformer,
    MultiHeadPrefix,
    MultiHeadStreaming,
    MultiHeadWindow,
)
from attention.probe import Probe
from models.decoder import Decoder, DecoderOptions
from models.generate import generate
from models.pure import merge, split
from tests import contract, oracles
from tests.oracles import assert_close
from tests.subject import B, D, T, positions_of, random, subject
from tests.variants import VARIANTS

# One of every kind of cache, with the options that ask most of it; the others are broad.
ALWAYS = {"gqa", "longformer global", "cross", "linear", "mla query latent"}


@pytest.mark.parametrize(("check", "variant"), contract.cases(VARIANTS, ALWAYS))
def test_contract(check, variant):
    check(variant)


def test_every_registered_variant_is_here():
    """Whoever adds a variant to ``attention.VARIANTS`` adds a line to ``tests.variants``."""
    assert set(REGISTERED.values()) <= {type(variant.options) for variant in VARIANTS}


@pytest.mark.broad
def test_generation_through_every_variant():
    """One decoder of all variants that need nothing special, as a hybrid pattern."""
    chosen = [v for v in VARIANTS if not v.model and not v.exempt]
    assert len(chosen) >= 6
    options = DecoderOptions(
        vocab_size=11, num_layers=len(chosen), d_model=16, num_heads=4, mlp="none",
        pattern=tuple(v.name for v in chosen), layers=tuple(v.options for v in chosen),
    )  # fmt: skip
    model = Decoder(options, nnx.Rngs(0))
    prompt = np.random.default_rng().integers(0, 11, (2, 5))
    new = np.asarray(generate(model, prompt, 9)[0])
    tokens = np.concatenate([prompt, new], axis=1)
    graph, params = split(model)
    call = jax.jit(lambda p, t: merge(graph, p)(t)[0])
    logits = np.asarray(call(params, tokens))[:, 4:-1]
    taken = np.take_along_axis(logits, new[..., None], axis=-1)[..., 0]
    # Of two logits that are equal to rounding either may be taken.
    np.testing.assert_allclose(taken, logits.max(-1), rtol=0, atol=1e-4)


# --- softmax attention against NumPy -------------------------------------------------------------

SEES = {
    "mha": lambda i, j: j <= i,
    "gqa": lambda i, j: j <= i,
    "mqa": lambda i, j: j <= i,
    "smeared": lambda i, j: j <= i,
    "window": lambda i, j: (j <= i) & (j > i - 2),
    "streaming": lambda i, j: (j <= i) & ((j > i - 4) | (j < 2)),
    "longformer": lambda i, j: (j <= i) & ((j > i - 2) | (j < 2) | (i < 2)),
    "masked": lambda i, j: (j <= i) & ((j > i - 2) | (j < 1)) & (j > i - 5),
    "full": lambda i, j: j == j,
    "longformer encoder": lambda i, j: (abs(i - j) < 2) | (j < 1) | (i < 1),
    "prefix": lambda i, j: (j <= i) | ((i < 3) & (j < 3)),
}


def rotated(x, positions, width, interleaved):
    """Pairs of channels as complex numbers, turned by position · base^(−2i/width)."""
    x = np.array(x)
    first, second = (
        (slice(0, width, 2), slice(1, width, 2)) if interleaved
        else (slice(0, width // 2), slice(width // 2, width))
    )  # fmt: skip
    angle = positions[..., None] * 10_000.0 ** (-np.arange(0, width, 2) / width)
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angle)[:, :, None]
    x[..., first], x[..., second] = turned.real, turned.imag
    return x


def multi_head(options, context, params, x, positions, visible) -> np.ndarray:
    """The layer in float64, step by step from its formulas."""
    w = {name.rsplit("/", 1)[-1]: np.asarray(p, np.float64) for name, p in params.items()}
    norms = {name.split("/")[-2]: np.asarray(p) for name, p in params.items() if "gain" in name}
    q, k, v = (np.einsum("btd,dnh->btnh", x, w[name]) for name in ("w_q_DNH", "w_k_DKH", "w_v_DKH"))
    if options.bias:
        q, k, v = q + w["q_NH"], k + w["k_KH"], v + w["v_KH"]
    if options.smeared_keys:
        share = 1 / (1 + np.exp(-w["alpha_K"]))[:, None]
        raw = k.copy()
        for b, t in np.argwhere(positions > 0):
            k[b, t] = share * raw[b, t] + (1 - share) * raw[b, t - 1]
    if options.qk_norm:
        q, k = (
            a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * norms[name]
            for a, name in ((q, "q_norm"), (k, "k_norm"))
        )
    if context.rotary:
        width = options.rope_width or context.head_width
        inter = context.rope_layout == "interleaved"
        q, k = (rotated(a, positions, width, inter) for a in (q, k))
    sink = w["sink_N"] if options.learned_sink else None
    heads = oracles.attention(q, k, v, visible, sink=sink, scale=options.scale).out
    y = np.einsum("btne,ned->btd", heads, w["w_o_NHD"])
    return y + w["bias_D"] if options.bias else y


@pytest.mark.parametrize("name", SEES)
def test_against_numpy(name):
    """Two documents and padding: every option of softmax attention, and every mask."""
    variant = next(v for v in VARIANTS if v.name == name)
    s = subject(variant)
    segments = np.array([[1] * 7 + [2] * 4 + [0] * 2, [1] * 13, [0] * 4 + [3] * 9], np.int32)
    x, positions = random(B, T, D), positions_of(segments)
    visible = oracles.visible_pairs(
        SEES[name], B, T, T, q_index=positions, k_index=positions,
        q_segments=segments, k_segments=segments,
    )  # fmt: skip
    context = s.options.context()
    expected = multi_head(variant.options, context, s.params, x, positions, visible)
    got = s.run(x, segments)["y"]
    valid = segments != 0
    assert_close(got[valid], expected[valid])


# --- claims --------------------------------------------------------------------------------------


def layer(options, seed=0, **context):
    shape = {"d_model": 16, "num_heads": 2, "head_width": 8} | context
    return options.build(Context(**shape), nnx.Rngs(seed))


def call(layer, x, positions=None, probe_name=None):
    """Output, and the activation of that name."""
    graph, params = split(layer)
    positions = np.arange(x.shape[1], dtype=np.int32)[None] if positions is None else positions

    @jax.jit
    def run(params, x, positions):
        probe = Probe(read=(probe_name,) if probe_name else ())
        y, _ = merge(graph, params)(x, positions, probe=probe)
        return y, probe.values.get(probe_name, 0)

    return jax.tree.map(np.asarray, run(params, x, positions))


def test_relations_have_a_direction(record_property):
    """Claim 3: scores are symmetric where W_Q = W_K, and else they are not.

    log p_ij − log p_ji of symmetric scores is a difference of potentials: it adds up to 0 around
    every triangle.
    """
    x = random(1, 5, 16)
    full = layer(MultiHeadFull(), rotary=False)
    twin = layer(MultiHeadFull(), rotary=False)
    twin.heads.w_k_DKH[...] = twin.heads.w_q_DNH[...]
    for model, symmetric, name in ((full, False, "W_Q ≠ W_K"), (twin, True, "W_Q = W_K")):
        log = np.log(call(model, x, probe_name="pattern")[1][0].astype(np.float64))
        skew = log - log.transpose(0, 2, 1)
        around = skew[:, 0, 1] + skew[:, 1, 2] + skew[:, 2, 0]
        record_property("figures", f"{name}: asymmetry {np.abs(around).max():.1g}")
        assert (np.abs(around) < 1e-4).all() == symmetric


def test_every_token_sees_every_token(record_property):
    """Claim 7: no weight of a bidirectional layer is 0; half of a causal one's are."""
    x = random(1, 6, 16)
    full = call(layer(MultiHeadFull()), x, probe_name="pattern")[1]
    causal = call(layer(MultiHead()), x, probe_name="pattern")[1]
    seen = (f"{(weights > 0).sum()} of {weights.size}" for weights in (full, causal))
    record_property("figures", "weights above 0: {}; causal {}".format(*seen))
    assert (full > 0).all()
    np.testing.assert_array_equal(causal > 0, np.broadcast_to(np.tri(6, dtype=bool), (1, 2, 6, 6)))


def test_shuffling_tokens_shuffles_rows():
    """Claim 11: without positions and order no more happens; a causal mask is an order."""
    x, order = random(1, 7, 16), np.array([3, 0, 6, 2, 5, 1, 4])
    for options, context, same in (
        (MultiHeadFull(), {"rotary": False}, True),
        (MultiHeadFull(), {}, False),
        (MultiHead(), {"rotary": False}, False),
    ):
        model = layer(options, **context)
        y, shuffled = call(model, x)[0], call(model, x[:, order])[0]
        assert np.allclose(shuffled, y[:, order], atol=1e-5) == same


@pytest.mark.parametrize("layout", ["half_split", "interleaved"])
def test_rotation(layout):
    """Claim 12: only distances matter, nothing is trained, and values are not rotated."""
    x, places = random(1, 6, 16), np.array([[0, 2, 3, 7, 8, 20]], np.int32)
    model, bare = layer(MultiHead(), rope_layout=layout), layer(MultiHead(), rotary=False)
    assert {k: v.shape for k, v in split(model)[1].items()} == {
        k: v.shape for k, v in split(bare)[1].items()
    }
    y, pattern = call(model, x, places, "pattern")
    moved, again = call(model, x, places + 100, "pattern")
    assert_close(again, pattern)
    assert_close(moved, y)
    assert not np.allclose(call(model, x, places * 2, "pattern")[1], pattern, atol=1e-3)
    # The first token sees itself alone: what comes out is its value.
    same = call(bare, x, places)[0]
    np.testing.assert_allclose(moved[:, 0], same[:, 0], atol=1e-6)


@pytest.mark.parametrize("options", [
    MultiHead(smeared_keys=True), MultiHeadWindow(window=3, smeared_keys=True),
    Linear(smeared_keys=True), Latent(latent_rank=5, smeared_keys=True),
], ids=str)  # fmt: skip
def test_the_first_token_is_unchanged_wherever_it_stands(options):
    """R1, with smeared keys: 1000 added to all positions changes nothing."""
    x, places = random(1, 5, 16), np.arange(5, dtype=np.int32)[None]
    # Feature maps see the rotation itself, so that of linear attention is left out.
    model = layer(options, rotary=not isinstance(options, Linear))
    y, moved = (call(model, x, p)[0] for p in (places, places + 1000))
    np.testing.assert_allclose(moved, y, atol=1e-4)


def test_heads_cost_no_parameters(record_property):
    """Claim 13: 4 d² in all, for one head of width d or many of width d/h."""
    for num_heads in (1, 2, 8):
        params = split(layer(MultiHead(), num_heads=num_heads, head_width=16 // num_heads))[1]
        count = sum(p.size for p in params.values())
        record_property("figures", f"d = 16, h = {num_heads}: {count:,}")
        assert count == 4 * 16**2


def test_shared_heads_are_repeated_ones():
    """Claim 24, G1: GQA is MHA whose key-value heads are equal within a group."""
    x = random(2, 6, 16)
    positions = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    for K in (1, 2):
        shape = {"num_heads": 4, "head_width": 4}
        shared, full = layer(MultiHead(num_kv_heads=K), **shape), layer(MultiHead(), **shape)
        for name in ("w_k_DKH", "w_v_DKH"):
            repeated = jnp.repeat(getattr(shared.heads, name)[...], 4 // K, axis=1)
            getattr(full.heads, name)[...] = repeated
        full.heads.w_q_DNH[...] = shared.heads.w_q_DNH[...]
        full.w_o_NHD[...] = shared.w_o_NHD[...]
        assert_close(call(shared, x, positions)[0], call(full, x, positions)[0])


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.name in SEES], ids=lambda v: v.name)
def test_rates_of_dropout(variant):
    """D1: each layer refuses what is no rate."""
    context = subject(variant).options.context()
    for rate in (-0.5, float("nan"), 1.0, 1.5):
        with pytest.raises(ValueError, match=f"dropout must be at least 0 and below 1, got {rate}"):
            dataclasses.replace(variant.options, dropout=rate).build(context, nnx.Rngs(0))


# --- positions and padding between tokens --------------------------------------------------------


@pytest.mark.parametrize("options", [
    MultiHeadStreaming(window=2, first=1), MultiHead(smeared_keys=True),
    pytest.param(MultiHeadWindow(window=2), marks=pytest.mark.broad),
    pytest.param(Additive(mask_expression="Causal() & Window(2)"), marks=pytest.mark.broad),
], ids=str)  # fmt: skip
def test_padding_between_tokens(options):
    """Padding is irrelevant wherever it stands, in training as through a cache."""
    context = {"rotary": False} if isinstance(options, Additive) else {}
    model, x = layer(options, **context), random(1, 5, 16)
    segments, there = np.array([[1, 0, 0, 1, 1]], np.int32), [0, 3, 4]
    alone = call(model, x[:, there])[0]
    for cache in (None, model.init_cache(1, 8)):
        y, _ = model(x, positions_of(segments), segments_BT=segments, cache=cache)
        assert_close(y[:, there], alone, what="training" if cache is None else "cache")


@pytest.mark.parametrize(
    "options", [MultiHeadStreaming(window=2, first=1), MultiHeadPrefix(prefix=3)], ids=str
)
def test_masks_count_from_position_0(options):
    """The positions that are given decide, with segments as through a cache."""
    model, x = layer(options), random(1, 5, 16)
    places = np.arange(3, 8, dtype=np.int32)[None]
    told = model(x, places, segments_BT=np.ones((1, 5), np.int32))[0]
    cached, _ = model(x, places, cache=model.init_cache(1, 20))
    assert_close(cached, told, what="cache")
    bare = call(model, x, places)[0]
    from_0 = call(model, x, places - 3)[0]
    assert_close(bare, from_0, what="told nothing, a mask counts from the first token")
    assert np.abs(bare - told).max() > 1e-3


def test_a_decoder_heeds_the_positions_it_is_given():
    """Also those that do not start at 0, which a streaming mask tells apart."""
    options = DecoderOptions(
        vocab_size=11, num_layers=2, d_model=16, num_heads=4, mlp="none", pattern=("streaming",),
        layers=(MultiHeadStreaming(window=2, first=1),),
    )  # fmt: skip
    model, tokens = Decoder(options, nnx.Rngs(0)), np.random.default_rng().integers(0, 11, (1, 6))
    places = np.arange(2, 8, dtype=np.int32)[None]
    cached, _ = model(tokens, places, caches=model.init_caches(1, 20))
    given = model(tokens, places)[0]
    assert_close(given, cached, what="cache")
    assert np.abs(given - model(tokens)[0]).max() > 1e-3


@pytest.mark.parametrize("options", [
    MultiHead(smeared_keys=True),
    pytest.param(Linear(smeared_keys=True), marks=pytest.mark.broad),
    pytest.param(Latent(latent_rank=5, smeared_keys=True), marks=pytest.mark.broad),
    pytest.param(Additive(smeared_keys=True), marks=pytest.mark.broad),
], ids=str)  # fmt: skip
def test_smeared_keys_cannot_go_back(options):
    """The raw key before the token is gone: refused, where a wrong key would be made silently."""
    context = {"rotary": False} if isinstance(options, Additive) else {}
    model, x = layer(options, **context), random(1, 3, 16)
    places = np.arange(5, 8, dtype=np.int32)[None]
    _, cache = model(x, places, cache=model.init_cache(1, 12))
    with pytest.raises(ValueError, match="cannot go back from position 7 to 6: the raw key"):
        model(x[:, :1], np.full((1, 1), 6, np.int32), cache=cache)
    again, _ = model(x, places - 5, cache=cache)
    assert_close(again, model(x, places - 5, cache=cache.reset())[0])
    onward, _ = model(x[:, :1], np.full((1, 1), 9, np.int32), cache=cache)
    assert np.isfinite(onward).all()


@pytest.mark.parametrize(("options", "why"), [
    (MultiHeadWindow(window=3), "the ring has let go"), (Linear(), "its state is a sum"),
], ids=str)  # fmt: skip
def test_what_is_forgotten_cannot_be_gone_back_to(options, why):
    """C2: refused, where another sequence would be continued silently."""
    model, x = layer(options), random(1, 10, 16)
    places = np.arange(10, dtype=np.int32)[None]
    _, cache = model(x, places, cache=model.init_cache(1, 20))
    with pytest.raises(ValueError, match=f"cannot go back from position [89] to 5: {why}"):
        model(x[:, 5:8], places[:, 5:8], cache=cache)
    again, _ = model(x[:, :2], places[:, :2], cache=cache)
    assert_close(again, model(x[:, :2], places[:, :2], cache=model.init_cache(1, 20))[0])
    onward, _ = model(x[:, :1], places[:, :1] + 10, cache=cache)
    whole = call(model, np.concatenate([x, x[:, :1]], axis=1))[0]
    assert_close(onward, whole[:, -1:])


def test_a_ring_that_has_forgotten_nothing_can_go_back():
    model, x = layer(MultiHeadWindow(window=6)), random(1, 5, 16)
    places = np.arange(5, dtype=np.int32)[None]
    whole, cache = model(x, places, cache=model.init_cache(1, 20))
    again, _ = model(x[:, 2:], places[:, 2:], cache=cache)
    assert_close(again, whole[:, 2:])


def test_a_prefix_must_come_in_one_call():
    model, x = layer(MultiHeadPrefix(prefix=4)), random(1, 6, 16)
    places = np.arange(6, dtype=np.int32)[None]
    _, cache = model(x[:, :3], places[:, :3], cache=model.init_cache(1, 8))
    with pytest.raises(ValueError, match=r"first 4 positions .* begin at position 3"):
        model(x[:, 3:], places[:, 3:], cache=cache)


def test_global_tokens_are_counted_as_the_mask_counts():
    """Told nothing else, both take the first token for position 0."""
    options = MultiHeadLongformer(window=2, num_global=2, global_projections=True)
    model, x = layer(options, rotary=False), random(1, 6, 16)
    places = np.arange(6, dtype=np.int32)[None]
    assert_close(call(model, x, places + 100)[0], call(model, x, places)[0])
