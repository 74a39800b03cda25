"""report.html: one file that a browser opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go
import plotly.io

from analysis.plots import COLOURS
from sweeps import result
from sweeps.html import Cell, badge, code, document, table, text, value
from sweeps.pictures import curve, mean_curve, with_curves
from sweeps.results import Results, chance_name
from sweeps.tables import NOTE, chance_of, machine, with_chance, with_interval
from sweeps.verdicts import Verdict

_DASHES = ("solid", "dash", "dot", "dashdot")


def page(results: Results, verdicts: Sequence[Verdict]) -> str:
    """The page: verdicts, the table of points, curves, all runs with their commands."""
    about = results.description
    body = [
        f"<h1>{escape(results.name)}: {escape(about['question'])}</h1>",
        f"<p><code>{escape(about['command'])}</code></p>",
        "".join(f"<p>{escape(line)}</p>" for line in machine(results)),
    ]
    if verdicts:
        rows = [[text(v.claim), text(v.expected), text(v.measured), badge(v)] for v in verdicts]
        body += [
            "<h2>Verdicts</h2>",
            table("verdicts", ("claim", "expected", "measured", "verdict"), rows),
        ]
    body += ["<h2>Results</h2>", f"<p>{escape(NOTE)} A click on a heading sorts.</p>"]
    body.append(table("points", *_points(results)))
    metrics = with_curves(results)
    if metrics:
        body.append("<h2>Curves</h2><p>The thick line is the mean over seeds at the best learning "
                    "rate, thin ones are single runs; a click on a name hides it.</p>")  # fmt: skip
    for i, metric in enumerate(metrics):
        body.append(
            plotly.io.to_html(
                curves(results, metric),
                full_html=False,
                include_plotlyjs=i == 0,
                div_id=f"curves{i}",
                config={"displaylogo": False, "responsive": True},
            )
        )
    body += ["<h2>Runs</h2>", table("runs", *_runs(results))]
    return document(results.name, body)


def curves(results: Results, metric: str) -> go.Figure:
    """Every run against training tokens, the mean of each point's best learning rate on top."""
    figure = go.Figure()
    for index, point in enumerate(results.points):
        colour = COLOURS[index % len(COLOURS)]
        dash = _DASHES[index % len(_DASHES)]
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


def _points(results: Results) -> tuple[list[str], list[list[Cell]]]:
    numbers = [*with_chance(results), *results.events, *results.columns]
    head = ["point", *numbers, "learning rate", "seeds"]
    solved = any(point.solved for point in results.points)
    rows = []
    for point in results.points:
        row = [text(point.name)]
        for metric in results.metrics:
            found = point.sample(metric)
            row.append((with_interval(found), found.mean if found.values else ""))
            if results.chance(metric) is not None:
                row.append(value(chance_of(point, metric)))
        for event in results.events:
            found = point.sample(event)
            row.append((with_interval(found), found.mean if found.values else ""))
        row += [value(point.sample(column).mean) for column in results.columns]
        done = sum(run.status == result.DONE for run in point.best)
        row += [(f"{point.learning_rate:g}", point.learning_rate)]
        row += [(f"{done} of {len(point.best)}", done)]
        row += [text(point.solved)] if solved else []
        rows.append([*row, code(point.command)])
    return [*head, *(["made equal"] if solved else []), "command"], rows


def _runs(results: Results) -> tuple[list[str], list[list[Cell]]]:
    numbers = [*with_chance(results), *results.events, *results.columns]
    head = ["run", "status", "seed", "learning rate", *numbers]
    rows = []
    for point in results.points:
        for run in point.runs:
            star = " ★" if run.learning_rate == point.learning_rate and len(point.rates) > 1 else ""
            status = f"{run.status}: {run.error}" if run.error else run.status
            row = [text(run.name), text(status), (str(run.seed), run.seed)]
            row.append((f"{run.learning_rate:g}{star}", run.learning_rate))
            for metric in results.metrics:
                row.append(value(run.metrics.get(metric)))
                if results.chance(metric) is not None:
                    row.append(value(run.metrics.get(chance_name(metric))))
            named = (*results.events, *results.columns)
            row += [value(run.metrics.get(name)) for name in named]
            rows.append([*row, code(run.command)])
    return [*head, "command"], rows
