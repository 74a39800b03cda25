"""The record of a run that has ended: its numbers, and what is no success."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sweeps import result
from sweeps.fairness import Bill
from sweeps.folder import SweepFolder
from sweeps.plan import make_plan
from tests import tiny_sweep
from tests.filled_sweep import ENVIRONMENT, STUDY
from training import loop
from training.run_folder import RunFolder


def trained(tmp_path, last):
    plan = make_plan(tiny_sweep.get_sweep(), tiny_sweep.get_config().to_dict())
    run = plan.runs[0]
    folder = SweepFolder(tmp_path).run(run.name)
    folder.begin(run.config, ENVIRONMENT)
    folder.append_metrics({"step": 4, "tokens": 272, "tokens_per_second": 1e9})
    for _ in range(2):
        folder.append_metrics({"step": last, "tokens_per_second": 68_000, "copy/accuracy": 0.5})
    return run, folder


def test_a_record_holds_the_numbers_the_costs_and_the_measures(tmp_path):
    run, folder = trained(tmp_path, last=10)
    measures = [lambda folder, settings: {"width": settings.model.d_model}]
    record = result.done(run.order(), run.settings, folder, measures, ["copy/accuracy", "width"])
    assert record["status"] == "done" and record["environment"]["platform"] == "cpu"
    numbers = record["metrics"]
    assert numbers["copy/accuracy"] == 0.5 and numbers["width"] == 8
    assert numbers["step_time_ms"] == pytest.approx(1.0)  # 68 tokens at 68,000 a second
    # Embedding and head 16 × 8 each, four projections 8 × 8, two norms of 8.
    assert numbers["parameters"] == 528 and numbers["cache_bytes_per_token"] == 2 * 8 * 4


def test_half_a_run_and_missing_numbers_are_no_success(tmp_path):
    run, folder = trained(tmp_path / "a", last=8)
    with pytest.raises(result.NoResult, match="end at step 8, not at 10"):
        result.done(run.order(), run.settings, folder, [], [])
    run, folder = trained(tmp_path / "b", last=10)
    with pytest.raises(result.NoResult, match=r"no 'recall/accuracy'; it has .*copy/accuracy"):
        result.done(run.order(), run.settings, folder, [], ["recall/accuracy"])
    measures = [lambda *_: {"x": math.nan, "y": 3.0}]
    with pytest.raises(result.NoResult, match="x is nan"):
        result.done(run.order(), run.settings, folder, measures, ["x"])
    # Not asked for, it is left out: a record is JSON, which has no NaN.
    numbers = result.done(run.order(), run.settings, folder, measures, ["y"])["metrics"]
    assert numbers["y"] == 3 and "x" not in numbers


def test_what_a_run_has_at_its_end_is_known_before(tmp_path):
    """``NUMBERS`` and ``OF_A_TASK`` are what a trained run has."""
    run = make_plan(STUDY, tiny_sweep.get_config().to_dict()).points[0].runs[0]
    folder = RunFolder(tmp_path / "run")
    loop.train(run.config, run.settings, folder)
    numbers = result.done(run.order(), run.settings, folder, [], [])["metrics"].keys()
    bill = {field.name for field in dataclasses.fields(Bill)}
    tasks = {f"{task}/{name}" for task in ("copy", "induction") for name in result.OF_A_TASK}
    assert numbers == {*result.NUMBERS, *bill, *tasks}
