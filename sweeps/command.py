"""What sweep.py does, beside reading its flags."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sweeps import estimate, executor_flags, results
from sweeps import report as reports
from sweeps.description import describe
from sweeps.drive import Outcome, drive
from sweeps.fairness import Equal
from sweeps.folder import SweepFolder
from sweeps.options import Options
from sweeps.packs import MODES
from sweeps.plan import Plan, make_plan
from sweeps.progress import SweepProgress
from sweeps.study import Study
from sweeps.tables import body, head
from sweeps.verdicts import judge
from training.progress import table
from training.settings import OptionError


@dataclasses.dataclass(frozen=True)
class Request:
    """A sweep file as the user asks for it.

    Attributes:
      name: of the sweep.
      path: of its file.
      study: what it asks.
      plan: all its points.
    """

    name: str
    path: str
    study: Study
    plan: Plan


def main(path: str, study: Study, options: Options) -> int:
    """Runs what is missing of a study and reports it; returns the exit code.

    Raises:
      OptionError: a mistake in the file or the options, or a folder that cannot be used. Nothing
        has been changed.
    """
    _check(options)
    request = read_request(path, study, options)
    plan = choose(request, options.only, options.point)
    if options.dry_run:
        dry_run(request, plan, options)
        return 0
    return sweep(request, plan, options)


def _check(options: Options) -> None:
    """Raises OptionError where a flag of running has no such value, also before a dry run."""
    if options.retries < 0:
        raise OptionError(f"--retries must not be negative, got {options.retries}")
    if options.pack not in MODES:
        raise OptionError(f"--pack must be one of {', '.join(MODES)}, got {options.pack!r}")
    executor_flags.kind(options).check(options)


def read_request(path: str, study: Study, options: Options) -> Request:
    """The study with the user's overrides, every run checked.

    Raises:
      OptionError: a mistake in the file, the overrides or the other options.
    """
    if (options.equal is None) != (options.equal_to is None):
        raise OptionError("--equal and --equal_to go together: a quantity and the point to match")
    if options.equal is None and "equal_within" in options.given:
        raise OptionError("--equal_within is for --equal, which is not set")
    equal = None
    if options.equal is not None:
        equal = Equal(options.equal, options.equal_to, within=options.equal_within)
    plan = make_plan(
        study,
        options.base(),
        options.overrides,
        seeds=None if options.seeds is None else read_seeds(options.seeds),
        equal=equal,
    )
    return Request(Path(path).stem, path, study, plan)


def read_seeds(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise OptionError(f"--seeds takes a number or a list such as 0,3,7, got {text!r}")
    numbers = tuple(int(part) for part in parts)
    if len(parts) > 1:
        for seed in numbers:
            if numbers.count(seed) > 1:
                raise OptionError(f"--seeds={text} has {seed} twice")
        return numbers
    if numbers[0] < 1:
        raise OptionError(f"--seeds must be at least 1, got {text}")
    return tuple(range(numbers[0]))


def choose(request: Request, only: str | None, point: int | None) -> Plan:
    """The part of the plan that is to run.

    Raises:
      OptionError: nothing is chosen, or both ways of choosing are used.
    """
    if only is not None and point is not None:
        raise OptionError("--only and --point exclude each other")
    if point is not None:
        return request.plan.at(point)
    return request.plan if only is None else request.plan.only(only)


def dry_run(request: Request, plan: Plan, options: Options) -> None:
    """Prints the points with parameters, cost and an estimate of time."""
    rate = estimate.measure(plan)
    rows = []
    for point in plan.points:
        seconds = sum(estimate.seconds(run, point.bill, rate) for run in point.runs)
        rows.append((
            f"{point.index} {point.name}", str(len(point.runs)),
            f"{point.bill.parameters:,}", f"{point.bill.cache_bytes_per_token:,}",
            f"{point.bill.flops_per_step / 1e9:.3g}", f"{seconds / 60:.1f}",
        ))  # fmt: skip
    columns = ("point", "runs", "parameters", "cache bytes per token", "GFLOP per step",
               "core minutes")  # fmt: skip
    table(f"{request.name}: {len(plan.runs)} runs of {len(plan.points)} points", rows, columns)
    for point in plan.points:
        if point.solved:
            print(f"{point.name}: {point.solved}")
    print(estimate.sentence(plan, rate, executor_flags.kind(options).at_once(options)))


def sweep(request: Request, plan: Plan, options: Options) -> int:
    """Runs what is missing, reports, and returns the exit code: 1 where a run has failed.

    Raises:
      OptionError: the folder holds something else or is in use. Nothing has been changed.
    """
    workdir, one_point = options.folder(request.name), options.point is not None
    folder = SweepFolder(workdir)
    folder.check_usable_for(request.name, request.plan)
    executor = executor_flags.make(options)
    with folder.locked(plan.points[0].name if one_point else None) as left:
        # Once more: it may have been another's between the look and the lock.
        folder.check_usable_for(request.name, request.plan)
        description = describe(request.name, request.path, request.study, request.plan)
        folder.begin(description, Path(request.path))
        with SweepProgress() as progress:
            for sentence in left:
                progress.say(sentence)
            outcome = drive(plan, folder, executor, progress, options.retries, options.pack)
        try:
            if one_point:
                print(f"report: python sweep.py --report_only --workdir={workdir}")
            else:
                _report(folder, request.study)
        finally:
            code = _conclude(outcome, workdir)
    return code


def report(folder: SweepFolder, study: Study, options: Options) -> int:
    """Writes the report of a folder again, whatever state its runs are in.

    Raises:
      OptionError: a flag is given that chooses or changes runs; a report has all that the folder
        holds.
    """
    others = sorted(options.given - {"workdir", "report_only"})
    others += [f"config.{name}" for name in options.overrides]
    if others:
        raise OptionError(
            f"--{others[0]} would do nothing with --report_only, which trains nothing and reports "
            "all that the folder holds; leave one of them out"
        )
    _report(folder, study)
    return 0


def _report(folder: SweepFolder, study: Study) -> None:
    found = results.read(folder)
    written = reports.write(folder, study, found)
    table(
        f"{found.name}: {found.description['question']}", body(found, interval=False), head(found)
    )
    for verdict in judge(study.verdicts, found):
        print(f"{verdict}: {verdict.claim}\n    {verdict.expected}; measured {verdict.measured}")
    print(f"saved {', '.join(str(path) for path in written)}")


def _conclude(outcome: Outcome, workdir: str) -> int:
    if not outcome.errors:
        return 0
    for name, error in outcome.errors.items():
        print(f"FAILED {name}: {error}")
    print(
        f"{len(outcome.errors)} of {len(outcome.errors) + len(outcome.done)} runs have no result; "
        f"the same command tries them again, the others are kept in {workdir}"
    )
    return 1
