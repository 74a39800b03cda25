"""claims.md and claims.html: every row with its verdict, its figures and how to run it again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from sweeps import html
from sweeps.claims.judge import Judged
from sweeps.claims.record import Record, told
from sweeps.claims.rows import NO_ROW, Claims, Evidence, Finding
from sweeps.executor import ROOT
from sweeps.tables import grid
from training.run_folder import write_text

HEAD = ("row", "claim", "the article's figure", "our figure", "verdict", "evidence", "again")
_EVIDENCE = ("evidence", "run", "took", "on", "again")
YES, NO = "✓", "✗"


@dataclasses.dataclass(frozen=True)
class Page:
    """What both files show.

    Attributes:
      claims: all rows.
      judged: their verdicts, in the order of the rows.
      records: what came of all evidence.
      command: that makes the page again.
    """

    claims: Claims
    judged: tuple[Judged, ...]
    records: Mapping[Evidence, Record]
    command: str

    def write(self, folder: Path) -> list[Path]:
        """Writes both files with links that hold in that folder; returns their paths."""
        texts = {"claims.md": self.markdown(folder), "claims.html": self.html(folder)}
        for name, text in texts.items():
            write_text(folder / name, text)
        return [folder / name for name in texts]

    def markdown(self, folder: Path) -> str:
        """The page as text, for a folder."""
        rows = [
            (
                str(each.row.number), each.row.claim, each.row.figures,
                "<br>".join(map(_md, _lines(each))),
                f"**{each}**", "<br>".join(_links(each.row.evidence, folder, _md_link)),
                "<br>".join(f"`{told(one)}`" for one in each.row.evidence),
            )
            for each in self.judged
        ]  # fmt: skip
        parts = [f"# {self.claims.title}\n", f"`{self.command}`\n", self._count() + "\n"]
        parts.append(grid(HEAD, rows))
        for each in self._differing():
            lines = "\n".join(f"- {_md(line)}" for line in _difference(each))
            parts.append(f"### Row {each.row.number}: {each.row.claim}\n\n{lines}\n")
        if self._differing():
            parts.insert(4, f"## {_DIFFERING}\n")
        if self._beside():
            parts.append(f"## {_BESIDE}\n")
        for one, lines in self._beside():
            lines = "\n".join(f"- {_md(line)}" for line in lines)
            parts.append(f"### {one.name}\n\n{lines}\n")
        evidence = [(*cells, f"`{told(one)}`") for one, cells in self._evidence()]
        parts.append("## Evidence\n\n" + grid(_EVIDENCE, evidence))
        for one in self._with_table():
            table = self.records[one].found.table
            parts.append(f"### {one.name}\n\n" + grid(table.head, table.rows))
        return "\n".join(parts)

    def html(self, folder: Path) -> str:
        """The page as one file for a browser, for a folder."""
        rows = [
            (
                (str(each.row.number), each.row.number),
                html.text(each.row.claim),
                html.text(each.row.figures),
                ("<br>".join(map(escape, _lines(each))), ""),
                (html.marked(str(each), each.confirmed), str(each)),
                ("<br>".join(_links(each.row.evidence, folder, _html_link)), ""),
                ("".join(html.code(told(one))[0] for one in each.row.evidence), ""),
            )
            for each in self.judged
        ]
        body = [
            f"<h1>{escape(self.claims.title)}</h1>",
            f"<p><code>{escape(self.command)}</code></p><p>{escape(self._count())}</p>",
            html.table("claims", HEAD, rows),
        ]
        if self._differing():
            body.append(f"<h2>{_DIFFERING}</h2>")
        for each in self._differing():
            lines = "".join(f"<li>{escape(line)}</li>" for line in _difference(each))
            body.append(f"<h3>Row {each.row.number}: {escape(each.row.claim)}</h3><ul>{lines}</ul>")
        if self._beside():
            body.append(f"<h2>{_BESIDE}</h2>")
        for one, lines in self._beside():
            lines = "".join(f"<li>{escape(line)}</li>" for line in lines)
            body.append(f"<h3>{escape(one.name)}</h3><ul>{lines}</ul>")
        evidence = [
            (*map(html.text, cells), html.code(told(one))) for one, cells in self._evidence()
        ]
        body += ["<h2>Evidence</h2>", html.table("evidence", _EVIDENCE, evidence)]
        for one in self._with_table():
            table = self.records[one].found.table
            cells = [list(map(html.text, row)) for row in table.rows]
            body += [f"<h3>{escape(one.name)}</h3>", html.table(one.name, table.head, cells)]
        return html.document(self.claims.title, body)

    def _count(self) -> str:
        confirmed = sum(each.confirmed for each in self.judged)
        failed = [one.name for one, record in self.records.items() if not record.done]
        without = f" Without a result: {', '.join(failed)}." if failed else ""
        return f"{confirmed} of {len(self.judged)} rows are confirmed.{without}"

    def _differing(self) -> list[Judged]:
        return [each for each in self.judged if not each.confirmed]

    def _beside(self) -> list[tuple[Evidence, list[str]]]:
        """What no row claims and is not as in a paper, with the tests of its reason."""
        found = []
        for one, record in self.records.items():
            lines, differs = [], False
            for finding in record.found.findings:
                if finding.row != NO_ROW:
                    continue
                if not finding.reason:
                    differs = not finding.confirmed
                if differs:
                    lines.append(("Reason, tested: " if finding.reason else "") + _line(finding))
            if lines:
                found.append((one, lines))
        return found

    def _evidence(self) -> list[tuple[Evidence, tuple[str, ...]]]:
        found = []
        for one, record in self.records.items():
            took = f"{record.seconds / 60:.1f} minutes" if record.started else "–"
            where = record.machine or "–"
            run = record.started or "–"
            run += "" if record.done else f", {record.error}"
            found.append((one, (one.name, run, took, where)))
        return found

    def _with_table(self) -> list[Evidence]:
        return [one for one, record in self.records.items() if record.found.table]


_DIFFERING = "What is not confirmed, and why"
_BESIDE = "What no row claims, and is not as in the papers"


def _lines(each: Judged) -> list[str]:
    found = [_line(finding) for finding in each.findings]
    return found + [f"{NO} {name}: {error}" for name, error in each.errors.items()]


def _line(finding: Finding) -> str:
    return f"{YES if finding.confirmed else NO} {finding.what}: {finding.measured}"


def _difference(each: Judged) -> list[str]:
    """What does not confirm the row, the reason, and how its test came out."""
    lines = [_line(finding) for finding in each.findings if not finding.confirmed]
    lines += [f"{NO} {name}: {error}" for name, error in each.errors.items()]
    if each.row.reason:
        lines.append(f"Reason: {each.row.reason}")
    return lines + [f"Tested: {_line(finding)}" for finding in each.reasons]


def _links(
    evidence: Sequence[Evidence], folder: Path, link: Callable[[str, str], str]
) -> Iterable[str]:
    for name in dict.fromkeys(name for one in evidence for name in one.links):
        path = name.partition("::")[0]
        yield link(name, os.path.relpath(ROOT / path, folder.resolve()))


def _md(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return escape(text, quote=False)


def _md_link(name: str, path: str) -> str:
    return f"[{name}]({path})"


def _html_link(name: str, path: str) -> str:
    return f'<a href="{escape(path)}">{escape(name)}</a>'
