"""What is left of a model without some heads, on ablations and models made by hand."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest

from analysis import emergence_table, head_scores, watch
from models.pure import merge, split
from sweeps import emergence_measures
from sweeps.emergence_measures import (
    HeadsRemoved,
    LateLessEarly,
    Pruning,
    copied,
    emergence,
    free_share,
)
from tasks import evaluation_key
from tests import tiny
from training import loop
from training.objective import LOSS_ON
from training.restore import restore
from training.run_folder import RunFolder
from training.settings import OptionError, settings

T = 64


class ByHand:
    """An ablation of 2 × 3 heads of which each has a worth in context and in accuracy.

    In-context learning is the sum of the worths kept. Layer 1 needs what layer 0 does by patterns
    alone, so that it is lost fully and kept where patterns are preserved.
    """

    shape = (2, 3)
    worth_LN = np.array([[0.0, 0.0, 0.0], [3.0, 1.0, 0.0]])
    previous = (0, 1)

    def full(self, gate_LN):
        gate_LN = np.asarray(gate_LN)
        return self._result(gate_LN, gate_LN[self.previous])

    def pattern_preserving(self, gate_LN):
        return self._result(np.asarray(gate_LN), 1.0)

    def prune(self, order):
        gate_LN, found = np.ones(self.shape), [self.full(np.ones(self.shape))]
        for head in order:
            gate_LN[head] = 0
            found.append(self.full(gate_LN))
        return found

    importance_LN = np.array([[0.0, 5.0, 0.1], [4.0, 1.0, 0.2]])

    def _result(self, gate_LN, share):
        kept = float((gate_LN * self.worth_LN).sum() * share)
        loss_T = np.full(T, 4.0)
        loss_T[62] -= kept  # late in the sequence: token 500 of 512
        return types.SimpleNamespace(loss_T=loss_T, accuracy=kept / 4)


def test_the_share_of_learning_that_is_kept():
    among = {"random": [(0, 0), (0, 1), (0, 2), (1, 2)], "idle": [(0, 0), (0, 2), (1, 2)]}
    found = HeadsRemoved(draws=400).kept(ByHand(), [(1, 0)], among)
    assert found["kept/induction_full"] == pytest.approx(0.25)
    assert found["kept/induction_preserving"] == pytest.approx(0.25)
    # One draw in four takes the previous-token head, and with it everything.
    assert found["kept/random_full"] == pytest.approx(0.75, abs=0.06)
    assert found["kept/random_preserving"] == pytest.approx(1)
    assert found["kept/idle_full"] == found["kept/idle_preserving"] == pytest.approx(1)


def test_where_too_few_heads_are_left_all_of_them_go():
    found = HeadsRemoved().kept(ByHand(), [(1, 0), (1, 1)], {"random": [(0, 1)], "idle": []})
    assert found["kept/induction_full"] == pytest.approx(0)
    assert found["kept/random_full"] == pytest.approx(0)
    assert found["kept/random_preserving"] == pytest.approx(1)
    assert not any(name.startswith("kept/idle") for name in found)


def test_pruning_by_importance_and_at_random():
    found = Pruning(orders=200).prune(ByHand(), ByHand.importance_LN)
    by_importance = [found[f"pruned/importance@{share}"] for share in (0, 17, 33, 50, 67, 83, 100)]
    assert by_importance == pytest.approx([1, 1, 1, 1, 0.75, 0, 0])
    assert found["pruned/importance_free"] == pytest.approx(0.5)
    # One head at random: one time in six each the previous-token head, 3/4 or 1/4 is lost.
    assert found["pruned/random@17"] == pytest.approx(1 - (1 + 0.75 + 0.25) / 6, abs=0.06)
    assert found["pruned/random_free"] == 0


def test_heads_are_ranked_on_other_sequences_than_they_are_tried_on(trained, monkeypatch):
    chosen, folder = trained
    ranked, tried = [], []

    class Kept(ByHand):
        def __init__(self, model, batch):
            self.tokens_BT = np.asarray(batch.tokens_BT)

        def importance(self):
            ranked.append(self.tokens_BT)
            return self.importance_LN

        def prune(self, order):
            tried.append(self.tokens_BT)
            return super().prune(order)

    monkeypatch.setattr(emergence_measures, "Ablation", Kept)
    Pruning(sequences=8, orders=2)(folder, chosen)
    assert len(ranked) == 1 and len(tried) == 3 and ranked[0].shape == tried[0].shape
    for tokens_BT in tried:
        np.testing.assert_array_equal(tokens_BT, tried[0])
        assert not (tokens_BT == ranked[0]).all(1).any()


def test_the_share_of_heads_that_is_free():
    assert free_share([0.9, 0.89, 0.885, 0.5, 0.9], 0.02) == 0.5
    assert free_share([0.9, 0.8, 0.9], 0.02) == 0
    assert free_share([0.9, 0.9, 0.9], 0.02) == 1


def test_a_run_that_was_not_watched_cannot_be_measured(tmp_path):
    with pytest.raises(OptionError, match=r"emergence\.csv is missing.*analysis\.every"):
        emergence(RunFolder(tmp_path), None)


def test_a_run_without_induction_heads_has_none_to_remove(tmp_path):
    folder = RunFolder(tmp_path)
    scores = {name: np.full((1, 2), 0.05) for name in ("prefix_matching", "previous_token")}
    for step in range(3):
        row = emergence_table.flat_row({"step": step, "tokens": step}, scores, [1.0])
        emergence_table.append(folder.emergence, row)
    assert HeadsRemoved()(folder, None) == {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two steps of a model of one layer and two heads."""
    config = tiny.config(task__length=47, task__vocab_size=32, train__steps=2, train__eval_every=2)
    folder = RunFolder(tmp_path_factory.mktemp("measures") / "run")
    loop.train(config, settings(config), folder)
    return settings(config), folder


