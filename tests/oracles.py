"""Independent answers: dense attention in float64 NumPy, row by row, and the tests' standard data.

Nothing here imports the code under test. A row is a plain softmax over the keys that it sees, so
what a mask hides is never read, and the gradients are the textbook formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

# How far a result may be from float64, relative to the largest value in sight (at least 1). The
# last is of float16 too, where the right answer is that of inputs before they were rounded to it.
TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 4e-3, "float16": 5e-4, "rounded": 4e-3}


def wave(shape: tuple[int, ...], a: float, b: float) -> np.ndarray:
    """S(shape, a, b): element n = 1, 2, … in C order is sin(a n + b), in float64."""
    return np.sin(a * np.arange(1, np.prod(shape) + 1) + b).reshape(shape)


def standard(
    B: int, T: int, S: int, N: int, K: int, H: int, E: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The standard q_BTNH, k_BSKH, v_BSKE and upstream gradient do_BTNE, in float64."""
    return (
        wave((B, T, N, H), 0.7, 0.0),
        wave((B, S, K, H), 1.3, 0.5),
        wave((B, S, K, E), 2.1, 1.0),
        wave((B, T, N, E), 0.9, 0.3),
    )


def uniform(T: int, S: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q and k of zeros and v_j = j: each output is the mean of the positions that it sees."""
    return (
        np.zeros((1, T, 1, 1)),
        np.zeros((1, S, 1, 1)),
        np.arange(S, dtype=float).reshape(1, S, 1, 1),
    )


def chk(x) -> float:
    """Σ x · S(x.shape, 0.31, 0.2): a transposed or shifted result changes it."""
    x = np.asarray(x, np.float64)
    return float((x * wave(x.shape, 0.31, 0.2)).sum())


@dataclasses.dataclass(frozen=True)
class Result:
    """What dense attention gives: outputs, and the gradients of Σ out · do + Σ lse · dlse."""

    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray | None = None
    dk: np.ndarray | None = None
    dv: np.ndarray | None = None
    dsink: np.ndarray | None = None


def visible_pairs(
    sees: Callable[[np.ndarray, np.ndarray], np.ndarray],
    B: int,
    T: int,
    S: int,
    q_index=None,
    k_index=None,
    q_segments=None,
    k_segments=None,
) -> np.ndarray:
    """(B, T, S) booleans. ``sees(i, j)`` is a formula on positions, independent of the masks."""
    i = np.broadcast_to(np.arange(T) + S - T if q_index is None else q_index, (B, T))
    j = np.broadcast_to(np.arange(S) if k_index is None else k_index, (B, S))
    visible = np.zeros((B, T, S), bool)
    for b in range(B):
        for t in range(T):
            visible[b, t] = sees(i[b, t], j[b]) & (j[b] >= 0)
            if q_segments is None and k_segments is None:
                continue
            for s in np.flatnonzero(visible[b, t]):
                mine = None if q_segments is None else q_segments[b][t]
                yours = None if k_segments is None else k_segments[b][s]
                padding = mine == 0 or yours == 0
                stranger = mine is not None and yours is not None and mine != yours
                visible[b, t, s] = not padding and not stranger
    return visible


def attention(
    q, k, v, visible, *, do=None, dlse=None, sink=None, scale: float | None = None
) -> Result:
    """Dense softmax attention and its gradients over the visible pairs, in float64.

    out_i = Σ_j p_ij v_j, p_ij = exp(s_ij − lse_i), s_ij = scale · q_i·k_j,
    lse_i = log(Σ_j exp(s_ij) + exp(sink)); a row that sees nothing is 0, its lse −inf.
    With a = do_i·v_j − do_i·out_i + dlse_i: ds_ij = p_ij a and dsink = Σ_i p_i,sink a (v = 0).
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    (B, T, N, H), K, E = q.shape, k.shape[2], v.shape[3]
    do = np.zeros((B, T, N, E)) if do is None else np.asarray(do, np.float64)
    dlse = np.zeros((B, N, T)) if dlse is None else np.asarray(dlse, np.float64)
    scale = 1 / np.sqrt(H) if scale is None else scale
    out, lse = np.zeros((B, T, N, E)), np.full((B, N, T), -np.inf)
    dq, dk, dv, dsink = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros(N)
    for b in range(B):
        for t in range(T):
            seen = np.flatnonzero(visible[b, t])
            if not seen.size:
                continue
            for n in range(N):
                kv = n // (N // K)
                keys, values = k[b, seen, kv], v[b, seen, kv]
                scores = scale * keys @ q[b, t, n]
                logits = scores if sink is None else np.append(scores, sink[n])
                top = logits.max()
                lse[b, n, t] = top + np.log(np.exp(logits - top).sum())
                p = np.exp(scores - lse[b, n, t])
                out[b, t, n] = p @ values
                centre = do[b, t, n] @ out[b, t, n] - dlse[b, n, t]
                ds = p * (values @ do[b, t, n] - centre)
                dq[b, t, n] = scale * ds @ keys
                dk[b, seen, kv] += scale * np.outer(ds, q[b, t, n])
                dv[b, seen, kv] += np.outer(p, do[b, t, n])
                if sink is not None:
                    dsink[n] -= np.exp(sink[n] - lse[b, n, t]) * centre
    return Result(out, lse, dq, dk, dv, dsink)


def assert_close(actual, expected, dtype: str = "float32", what: str = "") -> None:
    """Elementwise within TOLERANCE[dtype] of the largest finite expected value, or of 1."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{what}: {actual.shape}, not {expected.shape}"
    size = max(1.0, np.abs(expected[np.isfinite(expected)]).max(initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE[dtype] * size, err_msg=what)
