"""From findings to verdicts: what the evidence that a row cites says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from sweeps.claims.record import Record
from sweeps.claims.rows import Evidence, Finding, Row
from sweeps.verdicts import CONFIRMED, NOT_CONFIRMED


@dataclasses.dataclass(frozen=True)
class Judged:
    """A row and what its evidence says.

    Attributes:
      row: the claim.
      findings: on it, in the order of its evidence.
      reasons: findings that test why it is not as in the literature.
      errors: evidence that has failed, has not run or says nothing of the row → why.
    """

    row: Row
    findings: tuple[Finding, ...]
    reasons: tuple[Finding, ...]
    errors: Mapping[str, str]

    @property
    def confirmed(self) -> bool:
        """Whether all evidence is there, says something, and confirms the claim."""
        judged = [finding.confirmed for finding in self.findings]
        return not self.errors and bool(judged) and all(judged)

    def __str__(self) -> str:
        return CONFIRMED if self.confirmed else NOT_CONFIRMED


def judge(row: Row, records: Mapping[Evidence, Record]) -> Judged:
    """The verdict on a row."""
    findings, errors = [], {}
    for evidence in row.evidence:
        record = records[evidence]
        mine = _about(row, record.found.findings)
        if record.error:
            errors[evidence.name] = record.error
        elif not mine:
            errors[evidence.name] = f"says nothing of row {row.number}"
        findings += mine
    return Judged(
        row,
        tuple(finding for finding in findings if not finding.reason),
        tuple(finding for finding in findings if finding.reason),
        errors,
    )


def _about(row: Row, findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.row in (None, row.number)]
