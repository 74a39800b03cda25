"""Random keys as pure functions of the seed: one stream per use, no generator state to save.

``fold_in(fold_in(key(seed), STREAM), index)``: streams of one seed never meet, and the batch of
step i follows from (seed, i) alone, so a resumed run needs nothing but its step.
"""

from __future__ import annotations

import jax

_INIT, _TRAIN, _EVALUATION, _DROPOUT = range(4)


def init_key(seed: int | jax.Array) -> jax.Array:
    """Key of the parameters' initial values."""
    return _stream(seed, _INIT)


def train_key(seed: int | jax.Array, step: int | jax.Array) -> jax.Array:
    """Key of the training batch at ``step``; both arguments may be traced."""
    return jax.random.fold_in(_stream(seed, _TRAIN), step)


def evaluation_key(seed: int | jax.Array, index: int | jax.Array) -> jax.Array:
    """Key of evaluation batch ``index``: the same whenever in training it is asked for."""
    return jax.random.fold_in(_stream(seed, _EVALUATION), index)


def dropout_key(seed: int | jax.Array) -> jax.Array:
    """Key from which dropout masks are drawn; fold the step in before use."""
    return _stream(seed, _DROPOUT)


def _stream(seed: int | jax.Array, stream: int) -> jax.Array:
    # A larger seed would lose its high bits without a word, and two seeds would be one.
    if not isinstance(seed, jax.Array) and (
        isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32
    ):
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to {2**32 - 1}")
    if not isinstance(seed, jax.Array):
        seed = jax.numpy.uint32(seed)
    return jax.random.fold_in(jax.random.key(seed), stream)
