"""Evaluates a trained model: ``python eval.py --workdir=runs/gqa --attention=0``."""

import dataclasses

from absl import flags

from analysis import evaluation, patterns, plots
from analysis.cost import cost, describe
from training import command, progress
from training.checkpoint import CheckpointError
from training.restore import restore
from training.run_folder import RunFolder, write_json
from training.settings import OptionError

WORKDIR = flags.DEFINE_string("workdir", None, "Run folder, as train.py made it.")
CHECKPOINT = flags.DEFINE_string("checkpoint", "last", "'last', 'best', or a step.")
ATTENTION = flags.DEFINE_flag(
    command.numbers(
        "attention",
        bare=0,
        help="Also draw the attention patterns of a sequence of the evaluation stream, by its "
        "number; may be repeated, and --attention alone draws the first.",
    )
)
SEQUENCES = flags.DEFINE_integer("sequences", 256, "Sequences per task and length.")


def main() -> None:
    if WORKDIR.value is None:
        raise OptionError("--workdir is needed: a run folder, such as --workdir=runs/gqa")
    if SEQUENCES.value < 1:
        raise OptionError(f"--sequences must be at least 1, got {SEQUENCES.value}")
    if min(ATTENTION.value, default=0) < 0:
        raise OptionError(f"--attention must be 0 or more, got {min(ATTENTION.value)}")
    folder = RunFolder(WORKDIR.value)
    run = restore(folder, CHECKPOINT.value)
    rows = evaluation.accuracy_by_length(run.model, run.settings, SEQUENCES.value)
    parts = cost(run.settings.model, run.settings.task.length).parameters
    cache = evaluation.cache_bytes(run.model, run.settings.task.length)

    progress.table(
        f"{folder.path} at step {run.step:,}: accuracy by length",
        [evaluation.as_text(row) for row in rows],
        ("task", "tokens", "in training", "accuracy", "whole", "generated", "whole", "chance"),
    )
    for row in rows:
        if row.note:
            print(f"{row.task} at {row.length} tokens: {row.note}")
    progress.table("cost", describe(run.settings), ("what", "number", "about"))
    source = cache["per_source_token"]
    of_source = f" and {source:,} per token of the source" if source else ""
    print(
        f"cache: {cache['per_token']:,} bytes per token{of_source}; {cache['allocated']:,} bytes "
        f"allocated for {cache['at_length']} tokens, as the formula says"
    )
    write_json(
        folder.evaluation,
        {
            "step": run.step,
            "sequences": SEQUENCES.value,
            "by_length": [dataclasses.asdict(row) for row in rows],
            "parameters": parts,
            "cache_bytes": cache,
            "training_overlap": evaluation.training_overlap(run.settings),
        },
    )
    plots.draw_accuracy_by_length(rows, folder.accuracy_by_length)
    saved = [folder.evaluation, folder.accuracy_by_length]
    for index in ATTENTION.value:
        saved += patterns.draw_sequence(run.model, run.settings, index, folder.path)
    print(f"saved {', '.join(map(str, saved))}")


if __name__ == "__main__":
    command.run(main, failures=(CheckpointError,))
