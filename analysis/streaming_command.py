"""The flags of ``python -m analysis.streaming``; apart, so that importing it defines none."""

import csv
import itertools

import numpy as np
from absl import flags

from analysis import streaming
from analysis.figures import new_figure
from analysis.plots import COLOURS, STYLES
from training import command, progress
from training.checkpoint import CheckpointError
from training.restore import restore
from training.run_folder import RunFolder, write_json
from training.settings import OptionError

_WORKDIR = flags.DEFINE_string("workdir", None, "Run folder, as train.py made it.")
_CHECKPOINT = flags.DEFINE_string("checkpoint", "last", "'last', 'best', or a step.")
_KEPT = flags.DEFINE_integer("kept", None, "Positions in a cache; default half of task.length.")
_FIRST = flags.DEFINE_list("first", ["0", "1", "4"], "How many of them are first tokens.")
_MULTIPLE = flags.DEFINE_integer("multiple", 16, "Length of the sequences, in task.length.")
_SEQUENCES = flags.DEFINE_integer("sequences", 32, "Sequences of the held-out stream.")


def main() -> None:
    """Runs the command."""
    command.run(_run, failures=(CheckpointError,))


def _run() -> None:
    if _WORKDIR.value is None:
        raise OptionError("--workdir is needed, such as --workdir=runs/text_induction")
    for flag in (_MULTIPLE, _SEQUENCES):
        if flag.value < 1:
            raise OptionError(f"--{flag.name} must be at least 1, got {flag.value}")
    if not all(first.isdecimal() for first in _FIRST.value):
        raise OptionError(f"--first takes whole numbers, such as 0,1,4; got {_FIRST.value}")
    folder = RunFolder(_WORKDIR.value)
    run = restore(folder, _CHECKPOINT.value)
    options = run.settings
    trained = {"task": options.held_out, "seed": options.eval.seed, "sequences": _SEQUENCES.value}
    kept = options.task.length // 2 if _KEPT.value is None else _KEPT.value
    firsts = tuple(map(int, _FIRST.value))
    try:
        spans, losses = streaming.table(
            options.model, run.params, kept=kept, firsts=firsts, multiple=_MULTIPLE.value, **trained
        )
    except ValueError as error:
        raise OptionError(f"streaming {folder.path}: {error}") from None
    perplexity = {
        name: [float(np.exp(loss_T[low:high].mean())) for low, high in spans]
        for name, loss_T in losses.items()
    }
    rows = [
        (name, *(f"{number:.2f}" for number in numbers)) for name, numbers in perplexity.items()
    ]
    header = ("attention", *(f"{low:,} to {high:,}" for low, high in spans))
    title = f"{folder.path} at step {run.step:,}: perplexity by position, {kept} positions kept"
    progress.table(title, rows, header)
    mass_LN, none_LN = streaming.sink_mass(run.model, **trained)
    for layer, mass_N in enumerate(mass_LN):
        heads = "  ".join(f"{mass:.3f}" for mass in mass_N)
        print(f"attention to the first token, layer {layer}: {heads}")
    table, picture = folder.path / "streaming.csv", folder.path / "streaming.png"
    summary = folder.path / "streaming.json"
    write_json(summary, {
        "step": run.step, "kept": kept, "spans": spans, "perplexity": perplexity,
        "first_token": mass_LN.tolist(), "no_token": none_LN.tolist(),
    })  # fmt: skip
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("position", *losses))
        columns = zip(*(loss_T.tolist() for loss_T in losses.values()), strict=True)
        writer.writerows((t, *row) for t, row in enumerate(columns))
    _draw(losses, options.task.length, kept, picture)
    print(f"saved {table}, {picture}, {summary}")


def _draw(losses: dict[str, np.ndarray], trained: int, kept: int, path) -> None:
    """Loss against position, means over quarters of a doubling."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    length = len(next(iter(losses.values())))
    edges = np.unique(np.geomspace(1, length, 4 * length.bit_length()).astype(int))
    for i, (name, loss_T) in enumerate(losses.items()):
        means = [loss_T[low:high].mean() for low, high in itertools.pairwise(edges)]
        axes.plot((edges[:-1] + edges[1:] - 1) / 2, means, label=name, lw=1.6,
                  color=COLOURS[i % len(COLOURS)], linestyle=STYLES[i % len(STYLES)])  # fmt: skip
    for at, what, height in ((trained, "training length", 1.0), (kept, "positions kept", 0.95)):
        axes.axvline(at, color="0.5", lw=1, linestyle=(0, (1, 1.5)))
        where = axes.get_xaxis_transform()
        axes.text(at, height, f" {what}", transform=where, fontsize=7, va="top")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position", ylabel="loss (nats)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
