"""The same weights under other masks, far past the training length."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from analysis import streaming
from analysis.cache_positions import StreamingInCache
from attention.multi_head import MultiHeadStreaming, MultiHeadWindow
from models import pure
from tasks import Induction
from tests import decoders

TASK = Induction(vocab_size=32, length=16)


@pytest.fixture(scope="module")
def model():
    return decoders.decoder("smeared", vocab_size=32)


def test_arms_are_the_same_weights_under_other_masks(model):
    found = streaming.arms(model.options, 8, (0, 2))
    assert [arm.name for arm in found] == [
        "dense", "window 8", "window 6 + 2 first", "window 6 + 2 first, as in the text",
    ]  # fmt: skip
    dense, window, in_cache, sinks = found
    assert dense.options == model.options and dense.kept is None
    assert window.options.layers == (MultiHeadWindow(window=8, smeared_keys=True),)
    assert sinks.options.layers == (MultiHeadStreaming(window=6, first=2, smeared_keys=True),)
    assert in_cache.options.layers == (StreamingInCache(window=6, first=2, smeared_keys=True),)
    params = pure.split(model)[1]
    for arm in found:
        assert pure.split(arm.options.build(nnx.Rngs(0)))[1].keys() == params.keys()
        if arm.kept is not None:
            kept = arm.options.layers[0].mask().retention()
            assert len(kept.pinned) + kept.last == arm.kept


def test_losses_are_those_of_the_masked_model(model):
    """Inside the window all arms agree; past it each is the model with that mask."""
    params = pure.split(model)[1]
    spans, losses = streaming.table(
        model.options, params, TASK, kept=8, firsts=(0, 2), multiple=4, sequences=6, seed=3
    )
    assert spans == [(0, 16), (16, 32), (32, 64)]
    dense, window, _, sinks = losses.values()
    assert dense.shape == (64,)
    counted = ~np.isnan(dense)
    batch = TASK.at_length(64).sample(streaming.evaluation_key(3, 2**31 + 64), 6)
    for name, arm in zip(losses, streaming.arms(model.options, 8, (0, 2)), strict=True):
        graph = pure.graph_of(arm.options)
        run = jax.jit(lambda p, graph=graph: pure.merge(graph, p)(batch.tokens_BT)[0])
        logits = run(params)
        nll = -np.take_along_axis(
            np.asarray(jax.nn.log_softmax(logits)), np.asarray(batch.targets_BT)[..., None], -1
        )[..., 0]
        weights = np.asarray(batch.weights_BT)
        expected = (nll * weights).sum(0)[counted] / weights.sum(0)[counted]
        np.testing.assert_allclose(losses[name][counted], expected, rtol=1e-4)
    assert not np.allclose(dense[counted], window[counted], atol=1e-3)
    assert not np.allclose(sinks[counted], window[counted], atol=1e-3)


@pytest.mark.broad
def test_positions_in_the_cache_are_those_of_what_it_holds():
    """In one layer the last of many tokens sees just what it sees of the cache's content alone."""
    model = decoders.decoder("mha", vocab_size=32)
    params = pure.split(model)[1]
    tokens = np.random.default_rng(0).integers(4, 32, (3, 40)).astype(np.int32)
    arm = streaming.arms(model.options, 8, (2,))[1]
    run = jax.jit(lambda p: pure.merge(pure.graph_of(arm.options), p)(tokens)[0])
    streamed = run(params)
    for end in (5, 8, 9, 20, 40):
        content = tokens[:, :end]
        if end > 8:
            content = np.concatenate([tokens[:, :2], tokens[:, end - 6 : end]], 1)
        alone, _ = model(content)
        np.testing.assert_allclose(streamed[:, end - 1], alone[:, -1], atol=1e-5)


def test_spans_double():
    assert streaming.spans(128, 1000) == [(0, 128), (128, 256), (256, 512), (512, 1000)]
    assert streaming.spans(128, 128) == [(0, 128)]


def test_the_mass_on_the_first_token(model):
    """Of zero queries attention is uniform: the mean of 1/(i + 1) over i = 1 … T − 1."""
    graph, params = pure.split(model)
    params = params | {k: 0 * v for k, v in params.items() if k.endswith("w_q_DNH")}
    found, none = streaming.sink_mass(pure.merge(graph, params), TASK, 0, 4)
    assert found.shape == (1, 4)
    np.testing.assert_allclose(found, np.mean([1 / (i + 1) for i in range(1, 16)]), rtol=1e-5)
    np.testing.assert_allclose(none, 0, atol=1e-6)


def test_the_mass_on_a_learned_sink():
    """Of zero queries and a sink of 0 it is one of i + 2 equal weights."""
    graph, params = pure.split(decoders.decoder("mha", vocab_size=32, learned_sink=True))
    params = params | {k: 0 * v for k, v in params.items() if k.endswith(("w_q_DNH", "sink_N"))}
    first, none = streaming.sink_mass(pure.merge(graph, params), TASK, 0, 4)
    expected = np.mean([1 / (i + 2) for i in range(16)])
    np.testing.assert_allclose(none, expected, rtol=1e-5)
    np.testing.assert_allclose(first, np.mean([1 / (i + 2) for i in range(1, 16)]), rtol=1e-5)


def test_models_that_cannot_go_on_are_refused():
    with pytest.raises(ValueError, match="the masks of causal multi-head attention"):
        streaming.arms(decoders.decoder("window", vocab_size=32).options, 8, (0,))
    with pytest.raises(ValueError, match="first tokens must be from 0 to 7, got 8"):
        streaming.arms(decoders.decoder("mha", vocab_size=32).options, 8, (8,))
