"""Which (query, key) pairs may meet: small frozen values with ``&``, ``|`` and ``~``.

A mask is a formula on positions, never a matrix. The dense reference evaluates the formula on all
pairs, the tiled kernels on the tiles that need it, the cache is sized by what the formula can still
reach, and the picture and the cost are drawn from it too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

EMPTY, PARTIAL, FULL = 0, 1, 2

# Positions that a mask may pin; one that would pin more keeps all, or is refused.
MOST_PINNED = 1 << 16


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which past keys can still matter to the query being decoded, or to a later one.

    Attributes:
      pinned: positions that must be kept for ever, ascending.
      last: how many of the most recent positions must be kept, the query's own included;
        None keeps all of them.
    """

    pinned: tuple[int, ...]
    last: int | None

    def _reach(self) -> float:
        return math.inf if self.last is None else self.last

    def _from(self, pinned: Iterable[int], reach: float) -> Retention:
        if math.isinf(reach):
            return Retention((), None)
        return Retention(tuple(sorted(set(pinned))), int(reach))

    def __and__(self, other: Retention) -> Retention:
        reach = min(self._reach(), other._reach())
        pinned = set(self.pinned) & set(other.pinned)
        # A position pinned on one side meets the recent ones of the other, while they last.
        if other._reach() > reach:
            pinned |= set(self.pinned)
        if self._reach() > reach:
            pinned |= set(other.pinned)
        return self._from(pinned, reach)

    def __or__(self, other: Retention) -> Retention:
        return self._from(self.pinned + other.pinned, max(self._reach(), other._reach()))


class Mask:
    """Base of all masks: ``mask(q_index, k_index)`` is true where the query may see the key.

    Indices are absolute positions; they broadcast against each other. Only ``−``, ``<``, ``>=``,
    ``&`` and ``|`` are used on them: NumPy, jax.numpy and a Pallas kernel run the same line.
    """

    def __call__(self, q_index, k_index):
        raise NotImplementedError

    def outside(self, q_index, k_index):
        """The complement of ``mask(q_index, k_index)``."""
        raise NotImplementedError

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi) -> np.ndarray:
        """EMPTY 0, PARTIAL 1 or FULL 2 for the tiles [q_lo, q_hi) × [k_lo, k_hi).

        Exact for a primitive. For combinations it is safe: EMPTY and FULL are always true,
        PARTIAL may stand where a closer look would find one of the other two.
        """
        raise NotImplementedError

    def retention(self) -> Retention:
        """Which past keys a cache has to keep; at least those, for ``~`` all of them."""
        raise NotImplementedError

    def causal_from(self) -> int | None:
        """A position p from which on the mask is causal; None where there is none.

        For every i ≥ p, no query up to i sees a key after i. Next-token training may count the
        positions from p on, and a cache may take one token at a time after the first p + 1. The
        first such p for a primitive; a combination may give a later one, or None.
        """
        raise NotImplementedError

    def ordinal(self) -> bool:
        """Whether only the order of positions matters, not where or how far apart they are."""
        raise NotImplementedError

    def count(self, num_queries: int, num_keys: int | None = None) -> int:
        """Number of visible pairs; queries are aligned with the last keys."""
        num_keys = num_queries if num_keys is None else num_keys
        offset = num_keys - num_queries
        return _count(self, offset, offset + num_queries, 0, num_keys)

    def draw(self, num_queries: int, num_keys: int | None = None, path: str | None = None) -> str:
        """The picture as text, one row a query; with ``path`` also saved there as a PNG."""
        from attention.masks import picture

        if path is not None:
            picture.save_png(self, num_queries, num_keys, path)
        return picture.as_text(self, num_queries, num_keys)

    def __and__(self, other: Mask) -> Mask:
        return And(self, other) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return Or(self, other) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self):
        raise TypeError(
            f"a mask has no truth value: {self}. Use & | ~ instead of and, or, not, "
            "and 'is None' to ask whether there is one"
        )


def _count(mask: Mask, q_lo: int, q_hi: int, k_lo: int, k_hi: int) -> int:
    if q_hi <= q_lo or k_hi <= k_lo:
        return 0
    kind = int(mask.tile_kinds(q_lo, q_hi, k_lo, k_hi))
    if kind != PARTIAL:
        return (q_hi - q_lo) * (k_hi - k_lo) * (kind == FULL)
    if (q_hi - q_lo) * (k_hi - k_lo) <= 65536:
        q, k = np.arange(q_lo, q_hi)[:, None], np.arange(k_lo, k_hi)
        return int(np.count_nonzero(mask(q, k)))
    q_mid, k_mid = (q_lo + q_hi) // 2, (k_lo + k_hi) // 2
    return sum(
        _count(mask, *q, *k)
        for q in ((q_lo, q_mid), (q_mid, q_hi))
        for k in ((k_lo, k_mid), (k_mid, k_hi))
    )


def _kinds(is_empty, is_full) -> np.ndarray:
    return np.where(is_full, FULL, np.where(is_empty, EMPTY, PARTIAL)).astype(np.int8)


