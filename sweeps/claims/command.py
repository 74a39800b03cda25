"""What sweep.py does with a file of claims."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from sweeps.claims import drive as driving
from sweeps.claims import record
from sweeps.claims.judge import Judged, judge
from sweeps.claims.page import Page
from sweeps.claims.progress import EvidenceProgress
from sweeps.claims.rows import Claims, Evidence, Row
from sweeps.executor import ROOT
from sweeps.folder import SweepFolder
from sweeps.options import Options
from training.environment import git_commit

# Flags that mean something here; the others are for studies.
_READ = ("config", "workdir", "dry_run", "only", "report_only")


def main(path: str, claims: Claims, options: Options) -> int:
    """Runs what is missing, writes the page, and returns the exit code: 1 where evidence failed.

    Raises:
      OptionError: a flag that is for studies, an unknown row, or a folder that holds something
        else or is in use. Nothing has been changed.
    """
    options.refuse_others(_READ, f"{path} is a page of claims")
    chosen = claims.rows if options.only is None else claims.only(options.only)
    evidence = _evidence_of(chosen)
    if options.dry_run:
        _dry_run(claims, chosen)
        return 0
    name = Path(path).stem
    folder = SweepFolder(options.folder(name))
    folder.check_usable_for(name)
    record.check_same(folder, evidence)
    with folder.locked(None) as left:
        folder.check_usable_for(name)
        folder.begin(_description(name, path, claims), Path(path))
        with EvidenceProgress() as progress:
            for sentence in left:
                progress.say(sentence)
            driving.drive(evidence, folder, progress, lambda: _page(folder, claims))
        return _report(folder, claims, chosen)


def report(folder: SweepFolder, claims: Claims, options: Options) -> int:
    """Writes the page again, whatever state the evidence is in."""
    options.refuse_others(_READ, f"{folder.path} holds a page of claims")
    chosen = claims.rows if options.only is None else claims.only(options.only)
    _report(folder, claims, chosen)
    return 0


def _evidence_of(rows: Sequence[Row]) -> tuple[Evidence, ...]:
    return tuple(dict.fromkeys(each for row in rows for each in row.evidence))


def _dry_run(claims: Claims, rows: Sequence[Row]) -> None:
    print(f"{claims.title}: {len(rows)} of {len(claims.rows)} rows")
    for row in rows:
        print(f"{row.number:3}  {row.claim}  [{', '.join(each.name for each in row.evidence)}]")
    evidence = _evidence_of(rows)
    for each in driving.in_order(evidence):
        print(f"{each.name}, {each.minutes:g} minutes: {record.told(each)}")
    alone = sum(each.minutes for each in evidence if each.whole)
    print(
        f"About {driving.minutes(evidence):.0f} minutes on 2 cores: {alone:.0f} with the machine "
        "for themselves, the others a core each"
    )


def _description(name: str, path: str, claims: Claims) -> dict:
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "name": name, "question": claims.title, "study": path, "started": now,
        "git": git_commit(),
    }  # fmt: skip


def _page(folder: SweepFolder, claims: Claims) -> tuple[Page, list[Path]]:
    """Writes what is known now, so that a kill loses no more than what runs."""
    records = driving.records(claims.evidence, folder)
    judged = tuple(judge(row, records) for row in claims.rows)
    path = folder.read_description()["study"]
    page = Page(claims, judged, records, f"python sweep.py --config={path}")
    written = page.write(folder.path)
    if claims.docs and all(each != record.NOT_RUN for each in records.values()):
        written += page.write(ROOT / claims.docs)
    return page, written


def _report(folder: SweepFolder, claims: Claims, chosen: Sequence[Row]) -> int:
    page, written = _page(folder, claims)
    mine = [each for each in page.judged if each.row in chosen]
    for each in mine:
        _say(each)
    confirmed = sum(each.confirmed for each in mine)
    print(f"{confirmed} of {len(mine)} rows confirmed; saved {', '.join(map(str, written))}")
    failed = [one.name for one in _evidence_of(chosen) if not page.records[one].done]
    if failed:
        print(
            f"{len(failed)} pieces of evidence have no result: {', '.join(failed)}; the same "
            f"command tries them again, the others are kept in {folder.path}"
        )
    return 1 if failed else 0


def _say(each: Judged) -> None:
    print(f"{each}: {each.row.number}: {each.row.claim}")
    for finding in each.findings:
        print(f"    {finding.what}: {finding.measured}")
    for name, error in each.errors.items():
        print(f"    {name}: {error}")
