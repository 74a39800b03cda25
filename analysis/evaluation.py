"""What a trained model can do: accuracy by length, inside the training range and beyond it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from models.decoder import Decoder, reads_memory
from models.generate import generate
from models.pure import merge, split
from tasks import Batch, Task, evaluation_key
from tasks.space import expected_overlap
from training.metrics import Counts
from training.settings import Settings
from training.step import count_batch

# Sequence lengths as multiples of the training length.
MULTIPLES = (0.25, 0.5, 1, 2, 4)


@dataclasses.dataclass(frozen=True)
class LengthResult:
    """One row of the table of accuracy by length.

    Attributes:
      task: name.
      length: tokens that the model reads.
      inside: whether training has seen sequences of this length.
      chance: accuracy of a guesser without memory.
      accuracy, sequence_accuracy: teacher-forced; None where not possible.
      generated_accuracy, generated_sequence_accuracy: by generation through the cache.
      note: why a number is missing.
    """

    task: str
    length: int
    inside: bool
    chance: float
    accuracy: float | None = None
    sequence_accuracy: float | None = None
    generated_accuracy: float | None = None
    generated_sequence_accuracy: float | None = None
    note: str = ""


def accuracy_by_length(model: Decoder, settings: Settings, sequences: int) -> list[LengthResult]:
    """Both accuracies of every evaluated task at 1/4 to 4 times the training length."""
    return [
        _at_length(model, settings, task, int(multiple * settings.task.length), sequences)
        for task in settings.evaluated
        for multiple in MULTIPLES
    ]


def _at_length(
    model: Decoder, settings: Settings, task: Task, length: int, sequences: int
) -> LengthResult:
    # With answers of fixed length, what is generated can be compared with what is forced.
    can_generate = hasattr(task, "fixed") and settings.objective.generates
    try:
        task = task.fixed(length) if can_generate else task.at_length(length)
    except ValueError as error:
        row = LengthResult(task.name, length, length <= settings.task.length, task.chance)
        return dataclasses.replace(row, note=str(error))
    row = LengthResult(task.name, task.length, length <= settings.task.length, task.chance)
    if settings.model.position == "learned" and task.length > settings.model.max_length:
        note = f"there are {settings.model.max_length} learned positions"
        return dataclasses.replace(row, note=note)
    try:
        settings.objective.check(settings.model.all_layers(), task.first_answer)
    except ValueError:
        return dataclasses.replace(row, note="the mask would show the answers at this length")
    batch, forced = forced_accuracy(model, settings, task, length, sequences)
    row = dataclasses.replace(
        row, accuracy=forced["accuracy"], sequence_accuracy=forced["sequence_accuracy"]
    )
    if not can_generate:
        return dataclasses.replace(row, note="nothing is generated with this task and objective")
    start = task.first_answer
    tokens, _ = generate(
        model, batch.tokens_BT[:, : start + 1], task.length - start, **batch.source_arguments()
    )
    right = np.asarray(tokens == batch.targets_BT[:, start:])
    return dataclasses.replace(
        row,
        generated_accuracy=float(right.mean()),
        generated_sequence_accuracy=float(right.all(-1).mean()),
    )


def forced_accuracy(
    model: Decoder, settings: Settings, task: Task, stream: int, sequences: int
) -> tuple[Batch, dict[str, float]]:
    """The sequences of a task that belong to ``stream``, and ``Counts.ratios`` on them."""
    key = evaluation_key(settings.eval.seed, 2**31 + stream)
    batch = task.sample(key, sequences)
    graph, params = split(model)
    counts = _teacher_forced(graph, settings.objective, params, batch, key, task.chance)
    return batch, counts.ratios()


@functools.partial(jax.jit, static_argnums=(0, 1))
def _teacher_forced(graph, objective, params, batch, key, chance) -> Counts:
    model = merge(graph, params)

    # A few sequences at a time bound the memory of the dense scores at the longest lengths.
    def one(row_and_index) -> Counts:
        row, index = row_and_index
        row = jax.tree.map(lambda x: x[None], row)
        return count_batch(model, row, jax.random.fold_in(key, index), chance, objective)

    rows = jnp.arange(batch.tokens_BT.shape[0])
    return jax.tree.map(lambda x: x.sum(0), jax.lax.map(one, (batch, rows), batch_size=32))


def cache_bytes(model: Decoder, length: int) -> dict[str, int]:
    """Bytes of the cache per token by the formula, and of a cache as allocated.

    A model that reads a source keeps ``per_source_token`` of it too; the allocated cache is then
    for ``length`` tokens of both.

    Raises:
      RuntimeError: the allocated cache is not what the formula says.
    """
    layers = model.caching_layers()
    per_token = {True: 0, False: 0}
    for layer in layers:
        per_token[reads_memory(layer.options)] += layer.cache_bytes_per_token()
    formula = sum(layer.cache_bytes(length) for layer in layers)
    lengths = (length, length) if model.reads_source else (length,)
    allocated = sum(cache.nbytes for cache in model.init_caches(1, *lengths))
    if allocated != formula:
        raise RuntimeError(f"the cache holds {allocated} bytes, the formula says {formula}")
    return {
        "per_token": per_token[False],
        "per_source_token": per_token[True],
        "at_length": length,
        "allocated": allocated,
    }


def training_overlap(settings: Settings) -> dict[str, float]:
    """Expected share of fresh sequences of each task that training has seen too.

    0 for a task that is evaluated on what training never draws.
    """
    drawn = settings.train.steps * settings.train.batch_size
    total = sum(settings.task.shares)
    seen = {
        task.name: int(drawn * share / total)
        for task, share in zip(settings.task.tasks, settings.task.shares, strict=True)
    }
    overlaps = {}
    for task in settings.evaluated:
        drawn = seen[task.name] if task in settings.task.tasks else 0
        overlaps[task.name] = expected_overlap(task.space, drawn)
    return overlaps


def as_text(row: LengthResult) -> tuple[str, ...]:
    """A row of the printed table."""
    numbers = (
        row.accuracy,
        row.sequence_accuracy,
        row.generated_accuracy,
        row.generated_sequence_accuracy,
    )
    shown = ["–" if number is None else f"{number:.4f}" for number in numbers]
    inside = "yes" if row.inside else "no"
    return (row.task, str(row.length), inside, *shown, f"{row.chance:.4f}")
