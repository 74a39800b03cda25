"""What the benchmark of training steps gives to its peer, and makes of its times."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import peers, train_step


def test_another_model_is_no_peer():
    train_step.check_losses("same", [4.0, 3.0], [4.0, 3.0001], rtol=1e-3)
    with pytest.raises(peers.PeerError, match="other is not the same model"):
        train_step.check_losses("other", [4.0, 3.0], [4.0, 3.1], rtol=1e-3)


def test_torch_is_given_the_batches_that_ours_draws(tmp_path: Path):
    run = train_step.settings(train_step.options_of(train__steps=20, train__batch_size=4))
    request = train_step.for_torch(run, tmp_path / "some.npz", batches=3)
    assert len(request["learning_rates"]) == 20
    with np.load(tmp_path / "some.npz") as file:
        batch = run.task.sample(train_step.train_key(run.train_seed, 2), 4)
        np.testing.assert_array_equal(file["tokens"][2], batch.tokens_BT)
        np.testing.assert_array_equal(file["targets"][2], batch.targets_BT)
        np.testing.assert_array_equal(file["weights"][2], batch.weights_BT)
        assert file["params/w_embed_VD"].shape == (64, 64)


def test_step_table_and_goals():
    samples = {
        ("ours", "float32"): [0.03, 0.04],
        ("ours", "bfloat16"): [0.02, 0.02],
        ("PyTorch eager", "float32"): [0.06, 0.08],
    }
    errors = {("PyTorch compiled", "float32"): "no compiler"}
    table = train_step.step_table(samples, errors, tokens=4096)
    assert "| PyTorch eager, float32 | 70.0 (65.0–75.0) | 58,514 | 2.00 (2.00–2.00) |" in table
    assert "| PyTorch compiled, float32 | no compiler |" in table
    assert "| PyTorch eager, bfloat16 | not measured |" in table
    reached = {goal.name: goal.reached for goal in train_step.goals(samples)}
    assert reached == {
        "a training step beside PyTorch compiled": None,
        "a training step beside PyTorch eager": pytest.approx(2.0),
    }


def test_what_is_spent_beside_the_steps_is_a_share_of_them():
    beside = train_step.Beside(steps=100, data=0.01, lines=0.03, checkpoints=0.04)
    assert beside.share(0.04) == pytest.approx(0.02)
    text = train_step.beside_text(beside, 0.04)
    assert "drawing batches 0.25 %, lines of the log 0.75 %, checkpoints 1.00 %" in text
    assert text.endswith("together 2.00 % (goal: under 3 %, reached)")
    assert train_step.beside_text(beside, 0.02).endswith("4.00 % (goal: under 3 %, NOT reached)")
    assert "NOT reached" in train_step.start_text(12.5, 3.0)
    assert "NOT" not in train_step.start_text(11.5, 3.0)
