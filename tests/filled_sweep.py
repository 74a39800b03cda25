"""A sweep folder as a sweep of eight runs leaves it, without training any."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sweeps import result
from sweeps.description import describe
from sweeps.folder import SweepFolder
from sweeps.pictures import Scatter, Series
from sweeps.plan import make_plan
from tests import tiny_sweep
from training.run_folder import write_json

RATES = (1e-3, 1e-2)
STUDY = dataclasses.replace(
    tiny_sweep.get_sweep(),
    learning_rates=RATES,
    events=("half_step",),
    pictures=(
        Scatter("cache_bytes", "copy/accuracy", "memory"),
        Series("copy/accuracy@", "lengths", trained=16, chance=0.1),
    ),
)
# Point, learning rate, seed → copy accuracy; mqa's run at 0.01 with seed 1 has failed.
COPY = {
    ("gqa", 1e-3, 0): 0.25, ("gqa", 1e-3, 1): 0.75, ("gqa", 1e-2, 0): 0.5, ("gqa", 1e-2, 1): 0.625,
    ("mqa", 1e-3, 0): 0.25, ("mqa", 1e-3, 1): 0.5, ("mqa", 1e-2, 0): 1.0,
}  # fmt: skip
ENVIRONMENT = {
    "started": "2026-01-02T03:04:05+00:00", "device_kind": "cpu", "platform": "cpu",
    "cpu_count": 2, "versions": {"jax": "1.2.3"}, "git": {"commit": "a" * 40, "modified": True},
    "attention_implementation": {"layer0": "reference"},
}  # fmt: skip


def fill(path) -> SweepFolder:
    """A sweep folder with eight runs: seven done, one failed."""
    plan = make_plan(STUDY, tiny_sweep.get_config().to_dict())
    folder = SweepFolder(path)
    folder.begin(describe("tiny", "a <b>.py", STUDY, plan), Path(tiny_sweep.__file__))
    for point in plan.points:
        for run in point.runs:
            copy = COPY.get((run.point, run.learning_rate, run.seed))
            if copy is None:
                write_json(folder.result(run.name), result.failed(run.order(), "Diverged: <nan>\n"))
                continue
            numbers = dataclasses.asdict(point.bill) | {
                "copy/accuracy": copy, "copy/chance": 0.0833, "induction/accuracy": copy / 2,
                "induction/chance": 0.0833, "step_time_ms": 1.5, "copy/accuracy@16": copy,
                "copy/accuracy@32": copy / 4,
            }  # fmt: skip
            if copy == 0.5:  # something happened
                numbers["half_step"] = 40.0 + run.seed
            head = result.failed(run.order(), "")
            write_json(
                folder.result(run.name),
                head | {"status": "done", "metrics": numbers, "environment": ENVIRONMENT},
            )
            folder.run(run.name).path.mkdir(parents=True)
            for step in (0, 5, 10):
                value = 0.1 + (copy - 0.1) * step / 10
                folder.run(run.name).append_metrics(
                    {"step": step, "tokens": step * 68, "copy/accuracy": value,
                     "induction/accuracy": value / 2}
                )  # fmt: skip
    return folder
