"""The kinds of evidence: tests, benchmarks, studies, trained models. See ``rows.Evidence``."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

from sweeps import results, study
from sweeps.claims.rows import NO_ROW, Finding, Found, Table
from sweeps.executor import ROOT
from sweeps.folder import SweepFolder
from sweeps.tables import body, head
from sweeps.verdicts import judge
from training.run_folder import RunFolder

# Marks of a test case in JUnit's report.
_BAD = ("failure", "error", "skipped")
# "24: …" and "24, 25: …" are verdicts on rows, "reason 24: …" on why one is not as in the
# literature; without a number they are on a paper's claim, which no row has.
_ROWS = re.compile(r"(?:(reason)(?: |: ))?(?:(\d+(?:, \d+)*): )?(.+)", re.S)


@dataclasses.dataclass(frozen=True)
class Pytest:
    """Tests, all of whose cases have to pass.

    Our figures are what a test gives to ``record_property("figures", …)``.

    Attributes:
      name: see ``rows.Evidence``.
      nodes: "tests/test_x.py::test_y", each; cases in brackets are counted together.
      minutes: see ``rows.Evidence``.
      reason: they test a reason.
    """

    name: str
    nodes: tuple[str, ...]
    minutes: float = 0.2
    reason: bool = False
    whole = False

    @property
    def links(self) -> tuple[str, ...]:
        return self.nodes

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.partition("::")[0] for node in self.nodes))

    def commands(self, folder: Path) -> tuple[tuple[str, ...], ...]:
        report = f"--junitxml={folder / 'junit.xml'}"
        return (("-m", "pytest", "-q", "-p", "no:cacheprovider", report, *self.nodes),)

    def read(self, folder: Path) -> Found:
        cases = list(ElementTree.parse(folder / "junit.xml").iter("testcase"))
        return Found(tuple(self._finding(node, cases) for node in self.nodes))

    def _finding(self, node: str, cases: list[ElementTree.Element]) -> Finding:
        file, _, test = node.partition("::")
        module = file.removesuffix(".py").replace("/", ".")
        mine = [
            case
            for case in cases
            if case.get("classname") == module and test in (case.get("name"), _bare(case))
        ]
        passed = [case for case in mine if not any(case.find(kind) is not None for kind in _BAD)]
        figures = dict.fromkeys(
            line.get("value")
            for case in mine
            for line in case.iter("property")
            if line.get("name") == "figures"
        )
        counted = f"{len(passed)} of {len(mine)} cases pass" if mine else "it has not run"
        measured = "; ".join((*figures, counted))
        return Finding(None, node, measured, 0 < len(mine) == len(passed), self.reason)


def _bare(case: ElementTree.Element) -> str:
    return case.get("name", "").partition("[")[0]


@dataclasses.dataclass(frozen=True)
class Bench:
    """A benchmark, which gives verdicts by number of row.

    Attributes:
      name: see ``rows.Evidence``.
      benchmark: a module in benchmarks/.
      options: of its command.
      minutes: see ``rows.Evidence``.
    """

    name: str
    benchmark: str
    options: tuple[str, ...]
    minutes: float
    whole = True

    @property
    def links(self) -> tuple[str, ...]:
        return (f"benchmarks/{self.benchmark}.py",)

    @property
    def needs(self) -> tuple[str, ...]:
        return self.links

    def commands(self, folder: Path) -> tuple[tuple[str, ...], ...]:
        return (("-m", f"benchmarks.{self.benchmark}", *self.options, f"--out={folder}"),)

    def read(self, folder: Path) -> Found:
        verdicts = json.loads((folder / f"{self.benchmark}.json").read_text())
        return Found(tuple(self._finding(verdict) for verdict in verdicts))

    def _finding(self, verdict: dict) -> Finding:
        row, confirmed = int(verdict["row"]), bool(verdict["confirmed"])
        return Finding(row, verdict["claim"], verdict["figures"], confirmed)


@dataclasses.dataclass(frozen=True)
class StudyEvidence:
    """A study, often in a short form; its verdicts begin with the numbers of their rows.

    Attributes:
      name: of its file in configs/sweeps, less ".py".
      options: of sweep.py: what makes it short.
      minutes: see ``rows.Evidence``.
    """

    name: str
    options: tuple[str, ...]
    minutes: float
    whole = True

    @property
    def path(self) -> str:
        return f"configs/sweeps/{self.name}.py"

    @property
    def links(self) -> tuple[str, ...]:
        return (self.path,)

    @property
    def needs(self) -> tuple[str, ...]:
        return self.links

    def commands(self, folder: Path) -> tuple[tuple[str, ...], ...]:
        return (("sweep.py", f"--config={self.path}", *self.options, f"--workdir={folder}"),)

    def read(self, folder: Path) -> Found:
        found = results.read(SweepFolder(folder))
        # What a short form leaves out has not failed.
        tried = tuple(
            point for point in found.points if any(r.status != results.MISSING for r in point.runs)
        )
        shown = dataclasses.replace(found, points=tried)
        findings = [
            finding
            for verdict in study.load(ROOT / self.path).verdicts
            for finding in self._findings(verdict, found, shown)
        ]
        return Found(tuple(findings), Table(head(shown), tuple(body(shown))))

    @staticmethod
    def _findings(verdict, found, shown) -> list[Finding]:
        (full,), (short,) = judge((verdict,), found), judge((verdict,), shown)
        reason, numbers, claim = _ROWS.match(full.claim).groups()
        if numbers is None:
            if short != full:
                return []
            numbers = str(NO_ROW)
        measured = f"{full.measured} (wanted: {full.expected})"
        return [
            Finding(int(number), claim, measured, full.confirmed, bool(reason))
            for number in numbers.split(", ")
        ]


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """A number at the end of a training run has to reach a bound."""

    metric: str
    bound: float
    what: str


@dataclasses.dataclass(frozen=True)
class Training:
    """A training run by train.py.

    Attributes:
      name: see ``rows.Evidence``.
      config: its file.
      options: of train.py.
      bounds: what its last evaluation has to reach.
      minutes: see ``rows.Evidence``.
    """

    name: str
    config: str
    options: tuple[str, ...]
    bounds: tuple[AtLeast, ...]
    minutes: float
    whole = False

    @property
    def links(self) -> tuple[str, ...]:
        return (self.config,)

    @property
    def needs(self) -> tuple[str, ...]:
        return self.links

    def commands(self, folder: Path) -> tuple[tuple[str, ...], ...]:
        return (("train.py", f"--config={self.config}", *self.options, f"--workdir={folder}"),)

    def read(self, folder: Path) -> Found:
        lines = [line for line in RunFolder(folder).read_metrics() if self.bounds[0].metric in line]
        if not lines:
            raise ValueError(f"{folder} has no {self.bounds[0].metric}")
        last = lines[-1]
        return Found(tuple(self._finding(bound, last) for bound in self.bounds))

    def _finding(self, bound: AtLeast, last: dict) -> Finding:
        value = last[bound.metric]
        chance = last.get(bound.metric.replace("accuracy", "chance"), 0.0)
        measured = (
            f"{bound.metric} {value:.3f} after {last['step']:,} steps (chance {chance:.3f}; "
            f"wanted: at least {bound.bound:g})"
        )
        return Finding(None, bound.what, measured, value >= bound.bound)
