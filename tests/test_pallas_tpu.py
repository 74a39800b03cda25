"""The TPU kernels against float64, in the TPU interpreter with race detection on two cores."""

import dataclasses

import jax
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
from tests.oracles import assert_close, chk, standard, visible_pairs


def call_of(q, k, v, mask, *, dtype="float32", **options) -> ops.Call:
    fields = {field.name: None for field in dataclasses.fields(ops.Call)}
    arrays = dict(zip(("q_BTNH", "k_BSKH", "v_BSKE"), (q, k, v), strict=True))
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    return ops.Call(**fields | {"scale": q.shape[3] ** -0.5} | arrays | {"mask": mask} | options)


class Run:
    """Outputs and all gradients of Σ out · do + Σ lse · dlse, compiled once."""

    def __init__(self, call: ops.Call, do, tile=None, dlse=None, backward=None, parameters=None):
        names = ["q_BTNH", "k_BSKH", "v_BSKE"] + ["sink_N"] * (call.sink_N is not None)
        self.arrays = {name: getattr(call, name) for name in names}
        do = jnp.asarray(do, call.v_BSKE.dtype)
        with tpu.interpreted(parameters):
            assert tpu.cannot(call) is None
            plan = tpu.plan(call, tile, backward or tile)

        def loss(arrays):
            out, lse = tpu.run_planned(dataclasses.replace(call, **arrays), plan)
            total = (out * do).astype(jnp.float32).sum()
            # Rows without a key have lse −inf, whose gradient must not count, whatever dlse is.
            if dlse is not None:
                total = total + jnp.where(lse == -jnp.inf, 0, lse * dlse).sum()
            return total, (out, lse)

        self.program = jax.jit(jax.grad(loss, has_aux=True))
        self()

    def __call__(self, **replaced):
        gradients, (self.out, self.lse) = self.program(self.arrays | replaced)
        self.dq, self.dk, self.dv = (gradients[x] for x in ("q_BTNH", "k_BSKH", "v_BSKE"))
        self.dsink = gradients.get("sink_N")
        return self.bits()

    def bits(self) -> list[bytes]:
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
    "causal, more queries than keys": (Causal(), lambda i, j: j <= i, 160, 96, Tile(64, 32)),
    "full": (Full(), lambda i, j: j >= 0 * i, 7, 7, Tile(4, 4)),
    "window": (
        Window(20),
        lambda i, j: (j <= i) & (i - j < 20),
        96,
        160,
        Tile(32, 64),
    ),
    "symmetric window and a global": (
        Window(9, ahead=8) | Global((0, 33)),
        lambda i, j: (abs(i - j) < 9) | (i == 0) | (j == 0) | (i == 33) | (j == 33),
        60,
        60,
        Tile(16, 16),
    ),
    "streaming": (
        Causal() & (Window(16) | First(3)),
        lambda i, j: (j <= i) & ((i - j < 16) | (j < 3)),
        129,
        129,
        Tile(32, 64),
    ),
    "prefix": (
        Causal() | Prefix(40),
        lambda i, j: (j <= i) | ((i < 40) & (j < 40)),
        70,
        70,
        Tile(32, 32),
    ),
    "not causal": (~Causal(), lambda i, j: j > i, 50, 50, Tile(16, 32)),
}


@pytest.mark.parametrize("name", MASKS)
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
    assert run() == run.bits()


@pytest.mark.parametrize(
    ("T", "tile", "expected"),
    [
        (1, None, (0.295126385, 0, 0, 0.043175011)),
        (7, Tile(8, 8), (0.081170138, 0.094857367, -0.224473432, 3.412138008)),
        (129, Tile(128, 64), (0.277087849, 0.142055630, -0.149609252, 4.456847175)),
        (300, Tile(128, 128), (0.228822077, 0.138171060, -0.144926871, 4.236733583)),
    ],
)
def test_lengths_that_no_tile_divides(T: int, tile: Tile | None, expected):
    q, k, v, do = standard(1, T, T, 2, 2, 16, 16)
    run = Run(call_of(q, k, v, Causal()), do, tile)
    visible = visible_pairs(lambda i, j: j <= i, 1, T, T)
    run.assert_equals(oracles.attention(q, k, v, visible, do=do))
    for name, value in zip(("out", "dq", "dk", "dv"), expected, strict=True):
        assert chk(getattr(run, name)) == pytest.approx(value, abs=1e-4), name
    first = run.bits()
    assert all(run() == first for _ in range(2))


