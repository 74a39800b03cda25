"""Parts of pages that a browser opens without a network: the shell, tables, cells."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from sweeps.tables import number, spaced
from sweeps.verdicts import Verdict

_HERE = Path(__file__).parent
# What a cell shows, and the value that it is sorted by.
Cell = tuple[str, object]

_SHELL = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script>
{script}</script>
</body>
</html>
"""


def document(title: str, body: Sequence[str]) -> str:
    """A page with the style of all pages, whose tables sort by a click on a heading."""
    return _SHELL.format(
        title=escape(title),
        style=(_HERE / "page.css").read_text(),
        script=(_HERE / "page.js").read_text(),
        body="\n".join(body),
    )


def text(shown: str) -> Cell:
    """A cell of text."""
    return escape(shown), shown


def value(value: float | None) -> Cell:
    """A cell of a number, or of none."""
    missing = value is None or value != value
    return ("–", "") if missing else (number(value), value)


def code(shown: str) -> Cell:
    """A cell of a command."""
    return f"<code>{escape(shown)}</code>", shown


def badge(verdict: Verdict) -> Cell:
    """A cell of a verdict's word."""
    return marked(str(verdict), verdict.confirmed), str(verdict)


def marked(word: str, confirmed: bool) -> str:
    """A word in the colour of what is confirmed or is not."""
    return f'<strong class="{"yes" if confirmed else "no"}">{escape(word)}</strong>'


def table(name: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table whose headings sort it."""
    titles = "".join(
        f'<th scope="col"><button type="button">{escape(spaced(title))}</button></th>'
        for title in head
    )
    lines = "".join(
        "<tr>"
        + "".join(f'<td data-value="{escape(str(value))}">{shown}</td>' for shown, value in row)
        + "</tr>\n"
        for row in rows
    )
    return (
        f'<div class="wide"><table id="{name}"><thead><tr>{titles}</tr></thead>\n'
        f"<tbody>\n{lines}</tbody></table></div>"
    )