def _whole_number(mask: Mask, name: str, value, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise ValueError(
            f"{type(mask).__name__}: {name} must be a whole number of at least {at_least}, "
            f"got {value!r}"
        )


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key (BERT)."""

    def __call__(self, q_index, k_index):
        return (q_index >= k_index) | (q_index < k_index)

    def outside(self, q_index, k_index):
        return (q_index >= k_index) & (q_index < k_index)

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, _, k_lo, _ = np.broadcast_arrays(q_lo, q_hi, k_lo, k_hi)
        return _kinds(np.zeros(q_lo.shape, bool), np.ones(q_lo.shape, bool))

    def retention(self):
        return Retention((), None)

    def ordinal(self):
        return True

    def causal_from(self):
        return None


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Query i sees the keys j ≤ i (GPT)."""

    def __call__(self, q_index, k_index):
        return q_index >= k_index

    def outside(self, q_index, k_index):
        return q_index < k_index

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = map(np.asarray, (q_lo, q_hi, k_lo, k_hi))
        return _kinds(q_hi - 1 < k_lo, q_lo >= k_hi - 1)

    def retention(self):
        return Retention((), None)

    def ordinal(self):
        return True

    def causal_from(self):
        return 0


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """Query i sees the keys j with −ahead ≤ i − j < window; the query itself is counted.

    ``Window(w)`` looks back only and sees w keys; an encoder's symmetric window of the same reach
    is ``Window(w, ahead=w − 1)``.

    Raises:
      ValueError: window below 1 or ahead below 0.
    """

    window: int
    ahead: int = 0

    def __post_init__(self):
        _whole_number(self, "window", self.window, 1)
        _whole_number(self, "ahead", self.ahead, 0)

    def __call__(self, q_index, k_index):
        distance = q_index - k_index
        window, ahead = self._bounds()
        return (distance < window) & (distance >= -ahead)

    def outside(self, q_index, k_index):
        distance = q_index - k_index
        window, ahead = self._bounds()
        return (distance >= window) | (distance < -ahead)

    def _bounds(self) -> tuple[int, int]:
        # Positions are 32-bit integers; no two of them are farther apart.
        return min(self.window, 2**31 - 1), min(self.ahead, 2**31 - 1)

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = map(np.asarray, (q_lo, q_hi, k_lo, k_hi))
        nearest, farthest = q_lo - (k_hi - 1), q_hi - 1 - k_lo
        return _kinds(
            (farthest < -self.ahead) | (nearest >= self.window),
            (nearest >= -self.ahead) & (farthest < self.window),
        )

    def retention(self):
        return Retention((), self.window)

    def ordinal(self):
        return False

    def causal_from(self):
        return 0 if self.ahead == 0 else None


@dataclasses.dataclass(frozen=True)
class First(Mask):
    """Every query sees the first n keys: the attention sinks of streaming models."""

    n: int

    def __post_init__(self):
        _whole_number(self, "n", self.n, 1)

    def __call__(self, q_index, k_index):
        # The query takes part only to give the result its shape.
        return (k_index < self.n) & ((q_index >= k_index) | (q_index < k_index))

    def outside(self, q_index, k_index):
        return (k_index >= self.n) & ((q_index >= k_index) | (q_index < k_index))

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        _, _, k_lo, k_hi = np.broadcast_arrays(q_lo, q_hi, k_lo, k_hi)
        return _kinds(k_lo >= self.n, k_hi <= self.n)

    def retention(self):
        return Retention((), None) if self.n > MOST_PINNED else Retention(tuple(range(self.n)), 0)

    def ordinal(self):
        return False

    def causal_from(self):
        return self.n - 1


@dataclasses.dataclass(frozen=True)
class Prefix(Mask):
    """The first n positions see each other in both directions (prefix-LM, with ``Causal() |``)."""

    n: int

    def __post_init__(self):
        _whole_number(self, "n", self.n, 1)

    def __call__(self, q_index, k_index):
        return (q_index < self.n) & (k_index < self.n)

    def outside(self, q_index, k_index):
        return (q_index >= self.n) | (k_index >= self.n)

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = map(np.asarray, (q_lo, q_hi, k_lo, k_hi))
        return _kinds((q_lo >= self.n) | (k_lo >= self.n), (q_hi <= self.n) & (k_hi <= self.n))

    def retention(self):
        return Retention((), self.n)

    def ordinal(self):
        return False

    def causal_from(self):
        return self.n - 1


@dataclasses.dataclass(frozen=True)
class Global(Mask):
    """Global tokens see, and are seen by, all (Longformer, with ``Window(w, ahead) |``).

    Attributes:
      tokens: how many of the first positions are global, or a tuple of positions.
    """

    tokens: int | tuple[int, ...]

    def __post_init__(self):
        if isinstance(self.tokens, tuple):
            for position in self.tokens:
                _whole_number(self, "a position", position, 0)
            if not self.tokens:
                raise ValueError("Global: at least one position is needed, got ()")
            object.__setattr__(self, "tokens", tuple(sorted(set(map(int, self.tokens)))))
        elif isinstance(self.tokens, list):
            raise ValueError(f"Global: positions are written as a tuple, got {self.tokens}")
        else:
            _whole_number(self, "tokens", self.tokens, 1)
            if self.tokens > MOST_PINNED:
                raise ValueError(
                    f"Global: tokens must be at most {MOST_PINNED}, got {self.tokens}; "
                    "Full() lets all see each other"
                )

    @property
    def positions(self) -> tuple[int, ...]:
        return self.tokens if isinstance(self.tokens, tuple) else tuple(range(self.tokens))

    def _runs(self) -> list[tuple[int, int]]:
        """The positions as half-open runs, so that few comparisons test for membership."""
        starts, ends = [], []
        for position in self.positions:
            if ends and ends[-1] == position:
                ends[-1] += 1
            else:
                starts.append(position)
                ends.append(position + 1)
        return list(zip(starts, ends, strict=True))

    def _member(self, index):
        runs = [(index >= lo) & (index < hi) for lo, hi in self._runs()]
        return _any(runs)

    def _stranger(self, index):
        lows = [index < lo for lo, _ in self._runs()] + [None]
        highs = [None] + [index >= hi for _, hi in self._runs()]
        gaps = []
        for high, low in zip(highs, lows, strict=True):
            gaps.append(low if high is None else high if low is None else high & low)
        return _any(gaps)

    def __call__(self, q_index, k_index):
        return self._member(q_index) | self._member(k_index)

    def outside(self, q_index, k_index):
        return self._stranger(q_index) & self._stranger(k_index)

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        q_lo, q_hi, k_lo, k_hi = map(np.asarray, (q_lo, q_hi, k_lo, k_hi))
        positions = np.asarray(self.positions)

        def members(lo, hi):
            return np.searchsorted(positions, hi) - np.searchsorted(positions, lo)

        q_members, k_members = members(q_lo, q_hi), members(k_lo, k_hi)
        return _kinds(
            (q_members == 0) & (k_members == 0),
            (q_members == q_hi - q_lo) | (k_members == k_hi - k_lo),
        )

    def retention(self):
        # A global query sees all keys before it, those that are not pinned too.
        pinned = set(self.positions)
        first_other = next(i for i in range(len(pinned) + 1) if i not in pinned)
        return Retention(self.positions, max(self.positions[-1] - first_other + 1, 0))

    def ordinal(self):
        return False

    def causal_from(self):
        return None


def _any(conditions):
    result = conditions[0]
    for condition in conditions[1:]:
        result = result | condition
    return result


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """``a & b``: the pairs that both masks allow."""

    a: Mask
    b: Mask

    def __call__(self, q_index, k_index):
        return self.a(q_index, k_index) & self.b(q_index, k_index)

    def outside(self, q_index, k_index):
        return self.a.outside(q_index, k_index) | self.b.outside(q_index, k_index)

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        tile = (q_lo, q_hi, k_lo, k_hi)
        return np.minimum(self.a.tile_kinds(*tile), self.b.tile_kinds(*tile))

    def retention(self):
        return self.a.retention() & self.b.retention()

    def ordinal(self):
        return self.a.ordinal() and self.b.ordinal()

    def causal_from(self):
        known = [p for p in (self.a.causal_from(), self.b.causal_from()) if p is not None]
        return min(known, default=None)

    def __repr__(self):
        return f"({self.a!r} & {self.b!r})"


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """``a | b``: the pairs that at least one of the masks allows."""

    a: Mask
    b: Mask

    def __call__(self, q_index, k_index):
        return self.a(q_index, k_index) | self.b(q_index, k_index)

    def outside(self, q_index, k_index):
        return self.a.outside(q_index, k_index) & self.b.outside(q_index, k_index)

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        tile = (q_lo, q_hi, k_lo, k_hi)
        return np.maximum(self.a.tile_kinds(*tile), self.b.tile_kinds(*tile))

    def retention(self):
        return self.a.retention() | self.b.retention()

    def ordinal(self):
        return self.a.ordinal() and self.b.ordinal()

    def causal_from(self):
        a, b = self.a.causal_from(), self.b.causal_from()
        return None if a is None or b is None else max(a, b)

    def __repr__(self):
        return f"({self.a!r} | {self.b!r})"


@dataclasses.dataclass(frozen=True)
class Not(Mask):
    """``~a``: the pairs that the mask does not allow."""

    a: Mask

    def __call__(self, q_index, k_index):
        return self.a.outside(q_index, k_index)

    def outside(self, q_index, k_index):
        return self.a(q_index, k_index)

    def tile_kinds(self, q_lo, q_hi, k_lo, k_hi):
        return (2 - self.a.tile_kinds(q_lo, q_hi, k_lo, k_hi)).astype(np.int8)

    def retention(self):
        return Retention((), None)

    def ordinal(self):
        return self.a.ordinal()

    def causal_from(self):
        return None

    def __invert__(self):
        return self.a

    def __repr__(self):
        return f"~{self.a!r}"
