"""Ablation and pruning on models whose heads are made by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis import ablation
from analysis.ablation import Ablation, least_important_first, random_order, without
from attention.probe import Probe
from models import pure
from tasks import Batch
from tests import decoders

V = 12


def batch(rows=3, T=6, seed=0):
    tokens = np.random.default_rng(seed).integers(4, V, (rows, T + 1))
    weights = np.ones((rows, T), np.float32)
    weights[0, 2:4] = 0
    return Batch(jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:]), jnp.asarray(weights))


@pytest.fixture(
    scope="module",
    params=["mha", *(pytest.param(name, marks=pytest.mark.broad) for name in ("mla", "linear"))],
)
def model(request):
    return decoders.decoder(request.param, vocab_size=V, num_layers=2)


def by_hand(logits_BTV, data):
    """Loss, accuracy and loss by position in NumPy; every position is counted in some row."""
    logits = np.asarray(logits_BTV, np.float64)
    targets, weights = np.asarray(data.targets_BT), np.asarray(data.weights_BT)
    nll = (
        np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    )
    right = (logits.argmax(-1) == targets) * weights
    total = weights.sum()
    return (
        (nll * weights).sum() / total,
        right.sum() / total,
        (nll * weights).sum(0) / weights.sum(0),
    )


def call(model, data, *, read=(), **replace):
    """Logits of the batch, and what was read; compiled, which is cheaper than step by step."""
    graph, params = pure.split(model)
    replace = {name.replace("_", "/"): change for name, change in replace.items()}

    @jax.jit
    def run(params, tokens):
        probe = Probe(read=read, replace=replace)
        return pure.merge(graph, params)(tokens, probe=probe)[0], probe.values

    return run(params, data.tokens_BT)


def assert_result(found, logits_BTV, data):
    loss, accuracy, loss_T = by_hand(logits_BTV, data)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert found.accuracy == pytest.approx(accuracy)
    np.testing.assert_allclose(found.loss_T, loss_T, rtol=1e-4)


def test_all_heads_kept_is_the_model(model):
    data = batch()
    ablated = Ablation(model, data)
    logits, _ = call(model, data)
    for way in (ablated.full, ablated.pattern_preserving):
        assert_result(way(np.ones((2, 4))), logits, data)


def test_a_full_ablation_is_a_head_of_zeros(model):
    data = batch()
    logits, _ = call(model, data, layer0_head=lambda head: head.at[:, :, 2].set(0))
    assert_result(Ablation(model, data).full(without((2, 4), [(0, 2)])), logits, data)


def test_a_pattern_preserving_ablation_moves_no_pattern(model):
    """Without a head of layer 0, layer 1 sees other values by the patterns it had before."""
    data = batch()
    _, values = call(model, data, read=("layer1/pattern",))
    logits, _ = call(
        model,
        data,
        layer0_head=lambda head: head.at[:, :, 2].set(0),
        layer1_pattern=lambda _: values["layer1/pattern"],
    )
    ablated = Ablation(model, data)
    gate = without((2, 4), [(0, 2)])
    assert_result(ablated.pattern_preserving(gate), logits, data)
    assert abs(ablated.pattern_preserving(gate).loss - ablated.full(gate).loss) > 1e-5


def test_patterns_of_global_tokens_are_preserved_too():
    """Longformer with projections of its own for global tokens has two patterns in a layer."""
    model = decoders.decoder(
        "longformer", vocab_size=V, num_layers=2, num_global=2, global_projections=True
    )
    data, names = batch(), ("layer1/pattern", "layer1/global/pattern")
    _, values = call(model, data, read=names)
    patterns = {name: lambda _, name=name: values[name] for name in names}
    logits, _ = call(model, data, layer0_head=lambda head: head.at[:, :, 2].set(0), **patterns)
    gate = without((2, 4), [(0, 2)])
    assert_result(Ablation(model, data).pattern_preserving(gate), logits, data)


def test_in_the_last_layer_both_are_the_same(model):
    ablated, gate = Ablation(model, batch()), without((2, 4), [(1, 0), (1, 3)])
    assert ablated.full(gate).loss == pytest.approx(ablated.pattern_preserving(gate).loss, rel=1e-5)


def test_importance_is_the_gradient_of_the_gate(model):
    """Central differences of each sequence's loss, by the probe."""
    data = batch(rows=2)

    graph, params = pure.split(model)

    @jax.jit
    def logits_of(params, gate_LN):
        cut = {
            f"layer{i}/head": lambda head, i=i: head * gate_LN[i][None, None, :, None]
            for i in range(2)
        }
        return pure.merge(graph, params)(data.tokens_BT, probe=Probe(replace=cut))[0]

    def losses(layer, head, gate):
        logits = logits_of(params, np.where(without((2, 4), [(layer, head)]), 1, np.float32(gate)))
        rows = [
            Batch(data.tokens_BT[b, None], data.targets_BT[b, None], data.weights_BT[b, None])
            for b in range(2)
        ]
        with np.errstate(invalid="ignore"):  # a position that this row does not count
            return np.array([by_hand(logits[b, None], row)[0] for b, row in enumerate(rows)])

    expected = [
        [np.abs(losses(i, n, 1.05) - losses(i, n, 0.95)).mean() / 0.1 for n in range(4)]
        for i in range(2)
    ]
    np.testing.assert_allclose(Ablation(model, data).importance(), expected, rtol=0.02, atol=2e-5)


