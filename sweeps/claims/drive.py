"""Runs the evidence that has no result yet, and writes down what came of each piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from sweeps.claims import record
from sweeps.claims.pool import Ended, Pool
from sweeps.claims.progress import EvidenceProgress
from sweeps.claims.record import Record
from sweeps.claims.rows import Evidence, Found
from sweeps.executor import ROOT
from sweeps.folder import SweepFolder

# Seconds between two looks at what runs.
_LOOK = 0.5


def drive(
    evidence: Sequence[Evidence],
    folder: SweepFolder,
    progress: EvidenceProgress,
    ended: Callable[[], None],
) -> None:
    """Runs all that is not done; what fails stops nothing else.

    Args:
      evidence: in any order.
      folder: locked by the caller.
      progress: is told.
      ended: is called whenever a piece has ended and its record is written.
    """
    missing = [each for each in evidence if not record.read(folder, each).done]
    progress.begin(evidence, missing)
    waiting = [each for each in in_order(missing) if _can_start(each, folder, progress)]
    with Pool() as pool:
        running = 0
        while waiting or running:
            while waiting and pool.fits(waiting[0]):
                running += _start(waiting.pop(0), folder, pool, progress)
            for one in pool.wait(_LOOK):
                running -= 1
                _finish(one, folder, progress)
                ended()
            progress.look()


def in_order(evidence: Iterable[Evidence]) -> list[Evidence]:
    """What shares the machine first, the longest first, so that no core waits at its end."""
    return sorted(evidence, key=lambda each: (each.whole, -each.minutes))


def minutes(evidence: Iterable[Evidence], cores: int = 2) -> float:
    """What it takes, what shares the machine on so many cores."""
    return sum(each.minutes if each.whole else each.minutes / cores for each in evidence)


def records(evidence: Iterable[Evidence], folder: SweepFolder) -> Mapping[Evidence, Record]:
    """What is known of all evidence."""
    return {each: record.read(folder, each) for each in evidence}


def _can_start(each: Evidence, folder: SweepFolder, progress: EvidenceProgress) -> bool:
    absent = [need for need in each.needs if not (ROOT / need).exists()]
    if absent:
        error = f"is missing: there is no {', '.join(absent)}"
        progress.ended(each, record.write(folder, each, error, Found(()), 0.0))
    return not absent


def _start(each: Evidence, folder: SweepFolder, pool: Pool, progress: EvidenceProgress) -> int:
    mine: Path = record.folder_of(folder, each).absolute()
    mine.parent.mkdir(parents=True, exist_ok=True)
    folder.log(each.name).unlink(missing_ok=True)
    folder.result(each.name).unlink(missing_ok=True)  # what it says is no longer so
    try:
        pool.start(each, list(each.commands(mine)), folder.log(each.name))
    except OSError as error:
        why = f"its process could not be started: {error}"
        progress.ended(each, record.write(folder, each, why, Found(()), 0.0))
        return 0
    progress.started(each)
    return 1


def _finish(ended: Ended, folder: SweepFolder, progress: EvidenceProgress) -> None:
    error = ended.error
    try:
        found = ended.evidence.read(record.folder_of(folder, ended.evidence))
    except Exception as why:
        # Half a file of a process that was killed may be anything.
        found = Found(())
        error = error or f"its files cannot be read: {type(why).__name__}: {why}"
    kept = record.write(folder, ended.evidence, error, found, ended.seconds)
    progress.ended(ended.evidence, kept)
