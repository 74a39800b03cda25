"""The front door of softmax attention: checks, picks an implementation or says why it cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention import few, reference, tiled
from attention.masks import Mask
from attention.pallas import gpu, tpu
from attention.reference import Dropout


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of ``attend``, arguments checked and defaults filled in.

    Indices are None where the caller gave none: then they are known before tracing, and tiles can
    be skipped. ``scale`` is a number.
    """

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKE: jax.Array
    mask: Mask
    q_index: jax.Array | None
    k_index: jax.Array | None
    q_segments: jax.Array | None
    k_segments: jax.Array | None
    scale: float
    sink_N: jax.Array | None
    dropout: Dropout | None

    def indices(self) -> tuple[jax.Array, jax.Array]:
        """Positions of queries and keys; by default aligned at the end."""
        T, S = self.q_BTNH.shape[1], self.k_BSKH.shape[1]
        q_index = jnp.arange(T) + S - T if self.q_index is None else self.q_index
        return q_index, jnp.arange(S) if self.k_index is None else self.k_index

    def allowed_pairs(self) -> jax.Array:
        """(B or 1, T, S) booleans."""
        return reference.allowed_pairs(self.mask, *self.indices(), self.q_segments, self.k_segments)


def _reference(call: Call, observe: Callable | None = None) -> tuple[jax.Array, jax.Array]:
    return reference.dense_attention(
        call.q_BTNH,
        call.k_BSKH,
        call.v_BSKE,
        call.allowed_pairs(),
        scale=call.scale,
        sink_N=call.sink_N,
        dropout=call.dropout,
        observe=observe,
    )


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A way to compute ``attend``.

    Attributes:
      run: Call → (out_BTNE, lse_BNT).
      cannot: Call → the reason why this call is beyond it, or None.
      unwise: Call → the reason why "auto" passes it over although it could, or None.
    """

    run: Callable[[Call], tuple[jax.Array, jax.Array]]
    cannot: Callable[[Call], str | None]
    unwise: Callable[[Call], str | None]


IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.run, tpu.cannot, tpu.unwise),
    "gpu": Implementation(gpu.run, gpu.cannot, gpu.unwise),
    "tiled": Implementation(tiled.run, tiled.cannot, tiled.unwise),
    "few": Implementation(few.run, few.cannot, few.unwise),
    "reference": Implementation(_reference, lambda call: None, lambda call: None),
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation runs a call, and why not each of the others."""

    chosen: str
    others: dict[str, str]

    def __str__(self):
        lines = [f"{self.chosen} runs"]
        return "\n".join(lines + [f"not {name}: {why}" for name, why in self.others.items()])


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKE: jax.Array,
    mask: Mask,
    *,
    q_index: jax.Array | None = None,
    k_index: jax.Array | None = None,
    q_segments: jax.Array | None = None,
    k_segments: jax.Array | None = None,
    scale: float | None = None,
    sink_N: jax.Array | None = None,
    dropout: Dropout | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Softmax attention: out_i = Σ_j softmax_j(scale · q_i·k_j) v_j over the pairs of the mask.

    Query head n reads key-value head n // G, G = N/K (the head order of Llama). Softmax and
    accumulation are float32 or wider. A row that sees no key is 0 and passes no gradient. What a
    mask hides reaches nothing, not even inf or NaN.

    Args:
      q_BTNH, k_BSKH, v_BSKE: queries, keys, values.
      mask: which positions may meet.
      q_index: positions of the queries, (T,) or (B, T); default i + S − T.
      k_index: positions of the keys, (S,) or (B, S), −1 for an empty slot; default 0 … S − 1.
      q_segments: (B, T) documents, 0 for padding; where both are given, only equal ones meet.
      k_segments: (B, S), likewise.
      scale: default 1/√H.
      sink_N: a logit per query head that takes part in the softmax and carries no value.
      dropout: attention dropout, or None.
      implementation: "auto", or one of ``IMPLEMENTATIONS`` by name.

    Returns:
      out_BTNE in the dtype of v.

    Raises:
      ValueError: shapes that do not fit together, q, k and v that are not floating-point,
        positions and segments that are not whole numbers.
      TypeError: the mask is none.
      NotImplementedError: the named implementation cannot run this call; the reason is given.
    """
    return attend_with_lse(
        q_BTNH,
        k_BSKH,
        v_BSKE,
        mask,
        q_index=q_index,
        k_index=k_index,
        q_segments=q_segments,
        k_segments=k_segments,
        scale=scale,
        sink_N=sink_N,
        dropout=dropout,
        implementation=implementation,
    )[0]


def attend_with_lse(
    q_BTNH, k_BSKH, v_BSKE, mask, *, implementation="auto", **options
) -> tuple[jax.Array, jax.Array]:
    """``attend`` with the same arguments, returning also lse_BNT = log Σ_j exp(scale · q·k).

    A sink counts in the sum; a row without a key has −inf.
    """
    call = _checked(q_BTNH, k_BSKH, v_BSKE, mask, **options)
    chosen = _choose(call, implementation).chosen
    return IMPLEMENTATIONS[chosen].run(call)


def attend_with_pattern(
    q_BTNH, k_BSKH, v_BSKE, mask, observe: Callable[[jax.Array], jax.Array], **options
) -> jax.Array:
    """``attend`` by the reference, the only one that holds the weights (B, N, T, S) of all pairs.

    ``observe`` is shown the weights, and what it returns takes their place.
    """
    return _reference(_checked(q_BTNH, k_BSKH, v_BSKE, mask, **options), observe)[0]


def explain(q_BTNH, k_BSKH, v_BSKE, mask, *, implementation="auto", **options) -> Explanation:
    """Which implementation ``attend`` would run for these arguments, and why not the others.

    Takes arrays or ``jax.ShapeDtypeStruct``; computes nothing.
    """
    return _choose(_checked(q_BTNH, k_BSKH, v_BSKE, mask, **options), implementation)


def check_implementation(name: str) -> None:
    """Raises ValueError unless ``name`` is "auto" or that of an implementation."""
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation must be 'auto' or one of {list(IMPLEMENTATIONS)}, got {name!r}"
        )


def _choose(call: Call, implementation: str) -> Explanation:
    check_implementation(implementation)
    if implementation != "auto":
        reason = IMPLEMENTATIONS[implementation].cannot(call)
        if reason is not None:
            raise NotImplementedError(f"attention implementation {implementation!r}: {reason}")
        others = dict.fromkeys(IMPLEMENTATIONS, f"{implementation!r} was named")
        del others[implementation]
        return Explanation(implementation, others)
    others, chosen = {}, None
    for name, candidate in IMPLEMENTATIONS.items():
        reason = candidate.cannot(call) or candidate.unwise(call)
        if chosen is not None:
            others[name] = reason or f"{chosen!r} comes first"
        elif reason is None:
            chosen = name
        else:
            others[name] = reason
    return Explanation(chosen, others)


def _checked(
    q_BTNH,
    k_BSKH,
    v_BSKE,
    mask,
    *,
    q_index=None,
    k_index=None,
    q_segments=None,
    k_segments=None,
    scale=None,
    sink_N=None,
    dropout=None,
) -> Call:
    for name, array in (("q_BTNH", q_BTNH), ("k_BSKH", k_BSKH), ("v_BSKE", v_BSKE)):
        if len(array.shape) != 4:
            raise ValueError(f"{name} must have 4 axes, got shape {array.shape}")
        if 0 in array.shape:
            raise ValueError(f"{name} must have no axis of length 0, got shape {array.shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must hold real floating-point numbers, got {array.dtype}")
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    if k_BSKH.shape != (B, S, K, H):
        raise ValueError(f"k_BSKH {k_BSKH.shape} must agree with q_BTNH {q_BTNH.shape} in B and H")
    if v_BSKE.shape[:3] != (B, S, K):
        raise ValueError(f"v_BSKE {v_BSKE.shape} must agree with k_BSKH {k_BSKH.shape} in B, S, K")
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of {K} key-value heads")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask such as Causal(), got {type(mask).__name__}")
    for name, array, length in (("q_index", q_index, T), ("k_index", k_index, S)):
        if array is not None and array.shape not in ((length,), (1, length), (B, length)):
            raise ValueError(f"{name} must be ({length},) or ({B}, {length}), got {array.shape}")
    for name, array, length in (("q_segments", q_segments, T), ("k_segments", k_segments, S)):
        if array is not None and array.shape != (B, length):
            raise ValueError(f"{name} must be ({B}, {length}), got {array.shape}")
    for name, array in (
        ("q_index", q_index), ("k_index", k_index),
        ("q_segments", q_segments), ("k_segments", k_segments),
    ):  # fmt: skip
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} must hold whole numbers, got {array.dtype}")
    if sink_N is not None and sink_N.shape != (N,):
        raise ValueError(f"sink_N must have one logit per query head, ({N},), got {sink_N.shape}")
    scale = H**-0.5 if scale is None else scale
    if jnp.shape(scale):
        raise ValueError(f"scale must be one number, got an array of shape {jnp.shape(scale)}")
    # What NumPy holds is known before tracing: every implementation takes it.
    scale = scale.item() if isinstance(scale, np.ndarray) else scale
    return Call(
        q_BTNH, k_BSKH, v_BSKE, mask, q_index, k_index, q_segments, k_segments, scale, sink_N,
        dropout,
    )  # fmt: skip
