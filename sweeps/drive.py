"""Runs what is missing of a sweep, and writes down what came of every run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Sequence

from sweeps import packs, result
from sweeps.executor import Ended, Executor, Job
from sweeps.folder import SweepFolder
from sweeps.plan import Plan, Run
from sweeps.progress import SweepProgress
from training.run_folder import write_json
from training.settings import OptionError

# Seconds between two looks at what the runs have written.
_LOOK = 0.5


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of the runs of a plan.

    Attributes:
      done, failed: names of runs, those of earlier sessions too.
      errors: name of a failed run → why.
    """

    done: tuple[str, ...]
    failed: tuple[str, ...]
    errors: dict[str, str]


def drive(
    plan: Plan,
    folder: SweepFolder,
    executor: Executor,
    progress: SweepProgress,
    retries: int,
    pack: str,
) -> Outcome:
    """Trains every run that has not succeeded yet; a failed run stops no other.

    Args:
      plan: what to train.
      folder: of the sweep, locked by the caller.
      executor: trains the jobs; stopped at the end, also by an error.
      progress: is told.
      retries: how often a run whose process died is started again, from its last checkpoint.
      pack: one of ``packs.MODES``.
    """
    missing = [run for run in plan.runs if not folder.is_done(run.name)]
    progress.begin(plan.runs, missing, folder)
    session = _Session(folder, executor, progress, retries, pack)
    try:
        session.train([Task(runs) for runs in packs.group(missing, pack)])
    finally:
        executor.stop()
    return _outcome(plan, folder, session.unwritten)


@dataclasses.dataclass(frozen=True)
class Task:
    """Runs that are trained by one process."""

    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        more = f",and {len(self.runs) - 1} more" if len(self.runs) > 1 else ""
        return self.runs[0].name + more


class _Session:
    """The jobs that wait and those that run."""

    def __init__(self, folder, executor, progress, retries, pack):
        self.folder, self.executor, self.progress = folder, executor, progress
        self.retries, self.pack, self.at_once = retries, pack, 1
        self.deaths: collections.Counter[str] = collections.Counter()
        # Packs that were measured and are slower than their runs by themselves, with their names.
        self.slower: dict[str, packs.Measured] = {}
        self.running: dict[str, Task] = {}
        # Failures that could not be written down, because the disk is full.
        self.unwritten: dict[str, str] = {}

    def train(self, tasks: Sequence[Task]) -> None:
        waiting = collections.deque(tasks)
        self.at_once = max(1, self.executor.parallel // max(1, len(tasks)))
        while waiting or self.running:
            while waiting and len(self.running) < self.executor.slots:
                task = waiting.popleft()
                if loser := self._slower_than_alone(task):
                    why = f"one program was slower for {loser}, which is no heavier"
                    waiting.extend(self._each(task.runs, why))
                else:
                    self._start(task)
            for ended in self.executor.wait(_LOOK):
                waiting.extend(self._ended(ended))
            self.progress.look(self.folder)

    def _start(self, task: Task) -> None:
        for run in task.runs:
            # What an earlier session says of it is no longer so.
            self.folder.result(run.name).unlink(missing_ok=True)
        job = Job(task.name, self.folder.job(task.name), self.folder.log(task.name))
        try:
            write_json(job.file, self._order(task))
            self.executor.start(job)
        except OSError as error:
            for run in task.runs:
                self._fail(run, f"its process could not be started: {error}")
            return
        self.running[task.name] = task
        self.progress.started(task.runs)

    def _order(self, task: Task) -> dict:
        return {
            "workdir": str(self.folder.path.absolute()),
            "name": task.name,
            "runs": [run.order() for run in task.runs],
            "pack": self.pack,
            "at_once": self.at_once,
        }

    def _ended(self, ended: Ended) -> list[Task]:
        """Notes what came of the runs of a job; returns those to be started again."""
        task = self.running.pop(ended.job.name)
        without = []
        for run in task.runs:
            record = self._read(run)
            if record is None:
                without.append(run)
            else:
                self.progress.ended(run, record.get("error", ""))
        if not without:
            return []
        if len(task.runs) > 1 and self.pack == "auto":
            return self._each(without, self._why_apart(task, ended))
        if ended.died and self.deaths[task.runs[0].name] < self.retries:
            self.deaths[task.runs[0].name] += 1
            return self._again([Task(tuple(without))], f"{ended.died}; from the last checkpoint")
        for run in without:
            self._fail(run, ended.died or _last_words(ended.job))
        return []

    def _again(self, tasks: list[Task], why: str) -> list[Task]:
        for task in tasks:
            for run in task.runs:
                self.progress.again(run, why)
        return tasks

    def _each(self, runs: Sequence[Run], why: str) -> list[Task]:
        """The runs of a pack, each by itself."""
        self.progress.apart(runs, why)
        return [Task((run,)) for run in runs]

    def _why_apart(self, task: Task, ended: Ended) -> str:
        """Why runs of a pack are to be trained by themselves: it was slower, or it has failed."""
        path = self.folder.pack(task.name)
        found = json.loads(path.read_text()) if path.exists() else {"packed": True}
        if found["packed"] or ended.died:
            return f"as one program they failed: {ended.died or _last_words(ended.job)}"
        self.slower[task.name] = packs.Measured.of(found)
        return "one program would be slower, as measured"

    def _slower_than_alone(self, task: Task) -> str:
        """The pack, measured in this session, that lets one expect no gain of this; "" if none."""
        if self.pack != "auto" or len(task.runs) == 1:
            return ""
        flops, steps = packs.weight(task.runs)
        losers = (n for n, m in self.slower.items() if m.decides(len(task.runs), steps, flops))
        return next(losers, "")

    def _read(self, run: Run) -> dict | None:
        with contextlib.suppress(OptionError):
            return self.folder.read_result(run.name)

    def _fail(self, run: Run, error: str) -> None:
        record = result.failed(run.order(), error)
        try:
            write_json(self.folder.result(run.name), record)
        except OSError as why:
            self.unwritten[run.name] = f"{record['error']} (and {why})"
        self.progress.ended(run, record["error"])


def _last_words(job: Job) -> str:
    """The end of what a process printed that has left no record."""
    try:
        lines = [line for line in job.log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    said = f": {lines[-1].strip()}" if lines else ""
    return f"its process ended without a result{said} (see {job.log})"


def _outcome(plan: Plan, folder: SweepFolder, unwritten: dict[str, str]) -> Outcome:
    done, errors = [], dict(unwritten)
    for run in plan.runs:
        record = folder.read_result(run.name)
        if record is not None and record["status"] == result.DONE:
            done.append(run.name)
        elif run.name not in errors:
            errors[run.name] = "has not run" if record is None else record["error"]
    return Outcome(tuple(done), tuple(errors), errors)
