"""What a page of claims is made of: rows, the evidence that they cite, and what evidence finds."""

from __future__ import annotations

import dataclasses
import fnmatch
from pathlib import Path
from typing import Protocol

from sweeps.axes import AxisError
from training.settings import OptionError

NO_ROW = 0


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a piece of evidence says.

    Attributes:
      row: number of the claim it is about; None: of every claim that cites the evidence;
        ``NO_ROW``: of none, it is a paper's and stands on the page by itself.
      what: what was expected, or tested.
      measured: what came of it: our figure.
      confirmed: whether that is what was expected.
      reason: it tests why the row is not as in the literature, and decides nothing about the row.
    """

    row: int | None
    what: str
    measured: str
    confirmed: bool
    reason: bool = False


@dataclasses.dataclass(frozen=True)
class Table:
    """Numbers behind the findings, as text cells."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """All that a piece of evidence says, read from the files that its processes have left."""

    findings: tuple[Finding, ...]
    table: Table | None = None


class Evidence(Protocol):
    """A frozen value. It has files in a folder of its own, which its commands may find half full.

    Attributes:
      name: of its files and on the page.
      links: where it stands: paths from the root of the repository, "::" before a test's name.
      minutes: what it is expected to take, on 2 cores.
      whole: whether it needs the machine for itself, since it measures time or uses all cores.
      needs: paths from the root without which it cannot start.
    """

    name: str
    links: tuple[str, ...]
    minutes: float
    whole: bool
    needs: tuple[str, ...]

    def commands(self, folder: Path) -> tuple[tuple[str, ...], ...]:
        """Arguments of Python, run one after the other from the root of the repository."""
        ...

    def read(self, folder: Path) -> Found:
        """What the commands have left; OSError, ValueError or KeyError where that is not whole."""
        ...


@dataclasses.dataclass(frozen=True)
class Row:
    """A claim.

    Attributes:
      number: in the table of claims.
      claim: a sentence.
      figures: the article's, or what it says in place of any.
      evidence: what shows it; all of it has to confirm the claim.
      reason: why it is not as in the literature where it is not: a sentence, whose test is among
        the findings.
    """

    number: int
    claim: str
    figures: str
    evidence: tuple[Evidence, ...]
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Claims:
    """A page of claims: what the ``get_sweep()`` of its file returns.

    Attributes:
      title: of the page.
      rows: in the order of the page.
      docs: folder, from the root of the repository, that gets the page when all evidence has
        run; "" for none: the page stays in the work folder.

    Raises:
      AxisError: two rows of a number, a row without evidence, or a name for two things.
    """

    title: str
    rows: tuple[Row, ...]
    docs: str = ""

    def __post_init__(self):
        numbers = [row.number for row in self.rows]
        if repeated := sorted({n for n in numbers if numbers.count(n) > 1}):
            raise AxisError(f"there are two rows {', '.join(map(str, repeated))}")
        if bare := [str(row.number) for row in self.rows if not row.evidence]:
            raise AxisError(f"row {', '.join(bare)} cites no evidence")
        names = [each.name for each in self.evidence]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise AxisError(f"two pieces of evidence are named {', '.join(repeated)}")

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """All that the rows cite, each piece once."""
        return tuple(dict.fromkeys(each for row in self.rows for each in row.evidence))

    def only(self, patterns: str) -> tuple[Row, ...]:
        """The rows whose number matches one of several shell patterns.

        Args:
          patterns: with commas or spaces between.

        Raises:
          OptionError: one of them matches none.
        """
        kept = []
        for pattern in patterns.replace(",", " ").split() or [patterns]:
            found = [row for row in self.rows if fnmatch.fnmatchcase(str(row.number), pattern)]
            if not found:
                known = ", ".join(str(row.number) for row in self.rows)
                raise OptionError(f"--only={patterns}: no row is {pattern!r}; there are {known}")
            kept += found
        return tuple(row for row in self.rows if row in kept)
