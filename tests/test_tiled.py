"""What only the tiled implementation promises: memory, program size, tiles of any shape, refusals.

What every implementation must compute is in test_attend.py. Here tiles are small, so that a short
sequence has empty, full, partial and cut ones.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import tiled
from attention.masks import Causal, First, Full, Global, Window
from attention.ops import attend, attend_with_lse, explain
from attention.reference import Dropout
from attention.tile_table import tile_table
from attention.tiles import Plan
from tests import oracles
from tests.attending import Lying
from tests.oracles import assert_close, chk, standard, visible_pairs
from tests.test_attend import MASKS

MiB = 1 << 20


@functools.partial(jax.jit, static_argnames=("mask", "sizes", "scale"))
def _evaluate(q, k, v, do, dlse, mask, sizes, scale, sink, q_segments, k_segments):
    (_, T, N, H), (_, S, K, _) = q.shape, k.shape
    scale = H**-0.5 if scale is None else scale
    segmented = q_segments is not None or k_segments is not None
    plan = Plan(mask, scale, N // K, T, S, *sizes, masks_all=segmented)

    def forward(q, k, v, sink):
        return tiled._attend(plan, q, k, v, sink, q_segments, k_segments)

    (out, lse), backward = jax.vjp(forward, q, k, v, sink)
    return out, lse, *backward((do.astype(out.dtype), dlse.astype(lse.dtype)))


def in_tiles(
    q, k, v, do, dlse, mask, sizes, *, scale=None, sink=None, q_segments=None, k_segments=None
) -> oracles.Result:
    """Outputs and gradients under tiles of the given sizes, in NumPy."""
    results = _evaluate(q, k, v, do, dlse, mask, sizes, scale, sink, q_segments, k_segments)
    return oracles.Result(*jax.tree.map(np.asarray, results))


def random_inputs(B, T, S, N, K, H, E, dtype=np.float32):
    rng = np.random.default_rng()
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, E), (B, T, N, E), (B, N, T)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def assert_equals(got, expected, dtype="float32"):
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert_close(getattr(got, name), getattr(expected, name), dtype, name)
    if got.dsink is not None:
        assert_close(got.dsink, expected.dsink, dtype, "dsink")


# --- tiles of any shape ---------------------------------------------------------------------------

# By default masks that are most unlike each other.
CHIEF = ("full", "causal", "streaming", "longformer")
# Of each mask another tile: square ones and not, of a few rows and of most.
SIZES = [(16, 8), (8, 8), (10, 24), (9, 17), (24, 10), (8, 16), (12, 12), (40, 8), (8, 40)]


@pytest.mark.parametrize(
    ("mask", "sees", "sizes", "dtype"),
    [
        pytest.param(
            *mask,
            sizes,
            dtype,
            id=f"{name}-{dtype}",
            marks=() if name in CHIEF else pytest.mark.broad,
        )
        for (name, mask), sizes in zip(MASKS.items(), SIZES, strict=True)
        for dtype in ("float32", *{"causal": ["bfloat16"], "streaming": ["float16"]}.get(name, ()))
    ],
)
def test_any_tile(mask, sees, sizes, dtype):
    """Lengths that no tile divides, grouped heads, H ≠ E, both cotangents, a sink."""
    inputs = random_inputs(2, 45, 51, 4, 2, 6, 3)
    q, k, v, do, dlse = (np.asarray(jnp.asarray(x, dtype), np.float64) for x in inputs)
    sink = np.random.default_rng().standard_normal(4).astype(np.float32)
    given = (jnp.asarray(x, dtype) for x in (q, k, v))
    got = in_tiles(*given, do, dlse, mask, sizes, sink=sink)
    assert str(got.dk.dtype) == dtype
    visible = visible_pairs(sees, 2, 45, 51)
    # The output is kept as it is returned, and what it is rounded by enters the gradients.
    tolerance = dtype if dtype == "float32" else "rounded"
    expected = oracles.attention(q, k, v, visible, do=do, dlse=dlse, sink=sink)
    assert_equals(got, expected, tolerance)


def test_more_queries_than_keys():
    """The first rows see nothing: no tile of theirs is visited."""
    q, k, v, do, dlse = random_inputs(1, 50, 21, 2, 1, 4, 4)
    got = in_tiles(q, k, v, do, dlse, Causal(), (8, 8))
    visible = visible_pairs(lambda i, j: j <= i, 1, 50, 21)
    assert not visible[0, :29].any()
    assert_equals(got, oracles.attention(q, k, v, visible, do=do, dlse=dlse))
    assert (np.asarray(got.out[:, :29]) == 0).all() and (np.asarray(got.dq[:, :29]) == 0).all()


def test_segments_turn_full_tiles_partial():
    rng = np.random.default_rng()
    q, k, v, do, dlse = random_inputs(2, 40, 40, 2, 2, 4, 5)
    documents = np.sort(rng.integers(0, 4, (2, 40)))
    got = in_tiles(q, k, v, do, dlse, Causal(), (8, 8), q_segments=documents, k_segments=documents)
    visible = visible_pairs(
        lambda i, j: j <= i, 2, 40, 40, q_segments=documents, k_segments=documents
    )
    assert_equals(got, oracles.attention(q, k, v, visible, do=do, dlse=dlse))


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_the_scale_may_be_any_number(scale):
    q, k, v, do, dlse = random_inputs(1, 20, 20, 2, 1, 4, 4)
    got = in_tiles(q, k, v, do, dlse, Causal(), (8, 8), scale=scale)
    visible = visible_pairs(lambda i, j: j <= i, 1, 20, 20)
    assert_equals(got, oracles.attention(q, k, v, visible, do=do, dlse=dlse, scale=scale))


@pytest.mark.parametrize("side", [64, 128])
@pytest.mark.parametrize(
    ("T", "numbers"),
    [
        (7, (0.081170138, 0.094857367, -0.224473432, 3.412138008)),
        (129, (0.277087849, 0.142055630, -0.149609252, 4.456847175)),
        (300, (0.228822077, 0.138171060, -0.144926871, 4.236733583)),
    ],
)
def test_case_T1(T, numbers, side):
    """Lengths that the tile does not divide, with both sides of the case."""
    inputs = (x.astype(np.float32) for x in standard(1, T, T, 2, 2, 16, 16))
    got = in_tiles(*inputs, np.zeros((1, 2, T), np.float32), Causal(), (side, side))
    for name, number in zip(("out", "dq", "dk", "dv"), numbers, strict=True):
        assert chk(getattr(got, name)) == pytest.approx(number, abs=5e-5), name


def test_float64_stays_float64():
    with jax.enable_x64(True):
        q, k, v, do, dlse = random_inputs(1, 30, 30, 2, 1, 4, 4, np.float64)
        got = in_tiles(q, k, v, do, dlse, Causal(), (8, 8))
        assert got.out.dtype == got.lse.dtype == got.dk.dtype == np.float64
        visible = visible_pairs(lambda i, j: j <= i, 1, 30, 30)
        assert_equals(got, oracles.attention(q, k, v, visible, do=do, dlse=dlse), "float64")


def test_scores_of_ten_thousand_lose_nothing_backward():
    """A row's weights sum to 1 backward too: Σ dv = Σ do for do = 1.

    exp(score − lse) would miss it by 1e-3, since float32 steps by 1e-3 at 10,000.
    """
    q, k, v, do, dlse = random_inputs(1, 24, 24, 4, 4, 2, 1)
    q[..., 0], k[..., 0] = 100, 100  # adds 10,000 to every score and changes no weight
    got = in_tiles(q, k, v, np.ones_like(do), 0 * dlse, Full(), (8, 8), scale=1.0)
    np.testing.assert_allclose(got.dv.sum(1), 24, rtol=0, atol=2e-5)


# --- isolation, tile by tile ----------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
def test_garbage_in_a_visited_tile(garbage):
    """Key 19 is hidden from rows 0 … 18, some of which share its tiles, and from all of batch 1."""
    q, k, v, do, dlse = random_inputs(2, 32, 32, 2, 1, 4, 4)
    segments = np.ones((2, 32), np.int32)
    segments[1, 19] = 0
    do[0, 19:], dlse[0, :, 19:] = 0, 0
    run = functools.partial(
        in_tiles, do=do, dlse=dlse, mask=Causal(), sizes=(16, 8), k_segments=segments
    )
    clean_k, clean_v = k.copy(), v.copy()
    clean_k[:, 19], clean_v[:, 19] = 0, 0
    k[:, 19], v[:, 19] = garbage, garbage
    got, clean = run(q, k, v), run(q, clean_k, clean_v)
    for batch, rows in ((0, slice(0, 19)), (1, slice(None))):
        for name in ("out", "dq"):
            a, b = getattr(got, name)[batch, rows], getattr(clean, name)[batch, rows]
            np.testing.assert_array_equal(a, b, err_msg=name)
        np.testing.assert_array_equal(got.lse[batch, :, rows], clean.lse[batch, :, rows])
    for name in ("dk", "dv"):
        a = np.asarray(getattr(got, name))
        np.testing.assert_array_equal(a[1], getattr(clean, name)[1], err_msg=name)
        assert (a[1, 19] == 0).all()
        if not np.isfinite(garbage):
            assert np.isfinite(a).all()
    if not np.isfinite(garbage):
        assert np.isnan(got.out[0, 19:]).all() and np.isnan(got.lse[0, :, 19:]).all()


def test_a_bad_value_spoils_the_output_alone():
    """In a full tile as well: row 31 sees key 2 without any mask being evaluated."""
    q, k, v, do, dlse = random_inputs(1, 32, 32, 1, 1, 4, 4)
    v[0, 2, 0, 1] = np.inf
    got = in_tiles(q, k, v, do, dlse, Causal(), (8, 8))
    assert np.isnan(got.out[0, 2:]).all() and np.isfinite(got.out[0, :2]).all()
    assert np.isfinite(got.lse).all()


# --- memory, program size, repetition -------------------------------------------------------------

LONG = {
    "window": Window(128),
    "longformer": Window(128, ahead=127) | Global(4),
    "causal longformer": Causal() & (Window(128) | Global(4)),
    "streaming": Causal() & (Window(128) | First(4)),
    "causal": Causal(),
}


every_long_mask = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("longformer", "causal") else pytest.mark.broad)
        for name in LONG
    ],
)


def compiled(mask, T, backward):
    def forward(q, k, v):
        return attend(q, k, v, mask, implementation="tiled")

    def both(q, k, v):
        out, pull = jax.vjp(forward, q, k, v)
        return out, pull(out)

    x = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.bfloat16)
    lowered = jax.jit(both if backward else forward).lower(x, x, x)
    return lowered.compile()


def temporaries(mask, T, backward):
    return compiled(mask, T, backward).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", LONG)
def test_case_H1(name):
    """T = 16,384, forward and backward: under 64 MiB of temporaries."""
    assert temporaries(LONG[name], 16384, backward=True) < 64 * MiB


@every_long_mask
def test_case_H1_forward(name):
    assert temporaries(LONG[name], 16384, backward=False) < 64 * MiB


@every_long_mask
def test_twice_the_length_takes_twice_the_memory(name, record_property):
    short, long = (temporaries(LONG[name], T, backward=True) for T in (8192, 16384))
    record_property(
        "figures", f"{name}: {short / MiB:.1f} MiB at 8,192, {long / MiB:.1f} at 16,384"
    )
    assert long < 2.2 * short


@pytest.mark.parametrize("name", ["causal", "streaming", "longformer"])
def test_the_program_does_not_grow_with_the_length(name):
    """Forward and backward: a loop over the table's lists, whose length is not the program's."""

    def lines(T):
        x = jax.ShapeDtypeStruct((1, T, 1, 64), jnp.float32)
        grad = jax.grad(lambda q: attend(q, q, q, LONG[name], implementation="tiled").sum())
        return len(jax.jit(grad).lower(x).as_text().splitlines())

    assert lines(2048) == lines(1 << 16)


def test_keys_are_not_repeated_for_their_queries():
    """Eight query heads of one key-value head: nothing as wide as a key has a row for each pair."""
    q, k = array(2, 96, 8, 48), array(2, 384, 1, 48)
    grad = jax.grad(lambda q, k: attend(q, k, k, Causal(), implementation="tiled").sum(), (0, 1))
    shapes = re.findall(r"tensor<([\dx]+)x48xf32>", jax.jit(grad).lower(q, k).as_text())
    rows = {math.prod(map(int, shape.split("x"))) for shape in shapes}
    assert 2 * 384 in rows and max(rows) == 2 * 96 * 8 < 2 * 384 * 8


def test_full_tiles_skip_the_mask_and_empty_ones_are_skipped():
    """The pairs that count are those of the full tiles, though the mask hides each of them."""
    q, k, v, do, dlse = random_inputs(1, 32, 32, 2, 1, 4, 3)
    got = in_tiles(q, k, v, do, dlse, Lying(8), (8, 8))
    visible = visible_pairs(Lying(8).counted, 1, 32, 32)
    assert_equals(got, oracles.attention(q, k, v, visible, do=do, dlse=dlse))


def test_empty_tiles_are_not_visited(monkeypatch):
    """Visits counted as they happen: those that the table lists, forward and backward."""
    visits = []
    dot = tiled._dot

    def counting(*args):
        jax.debug.callback(lambda: visits.append(1))
        return dot(*args)

    monkeypatch.setattr(tiled, "_dot", counting)
    mask = Causal() & (Window(7) | First(3))
    table = tile_table(mask, 64, 64, 8, 8)
    assert table.fraction < 0.4
    in_tiles(*random_inputs(1, 64, 64, 1, 1, 4, 4), mask, (8, 8))
    jax.effects_barrier()
    # Two products forward, five backward.
    assert len(visits) == (2 + 5) * len(table.by_query.column)


def test_repetition_is_bit_equal():
    inputs = random_inputs(1, 300, 300, 2, 1, 16, 16)
    first = in_tiles(*inputs, Causal(), (64, 64))
    for _ in range(9):
        again = in_tiles(*inputs, Causal(), (64, 64))
        for name in ("out", "lse", "dq", "dk", "dv"):
            np.testing.assert_array_equal(getattr(again, name), getattr(first, name))


# --- which runs, and why not ----------------------------------------------------------------------


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"q_index": jax.ShapeDtypeStruct((64,), jnp.int32)}, "explicit positions"),
        ({"k_index": jax.ShapeDtypeStruct((2, 64), jnp.int32)}, "explicit positions"),
        ({"dropout": Dropout(0.1, None)}, "dropout"),
        ({"scale": jnp.float32(1.0)}, "scale is an array"),
    ],
)
def test_refusals_name_their_reason(options, reason):
    q = array(2, 64, 2, 8)
    with pytest.raises(NotImplementedError, match=f"'tiled': {reason}"):
        explain(q, q, q, Causal(), implementation="tiled", **options)
    assert reason in explain(q, q, q, Causal(), **options).others["tiled"]


def test_auto_takes_tiles_from_the_crossover_on():
    long, few = array(1, 1024, 2, 8), array(1, tiled.FEW - 1, 2, 8)
    assert explain(long, long, long, Causal()).chosen == "tiled"
    passed_over = explain(few, long, long, Causal())
    assert passed_over.chosen == "reference"
    assert f"fewer than {tiled.FEW}" in passed_over.others["tiled"]


def test_off_the_cpu_dense_goes_first_while_it_fits(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    short, long = array(1, 1024, 2, 8), array(1, 1 << 15, 2, 8)
    passed_over = explain(short, short, short, Causal())
    assert passed_over.chosen == "reference"
    assert "made for the CPU" in passed_over.others["tiled"]
    assert explain(long, long, long, Causal()).chosen != "reference"


def test_tile_sizes_follow_the_mask():
    wide = tiled._tile_sizes(Causal(), 8192, 8192, 1)
    narrow = tiled._tile_sizes(Window(128), 8192, 8192, 1)
    assert wide[0] > narrow[0] and wide[1] > narrow[1]
    assert tiled._tile_sizes(Causal(), 40, 70, 4) == (40, 70)
    # The rows of a tile are its queries times the group.
    assert tiled._tile_sizes(Full(), 8192, 8192, 8) == (128, 1024)


def test_the_lse_alone_has_a_gradient():
    q, k, v, _, dlse = random_inputs(1, 40, 40, 2, 1, 8, 8)

    def loss(q, k):
        return (attend_with_lse(q, k, v, Causal(), implementation="tiled")[1] * dlse).sum()

    dq, dk = jax.jit(jax.grad(loss, (0, 1)))(q, k)
    visible = visible_pairs(lambda i, j: j <= i, 1, 40, 40)
    exact = oracles.attention(q, k, v, visible, dlse=dlse)
    assert_close(dq, exact.dq)
    assert_close(dk, exact.dk)
