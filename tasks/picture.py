"""One example drawn for a terminal: what the model reads, and which answers count."""

from __future__ import annotations

from tasks.batch import Batch
from tasks.vocabulary import token_name

_COLUMNS = 88
_MARGIN = 9


def draw_row(batch: Batch, row: int = 0) -> str:
    """Two lines of text, wrapped: tokens, and below each the target where its weight is not 0."""
    reads = [token_name(token) for token in batch.tokens_BT[row].tolist()]
    targets = [token_name(token) for token in batch.targets_BT[row].tolist()]
    weights = batch.weights_BT[row].tolist()
    answers = [name if weight else "" for name, weight in zip(targets, weights, strict=True)]
    width = 1 + max(len(name) for name in reads + answers)
    per_line = max(1, (_COLUMNS - _MARGIN) // width)
    lines = []
    for start in range(0, len(reads), per_line):
        for label, cells in (("reads", reads), ("answers", answers)):
            text = "".join(cell.rjust(width) for cell in cells[start : start + per_line])
            lines.append((label.ljust(_MARGIN) + text).rstrip())
    return "\n".join(lines)
