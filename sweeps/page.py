"""report.html: one file that a browser opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go
import plotly.io

from analysis.plots import COLOURS
from sweeps import result
from sweeps.pictures import curve, mean_curve
from sweeps.results import Results, chance_name
from sweeps.tables import NOTE, chance_of, machine, number, spaced, with_chance, with_interval
from sweeps.verdicts import Verdict

_DASHES = ("solid", "dash", "dot", "dashdot")
_HERE = Path(__file__).parent


def page(results: Results, verdicts: Sequence[Verdict]) -> str:
    """The page: verdicts, the table of points, curves, all runs with their commands."""
    about = results.description
    body = [
        f"<h1>{escape(results.name)}: {escape(about['question'])}</h1>",
        f"<p><code>{escape(about['command'])}</code></p>",
        "".join(f"<p>{escape(line)}</p>" for line in machine(results)),
    ]
    if verdicts:
        rows = [[_text(v.claim), _text(v.expected), _text(v.measured), _badge(v)] for v in verdicts]
        body += [
            "<h2>Verdicts</h2>",
            _table("verdicts", ("claim", "expected", "measured", "verdict"), rows),
        ]
    body += ["<h2>Results</h2>", f"<p>{escape(NOTE)} A click on a heading sorts.</p>"]
    body.append(_table("points", *_points(results)))
    body.append("<h2>Curves</h2><p>The thick line is the mean over seeds at the best learning rate,"
                " thin ones are single runs; a click on a name hides it.</p>")  # fmt: skip
    for i, metric in enumerate(results.metrics):
        body.append(
            plotly.io.to_html(
                curves(results, metric),
                full_html=False,
                include_plotlyjs=i == 0,
                div_id=f"curves{i}",
                config={"displaylogo": False, "responsive": True},
            )
        )
    body += ["<h2>Runs</h2>", _table("runs", *_runs(results))]
    return _SHELL.format(
        title=escape(results.name),
        style=(_HERE / "page.css").read_text(),
        script=(_HERE / "page.js").read_text(),
        body="\n".join(body),
    )


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


def curves(results: Results, metric: str) -> go.Figure:
    """Every run against training tokens, the mean of each point's best learning rate on top."""
    figure = go.Figure()
    for index, point in enumerate(results.points):
        colour = COLOURS[index % len(COLOURS)]
        dash = _DASHES[(index // len(COLOURS)) % len(_DASHES)]
        group = {"legendgroup": point.name, "mode": "lines"}
        for run in point.runs:
            tokens, values = curve(run, metric)
            if tokens:
                figure.add_scatter(
                    x=tokens, y=values, name=run.name, showlegend=False, opacity=0.45,
                    line={"color": colour, "width": 1, "dash": dash}, **group,
                )  # fmt: skip
        tokens, values = mean_curve([curve(run, metric) for run in point.best])
        if tokens:
            figure.add_scatter(
                x=tokens, y=values, name=point.name,
                line={"color": colour, "width": 3, "dash": dash}, **group,
            )  # fmt: skip
    if (chance := results.chance(metric)) is not None:
        figure.add_hline(y=chance, line={"color": "grey", "dash": "dot"},
                         annotation_text=f"chance {chance:.3f}")  # fmt: skip
    figure.update_layout(
        template="plotly_white", height=480, hovermode="closest",
        xaxis_title="training tokens", yaxis_title=metric, margin={"t": 30},
    )  # fmt: skip
    return figure


# A cell: what is shown, as HTML, and the value that it is sorted by.
Cell = tuple[str, float | str]


def _text(text: str) -> Cell:
    return escape(text), text


def _value(value: float | None) -> Cell:
    return ("–", "") if value is None or value != value else (number(value), value)


def _code(text: str) -> Cell:
    return f"<code>{escape(text)}</code>", text


def _badge(verdict: Verdict) -> Cell:
    kind = "yes" if verdict.confirmed else "no"
    return f'<strong class="{kind}">{verdict}</strong>', str(verdict)


def _points(results: Results) -> tuple[list[str], list[list[Cell]]]:
    numbers = [*with_chance(results), *results.events, *results.columns]
    head = ["point", *numbers, "learning rate", "seeds"]
    solved = any(point.solved for point in results.points)
    rows = []
    for point in results.points:
        row = [_text(point.name)]
        for metric in results.metrics:
            found = point.sample(metric)
            row.append((with_interval(found), found.mean if found.values else ""))
            if results.chance(metric) is not None:
                row.append(_value(chance_of(point, metric)))
        for event in results.events:
            found = point.sample(event)
            row.append((with_interval(found), found.mean if found.values else ""))
        row += [_value(point.sample(column).mean) for column in results.columns]
        done = sum(run.status == result.DONE for run in point.best)
        row += [(f"{point.learning_rate:g}", point.learning_rate)]
        row += [(f"{done} of {len(point.best)}", done)]
        rows.append([*row, _text(point.solved)] if solved else row)
    return [*head, "made equal"] if solved else head, rows


def _runs(results: Results) -> tuple[list[str], list[list[Cell]]]:
    numbers = [*with_chance(results), *results.events, *results.columns]
    head = ["run", "status", "seed", "learning rate", *numbers]
    rows = []
    for point in results.points:
        for run in point.runs:
            star = " ★" if run.learning_rate == point.learning_rate and len(point.rates) > 1 else ""
            status = f"{run.status}: {run.error}" if run.error else run.status
            row = [_text(run.name), _text(status), (str(run.seed), run.seed)]
            row.append((f"{run.learning_rate:g}{star}", run.learning_rate))
            for metric in results.metrics:
                row.append(_value(run.metrics.get(metric)))
                if results.chance(metric) is not None:
                    row.append(_value(run.metrics.get(chance_name(metric))))
            named = (*results.events, *results.columns)
            row += [_value(run.metrics.get(name)) for name in named]
            rows.append([*row, _code(run.command)])
    return [*head, "command"], rows


def _table(name: str, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
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