@pytest.mark.parametrize(
    ("forward", "backward"),
    [(Tile(64, 128), Tile(128, 64)), (Tile(128, 64), Tile(64, 128))],
)
def test_tiles_of_any_shape_give_the_same(forward: Tile, backward: Tile):
    q, k, v, do = standard(1, 384, 384, 1, 1, 16, 16)
    run = Run(call_of(q, k, v, Causal()), do, forward, backward=backward)
    expected = {"out": 0.184965909, "dq": 0.050644703, "dk": -0.046148385, "dv": 1.030521938}
    for name, value in expected.items():
        assert chk(getattr(run, name)) == pytest.approx(value, abs=1e-4), name


def test_rows_without_a_key():
    """Case M1 and M2: such a row is 0, has lse −inf, and nothing passes through it."""
    q, k, v, do = standard(1, 3, 3, 1, 1, 2, 2)
    call = call_of(q, k, v, Causal(), q_segments=jnp.asarray([[1, 0, 1]]))
    run = Run(call, do, Tile(8, 8))
    right = [[0.041580662, -0.883454656], [0, 0], [0.368643480, -0.070491267]]
    assert_close(run.out[0, :, 0], right)
    assert run.lse[0, 0, 1] == -np.inf and np.isfinite(run.lse[0, 0, [0, 2]]).all()
    assert_close(run.dq[0, :, 0], [[0, 0], [0, 0], [0.399029190, 0.201964535]])
    right = [[-0.048462711, -0.120413183], [0.077469651, 0.192485459], [-0.029006939, -0.072072275]]
    assert_close(run.dk[0, :, 0], right)
    right = [[0.680412136, 0.724108537], [-0.584379415, -0.323048312], [-0.160158243, -0.088536401]]
    assert_close(run.dv[0, :, 0], right)
    for garbage in (1e6, np.inf, np.nan):
        loud = Run(call, do * np.array([1, garbage, 1])[:, None, None], Tile(8, 8))
        assert loud.bits() == run.bits()
        # … nor whatever its query holds.
        assert run(q_BTNH=call.q_BTNH.at[:, 1].set(garbage)) == loud.bits()


def test_segments_and_garbage_in_padding():
    """Packed documents do not meet, in any combination of segments; what is hidden stays so."""
    T = S = 40
    rng = np.random.default_rng(5)
    q, k, v, do = random(rng, 2, T, S, 2, 1, 8, 8)
    segments = np.zeros((2, T), int)
    segments[0, :13], segments[0, 13:31], segments[1, 7:] = 3, -(2**31), 9
    for q_segments, k_segments in ((segments, segments), (None, segments)):
        named = {"q_segments": q_segments, "k_segments": k_segments}
        named = {name: x for name, x in named.items() if x is not None}
        arrays = {name: jnp.asarray(x) for name, x in named.items()}
        call = call_of(q, k, v, Causal(), **arrays)
        run = Run(call, do, Tile(16, 16))
        visible = visible_pairs(lambda i, j: j <= i, 2, T, S, **named)
        run.assert_equals(oracles.attention(q, k, v, visible, do=do))
        hidden = jnp.asarray(segments == 0)[..., None, None]
        clean = run()
        for garbage in (1e30, np.inf, np.nan):
            dirty = run(
                k_BSKH=jnp.where(hidden, garbage, call.k_BSKH),
                v_BSKE=jnp.where(hidden, garbage, call.v_BSKE),
            )
            assert dirty == clean
            assert not np.asarray(run.dk)[segments == 0].any()


