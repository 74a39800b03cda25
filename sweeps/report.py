"""The report of a sweep: report.md, results.csv, results.jsonl, pictures and report.html."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sweeps import pictures, result
from sweeps.folder import SweepFolder
from sweeps.page import page
from sweeps.results import Results, RunResult
from sweeps.study import Study
from sweeps.tables import NOTE, body, grid, head, machine, rates
from sweeps.verdicts import Verdict, judge
from training.run_folder import flatten, write_text


def write(folder: SweepFolder, study: Study, results: Results) -> list[Path]:
    """Draws and writes everything; returns the paths, the page to read first last.

    Args:
      folder: of the sweep.
      study: for its verdicts and pictures.
      results: as read from the folder.
    """
    verdicts = judge(study.verdicts, results)
    drawn, missing = pictures.draw(results, folder.path), []
    for draw in study.pictures:
        try:
            drawn += draw(results, folder.path)
        except Exception as error:  # a user's function, which must not cost the report
            name = getattr(draw, "__name__", str(draw))
            missing.append(f"{name} could not be drawn: {type(error).__name__}: {error}")
            print(missing[-1], file=sys.stderr)
    texts = {
        "results.jsonl": "".join(json.dumps(record(run)) + "\n" for run in results.runs),
        "results.csv": table_csv(results),
        "report.md": markdown(results, verdicts, drawn, missing),
        "report.html": page(results, verdicts),
    }
    for name, text in texts.items():
        write_text(folder.path / name, text)
    return [*drawn, *(folder.path / name for name in texts)]


def record(run: RunResult) -> dict:
    """A run as a line of results.jsonl."""
    return {
        "run": run.name,
        "point": run.point,
        "seed": run.seed,
        "learning_rate": run.learning_rate,
        "status": run.status,
        "error": run.error,
        "metrics": dict(run.metrics),
        "config": dict(run.config),
        "versions": run.environment.get("versions"),
        "device": run.environment.get("device_kind"),
        "platform": run.environment.get("platform"),
        "git": run.environment.get("git"),
        "implementation": run.environment.get("attention_implementation"),
        "command": run.command,
    }


def table_csv(results: Results) -> str:
    """All runs, the whole grid, with every number and every option that differs between them."""
    head = ["run", "point", "seed", "learning_rate", "best_learning_rate", "status", "error"]
    numbers = dict.fromkeys(name for run in results.runs for name in run.metrics)
    numbers = [name for name in numbers if name not in head]
    flat = {run.name: dict(flatten(run.config)) for run in results.runs}
    options = sorted({name for options in flat.values() for name in options})
    varied = [
        name
        for name in options
        if name not in head
        and len({json.dumps(flat[r.name].get(name)) for r in results.runs if flat[r.name]}) > 1
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, *numbers, *varied, "command"])
    for point in results.points:
        for run in point.runs:
            is_best = run.learning_rate == point.learning_rate
            row = [run.name, point.name, run.seed, run.learning_rate, is_best]
            row += [run.status, run.error]
            row += [run.metrics.get(name, "") for name in numbers]
            row += [flat[run.name].get(name, "") for name in varied]
            writer.writerow([*row, run.command])
    return text.getvalue()


def markdown(
    results: Results, verdicts: Sequence[Verdict], drawn: Sequence[Path], missing: Sequence[str]
) -> str:
    """The report as a page of text."""
    about = results.description
    parts = [f"# {results.name}: {about['question']}\n", f"`{about['command']}`\n"]
    parts.append("  \n".join(machine(results)) + "\n")
    if verdicts:
        rows = [(v.claim, v.expected, v.measured, f"**{v}**") for v in verdicts]
        parts.append("## Verdicts\n\n" + grid(("claim", "expected", "measured", "verdict"), rows))
    parts.append("## Results\n\n" + NOTE + "\n\n" + grid(head(results), body(results)))
    if any(point.solved for point in results.points):
        rows = [(point.name, point.solved) for point in results.points if point.solved]
        parts.append("## Made equal\n\n" + grid(("point", "chosen"), rows))
    if any(len(point.rates) > 1 for point in results.points):
        parts.append("## Learning rates\n\n" + rates(results))
    if failures := [run for run in results.runs if run.status != result.DONE]:
        rows = [(run.name, run.status, run.error) for run in failures]
        parts.append("## Runs without a result\n\n" + grid(("run", "status", "why"), rows))
    parts += [f"![{path.stem.replace('_', ' ')}]({path.name})\n" for path in drawn]
    parts += [f"{text}\n" for text in missing]
    commands = "\n".join(point.command for point in results.points)
    parts.append(
        "## Commands\n\nEach trains and measures one row again, all its seeds; those of single "
        f"runs are in results.csv.\n\n```\n{commands}\n```\n"
    )
    return "\n".join(parts)
