"""Every mask at every size, and tiles of every size: cases T1, T2, N3, for every implementation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import tiled, tiles
from attention.masks import Causal
from attention.pallas import gpu, gpu_plan, tpu, tpu_kernels
from tests import oracles
from tests.attending import INTERPRETERS, interpreter, same_bits
from tests.oracles import chk, standard, visible_pairs
from tests.test_attend import MASKS

SIZES = [(1, 1), (7, 7), (96, 160), (129, 129), (300, 300)]
# By default one size for each mask, such that it cuts through tiles; T1 has all of a causal one.
DEFAULT = dict(zip(MASKS, (0, 1, 2, 3, 4, 3, 2, 4, 2), strict=True))
CASES = [
    pytest.param(
        *mask, *SIZES[i], id="{}-{}x{}".format(name, *SIZES[i]),
        marks=() if i == DEFAULT[name] else pytest.mark.broad,
    )
    for name, mask in MASKS.items()
    for i in range(len(SIZES))
]  # fmt: skip


@pytest.mark.parametrize(("mask", "sees", "T", "S"), CASES)
def test_every_mask_at_every_size(run, mask, sees, T, S):
    """B1 and T1: outputs and all gradients, G = 2, H ≠ E, a sink; bit-equal when repeated."""
    q, k, v, do = standard(1, T, S, 4, 2, 6, 3)
    dlse, sink = oracles.wave((1, 4, T), 1.7, 0.4), np.array([0.5, -1.0, 0, 2], np.float32)
    call = functools.partial(run, q, k, v, mask, do=do, dlse=dlse, sink_N=sink)
    got = call()
    visible = visible_pairs(sees, 1, T, S)
    run.assert_equal(got, oracles.attention(q, k, v, visible, do=do, dlse=dlse, sink=sink))
    jax.tree.map(same_bits, call(), got)


def test_float32_is_float32(run):
    """N3: products of float32 lose nothing, forward and backward."""
    q, k, v, do = (x.astype(np.float32) for x in standard(1, 256, 256, 1, 1, 64, 64))
    got = run(q, k, v, Causal(), do=do, dtype="float32", optimise=True)
    visible = visible_pairs(lambda i, j: j <= i, 1, 256, 256)
    expected = oracles.attention(q, k, v, visible, do=do)
    for name in ("out", "dq", "dk", "dv"):
        error = np.abs(getattr(got, name) - getattr(expected, name)).max()
        assert error <= 5e-6 * max(1, np.abs(getattr(expected, name)).max()), (name, error)


# --- tiles of every size --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Passes:
    """An implementation whose tiles a test may choose, forward and backward apart.

    Attributes:
      forward: (tile, q, k, v) → ((out, lse), what is kept).
      backward: (tile, kept, (do, dlse)) → dq, dk, dv and more.
      forward_tiles, backward_tiles: the tiles to try; what one is, the two functions know.
      within: how far a sum may be from the right one.
    """

    forward: Callable
    backward: Callable
    forward_tiles: list
    backward_tiles: list
    dtype: str = "float32"
    within: float = 5e-5


def _squares(*sides: int) -> list[tuple[int, int]]:
    return [(q, k) for q in sides for k in sides]


def _of_tiled(sizes):
    return tiles.Plan(Causal(), 0.25, 1, 384, 384, *sizes, masks_all=False)


def _of_tpu(sizes):
    scores = tpu_kernels.Scores(Causal(), 0.25, 384)
    return tpu.Plan(scores, 384, 1, tpu.Tile(*sizes), tpu._interpreter.get())


def _of_gpu(sizes):
    return gpu_plan.Plan(Causal(), 0.25, 384, 384, interpret=True, **sizes)


ANY_SIDES = _squares(64, 128), _squares(32, 64, 128)
PASSES = {
    "tiled": Passes(
        lambda sizes, q, k, v: tiled._forward(_of_tiled(sizes), q, k, v, None, None, None),
        lambda sizes, *rest: tiled._backward(_of_tiled(sizes), *rest),
        *ANY_SIDES,
    ),
    "tpu": Passes(
        lambda sizes, q, k, v: tpu._attention_forward(
            _of_tpu(sizes), q, k, v, jnp.full(1, -jnp.inf), None
        ),
        lambda sizes, *rest: tpu._attention_backward(_of_tpu(sizes), *rest),
        *ANY_SIDES,
    ),
    # The rows of its tiles are those of two warpgroups, and wgmma contracts 64 at least. Its two
    # backward kernels know nothing of each other, so two programs run every pair of their tiles.
    "gpu": Passes(
        lambda sizes, q, k, v: gpu._attend_forward(_of_gpu(sizes), q, k, v),
        lambda sizes, *rest: gpu._attend_backward(_of_gpu(sizes), *rest),
        [{"forward_keys": side} for side in (64, 128)],
        [{"dq_keys": side, "dkv_queries": side} for side in (64, 128)],
        dtype="float16",
        within=oracles.TOLERANCE["rounded"],
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.interpreted if name in INTERPRETERS else ())
        for name in PASSES
    ],
)
def test_every_tile(name):
    """T2: each forward tile with each backward tile."""
    passes = PASSES[name]
    q, k, v, do = (x.astype(passes.dtype) for x in standard(1, 384, 384, 1, 1, 16, 16))
    backward = [jax.jit(functools.partial(passes.backward, tile)) for tile in passes.backward_tiles]

    near = functools.partial(pytest.approx, rel=0, abs=passes.within)
    with interpreter(name):
        for tile in passes.forward_tiles:
            (out, lse), kept = jax.jit(functools.partial(passes.forward, tile))(q, k, v)
            assert chk(out) == near(0.184965909), tile
            for run, other in zip(backward, passes.backward_tiles, strict=True):
                gradients = run(kept, (jnp.asarray(do), jnp.zeros_like(lse)))[:3]
                sums = [chk(x) for x in gradients]
                assert sums == near([0.050644703, -0.046148385, 1.030521938]), (tile, other)
