"""Options and mistakes of the encoder-decoder: what it is made of, and what it refuses."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.memory import Memory
from attention.multi_head import MultiHead, MultiHeadCross, MultiHeadFull
from attention.reference import Dropout
from models.decoder import Decoder, DecoderOptions
from models.generate import generate
from models.pure import merge
from tests.encoder_decoders import (
    OPTIONS,
    PARAMS,
    SHAPE,
    SHAPES,
    B,
    D,
    S,
    T,
    V,
    graph_of,
    ids,
    model,
    padded,
    places,
    random,
    shapes,
)


def test_every_attention_draws_its_own_dropout(monkeypatch):
    """D1: also where encoder and decoder are given one key."""
    half = functools.partial(dataclasses.replace, dropout=0.5)
    graph = graph_of(
        dataclasses.replace(
            OPTIONS,
            layers=tuple(map(half, OPTIONS.layers)),
            encoder_layers=tuple(map(half, OPTIONS.encoder_layers)),
            cross=half(OPTIONS.cross),
        )
    )
    keys = []

    def noted(self, weights):
        keys.append(self.key)
        return weights

    monkeypatch.setattr(Dropout, "__call__", noted)

    @jax.jit
    def drawn(key):
        keys.clear()
        model = merge(graph, PARAMS)
        memory = model.encode(jnp.zeros((1, 2), jnp.int32), dropout_key=key)
        model(jnp.zeros((1, 2), jnp.int32), memory=memory, dropout_key=key)
        return [jax.random.key_data(key) for key in keys]

    assert len({tuple(key.tolist()) for key in drawn(jax.random.key(0))}) == 6


def test_parameters_and_layers_of_the_model():
    _, plain = shapes(lambda: Decoder(DecoderOptions(**SHAPE), nnx.Rngs(0)))
    assert plain.items() <= SHAPES.items()
    extra = {name.split("/")[0] for name in set(SHAPES) - set(plain)}
    assert extra == {"blocks", "encoder_blocks", "encoder_norm"}
    assert list(model().implementations(B, T)) == [
        "encoder0", "encoder1", "layer0", "layer0/cross", "layer1", "layer1/cross",
    ]  # fmt: skip


def memory_of(batch=B, length=S, **changes):
    index = np.ones((batch, length), np.int32)
    memory = Memory(np.zeros((batch, length, D), np.float32), places(0, length, batch), index)
    return dataclasses.replace(memory, **changes)


def change(**changes):
    return lambda: dataclasses.replace(OPTIONS, **changes)


LEARNED = types.SimpleNamespace(
    reads_source=True,
    options=types.SimpleNamespace(vocab_size=V, position="learned", max_length=4),
)
TOKENS = np.zeros((B, 2), np.int32)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (change(encoder_num_layers=0), r"^model\.encoder_num_layers must be at least 1, got 0$"),
        (change(encoder_layers=()), r"^model\.encoder_pattern must name at least one"),
        (change(encoder_layers=(MultiHeadFull(num_kv_heads=3),)), r"^attention\.full: num_kv_"),
        (change(cross=MultiHeadCross(num_kv_heads=3)), r"^attention\.cross: num_kv_heads must"),
        (change(cross=MultiHead()), r"^attention\.cross must be cross-attention, got"),
        (
            change(layers=(MultiHead(), MultiHeadCross())),
            r"^model\.pattern names 'window', which is cross-attention; every block",
        ),
        (change(encoder_layers=(MultiHeadCross(),)), r"^model\.encoder_pattern names 'full', "),
        (
            lambda: model().encode(ids(B, S), np.ones((B, T), np.int32)),
            r"^source_BS and its segments must be \(B, S\) alike, got \(3, 5\) and \(3, 7\)$",
        ),
        (lambda: model().encode(ids(B, S) + V), r"^source id \d+ is outside 0 … 16$"),
        (lambda: model()(TOKENS), r"^there is no memory to read; pass memory="),
        (
            lambda: model()(TOKENS, memory=memory_of(segments_BS=np.ones((B, 2), np.int32))),
            r"^memory\.segments_BS must be \(B, S\) = \(3, 5\) as its activations, got \(3, 2\)$",
        ),
        (
            lambda: model()(TOKENS, memory=memory_of(2)),
            r"^the memory has 2 rows for 3 rows of tokens$",
        ),
        (
            lambda: model()(
                TOKENS, places(0, 2), caches=model().init_caches(B, 4, 9), memory=memory_of()
            ),
            r"^the memory is \(B, S\) = \(3, 5\), but the caches are for \(3, 9\)$",
        ),
        (
            lambda: model()(TOKENS, places(0, 2), caches=model().init_caches(B, 4, S)),
            r"^the caches hold no memory, or only padding; pass memory=",
        ),
        (
            lambda: model()(TOKENS, caches=model().init_caches(B, 4, S), memory=memory_of()),
            r"^with caches, positions_BT must say",
        ),
        (lambda: generate(model(), TOKENS, 1), r"^an encoder-decoder needs source_BS, or caches"),
        (
            lambda: generate(model(), TOKENS, 1, source_segments_BS=padded()),
            r"^source_segments_BS is given, but source_BS is not$",
        ),
        (
            lambda: generate(model(), TOKENS, 1, caches=model().init_caches(B, 4, S)),
            r"^the caches hold no memory",
        ),
        (
            lambda: generate(model(), TOKENS, 1, source_BS=ids(2, S)),
            r"^source_BS and source_segments_BS must be \(B, S\) alike for 3 prompts, got \(2, 5\)",
        ),
        (
            lambda: generate(model(), TOKENS, 1, source_BS=ids(B, S) + V),
            r"^source id \d+ is outside 0 … 16$",
        ),
        (
            lambda: generate(LEARNED, TOKENS, 1, source_BS=ids(B, S)),
            r"^source position 4 is outside the 4 learned positions",
        ),
        (
            lambda: generate(
                types.SimpleNamespace(reads_source=False, options=LEARNED.options),
                TOKENS, 1, source_BS=ids(B, S),
            ),
            r"^a decoder reads no source; only an encoder-decoder does$",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_key_mask_of_the_length_of_the_queries_is_refused_by_the_layer():
    """Z1: a mask with T entries."""
    layer = model().blocks[0].cross
    memory = memory_of(segments_BS=np.ones((B, T), np.int32))
    with pytest.raises(ValueError, match=rf"segments_BS must be \(B, S\) = \({B}, {S}\)"):
        layer(random(B, T, D), places(0, T), memory=memory)


def test_a_memory_longer_than_its_cache_is_refused_by_the_layer():
    """It would take the place of the shorter one, and the cache would no longer be one type."""
    layer = model().blocks[0].cross
    with pytest.raises(
        ValueError, match=rf"= \({B}, {S}\), but the caches are for \({B}, {S - 1}\)"
    ):
        layer(random(B, T, D), places(0, T), memory=memory_of(), cache=layer.init_cache(B, S - 1))
