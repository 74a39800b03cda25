"""The TPU kernels against float64, in the TPU interpreter with race detection on two cores."""

import dataclasses
import re

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attention import ops
from attention.masks import EMPTY, Causal, First, Full, Global, Prefix, Window
from attention.pallas import tpu, tpu_calls
from attention.pallas.tpu import Tile
from attention.reference import Dropout
from attention.tile_table import tile_table
from tests import oracles
from tests.attending import Lying, chiefly
from tests.oracles import assert_close, chk, standard, visible_pairs


def call_of(q, k, v, mask, *, dtype="float32", **options) -> ops.Call:
    fields = {field.name: None for field in dataclasses.fields(ops.Call)}
    arrays = dict(zip(("q_BTNH", "k_BSKH", "v_BSKE"), (q, k, v), strict=True))
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    return ops.Call(**fields | {"scale": q.shape[3] ** -0.5} | arrays | {"mask": mask} | options)


class Run:
    """Outputs and all gradients of Σ out · do + Σ lse · dlse, compiled once."""

    def __init__(self, call: ops.Call, do, tile=None, dlse=None, parameters=None):
        names = ["q_BTNH", "k_BSKH", "v_BSKE"] + ["sink_N"] * (call.sink_N is not None)
        self.arrays = {name: getattr(call, name) for name in names}
        self.do = jnp.asarray(do, call.v_BSKE.dtype)
        with tpu.interpreted(parameters):
            assert tpu.cannot(call) is None
            plan = tpu.plan(call, tile)

        def results(arrays, do):
            def attention(arrays):
                return tpu.run_planned(dataclasses.replace(call, **arrays), plan)

            outputs, gradient = jax.vjp(attention, arrays)
            zeros = jnp.zeros_like(outputs[1])
            return outputs, gradient((do, zeros if dlse is None else jnp.asarray(dlse)))[0]

        self.program = jax.jit(results)
        self()

    def __call__(self, do=None, **arrays) -> list[bytes]:
        do = self.do if do is None else do
        (self.out, self.lse), gradients = self.program(self.arrays | arrays, do)
        self.dq, self.dk, self.dv = (gradients[x] for x in ("q_BTNH", "k_BSKH", "v_BSKE"))
        self.dsink = gradients.get("sink_N")
        results = self.out, self.lse, self.dq, self.dk, self.dv
        return [np.asarray(x).tobytes() for x in results]

    def assert_equals(self, expected: oracles.Result, dtype: str = "float32"):
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert_close(getattr(self, name), getattr(expected, name), dtype, name)
        if self.dsink is not None:
            assert_close(self.dsink, expected.dsink, dtype, "dsink")


def random(rng: np.random.Generator, B, T, S, N, K, H, E):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, E), (B, T, N, E)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


MASKS = {
    "full": (Full(), lambda i, j: j >= 0 * i, 7, 7, Tile(4, 8)),
    "causal": (Causal(), lambda i, j: j <= i, 160, 96, Tile(64, 32)),
    "window": (Window(20), lambda i, j: (j <= i) & (i - j < 20), 96, 160, Tile(32, 64)),
    "symmetric window and global tokens": (
        Window(9, ahead=8) | Global((0, 233)),
        lambda i, j: (abs(i - j) < 9) | (i == 0) | (j == 0) | (i == 233) | (j == 233),
        300,
        300,
        Tile(128, 128),
    ),
    "streaming": (
        Causal() & (Window(16) | First(3)),
        lambda i, j: (j <= i) & ((i - j < 16) | (j < 3)),
        129,
        129,
        Tile(64, 32),
    ),
    "prefix": (
        Causal() | Prefix(40),
        lambda i, j: (j <= i) | ((i < 40) & (j < 40)),
        70,
        70,
        Tile(16, 64),
    ),
}


@pytest.mark.parametrize("name", chiefly(MASKS, "streaming"))
def test_every_mask_equals_float64(name: str):
    """With G = 2, H ≠ E, a sink and a gradient of the log-sum-exp; some rows see no key."""
    mask, sees, T, S, tile = MASKS[name]
    rng = np.random.default_rng(T)
    q, k, v, do = random(rng, 1, T, S, 4, 2, 8, 5)
    sink = rng.standard_normal(4).astype(np.float32)
    dlse = rng.standard_normal((1, 4, T)).astype(np.float32)
    run = Run(call_of(q, k, v, mask, sink_N=jnp.asarray(sink)), do, tile, dlse)
    visible = visible_pairs(sees, 1, T, S)
    run.assert_equals(oracles.attention(q, k, v, visible, do=do, dlse=dlse, sink=sink))