@pytest.mark.parametrize("chosen", [(0,), (0, 1)])
def test_what_induction_heads_copy_together(trained, chosen):
    chosen_settings, folder = trained
    score = np.full((1, 2), 0.05)
    score[0, list(chosen)] = 0.9
    folder.emergence.unlink(missing_ok=True)
    row = emergence_table.flat_row({"step": 0}, {"prefix_matching": score}, [1.0])
    emergence_table.append(folder.emergence, row)
    found = copied(folder, chosen_settings)
    graph, params = split(restore(folder).model)
    sequences = watch.sequences_of(chosen_settings)

    @jax.jit
    def measured(params):
        model = merge(graph, params)
        scores = head_scores.head_scores(model, sequences)
        return head_scores.attended_logits(model, sequences)[0], scores["copying"]

    logits_BTNU, alone_LN = map(np.asarray, measured(params))
    logits_BTU = logits_BTNU[:, :, list(chosen)].sum(2)
    own = np.arange(logits_BTU.shape[1])
    assert found["copied_first"] == pytest.approx((logits_BTU.argmax(-1) == own).mean())
    rise = np.maximum(logits_BTU - logits_BTU.mean(-1, keepdims=True), 0)
    share = rise[:, own, own] / rise.sum(-1)
    assert found["copying_together"] == pytest.approx(4 * share.mean() - 1, abs=1e-5)
    if len(chosen) == 1:
        assert found["copying_together"] == pytest.approx(float(alone_LN[0, 0]), abs=1e-5)


def test_a_run_without_induction_heads_copies_nothing(trained):
    chosen_settings, folder = trained
    folder.emergence.unlink(missing_ok=True)
    row = emergence_table.flat_row({"step": 0}, {"prefix_matching": np.full((1, 2), 0.1)}, [1.0])
    emergence_table.append(folder.emergence, row)
    assert copied(folder, chosen_settings) == {}


def test_late_less_early_is_that_of_the_held_out_sequences(trained):
    chosen, folder = trained
    graph, params = split(restore(folder).model)
    run = jax.jit(lambda params, tokens_BT: merge(graph, params)(tokens_BT)[0])
    total, count = 0, 0
    for index in range(2):
        batch = chosen.held_out.sample(evaluation_key(chosen.eval.seed, index), 16)
        logits = np.asarray(run(params, batch.tokens_BT), np.float64)
        log_z = np.log(np.exp(logits).sum(-1))
        loss = log_z - np.take_along_axis(logits, batch.targets_BT[..., None], -1)[..., 0]
        weights = np.asarray(LOSS_ON["all"](batch))
        total, count = total + (loss * weights).sum(0), count + weights.sum(0)
    loss_T = total / count
    # Tokens 4 and 45 of 47.
    expected = loss_T[44:47].mean() - loss_T[3:6].mean()
    found = LateLessEarly(sequences=32, around=1)(folder, chosen)
    assert found == {"late_less_early": pytest.approx(expected, abs=1e-5)}
    for sequences in (0, 40):
        with pytest.raises(ValueError, match=f"sequences={sequences} must be a multiple of 16"):
            LateLessEarly(sequences=sequences)
