"""Caches: what a query may see is there, at its own position, and nothing else is needed.

``KVCache`` is used with ``attend`` here, without a layer; test_layers.py has the layers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.cache import KVCache, LatentCache, Slots
from attention.context import Context
from attention.masks import Causal, First, Full, Global, Prefix, Window
from attention.multi_head import MultiHead
from attention.ops import attend
from attention.rope import Rope
from tests import oracles
from tests.oracles import chk, standard, uniform


def places(start: int, stop: int, batch: int = 1) -> np.ndarray:
    return np.tile(np.arange(start, stop, dtype=np.int32), (batch, 1))


def new_cache(mask, length, k, v, dtype="float32") -> KVCache:
    shapes = {"k_BSKH": k.shape[2:], "v_BSKE": v.shape[2:]}
    return KVCache.create(k.shape[0], Slots.for_mask(mask, length), dtype, **shapes)


# Compiling the whole is cheaper than compiling each of its steps.
@jax.jit
def append(cache, positions, valid, new):
    return cache.append(positions, valid, **new)


@functools.partial(jax.jit, static_argnames="mask")
def append_and_attend(cache, positions, q, k, v, mask):
    cache, seen, index = cache.append(positions, positions >= 0, k_BSKH=k, v_BSKE=v)
    out = attend(
        q, seen["k_BSKH"], seen["v_BSKE"], mask, q_index=positions, k_index=index,
        implementation="reference",
    )  # fmt: skip
    return out, cache


def take(cache, k, v, start, stop, append=append):
    """The cache after these tokens, and what they attend over."""
    positions, part = places(start, stop, k.shape[0]), slice(start, stop)
    new = {"k_BSKH": k[:, part].astype("f"), "v_BSKE": v[:, part].astype("f")}
    return append(cache, positions, positions >= 0, new)


def decode(q, k, v, mask, sizes, length=None) -> tuple[np.ndarray, KVCache]:
    """Outputs of all queries, in chunks of these sizes."""
    cache = new_cache(mask, k.shape[1] if length is None else length, k, v)
    rows, start = [], 0
    for size in sizes:
        part = (np.asarray(a[:, start : start + size], np.float32) for a in (q, k, v))
        out, cache = append_and_attend(cache, places(start, start + size), *part, mask)
        rows.append(np.asarray(out))
        start += size
    return np.concatenate(rows, axis=1), cache


# --- what stays ----------------------------------------------------------------------------------

MASKS = {
    "causal": (Causal(), lambda i, j: j <= i),
    "window": (Causal() & Window(3), lambda i, j: i - 3 < j <= i),
    "window of one": (Window(1), lambda i, j: i == j),
    "streaming": (Causal() & (Window(3) | First(2)), lambda i, j: j <= i and (j > i - 3 or j < 2)),
    "first only": (Causal() & First(2), lambda i, j: j <= i and j < 2),
    "global": (
        Causal() & (Window(2) | Global((0, 3))),
        lambda i, j: j <= i and (j > i - 2 or j in (0, 3) or i in (0, 3)),
    ),
    "late global": (
        Causal() & (Window(2) | Global((6,))),
        lambda i, j: j <= i and (j > i - 2 or j == 6 or i == 6),
    ),
    "all but near": (Causal() & ~Window(3), lambda i, j: j <= i - 3),
    "both": (
        Causal() & (Window(2) | First(1)) & Window(4),
        lambda i, j: j <= i and (j > i - 2 or j < 1) and j > i - 4,
    ),
}


@pytest.mark.parametrize(("mask", "sees"), MASKS.values(), ids=MASKS)
def test_what_a_query_may_see_is_there(mask, sees):
    """C2, for random chunks and ragged rows: each visible position once, with its own entry."""
    rng = np.random.default_rng()
    for _ in range(3):
        lengths = np.array([11, int(rng.integers(1, 11))])
        token_of = rng.standard_normal((2, 11)).astype(np.float32)
        cache = KVCache.create(2, Slots.for_mask(mask, 11), "float32", k_BSKH=(1, 1), v_BSKE=(1, 1))
        start = 0
        while start < 11:
            size = 5 if start <= 6 and rng.integers(2) else 1
            positions = places(start, start + size, 2)
            valid = positions < lengths[:, None]
            stored = np.where(valid, token_of[:, start : start + size], np.nan)[..., None, None]
            # Padding has no position: whatever number stands there must not matter.
            given = np.where(valid, positions, rng.integers(0, 11))
            new = {"k_BSKH": stored, "v_BSKE": -stored}
            cache, entries, index = append(cache, given, valid, new)
            k, v, index = (np.asarray(a) for a in (*entries.values(), index))
            for b, t in np.argwhere(valid):
                i = positions[b, t]
                wanted = [j for j in range(i + 1) if sees(i, j)]
                found = [int(j) for j in index[b] if j >= 0 and sees(i, j)]
                assert sorted(found) == wanted, (i, index[b])
            for b, s in np.argwhere(index >= 0):
                assert k[b, s, 0, 0] == token_of[b, index[b, s]]
                assert v[b, s, 0, 0] == -token_of[b, index[b, s]]
            start += size


@pytest.mark.parametrize(
    ("mask", "length", "capacity"),
    [
        (Causal(), 9, 9),
        (Causal() & Window(4), 9, 4),
        (Causal() & Window(4), 4, 4),
        (Causal() & Window(4), 3, 3),
        (Causal() & (Window(4) | First(2)), 9, 6),
        (Causal() & (Window(4) | First(2)), 10**9, 6),
        (Causal() & (Window(4) | First(2)), 5, 5),
        (Causal() & (Window(4) | First(2)), 6, 6),
        (Causal() & (Window(3) | Global((0, 1))), 9, 5),
    ],
    ids=str,
)
def test_the_fewest_slots(mask, length, capacity):
    slots = Slots.for_mask(mask, length)
    assert slots.capacity == capacity
    assert slots.limit == (length if capacity == length else None)


@pytest.mark.parametrize("mask", [Full(), Window(3, ahead=1), First(1) | ~Causal()], ids=str)
def test_masks_that_look_ahead(mask):
    with pytest.raises(ValueError, match="a cache needs a causal mask"):
        Slots.for_mask(mask, 8)


def test_a_cache_of_no_length():
    with pytest.raises(ValueError, match="length of at least 1, got 0"):
        Slots.for_mask(Causal(), 0)


# --- published faults ----------------------------------------------------------------------------


def test_prefill_is_causal_and_empty_slots_are_not_seen():
    """C1."""
    q, k, v = uniform(6, 6)
    out, _ = decode(q, k, v, Causal(), [5, 1], length=8)
    np.testing.assert_allclose(out.ravel(), [0, 0.5, 1, 1.5, 2, 2.5], atol=1e-6)


@pytest.mark.parametrize(("sizes", "last"), [([7, 1], 5.5), ([1] * 10, 7.5)], ids=str)
def test_a_ring_wraps(sizes, last):
    """C2: window 4 in 4 slots, after a longer prompt and token by token."""
    T = sum(sizes)
    out, cache = decode(*uniform(T, T), Causal() & Window(4), sizes, length=100)
    assert cache.position_BS.shape == (1, 4)
    assert sorted(cache.position_BS[0].tolist()) == list(range(T - 4, T))
    assert out[0, -1, 0, 0] == pytest.approx(last)


@pytest.mark.parametrize("sizes", [[1] * 6, [2, 4], [5, 1], [6]], ids=str)
def test_window_counts_the_query(sizes):
    """W1: prefill and decoding have one rule."""
    out, _ = decode(*uniform(6, 6), Causal() & Window(3), sizes)
    np.testing.assert_allclose(out.ravel(), [0, 0.5, 1, 2, 3, 4], atol=1e-6)


@pytest.mark.parametrize(
    ("window", "number"),
    [(1, 3.301473431), (3, 0.672163687), (4, 0.706089088), (10, 0.444373949)],
)
@pytest.mark.parametrize("sizes", [[1] * 10, [7, 1, 1, 1]], ids=["decode", "long prompt"])
def test_window_numbers(window, number, sizes):
    """W1."""
    q, k, v, _ = standard(1, 10, 10, 2, 1, 4, 4)
    out, _ = decode(q, k, v, Causal() & Window(window), sizes)
    assert chk(out) == pytest.approx(number, abs=1e-5)


def test_one_token_at_the_wrong_offset_is_seen():
    """R1: rotated keys in the cache, queries rotated to where they stand."""
    q, k, v, _ = standard(1, 6, 6, 2, 2, 8, 4)
    rope = Rope(8)
    for shift in (0, 1000):
        rotated = [rope(a.astype("f"), places(shift, shift + 6)) for a in (q, k)]
        out, _ = decode(*rotated, v, Causal(), [1] * 6)
        assert chk(out) == pytest.approx(-0.164056284, abs=1e-4 if shift else 1e-5)


@pytest.mark.parametrize("sizes", [[1] * 8, [6, 1, 1], [3, 5]], ids=str)
def test_sinks_keep_their_absolute_positions(sizes):
    """K2: keys are rotated once, to the position of their token, and never again."""
    q, k, v, _ = standard(1, 8, 8, 1, 1, 8, 4)
    q, k = (np.asarray(Rope(8)(jnp.asarray(a, jnp.float32), places(0, 8))) for a in (q, k))
    out, cache = decode(q, k, v, Causal() & (Window(3) | First(2)), sizes, length=100)
    assert sorted(cache.position_BS[0].tolist()) == [0, 1, 5, 6, 7]
    expected = (-0.297351963, 0.048165649, 0.248719483, -0.299295773)
    np.testing.assert_allclose(out[0, 7, 0], expected, atol=1e-5)


def eagerly(cache, positions, valid, new):
    return cache.append(positions, valid, **new)


@pytest.mark.parametrize(("start", "stop", "what"), [(4, 5, 4), (3, 5, 4), (0, 9, 8), (9, 10, 9)])
def test_writing_past_the_end(start, stop, what):
    """C4: nothing is clamped onto the last slot, nothing is dropped in silence."""
    _, k, v = uniform(10, 10)
    cache = new_cache(Causal(), 4, k, v)
    if start:
        cache, *_ = take(cache, k, v, 0, 3)
    before = jax.tree.map(np.array, cache)
    with pytest.raises(ValueError, match=f"position {what} is past the end of a cache of length 4"):
        take(cache, k, v, start, stop, append=eagerly)
    jax.tree.map(np.testing.assert_array_equal, before, cache)
    cache, *_ = take(cache, k, v, min(start, 3), 4)
    assert cache.position_BS[0].tolist() == [0, 1, 2, 3]


def test_a_traced_write_past_the_end_touches_no_slot():
    """C4: where positions are not known yet, at least nothing that was stored is lost."""
    _, k, v = uniform(10, 10)
    cache, *_ = take(new_cache(Causal(), 4, k, v), k, v, 0, 4)

    def write(cache, positions):
        one = np.full((1, 1, 1, 1), 99, np.float32)
        return append(cache, positions, positions >= 0, {"k_BSKH": one, "v_BSKE": one})[0]

    jax.tree.map(np.testing.assert_array_equal, write(cache, places(4, 5)), cache)
    assert write(cache, places(2, 3)).v_BSKE[0, 2, 0, 0] == 99


# --- a cache as a value --------------------------------------------------------------------------


def test_a_cache_is_a_value():
    _, k, v = uniform(4, 4)
    empty = new_cache(Causal() & (Window(2) | First(1)), 9, k, v)
    full, *_ = take(empty, k, v, 0, 4)
    assert (np.asarray(empty.position_BS) == -1).all()
    assert all(not array.any() for array in empty.entries.values()), "C1: zeros, not garbage"
    leaves, tree = jax.tree.flatten(full)
    assert len(leaves) == 3
    assert tree == jax.tree.structure(empty)
    assert jax.tree.unflatten(tree, leaves).slots == full.slots
    assert (np.asarray(full.reset().position_BS) == -1).all()


def test_a_second_prompt_forgets_the_first():
    """C1: also what the first one pinned, and a shorter prompt than the first."""
    mask = Causal() & (Window(2) | First(2))
    _, k, v = uniform(9, 9)
    used, *_ = take(new_cache(mask, 99, k, v), k, v, 0, 9)
    for size in (1, 3):
        after, _, index = take(used, -k, -v, 0, size)
        assert set(index[0].tolist()) == {-1, *range(size)}
        held = {int(p): float(x) for p, x in zip(
            after.position_BS[0], after.v_BSKE[0, :, 0, 0], strict=True
        ) if p >= 0}  # fmt: skip
        assert held == {p: -p for p in range(size)}


def test_bytes_and_dtypes():
    """The dtype of the cache is its own: what is written is rounded to it."""
    _, k, v = uniform(3, 3)
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        cache = new_cache(Causal() & Window(5), 99, k, v, dtype)
        assert cache.nbytes == 2 * 5 * size
        cache, *_ = take(cache, k + 1.001, v, 0, 3)
        assert cache.k_BSKH.dtype == dtype
        assert float(cache.k_BSKH[0, 0, 0, 0]) == float(jnp.asarray(1.001, dtype))


def test_latents_are_kept_as_keys_are():
    """X2: rank + rotary width numbers a token, in a ring where the mask forgets."""
    cache = LatentCache.create(
        2, Slots.for_mask(Causal() & Window(3), 50), "float32", latent_BSR=(6,), rope_key_BSP=(4,)
    )
    assert cache.nbytes == 2 * 3 * (6 + 4) * 4
    latent, rope = np.random.default_rng().standard_normal((2, 2, 5, 6)).astype("f")
    positions = places(0, 5, 2)
    new = {"latent_BSR": latent, "rope_key_BSP": rope[..., :4]}
    cache, entries, index = append(cache, positions, positions >= 0, new)
    for b, s in np.argwhere(np.asarray(index) >= 0):
        np.testing.assert_array_equal(entries["latent_BSR"][b, s], latent[b, index[b, s]])
        np.testing.assert_array_equal(entries["rope_key_BSP"][b, s], rope[b, index[b, s], :4])
    assert sorted(cache.position_BS[0].tolist()) == [2, 3, 4]


# --- cost ----------------------------------------------------------------------------------------


def abstract(options, **context):
    """A layer of any size without its memory."""
    return nnx.eval_shape(lambda: options.build(Context(**context), nnx.Rngs(0)))


def cache_bytes(layer, batch, length) -> int:
    cache = jax.eval_shape(lambda: layer.init_cache(batch, length))
    return sum(a.size * a.dtype.itemsize for a in (cache.k_BSKH, cache.v_BSKE))


def test_llama_3_8b(record_property):
    """Claim 23: 128 KiB a token, 1 GiB at 8K, 16 GiB for 16 requests; 4 × with 32 heads."""
    shape = {"d_model": 4096, "num_heads": 32, "head_width": 128, "dtype": "bfloat16"}
    layer = abstract(MultiHead(num_kv_heads=8), **shape)
    per_token = 32 * layer.cache_bytes_per_token()
    one, many = (32 * cache_bytes(layer, batch, 8192) / 2**30 for batch in (1, 16))
    record_property("figures", f"{per_token / 2**10:g} KiB, {one:g} GiB, {many:g} GiB")
    assert (per_token, one, many) == (128 * 2**10, 1, 16)
    assert abstract(MultiHead(), **shape).cache_bytes_per_token() == 4 * 2**12


def test_shared_heads_shrink_the_cache(record_property):
    """Claim 24: 8 query heads with 8, 2 and 1 key-value heads."""
    shape = {"d_model": 64, "num_heads": 8, "head_width": 8}
    layers = {K: abstract(MultiHead(num_kv_heads=K), **shape) for K in (8, 2, 1)}
    per_token = {K: layer.cache_bytes_per_token() for K, layer in layers.items()}
    record_property("figures", f"bytes by kv heads: {per_token}")
    assert per_token == {8: 2 * 64 * 4, 2: 2 * 16 * 4, 1: 2 * 8 * 4}
    assert {K: cache_bytes(layer, 3, 7) for K, layer in layers.items()} == {
        K: 3 * 7 * bytes_ for K, bytes_ in per_token.items()
    }


def test_prefix_is_seen_only_when_prefilled_at_once():
    """Causal() | Prefix(n): the cache serves it where the first chunk holds the prefix."""
    mask = Causal() | Prefix(3)
    q, k, v, _ = standard(1, 7, 7, 2, 1, 4, 4)
    sees = oracles.visible_pairs(lambda i, j: (j <= i) | ((i < 3) & (j < 3)), 1, 7, 7)
    expected = oracles.attention(q, k, v, sees).out
    for sizes in ([3, 1, 1, 1, 1], [5, 2], [7]):
        out, _ = decode(q, k, v, mask, sizes)
        oracles.assert_close(out, expected)
