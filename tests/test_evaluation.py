"""Evaluation at lengths that training has not seen."""

from __future__ import annotations

from flax import nnx

from analysis import evaluation
from configs import prefix
from tests import tiny
from training.settings import settings


def test_a_prefix_shows_no_answer_at_shorter_lengths(monkeypatch):
    """E1: what the objective refuses in training is not evaluated either."""
    config = tiny.config(
        prefix.get_config, attention__prefix__prefix=6, task__copy__min_length=6, task__length=17,
        model__pattern=("prefix",),
    )  # fmt: skip
    options = settings(config)
    monkeypatch.setattr(evaluation, "MULTIPLES", (0.5, 1))
    rows = evaluation.accuracy_by_length(options.model.build(nnx.Rngs(0)), options, 4)
    notes = {(row.task, row.length): row.note for row in rows}
    assert [row.accuracy is None for row in rows] == [bool(row.note) for row in rows]
    shown = "the mask would show the answers at this length"
    assert notes == {
        ("copy", 7): shown, ("copy", 17): "", ("induction", 7): shown, ("induction", 17): ""
    }  # fmt: skip
