"""How long a sweep will take: one point is timed, the others follow by their FLOPs."""

from __future__ import annotations

from sweeps.executor import available_cores
from sweeps.fairness import Bill
from sweeps.packs import time_steps
from sweeps.plan import Plan, Run
from training.step import init_state, make_interval

# Seconds of a run that are not steps: loading jax and flax, evaluations, checkpoints.
_START = 6.0


def measure(plan: Plan) -> tuple[float, float]:
    """Seconds to compile, and seconds per FLOP of a training step of the plan's first point."""
    settings = plan.points[0].runs[0].settings
    interval = make_interval(settings)
    compiling, step = time_steps(
        lambda state, until: interval(state, until)[0],
        init_state(settings),
        settings,
    )
    return compiling, step / plan.points[0].bill.flops_per_step


def seconds(run: Run, bill: Bill, rate: tuple[float, float]) -> float:
    """Of one run by itself."""
    compiling, per_flop = rate
    return _START + compiling + run.settings.train.steps * bill.flops_per_step * per_flop


def sentence(plan: Plan, rate: tuple[float, float], at_once: int | None) -> str:
    """What the estimate says of the whole, and how it was made.

    Args:
      plan: what would run.
      rate: as ``measure`` gives it.
      at_once: runs at a time; None: not known, as that of a cluster.
    """
    whole = sum(seconds(run, point.bill, rate) for point in plan.points for run in point.runs)
    how = f"a step of {plan.points[0].name} was timed, the others follow by their FLOPs"
    if at_once is None:
        return f"About {whole / 60:.1f} core minutes, as many at a time as the cluster has: {how}"
    cores = min(at_once, len(available_cores()), len(plan.runs))
    return f"About {whole / 60:.1f} core minutes, {whole / cores / 60:.1f} on {cores} cores: {how}"
