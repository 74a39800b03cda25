"""The products of the tiles alone are those that attention makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import tiled
from attention.masks import EMPTY, Causal, Window
from attention.tile_table import tile_table
from benchmarks import products
from tests.oracles import assert_close, standard


@pytest.mark.parametrize("mask", [Causal(), Window(40)], ids=["causal", "window"])
def test_products_alone_are_those_of_the_tiles(monkeypatch, mask):
    """Σ (q kᵀ) v over whole tiles, and its gradients, at lengths that no tile divides."""
    monkeypatch.setattr(tiled, "_tile_sizes", lambda *_: (16, 32))
    q, k, v, do = standard(2, 50, 70, 4, 2, 6, 3)
    out, backward = jax.vjp(
        functools.partial(products.alone, mask), *(jnp.asarray(x, jnp.float32) for x in (q, k, v))
    )
    kinds = tile_table(mask, 50, 70, 16, 32).kinds
    visited_TS = np.repeat(np.repeat(kinds != EMPTY, 16, 0), 32, 1)[:50, :70]
    assert 0 < visited_TS.mean() < 1
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    s = np.einsum("btnh,bsnh->bnts", q, k) * visited_TS
    ds = np.einsum("btne,bsne->bnts", do, v) * visited_TS
    expected = [
        np.einsum("bnts,bsne->btne", s, v),
        np.einsum("bnts,bsnh->btnh", ds, k),
        np.einsum("bnts,btnh->bsnh", ds, q).reshape(2, 70, 2, 2, 6).sum(3),
        np.einsum("bnts,btne->bsne", s, do).reshape(2, 70, 2, 2, 3).sum(3),
    ]
    gradients = backward(jnp.asarray(do, jnp.float32))
    for got, right in zip((out, *gradients), expected, strict=True):
        assert_close(got, right)
