"""emergence.csv: what was seen of a model while it was trained, one row a look."""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from training.run_folder import write_text


@dataclasses.dataclass(frozen=True)
class EmergenceTable:
    """The rows of an emergence.csv.

    Columns are ``step``, ``tokens`` (trained on so far), ``loss`` (nats, all positions),
    ``loss_repeated`` (the positions whose target is determined by what came before),
    ``in_context_learning``, ``prefix_matching_chance`` and, of data with delimiters,
    ``delimiter_chance`` (the scores of uniform attention), ``SCORE/layerI/headJ`` for every score
    of every head, and ``loss_at/T`` for every position.

    Attributes:
      names: of the columns.
      values: (rows, columns).
    """

    names: tuple[str, ...]
    values: np.ndarray

    def __getitem__(self, name: str) -> np.ndarray:
        """A column."""
        return self.values[:, self.names.index(name)]

    def heads(self, score: str) -> np.ndarray:
        """A score of every head, (rows, L, N)."""
        layers = self._numbers(f"{score}/layer")
        heads = self._numbers(f"{score}/layer0/head")
        return np.stack(
            [np.stack([self[f"{score}/layer{i}/head{j}"] for j in heads], -1) for i in layers], 1
        )

    def loss_by_position(self) -> np.ndarray:
        """Loss in nats, (rows, T)."""
        return np.stack([self[f"loss_at/{t}"] for t in self._numbers("loss_at/")], 1)

    def _numbers(self, prefix: str) -> list[int]:
        """The numbers that follow ``prefix`` in names of columns."""
        rests = [name.removeprefix(prefix) for name in self.names if name.startswith(prefix)]
        return sorted({int(rest.partition("/")[0]) for rest in rests})


def flat_row(
    numbers: Mapping[str, float], scores: Mapping[str, np.ndarray], loss_T: Sequence[float]
) -> dict[str, float]:
    """A row as columns: plain numbers, scores of heads (L, N), loss by position."""
    row = dict(numbers)
    for name, score_LN in scores.items():
        for (i, j), value in np.ndenumerate(np.asarray(score_LN)):
            row[f"{name}/layer{i}/head{j}"] = float(value)
    return row | {f"loss_at/{t}": float(loss) for t, loss in enumerate(loss_T)}


def read(path: Path) -> EmergenceTable | None:
    """The whole rows of a file, without one that a kill has cut short; None without any."""
    if not path.exists():
        return None
    text = path.read_text()
    rows = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
    if len(rows) < 2:
        return None
    return EmergenceTable(tuple(rows[0]), np.array(rows[1:], dtype=float))


def forget_after(path: Path, step: int) -> None:
    """Drops the rows past ``step``: those steps will be taken again."""
    table = read(path)
    if table is None:
        path.unlink(missing_ok=True)
        return
    kept = table.values[table["step"] <= step]
    write_text(path, _lines([table.names, *map(_texts, kept)]) if len(kept) else "")


def append(path: Path, row: Mapping[str, float]) -> None:
    """Adds a row, and before the first one the header."""
    starts = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        file.write(_lines([tuple(row)] * starts + [_texts(row.values())]))


def _texts(values) -> list[str]:
    # Whole numbers stay whole; others are float32, of which 7 digits are known.
    return [str(int(v)) if math.isfinite(v) and v == int(v) else f"{v:.7g}" for v in values]


def _lines(rows) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()
