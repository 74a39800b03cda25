"""sweep.json: what was asked, so that a report needs nothing but the folder."""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from sweeps.plan import PER_RUN, Plan, Run
from sweeps.study import Study
from training.environment import git_commit
from training.run_folder import jsonable

# Flags that run a part of the sweep. The report is of the whole.
_CHOOSING = ("only", "point")


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
                "command": _of_point(name, point.name),
                "runs": runs,
            }
        )
    return {
        "name": name,
        "question": study.question,
        "study": path,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *_without(sys.argv, _CHOOSING)]),
        "git": git_commit(),
        "metrics": list(study.metrics),
        "columns": list(study.columns),
        "events": list(study.events),
        "points": points,
    }


def _of_point(sweep: str, point: str) -> str:
    """The shell command that trains and measures one point again, in a folder of its own."""
    workdir = f"runs/sweeps/{sweep}-{point}"
    argv = _without(sys.argv, (*_CHOOSING, "workdir"))
    return shlex.join(["python", *argv, f"--only={point}", f"--workdir={workdir}"])


def _without(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """The arguments without some flags, whether ``--flag=value`` or ``--flag value``."""
    kept, follows = [], False
    for argument in argv:
        name, given, _ = argument.lstrip("-").partition("=")
        left_out = argument.startswith("-") and name in names
        if not left_out and not follows:
            kept.append(argument)
        follows = left_out and not given
    return kept


def train_command(path: str, run: Run) -> str:
    """The shell command that trains one run of a sweep file alone, with the same options."""
    overrides = [f"--config.{option}={_text(value)}" for option, value in run.changes.items()]
    workdir = f"--workdir=runs/{run.name}"
    return shlex.join(["python", "train.py", f"--config={path}", *overrides, workdir])


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
