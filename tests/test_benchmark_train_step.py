"""What the benchmark of training steps gives to its peer, and makes of its times."""

import re
import time
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
    peaks = {("PyTorch eager", "float32"): 3 * 2**19}
    table = train_step.step_table(train_step.Measured(samples, peaks, {}), tokens=4096)
    assert (
        "| PyTorch eager, float32 | 70.0 (65.0–75.0) | 58,514 | 2.00 (2.00–2.00) | 1.5 |" in table
    )
    assert "| PyTorch compiled, float32 | not measured |" in table
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


def test_the_time_of_a_call_inside_another_is_counted_once():
    class Files:
        def save(self):
            self.wait()

        def wait(self):
            time.sleep(0.01)

    with train_step._timed((Files, "save"), (Files, "wait")) as seconds:
        Files().save()
        Files().wait()
    assert len(seconds) == 2
    assert not hasattr(Files.save, "__wrapped__")


class FakeOurs:
    losses, peak = np.array([4.0, 3.0]), 2**20

    def __init__(self, run):
        self.seconds = lambda: 0.5


class FakeTorch:
    """Compiled it computes another model, in bfloat16 it dies in its second turn."""

    def __init__(self):
        self.turns, self.prepared = 0, []

    def ask(self, **request):
        if "peak" in request:
            return {"bytes": 2**21}
        self.prepared.append((request["prepare"], request["dtype"]))
        return {"losses": [4.0, 2.0 if request["compile"] else 3.0]}

    def seconds(self, name, what, calls=1):
        if "bfloat16" in name:
            self.turns += 1
            if self.turns > 2:
                raise peers.PeerError("PyTorch stopped in the middle: killed by SIGKILL")
        return 1.0 / calls


@pytest.fixture
def fake_ours(monkeypatch):
    monkeypatch.setattr(train_step, "Ours", FakeOurs)
    monkeypatch.setattr(train_step, "for_torch", lambda run, file, batches: {"kind": "train_step"})


@pytest.mark.usefixtures("fake_ours")
def test_what_fails_beside_ours_costs_no_other_samples():
    measured = train_step.steps_beside_torch(FakeTorch(), 3, {})
    # A second a step: two steps fill a turn.
    assert measured.seconds == {
        ("ours", "float32"): [0.5] * 3,
        ("ours", "bfloat16"): [0.5] * 3,
        ("PyTorch eager", "float32"): [0.5] * 3,
    }
    assert measured.peaks["PyTorch eager", "float32"] == 2**21
    errors = measured.errors
    assert errors["PyTorch eager", "bfloat16"].endswith("killed by SIGKILL")
    for dtype in train_step.DTYPES:
        assert "is not the same model" in errors["PyTorch compiled", dtype]


@pytest.mark.usefixtures("fake_ours")
def test_what_is_left_out_is_not_prepared_and_says_why():
    torch = FakeTorch()
    left_out = {("PyTorch compiled", "float32"): "for a reason"}
    measured = train_step.steps_beside_torch(torch, 1, left_out)
    assert ("PyTorch compiled float32", "float32") not in torch.prepared
    assert measured.errors["PyTorch compiled", "float32"] == "for a reason"
    alone = train_step.steps_beside_torch(None, 1, left_out)
    assert {name for name, _ in alone.seconds} == {"ours"}
    assert set(alone.errors.values()) == {peers.WITHOUT} and len(alone.errors) == 4


def test_a_start_that_fails_says_what_it_said(tmp_path: Path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no space left' >&2\nexit 7\n")
    python.chmod(0o755)
    monkeypatch.setattr(train_step.sys, "executable", str(python))
    said = (
        "train.py --config=configs/gqa.py ended with exit code 7 before its first step, "
        "last saying 'no space left'"
    )
    with pytest.raises(train_step.NoFirstStep, match=re.escape(said)):
        train_step.start_seconds()
