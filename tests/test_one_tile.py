"""All heads of short sequences in one tile: equal to the tiles, and no larger than a piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import one_tile, tiled
from attention.masks import Causal, Full
from attention.ops import attend
from tests.test_tiled import _evaluate, assert_equals, in_tiles, random_inputs


@pytest.mark.parametrize("pairs", [13 * 11 * 4, 13 * 11 * 4 * 2, 1 << 18])
def test_one_tile_is_the_tiles_whatever_its_pieces(monkeypatch, pairs: int):
    """One batch entry at a time, two of them, or all six."""
    q, k, v, do, dlse = random_inputs(6, 13, 11, 4, 2, 8, 5)
    rng = np.random.default_rng(0)
    options = {
        "q_segments": rng.integers(0, 3, (6, 13)).astype(np.int32),
        "k_segments": rng.integers(0, 3, (6, 11)).astype(np.int32),
        "sink": rng.standard_normal(4).astype(np.float32),
    }
    monkeypatch.setattr(one_tile, "PAIRS", pairs)
    _evaluate.clear_cache()
    arguments = q, k, v, do, dlse, Causal()
    whole = in_tiles(*arguments, (13, 11), **options)
    assert_equals(whole, in_tiles(*arguments, (4, 4), **options))


def test_one_tile_goes_through_the_batch_in_pieces(monkeypatch):
    """A piece at a time has its scores, so the temporaries are those of a piece."""
    B, T = 32, 64
    shape = jax.ShapeDtypeStruct((B, T, 2, 8), jnp.float32)

    def temporaries(pairs):
        monkeypatch.setattr(one_tile, "PAIRS", pairs)
        forward = jax.jit(lambda q, k, v: attend(q, k, v, Causal(), implementation="tiled"))
        compiled = forward.lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = 4 * B * 2 * T * T
    assert temporaries(B * 2 * T * T) >= scores
    assert temporaries(2 * T * T) < scores


def test_one_tile_of_many_heads_is_a_loop_over_them():
    """However many heads: their scores would be 16 MiB a piece and more."""

    def temporaries(N):
        x = jax.ShapeDtypeStruct((1, 384, N, 8), jnp.float32)
        forward = jax.jit(lambda q, k, v: attend(q, k, v, Full(), implementation="tiled"))
        return forward.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert tiled._tile_sizes(Full(), 384, 384, 1) == (384, 384)
    assert temporaries(32) < temporaries(1) + 32 * 384 * 384 * 4 / 4
