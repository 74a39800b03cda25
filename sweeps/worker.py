"""Trains the runs of one job in a process of its own: ``python -m sweeps.worker JOB.json``.

The process ends when its standard input does, so that it does not outlive who started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from absl import logging

from analysis import watch
from sweeps import packs, result
from sweeps.folder import SweepFolder
from sweeps.packed import Pack, PackFailed, make_packed_interval, one_at_a_time, train_together
from sweeps.study import Study, load
from training import command, loop
from training.checkpoint import CheckpointError
from training.lock import locked
from training.run_folder import write_json
from training.settings import OptionError, settings

# Seconds for a process that was left over from a killed sweep to end.
_PATIENCE = 60.0

# What a user can mend or expect; anything else is a fault of ours and is logged with its traceback.
_EXPECTED = (loop.Diverged, CheckpointError, OptionError, OSError, result.NoResult)


def main(path: str) -> None:
    """Trains every run of the job that has no result yet."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logging.set_verbosity(logging.WARNING)
    command.enable_compilation_cache()
    job = json.loads(Path(path).read_text())
    folder = SweepFolder(job["workdir"])
    study = load(folder.study)
    with contextlib.ExitStack() as locks:
        for run in job["runs"]:
            what = f"run {run['name']}"
            locks.enter_context(locked(folder.locks / what, what, wait=_PATIENCE))
        runs = [run for run in job["runs"] if not folder.is_done(run["name"])]
        if len(runs) > 1:
            train_pack(job, runs, folder, study)
        elif runs:
            train(runs[0], folder, study)


def _end_with_parent() -> None:
    # Not sys.stdin, whose lock would be held when Python ends.
    while os.read(0, 1):
        pass
    os._exit(1)


def train(
    run: Mapping, folder: SweepFolder, study: Study, programs=None, step_time_ms=None, measure=None
) -> None:
    """Trains one run to its end and writes its result, or why it has none.

    No result is written where the run was packed and it is the pack that failed.

    Args:
      run: ``plan.Run.order()``.
      folder: of the sweep.
      study: what is asked of every run.
      programs: as for ``training.loop.train``.
      step_time_ms: as for ``result.done``.
      measure: as for ``watch.Recorder``.
    """
    try:
        typed, mine = settings(run["config"]), folder.run(run["name"])
        observer = watch.Recorder(typed, mine, measure) if typed.analysis.every else None
        loop.train(run["config"], typed, mine, programs=programs, observer=observer)
        asked = (*study.metrics, *study.columns)
        record = result.done(run, typed, mine, study.measures, asked, step_time_ms)
    except PackFailed:
        raise
    except _EXPECTED as error:
        record = result.failed(run, f"{type(error).__name__}: {error}")
    except Exception as error:
        traceback.print_exc()
        record = result.failed(run, f"{type(error).__name__}: {error} (the log says where)")
    write_json(folder.result(run["name"]), record)


def train_pack(job: Mapping, runs: Sequence[Mapping], folder: SweepFolder, study: Study) -> None:
    """Trains runs as one program; where it is to be faster and is not, the first of them alone.

    What was measured is in the folder's ``packs``, for whoever has to train the others.
    """
    start = time.process_time()
    typed = [settings(run["config"]) for run in runs]
    packed = make_packed_interval(typed)
    measured = packs.measure(typed, job["at_once"], start, packed)
    packing = measured.pays or job["pack"] == "on"
    write_json(folder.pack(job["name"]), {"packed": packing, **measured.record()})
    if not packing:
        train(runs[0], folder, study)
        return
    pack = Pack(typed, packed)
    # What a step of the pack takes is not comparable with the steps of other runs.
    alone_ms = 1000 * measured.alone_step
    first = typed[0]
    measure = one_at_a_time(watch.make_measure(first)) if first.analysis.every else None
    loops = [
        lambda programs, run=run: train(run, folder, study, programs, alone_ms, measure)
        for run in runs
    ]
    for error in train_together(loops, pack):
        if error is not None:
            raise error


if __name__ == "__main__":
    main(sys.argv[1])