@pytest.mark.parametrize(
    ("T", "tile", "expected"),
    [
        (1, None, (0.295126385, 0, 0, 0.043175011)),
        (129, Tile(128, 64), (0.277087849, 0.142055630, -0.149609252, 4.456847175)),
    ],
)
def test_lengths_that_no_tile_divides(T: int, tile: Tile | None, expected):
    """Case T1, with the given tile and the one that is chosen; every repetition is bit-equal."""
    q, k, v, do = standard(1, T, T, 2, 2, 16, 16)
    run = Run(call_of(q, k, v, Causal()), do, tile)
    for name, value in zip(("out", "dq", "dk", "dv"), expected, strict=True):
        assert chk(getattr(run, name)) == pytest.approx(value, abs=1e-4), name
    assert run() == run()


@pytest.mark.parametrize("of_queries", chiefly([True, False], True))
def test_segments_and_garbage_in_padding(of_queries: bool):
    """Packed documents do not meet, and case M3: what padding holds reaches nothing."""
    T = S = 24
    q, k, v, do = random(np.random.default_rng(5), 2, T, S, 2, 1, 8, 8)
    segments = np.zeros((2, T), np.int32)
    segments[0, :7], segments[0, 7:21], segments[1, 3:] = 3, -(2**31), 9
    named = {"k_segments": segments} | ({"q_segments": segments} if of_queries else {})
    call = call_of(q, k, v, Causal(), **{name: jnp.asarray(x) for name, x in named.items()})
    run = Run(call, do, Tile(16, 16))
    visible = visible_pairs(lambda i, j: j <= i, 2, T, S, **named)
    run.assert_equals(oracles.attention(q, k, v, visible, do=do))
    padding, garbage = segments == 0, np.array([1e30, np.inf, np.nan, 1, -1e38, 0, 1, 2])
    assert not np.asarray(run.dk)[padding].any() and not np.asarray(run.dv)[padding].any()
    clean = run()
    for row in (garbage, np.full(8, 1e38)):
        dirty = {name: getattr(call, name).at[padding].set(row) for name in ("k_BSKH", "v_BSKE")}
        assert run(**dirty) == clean


@pytest.mark.interpreted
def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_other():
    rng = np.random.default_rng(6)
    q, k, v, do = random(rng, 1, 40, 40, 4, 2, 8, 8)
    k[0, 17, 1, 0], v[0, 22, 0, 0] = np.nan, np.inf
    call = call_of(q, k, v, Causal() & Window(6))
    run = Run(call, do, Tile(32, 32))

    def dense(arrays):
        return ops.attend(*arrays, call.mask, implementation="reference")

    out, gradient = jax.vjp(dense, (call.q_BTNH, call.k_BSKH, call.v_BSKE))
    sick = np.isnan(np.asarray(run.out)).all(-1)
    np.testing.assert_array_equal(sick, np.isnan(np.asarray(out)).any(-1))
    assert sick.sum() == 24 and sick[0, 17:23, 2:].all() and sick[0, 22:28, :2].all()
    assert_close(np.nan_to_num(run.out), np.nan_to_num(out))
    for mine, right in zip((run.dq, run.dk, run.dv), gradient(run.do)[0], strict=True):
        assert_close(mine, right)


@pytest.mark.interpreted
def test_bfloat16_and_a_group_with_padding():
    """71 heads to one, as in Falcon, are folded as 72."""
    rng = np.random.default_rng(7)
    arrays = random(rng, 1, 20, 20, 71, 1, 8, 16)
    q, k, v, do = (np.asarray(jnp.asarray(x, "bfloat16"), np.float64) for x in arrays)
    run = Run(call_of(q, k, v, Causal(), dtype="bfloat16"), do, Tile(8, 16))
    assert run.out.dtype == run.dq.dtype == jnp.bfloat16 and run.lse.dtype == jnp.float32
    visible = visible_pairs(lambda i, j: j <= i, 1, 20, 20)
    right = oracles.attention(q, k, v, visible, do=do)
    assert_close(run.lse, right.lse)
    for name in ("out", "dq", "dk", "dv"):
        assert_close(getattr(run, name), getattr(right, name), "bfloat16", name)


def test_empty_tiles_are_not_visited():
    """What the interpreter runs is the table's tiles, and one visit for each idle row."""
    points = []

    def record(token, *point):
        points.append(point)
        return token

    parameters = pltpu.InterpretParams(grid_point_recorder=record)
    mask, T, tile = Window(8) & First(20), 64, Tile(8, 8)
    q, k, v, do = random(np.random.default_rng(8), 1, T, T, 2, 2, 8, 8)
    Run(call_of(q, k, v, mask), do, tile, parameters=parameters)
    table = tile_table(mask, T, T, 8, 8)
    working = np.count_nonzero(table.kinds)
    idle = [np.count_nonzero(~table.kinds.any(axis)) for axis in (1, 0)]
    assert working < table.kinds.size / 5 and all(idle)
    K, kernels = 2, 3
    assert len(points) == K * (kernels * working + 2 * idle[0] + idle[1])


