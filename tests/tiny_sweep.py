"""A sweep of four runs as small as tests.tiny, and folders as such sweeps leave them."""

import dataclasses
from pathlib import Path

from configs import gqa
from sweeps import result
from sweeps.axes import axis
from sweeps.description import describe
from sweeps.options import Options
from sweeps.plan import Plan
from sweeps.study import Study
from sweeps.verdicts import Above, Ratio
from tests import tiny


def get_config():
    """The base of all runs."""
    config = gqa.get_config()
    config.update_from_flattened_dict(
        {name: value for name, value in tiny.TINY.items() if not name.startswith("attention")}
    )
    return config


def get_sweep():
    """Two points, two seeds."""
    return Study(
        question="does a sweep work?",
        axes=axis("model.pattern", ("gqa",), ("mqa",), label=""),
        seeds=(0, 1),
        metrics=("copy/accuracy", "induction/accuracy"),
        columns=("parameters", "cache_bytes_per_token", "step_time_ms"),
        verdicts=(
            Ratio("heads that share keys halve the cache", "mqa", "gqa",
                  "cache_bytes_per_token", 0.5),
            Above("ten steps are enough", "gqa", "copy/accuracy", 0.99),
        ),
    )  # fmt: skip


def arguments(plan: Plan) -> tuple[dict, Path]:
    """What ``SweepFolder.begin`` takes."""
    return describe("tiny", "tiny.py", get_sweep(), plan), Path(__file__)


def record(run: dict) -> dict:
    """The result of a run that is done."""
    return {**result.failed(run, ""), "status": "done", "metrics": {"copy/accuracy": 0.5}}


def options(**changes) -> Options:
    """The flags of sweep.py as they are unless they are set."""
    default = Options(
        given=frozenset(changes), base=lambda: get_config().to_dict(), overrides={}, workdir=None,
        dry_run=False, only=None, point=None, seeds=None, equal=None, equal_to=None,
        equal_within=0.1, report_only=False, executor="local", ray_address="auto", workers=None,
        cores_per_run=1, gpus_per_run=0.0, memory_per_run=0.0, retries=2, pack="auto",
    )  # fmt: skip
    return dataclasses.replace(default, **changes)
