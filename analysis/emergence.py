"""Finding an abrupt change in a curve: when it came, and how long it took."""

from __future__ import annotations

import dataclasses

import numpy as np

# A rise of a prefix-matching score, from 0 to 1, that is not noise.
LEAST_RISE = 0.2


@dataclasses.dataclass(frozen=True)
class Change:
    """A rise from one level to another, in the units of x.

    Attributes:
      half: where the curve is half-way between the levels.
      start, end: where it has risen by 10 % and by 90 %.
      low, high: the levels.
    """

    half: float
    start: float
    end: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """From 10 % to 90 % of the rise."""
        return self.end - self.start


def find_change(x, y, least_rise: float = LEAST_RISE) -> Change | None:
    """The rise of a curve from the level where it starts to the level where it ends.

    The levels are the medians of the first and of the last tenth of the points. ``half`` is the
    first point half-way up, ``start`` the last one at 10 % before it, ``end`` the first one at
    90 % after it, all interpolated linearly. Of a logistic curve of rate k the width is
    ln(81)/k. Curves that fall are given with their sign turned.

    Args:
      x: ascending, such as training tokens.
      y: the curve; equally long.
      least_rise: a smaller rise is no change.

    Returns:
      The change; None where the curve ends less than ``least_rise`` above its start.

    Raises:
      ValueError: fewer than 3 points, different lengths, or x that does not ascend.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    if x.shape != y.shape or x.ndim != 1 or len(x) < 3 or not (np.diff(x) > 0).all():
        raise ValueError(f"a curve needs 3 points or more, x ascending; got {x.shape}, {y.shape}")
    tenth = max(1, len(y) // 10)
    low, high = float(np.median(y[:tenth])), float(np.median(y[-tenth:]))
    if not high - low >= least_rise:
        return None
    share = (y - low) / (high - low)
    half = _upward(x, share, 0.5)[0]
    start = [at for at in _upward(x, share, 0.1) if at <= half]
    end = [at for at in _upward(x, share, 0.9) if at >= half]
    return Change(half, start[-1] if start else float(x[0]), end[0], low, high)


def _upward(x: np.ndarray, share: np.ndarray, level: float) -> list[float]:
    """Where the curve crosses a level upwards."""
    at = np.flatnonzero((share[:-1] < level) & (share[1:] >= level))
    part = (level - share[at]) / (share[at + 1] - share[at])
    return (x[at] + part * (x[at + 1] - x[at])).tolist()


def strongest_head(score_RLN: np.ndarray) -> tuple[int, int]:
    """Layer and head with the highest score at the end, of scores by row."""
    return tuple(int(i) for i in np.unravel_index(score_RLN[-1].argmax(), score_RLN.shape[1:]))
