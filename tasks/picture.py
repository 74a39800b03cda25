"""One example drawn for a terminal: what the model reads, and which answers count."""

from __future__ import annotations

from tasks.batch import Batch
from tasks.vocabulary import token_name

_COLUMNS = 88
_MARGIN = 9


def draw_row(batch: Batch, row: int = 0) -> str:
    """The source if there is one, then tokens, and below each the target where its weight is not 0.

    Lines are wrapped.
    """
    reads = [token_name(token) for token in batch.tokens_BT[row].tolist()]
    targets = [token_name(token) for token in batch.targets_BT[row].tolist()]
    weights = batch.weights_BT[row].tolist()
    answers = [name if weight else "" for name, weight in zip(targets, weights, strict=True)]
    lines = []
    if batch.source_BS is not None:
        source = [token_name(token) for token in batch.source_BS[row].tolist()]
        lines += _wrapped({"source": source})
    return "\n".join(lines + _wrapped({"reads": reads, "answers": answers}))


def _wrapped(table: dict[str, list[str]]) -> list[str]:
    """Rows of cells under each other, in groups of as many columns as a line holds."""
    width = 1 + max(len(cell) for cells in table.values() for cell in cells)
    per_line = max(1, (_COLUMNS - _MARGIN) // width)
    lines = []
    for start in range(0, max(map(len, table.values())), per_line):
        for label, cells in table.items():
            text = "".join(cell.rjust(width) for cell in cells[start : start + per_line])
            lines.append((label.ljust(_MARGIN) + text).rstrip())
    return lines