def test_a_visible_nan_reaches_the_rows_that_see_it_and_no_other():
    rng = np.random.default_rng(6)
    q, k, v, do = random(rng, 1, 40, 40, 4, 2, 8, 8)
    k[0, 17, 1, 0], v[0, 22, 0, 0] = np.nan, np.inf
    call = call_of(q, k, v, Causal() & Window(6))
    run = Run(call, do, Tile(16, 16))

    def loss(arrays):
        out, _ = ops.attend_with_lse(*arrays, call.mask, implementation="reference")
        return (out * do).sum(), out

    arrays = call.q_BTNH, call.k_BSKH, call.v_BSKE
    (dq, dk, dv), out = jax.grad(loss, has_aux=True)(arrays)
    sick = np.isnan(np.asarray(run.out)).all(-1)
    np.testing.assert_array_equal(sick, np.isnan(np.asarray(out)).any(-1))
    assert sick.sum() == 24 and sick[0, 17:23, 2:].all() and sick[0, 22:28, :2].all()
    assert_close(np.nan_to_num(run.out), np.nan_to_num(out))
    for mine, right in zip((run.dq, run.dk, run.dv), (dq, dk, dv), strict=True):
        assert_close(mine, right)


def test_heads_of_a_group_are_neighbours():
    """Case G1: query head n reads key-value head n // G."""
    q, k, v, do = standard(1, 4, 4, 6, 3, 4, 4)
    run = Run(call_of(q, k, v, Causal()), do)
    assert chk(run.out) == pytest.approx(1.502564215, abs=1e-5)
    visible = visible_pairs(lambda i, j: j <= i, 1, 4, 4)
    run.assert_equals(oracles.attention(q, k, v, visible, do=do))


def test_bfloat16_and_a_group_with_padding():
    """71 heads to one, as in Falcon, are folded as 72."""
    rng = np.random.default_rng(7)
    arrays = random(rng, 1, 20, 20, 71, 1, 8, 16)
    q, k, v, do = (np.asarray(jnp.asarray(x, "bfloat16"), np.float64) for x in arrays)
    run = Run(call_of(q, k, v, Causal(), dtype="bfloat16"), do)
    assert run.out.dtype == run.dq.dtype == jnp.bfloat16 and run.lse.dtype == jnp.float32
    visible = visible_pairs(lambda i, j: j <= i, 1, 20, 20)
    right = oracles.attention(q, k, v, visible, do=do)
    assert_close(run.lse, right.lse)
    for name in ("out", "dq", "dk", "dv"):
        assert_close(getattr(run, name), getattr(right, name), "bfloat16", name)


@pytest.mark.parametrize("S", [4095, 4096])
def test_sums_over_many_keys_do_not_stall(S: int):
    """Case N1: the mean of 2048 ones and the rest zeros; a bfloat16 sum would stop at 256."""
    q, k = np.zeros((1, 1, 1, 8)), np.zeros((1, S, 1, 8))
    v = (np.arange(S) < 2048).astype(float).reshape(1, S, 1, 1)
    call = call_of(q, k, v, Full(), dtype="bfloat16")
    with tpu.interpreted():
        out, _ = tpu.run(call)
    assert float(out[0, 0, 0, 0]) == pytest.approx(2048 / S, abs=2e-3)


def test_empty_tiles_are_not_visited():
    """What the interpreter runs is the table's tiles, and one visit for each idle row."""
    points = []
    parameters = pltpu.InterpretParams(grid_point_recorder=lambda at, core: points.append(at))
    mask, T, tile = Window(8) & First(20), 64, Tile(8, 8)
    q, k, v, do = random(np.random.default_rng(8), 1, T, T, 2, 2, 8, 8)
    Run(call_of(q, k, v, mask), do, tile, parameters=parameters)
    table = tile_table(mask, T, T, 8, 8)
    working = np.count_nonzero(table.kinds)
    idle = [np.count_nonzero(~table.kinds.any(axis)) for axis in (1, 0)]
    assert working < table.kinds.size / 5 and all(idle)
    K, kernels = 2, 3
    assert len(points) == K * (kernels * working + 2 * idle[0] + idle[1])


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
        tile = tpu_calls.choose_tile(T, S, folded, 128, 2, backward=False)
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
