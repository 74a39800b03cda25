"""The folder of a sweep: what is in it, and when it may be written to."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from sweeps.plan import Plan, Run
from training.lock import locked
from training.run_folder import RunFolder, differences, write_json, write_text
from training.settings import OptionError

# Seconds for another point of a job array to begin.
_PATIENCE = 60.0


class SweepFolder:
    """Paths of a sweep folder.

    ``sweep.json`` what was asked · ``study.py`` the sweep file, as it was · ``runs/`` a run folder
    each · ``results/`` a file for each run that has ended · ``packs/`` what was measured before
    runs were packed · ``logs/`` what the processes printed · the report.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.description = self.path / "sweep.json"
        self.study = self.path / "study.py"
        self.locks = self.path / "locks"

    def run(self, name: str) -> RunFolder:
        """The run folder of a run."""
        return RunFolder(self.path / "runs" / name)

    def result(self, name: str) -> Path:
        """The file with the result of a run."""
        return self.path / "results" / f"{name}.json"

    def log(self, name: str) -> Path:
        """The file with what a run's process printed."""
        return self.path / "logs" / f"{name}.txt"

    def job(self, name: str) -> Path:
        """The file that tells a process what to train."""
        return self.path / "jobs" / f"{name}.json"

    def pack(self, name: str) -> Path:
        """The file with the times measured before a pack was trained."""
        return self.path / "packs" / f"{name}.json"

    def check_usable_for(self, name: str, plan: Plan | None = None) -> None:
        """Raises OptionError where the sweep must not write here; changes nothing.

        That is a file, a folder of something else, another sweep, or a run of the plan, where
        there is one, with other options.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise OptionError(f"--workdir={self.path} is a file; name a folder")
        if not self.description.exists():
            # The description is the first that begin writes; a full disk may keep half of it.
            begun = {self.locks.name, self.description.name + ".tmp"}
            others = any(path.name not in begun for path in self.path.iterdir())
            # Another point of a job array may have begun between both looks.
            if others and not self.description.exists():
                raise OptionError(
                    f"--workdir={self.path} holds files but no sweep.json, so it is no sweep "
                    "folder; choose another --workdir"
                )
            return
        saved = self.read_description()["name"]
        if saved != name:
            raise OptionError(
                f"--workdir={self.path} holds the sweep {saved}, not {name}; choose another "
                "--workdir"
            )
        if plan is not None:
            self._check_points(plan)
            for run in plan.runs:
                self._check_run(run)

    def _check_points(self, plan: Plan) -> None:
        """Raises OptionError where results of the folder would vanish from its report."""
        kept = {run.name for run in plan.runs}
        lost = [
            run["name"]
            for point in self.read_description()["points"]
            for run in point["runs"]
            if run["name"] not in kept and self.result(run["name"]).exists()
        ]
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            raise OptionError(
                f"--workdir={self.path} holds results of runs that this sweep does not have: "
                f"{', '.join(lost[:3])}{more}. Ask for the same points, --seeds and learning "
                "rates, choose another --workdir, or remove that folder"
            )

    def _check_run(self, run: Run) -> None:
        try:
            self.run(run.name).check_usable_for(run.config)
        except OptionError as error:
            raise OptionError(f"run {run.name}: {error}") from None
        record = self.read_result(run.name)
        if record is not None and (differing := differences(record["config"], run.config)):
            raise OptionError(
                f"{self.result(run.name)} is the result of other options: {'; '.join(differing)}. "
                "Choose another --workdir, or remove that file"
            )

    def begin(self, description: Mapping, study: Path) -> None:
        """Makes the folder and keeps what the sweep is; points of a job array take turns."""
        with locked(self.locks / "begin", f"the beginning of {self.path}", wait=_PATIENCE):
            write_json(self.description, description)
            for part in ("runs", "results", "logs", "jobs", "packs"):
                (self.path / part).mkdir(exist_ok=True)
            if study.resolve() != self.study.resolve():
                write_text(self.study, study.read_text())

    def read_description(self) -> dict:
        """What the sweep is.

        Raises:
          OptionError: there is no such folder, or it is not that of a sweep.
        """
        if not self.description.exists():
            raise OptionError(f"--workdir={self.path} has no sweep.json, so it is no sweep folder")
        try:
            return json.loads(self.description.read_text())
        except ValueError as error:
            raise OptionError(f"{self.description} cannot be read: {error}") from None

    def read_result(self, name: str) -> dict | None:
        """The record of a run that has ended, or None.

        Raises:
          OptionError: the file cannot be read.
        """
        path = self.result(name)
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise OptionError(f"{path} cannot be read: {error}; remove it") from None

    def is_done(self, name: str) -> bool:
        """Whether the run has succeeded."""
        record = self.read_result(name)
        return record is not None and record["status"] == "done"

    @contextlib.contextmanager
    def locked(self, point: str | None) -> Iterator[list[str]]:
        """Keeps others out while the block runs; those of other points only, if one is named.

        Yields:
          Sentences on owners that have ended without giving back their locks.

        Raises:
          OptionError: another sweep is at work in the folder.
        """
        what = f"the sweep folder {self.path}"
        sharing = {"shared": point is not None, "sharers": "point *"}
        with locked(self.locks / "sweep", what, **sharing) as left:
            if point is None:
                yield [left] if left else []
                return
            what = f"the point {point} of {self.path}"
            with locked(self.locks / f"point {point}", what) as own:
                yield [text for text in (left, own) if text]