# --- Pruning --------------------------------------------------------------------------------------


@pytest.fixture
def redundant():
    """One layer of which head 1 alone does something: it moves the head that reads it."""
    made = decoders.decoder("mha", vocab_size=V)
    attention = made.blocks[0].attention
    attention.w_o_NHD[...] = attention.w_o_NHD[...] * jnp.asarray([0.0, 9, 0, 0.01])[:, None, None]
    return made


def test_heads_that_do_nothing_go_first(redundant):
    importance = Ablation(redundant, batch()).importance()
    assert importance[0, 0] == importance[0, 2] == 0
    assert importance[0, 1] > 20 * importance[0, 3] > 0
    assert least_important_first(importance) == [(0, 0), (0, 2), (0, 3), (0, 1)]


def test_pruning_removes_one_head_more_each_time(redundant):
    ablated = Ablation(redundant, batch())
    order = [(0, 0), (0, 2), (0, 3), (0, 1)]
    losses = [found.loss for found in ablated.prune(order)]
    assert len(losses) == 5
    assert losses[0] == losses[1] == losses[2]
    assert abs(losses[3] - losses[0]) < 0.02 < abs(losses[4] - losses[0])
    assert losses[4] == ablated.full(np.zeros((1, 4))).loss
    assert losses[3] == ablated.full(without((1, 4), order[:3])).loss


def test_orders():
    assert least_important_first(np.array([[3.0, 1], [0, 1]])) == [(1, 0), (0, 1), (0, 0), (1, 1)]
    # A layer whose gradients are all a hundred times as large loses no head later for that.
    within = np.array([[3.0, 4], [1, 2]])
    assert least_important_first(within) == least_important_first(within * [[100], [1]])
    assert least_important_first(np.zeros((2, 1))) == [(0, 0), (1, 0)]
    first, again, other = (random_order((2, 3), seed) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(first) == sorted(other) == list(np.ndindex(2, 3))


def test_wrong_gates_and_orders_are_refused(redundant):
    ablated = Ablation(redundant, batch())
    with pytest.raises(ValueError, match=r"one a head, \(1, 4\), got \(2, 4\)"):
        ablated.full(np.ones((2, 4)))
    with pytest.raises(ValueError, match=r"each head of \(1, 4\) once"):
        ablated.prune([(0, 0), (0, 0), (0, 1), (0, 2)])
    assert ablation.without((1, 2), []).tolist() == [[1, 1]]