@pytest.mark.interpreted
def test_full_tiles_skip_the_mask():
    """The pairs that count are those of the full tiles, though the mask hides each of them."""
    q, k, v, do = random(np.random.default_rng(9), 1, 32, 32, 2, 1, 8, 5)
    run = Run(call_of(q, k, v, Lying(8)), do, Tile(8, 8))
    visible = visible_pairs(Lying(8).counted, 1, 32, 32)
    run.assert_equals(oracles.attention(q, k, v, visible, do=do))


def test_every_product_of_float32_is_exact():
    """N3, of which the interpreter knows nothing: it multiplies float32 as such in any case."""
    q, k, v, _ = random(np.random.default_rng(10), 1, 16, 16, 2, 1, 8, 5)
    call = call_of(q, k, v, Causal())
    with tpu.interpreted(), jax.default_matmul_precision("default"):
        plan = tpu.plan(call, Tile(8, 8))

        def loss(q):
            return tpu.run_planned(dataclasses.replace(call, q_BTNH=q), plan)[0].sum()

        program = str(jax.make_jaxpr(jax.grad(loss))(call.q_BTNH))
    products = re.findall(r"dot_general\[.*?(?:precision=(.*?)\n.*?)?preferred", program, re.DOTALL)
    # Two products forward, three for dq, four for dk and dv; on full and on masked tiles.
    assert len(products) >= 2 * (2 + 3 + 4)
    assert set(products) == {"(Precision.HIGHEST, Precision.HIGHEST)"}


def test_a_race_is_an_error():
    """Two cores write the same block: what the tests of kernels rely on to fail."""

    def copy(x, out):
        out[...] = x[...]

    with tpu.interpreted():
        racing = pl.pallas_call(
            copy,
            grid=(2,),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 128), "float32"),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
            interpret=tpu._interpreter.get(),
        )
        try:
            with pytest.raises(jax.errors.JaxRuntimeError, match="RACE DETECTED"):
                jax.block_until_ready(racing(jnp.ones((16, 128))))
        finally:
            pltpu.reset_tpu_interpret_mode_state()


def test_visits_list_every_tile_once_and_every_row():
    table = tile_table(Window(8) & First(20), 70, 64, 8, 16)
    for kinds, tiles in ((table.kinds, table.by_query), (table.kinds.T, table.by_key)):
        visits = tpu_calls.visits(tiles)
        rebuilt = np.zeros_like(kinds)
        work = visits.kind != EMPTY
        rebuilt[visits.row[work], visits.column[work]] = visits.kind[work]
        np.testing.assert_array_equal(rebuilt, kinds)
        assert np.count_nonzero(work) == np.count_nonzero(kinds)
        np.testing.assert_array_equal(np.unique(visits.row), np.arange(len(kinds)))
        assert (np.diff(visits.row) >= 0).all()
        # No tile is fetched for an idle visit.
        fetched = np.flatnonzero(~work[1:]) + 1
        np.testing.assert_array_equal(visits.column[fetched], visits.column[fetched - 1])


@pytest.mark.parametrize("group", range(1, 129))
def test_tiles_fill_whole_lanes(group: int):
    folded = tpu_calls.folded_group(group)
    assert folded >= group
    for T, S in ((1, 1), (300, 77), (8192, 8192)):
        tile = tpu_calls.choose_tile(T, S, folded, widest=128, item_size=2)
        rows = tile.queries * folded
        assert rows % 128 == 0 and tile.keys % 128 == 0
        assert rows * tile.keys <= 1024 * 512


def small(dtype="float32", **options) -> ops.Call:
    q, k, v, _ = standard(1, 8, 8, 2, 1, 8, 8)
    return call_of(q, k, v, Causal(), dtype=dtype, **options)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (small("float16"), "not float16"),
        (small(dropout=Dropout(0.1, jax.random.key(0))), "dropout"),
        (small(q_index=jnp.arange(8)), "explicit indices"),
        (small(k_index=jnp.arange(8)), "explicit indices"),
        (call_of(*standard(1, 8, 8, 2, 1, 257, 8)[:3], Causal()), "257"),
        (call_of(*standard(1, 8, 8, 129, 1, 8, 8)[:3], Causal()), "129"),
    ],
)
def test_refusals_name_their_reason(call: ops.Call, reason: str):
    with tpu.interpreted():
        assert reason in tpu.cannot(call)


def test_without_a_tpu_it_refuses_and_auto_passes_it_over():
    assert tpu.cannot(small()) == "it needs a TPU, this is a cpu"
    assert "not been checked" in tpu.unwise(small())
