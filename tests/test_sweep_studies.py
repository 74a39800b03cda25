"""The studies that ship: each expands, is valid, and names points and numbers that exist."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest

from sweeps import results
from sweeps.description import describe
from sweeps.folder import SweepFolder
from sweeps.plan import make_plan
from sweeps.results import chance_name
from sweeps.study import load
from sweeps.verdicts import judge

ROOT = Path(__file__).resolve().parent.parent
# claims.py describes a page of claims and no study; see tests/test_claims.py.
FILES = sorted(
    path
    for path in (ROOT / "configs" / "sweeps").glob("*.py")
    if path.name not in ("__init__.py", "claims.py")
)

# What a study of heads measures beyond its tables.
OF_HEADS = {f"kept/{which}_{way}" for which in ("induction", "random", "idle")
            for way in ("full", "preserving")}  # fmt: skip
OF_HEADS |= {f"pruned/{order}@{share}" for order in ("importance", "random") for share in (0, 25)}
OF_HEADS |= {"pruned/importance_free", "previous_correlation", "learning_correlation",
             "learning_inside"}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_study_is_valid_and_judges_points_it_has(path, tmp_path):
    module = runpy.run_path(str(path))
    assert f"python sweep.py --config=configs/sweeps/{path.name}" in module["__doc__"]
    assert re.search(r"\d+ minutes on 2 cores", module["__doc__"])
    study = load(path)
    plan = make_plan(study, module["get_config"]().to_dict())
    assert len(plan.points) >= 2
    folder = SweepFolder(tmp_path / "sweep")
    folder.begin(describe(path.stem, str(path), study, plan), path)
    found = results.read(folder)
    # Every run with all numbers at 1: what a verdict or a picture asks for exists.
    known = {"parameters", "cache_bytes_per_token", "cache_bytes", "step_time_ms"}
    known |= {*study.metrics, *study.columns, *study.events}
    known |= {name for metric in study.metrics if (name := chance_name(metric))}
    known |= {f"copy/accuracy@{n}" for n in (8, 48)} if path.stem == "copying" else set()
    known |= OF_HEADS if path.stem == "emergence" else set()
    runs = [dataclasses.replace(run, metrics=dict.fromkeys(known, 1.0)) for run in found.runs]
    by_point = {
        point.name: [run for run in runs if run.point == point.name] for point in found.points
    }
    points = tuple(
        dataclasses.replace(point, runs=tuple(by_point[point.name])) for point in found.points
    )
    found = dataclasses.replace(found, points=points)
    assert study.verdicts
    for verdict in judge(study.verdicts, found):
        assert "no result" not in verdict.measured and "cannot be judged" not in verdict.measured
    for draw in study.pictures:
        (picture,) = draw(found, tmp_path) or [None]
        assert picture is None or picture.exists()
