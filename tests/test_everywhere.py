"""One condition for all copies under vmap: the slow way is not taken beside the fast one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.everywhere import everywhere
from attention.masks import Causal
from attention.ops import attend_with_lse
from tests.oracles import assert_close

COPIES, B, S, N, H = 3, 2, 40, 2, 8


@pytest.mark.parametrize("false_at", [None, (0, 0, 0), (1, 2, 3)])
def test_all_copies_have_one_answer(false_at):
    holds = np.ones((2, 3, 4), bool)
    if false_at is not None:
        holds[false_at] = False
    nested = jax.vmap(jax.vmap(everywhere, out_axes=None), out_axes=None)
    for answer in (everywhere(holds), nested(holds), jax.jit(nested)(holds)):
        assert answer.shape == () and bool(answer) == (false_at is None)


def _copies(T: int):
    random = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, N, H), (B, S, N, H)
    return [jnp.asarray(random.standard_normal((COPIES, *s)), jnp.float32) for s in shapes]


@pytest.mark.parametrize(("name", "T", "looks"), [("tiled", 40, 2), ("few", 1, 1)])
def test_copies_do_not_take_both_ways(name, T, looks):
    def call(q, k, v):
        return attend_with_lse(q, k, v, Causal(), implementation=name)

    copies = _copies(T)
    alone = str(jax.make_jaxpr(call)(*(x[0] for x in copies)))
    together = str(jax.make_jaxpr(jax.vmap(call))(*copies))
    assert alone.count("cond[") == together.count("cond[") == looks


@pytest.mark.parametrize(("name", "T"), [("tiled", 40), ("few", 1)])
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_garbage_in_one_copy_stays_there(name, T, garbage):
    """Each copy has the results of its own call, forward and backward."""
    q, k, v = _copies(T)
    v = v.at[1, 0, 7].set(garbage)

    def call(q, k, v):
        out, lse = attend_with_lse(q, k, v, Causal(), implementation=name)
        return jnp.where(jnp.isfinite(out), out, 0).sum() + lse.sum(), (out, lse)

    calls = jax.jit(jax.value_and_grad(call, (0, 1, 2), has_aux=True))
    together = jax.jit(jax.vmap(calls))(q, k, v)
    for copy in range(COPIES):
        alone = calls(q[copy], k[copy], v[copy])
        for found, wanted in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            assert_close(found[copy], wanted)
    out = together[0][1][0]
    assert jnp.isnan(out[1, 0, -1]).all() and jnp.isfinite(out[jnp.array([0, 2])]).all()
