"""Runs of a sweep that are watched, by themselves and as one program."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from analysis import emergence_table
from sweeps import worker
from sweeps.emergence_measures import emergence
from sweeps.folder import SweepFolder
from sweeps.plan import make_plan
from tests import tiny_sweep


@pytest.mark.slow
def test_every_run_has_its_table_and_what_is_measured_of_it(tmp_path):
    config = tiny_sweep.get_config().to_dict()
    config["task"]["vocab_size"], config["analysis"]["every"] = 32, 5
    config["train"]["loss_on"], config["analysis"]["sequences"] = "all", 4
    study = dataclasses.replace(
        tiny_sweep.get_sweep(), columns=("changed", "previous_token"), measures=(emergence,)
    )
    runs = [run.order() for run in make_plan(study, config).points[0].runs]
    folder = SweepFolder(tmp_path)
    for part in ("results", "packs"):
        (tmp_path / part).mkdir()
    job = {"name": "pack", "at_once": 1, "pack": "on"}
    worker.train_pack(job, runs, folder, study)
    alone = SweepFolder(tmp_path / "alone")
    (tmp_path / "alone" / "results").mkdir(parents=True)
    worker.train(runs[0], alone, study)
    tables = [emergence_table.read(folder.run(run["name"]).emergence) for run in runs]
    expected = emergence_table.read(alone.run(runs[0]["name"]).emergence)
    for table in tables:
        assert table["step"].tolist() == [0, 5, 10]
    np.testing.assert_allclose(tables[0].values, expected.values, rtol=1e-3, atol=1e-5)
    assert not np.allclose(tables[0]["loss"], tables[1]["loss"], rtol=1e-3)
    record = json.loads(folder.result(runs[1]["name"]).read_text())
    assert record["status"] == "done", record
    assert record["metrics"]["changed"] == 0
    best = tables[1].heads("previous_token")[-1].max()
    assert record["metrics"]["previous_token"] == pytest.approx(best)
