"""sweep.json: what was asked, so that a report needs nothing but the folder."""

from __future__ import annotations

import datetime
import shlex
import sys
from typing import Any

from sweeps.plan import PER_RUN, Plan, Run
from sweeps.study import Study
from training.environment import git_commit
from training.run_folder import jsonable


def describe(name: str, path: str, study: Study, plan: Plan) -> dict:
    """The description of a sweep.

    Args:
      name: of the sweep.
      path: of its file, as the user wrote it.
      study: what it asks.
      plan: all its points.
    """
    points = []
    for point in plan.points:
        own = {k: v for k, v in point.runs[0].changes.items() if k not in PER_RUN}
        runs = [
            {
                "name": run.name,
                "seed": run.seed,
                "learning_rate": run.learning_rate,
                "steps": run.settings.train.steps,
                "command": train_command(path, run),
            }
            for run in point.runs
        ]
        points.append(
            {
                "name": point.name,
                "labels": list(point.labels),
                "changes": jsonable(own),
                "solved": str(point.solved or ""),
                "runs": runs,
            }
        )
    return {
        "name": name,
        "question": study.question,
        "study": path,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "git": git_commit(),
        "metrics": list(study.metrics),
        "columns": list(study.columns),
        "events": list(study.events),
        "points": points,
    }


def train_command(path: str, run: Run) -> str:
    """The shell command that trains one run of a sweep file alone, with the same options."""
    overrides = [f"--config.{option}={_text(value)}" for option, value in run.changes.items()]
    workdir = f"--workdir=runs/{run.name}"
    return shlex.join(["python", "train.py", f"--config={path}", *overrides, workdir])


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
