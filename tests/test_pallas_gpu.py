"""The Hopper kernels against float64, in the GPU interpreter on the CPU.

The interpreter runs the arithmetic, the copies and the barriers of the kernels. That they compile
and spill nothing is checked by benchmarks/aot_gpu.py, and the card itself by benchmarks/gpu.sh.
"""

import os

# Three warpgroups wait for each other inside callbacks, each of which holds a thread of XLA's
# pool; with a thread per core, two cores would wait for ever.
os.environ.setdefault("PJRT_NPROC", "16")

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ops
from attention.masks import Causal, First, Full, Global, Window
from attention.pallas import gpu, gpu_plan
from attention.reference import Dropout
from attention.tile_table import tile_table
from tests import oracles
from tests.attending import Lying, chiefly
from tests.oracles import assert_close, standard, visible_pairs


def call_of(q, k, v, mask, *, dtype="bfloat16", **options) -> ops.Call:
    fields = {field.name: None for field in dataclasses.fields(ops.Call)}
    arrays = dict(zip(("q_BTNH", "k_BSKH", "v_BSKE"), (q, k, v), strict=True))
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    return ops.Call(**fields | {"scale": q.shape[3] ** -0.5} | arrays | {"mask": mask} | options)


class Run:
    """Outputs and all gradients of Σ out · do + Σ lse · dlse, compiled once."""

    def __init__(self, call: ops.Call, do, dlse):
        names = ["q_BTNH", "k_BSKH", "v_BSKE"] + ["sink_N"] * (call.sink_N is not None)
        self.arrays = {name: getattr(call, name) for name in names}
        do = jnp.asarray(do, call.v_BSKE.dtype)

        def program(arrays):
            def outputs(arrays):
                return gpu.run(dataclasses.replace(call, **arrays))

            (out, lse), gradient = jax.vjp(outputs, arrays)
            return out, lse, *gradient((do, jnp.asarray(dlse, lse.dtype)))

        with gpu.interpreted():
            assert gpu.cannot(call) is None
            self.program = jax.jit(program).lower(self.arrays).compile()
        self()

    def __call__(self, **replaced) -> list[bytes]:
        self.out, self.lse, gradients = self.program(self.arrays | replaced)
        self.dq, self.dk, self.dv = (gradients[x] for x in ("q_BTNH", "k_BSKH", "v_BSKE"))
        self.dsink = gradients.get("sink_N")
        return self.bits()

    def bits(self) -> list[bytes]:
        results = self.out, self.lse, self.dq, self.dk, self.dv
        return [np.asarray(x).tobytes() for x in results]

    def assert_equals(self, expected: oracles.Result):
        dtype = str(self.out.dtype)
        assert_close(self.lse, expected.lse, "float32", "lse")
        assert_close(self.out, expected.out, dtype, "out")
        # Weights, outputs and score gradients are rounded before a gradient is multiplied out.
        for name in ("dq", "dk", "dv", "dsink")[: 3 + (self.dsink is not None)]:
            actual, right = (np.asarray(getattr(x, name), np.float64) for x in (self, expected))
            size = 3 * oracles.TOLERANCE[dtype] * max(1, np.abs(right).max())
            np.testing.assert_allclose(actual, right, rtol=0, atol=size, err_msg=name)
        assert {str(x.dtype) for x in (self.out, self.dq, self.dk, self.dv)} == {dtype}


def by_reference(call: ops.Call, do, dlse) -> oracles.Result:
    """What the specification says of the same arrays, for what float64 in ``oracles`` cannot."""
    names = ["q_BTNH", "k_BSKH", "v_BSKE"] + ["sink_N"] * (call.sink_N is not None)

    def outputs(*arrays):
        return ops.IMPLEMENTATIONS["reference"].run(
            dataclasses.replace(call, **dict(zip(names, arrays, strict=True)))
        )

    (out, lse), gradient = jax.vjp(outputs, *(getattr(call, name) for name in names))
    return oracles.Result(
        out, lse, *gradient((jnp.asarray(do, out.dtype), jnp.asarray(dlse, lse.dtype)))
    )


def random(rng: np.random.Generator, B, T, S, N, K, H, E, dtype="bfloat16"):
    """q, k, v and do, rounded to the dtype but held in float64."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, E), (B, T, N, E)
    return [
        np.asarray(rng.standard_normal(shape).astype(jnp.dtype(dtype)), np.float64)
        for shape in shapes
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """One mask with the formula that it means, and the shapes to run it on."""

    mask: object
    sees: object
    T: int
    S: int
    N: int = 1
    K: int = 1
    H: int = 64
    E: int = 64
    B: int = 1
    dtype: str = "bfloat16"
    options: tuple = ()


CASES = {
    "causal, grouped, narrow heads": Case(
        Causal(), lambda i, j: j <= i, 7, 7, N=2, K=1, H=40, E=24
    ),
    "causal in three blocks": Case(Causal(), lambda i, j: j <= i, 300, 300),
    "window and another scale": Case(
        Window(30) & First(100),
        lambda i, j: (j <= i) & (i - j < 30) & (j < 100),
        129,
        129,
        options=(("scale", -0.3),),
    ),
    "streaming, wide values, more queries than keys": Case(
        Causal() & (Window(30) | First(4)),
        lambda i, j: (j <= i) & ((i - j < 30) | (j < 4)),
        260,
        96,
        E=128,
        dtype="float16",
    ),
    "full, a full and a cut tile": Case(Full(), lambda i, j: j == j, 128, 130, H=128, B=2),
}


@pytest.mark.parametrize("name", chiefly(CASES, "causal, grouped, narrow heads"))
def test_equals_float64(name: str):
    """Outputs, log-sum-exp and gradients of both; T > S leaves rows and a block without a key."""
    case = CASES[name]
    rng = np.random.default_rng(list(CASES).index(name))
    shape = case.B, case.T, case.S, case.N, case.K, case.H, case.E
    q, k, v, do = random(rng, *shape, case.dtype)
    dlse = rng.standard_normal((case.B, case.N, case.T)).astype(np.float32)
    options = dict(case.options)
    run = Run(call_of(q, k, v, case.mask, dtype=case.dtype, **options), do, dlse)
    visible = visible_pairs(case.sees, case.B, case.T, case.S)
    right = oracles.attention(q, k, v, visible, do=do, dlse=dlse, **options)
    run.assert_equals(right)
    unseen = np.isneginf(right.lse)
    assert unseen.any() == (case.T > case.S)
    assert not np.asarray(run.out).swapaxes(1, 2)[unseen].any()
    assert not np.asarray(run.dq).swapaxes(1, 2)[unseen].any()


@pytest.mark.interpreted
def test_scores_of_ten_thousand_leave_gradients_within_what_is_said():
    """Of both signs, exact in float32, and a few apart, so that many keys have a weight."""
    rng = np.random.default_rng(0)
    _, _, v, do = random(rng, 1, 128, 128, 1, 1, 64, 64, "float16")
    q, k = (rng.integers(-4, 5, (1, 128, 1, 64)) / 4 for _ in range(2))
    q[..., 9:] = 0
    q[..., 0], k[..., 0] = 100, 100
    q[:, ::2, :, 0] = -100
    dlse = rng.standard_normal((1, 1, 128)).astype(np.float32)
    visible = visible_pairs(lambda i, j: j == j, 1, 128, 128)
    right = oracles.attention(q, k, v, visible, do=do, dlse=dlse, scale=1.0)
    assert right.lse.max() > 1e4 and right.lse.min() < -9900
    Run(call_of(q, k, v, Full(), dtype="float16", scale=1.0), do, dlse).assert_equals(right)


@pytest.mark.interpreted
def test_longformer_with_sink_repetition_and_garbage():
    """Grouped heads and 96 × 160; equal inputs give equal bits; what is hidden reaches nothing."""
    T, S, mask = 96, 160, (Window(40, ahead=39) | Global(3)) & (First(150) | Causal())
    rng = np.random.default_rng(9)
    q, k, v, do = random(rng, 1, T, S, 2, 1, 64, 64)
    sink, dlse = rng.standard_normal(2).astype(np.float32), rng.standard_normal((1, 2, T))
    do[:, 0] = 0
    call = call_of(q, k, v, mask & ~Window(2), sink_N=jnp.asarray(sink))
    run = Run(call, do, dlse)

    def sees(i, j):
        seen = (abs(i - j) < 40) | (i < 3) | (j < 3)
        return seen & ((j < 150) | (j <= i)) & ~((i - j >= 0) & (i - j < 2))

    visible = visible_pairs(sees, 1, T, S)
    run.assert_equals(oracles.attention(q, k, v, visible, do=do, dlse=dlse, sink=sink))
    clean = run.bits()
    assert run() == clean
    hidden = jnp.asarray(~visible[0].any(0))[None, :, None, None]
    assert hidden.any()
    for garbage in (1e30, np.nan):
        dirty = run(
            k_BSKH=jnp.where(hidden, garbage, call.k_BSKH).astype(jnp.bfloat16),
            v_BSKE=jnp.where(hidden, -garbage, call.v_BSKE).astype(jnp.bfloat16),
        )
        assert dirty == clean
    # A value or a key that some rows do see is theirs alone, and a value is not in the lse.
    for name in ("v_BSKE", "k_BSKH"):
        dirty = {name: getattr(call, name).at[0, 90, 0, 5].set(jnp.inf)}
        run(**dirty)
        sick = np.isnan(np.asarray(run.out, np.float32)).all(-1)[0]
        np.testing.assert_array_equal(sick, visible[0, :, 90, None].repeat(2, 1))
        assert np.isnan(run.lse).any() == (name == "k_BSKH")
        run.assert_equals(by_reference(dataclasses.replace(call, **dirty), do, dlse))


@pytest.mark.interpreted
def test_what_is_not_finite_is_not_hidden_where_all_is_seen():
    """Whole tiles and no mask: batch 0 sees a key of −inf, which would get the weight 0."""
    q, k, v, do = random(np.random.default_rng(1), 2, 128, 128, 1, 1, 64, 64)
    dlse = np.random.default_rng(2).standard_normal((2, 1, 128))
    k[0, 5, 0, 3], v[1, 9, 0, 2] = -np.inf, np.inf
    call = call_of(q, k, v, Full())
    run = Run(call, do, dlse)
    assert np.isnan(np.asarray(run.out, np.float32)).all()
    np.testing.assert_array_equal(np.isnan(run.lse).all((1, 2)), [True, False])
    assert np.isfinite(run.lse[1]).all()
    assert np.abs(np.asarray(run.dk[1], np.float32)).max() > 0.1
    run.assert_equals(by_reference(call, do, dlse))


@pytest.mark.interpreted
def test_full_tiles_skip_the_mask_and_empty_ones_are_skipped():
    """All three kernels: the pairs that count are the table's, though its mask denies them."""
    q, k, v, do = random(np.random.default_rng(3), 1, 256, 256, 1, 1, 64, 64)
    dlse = np.random.default_rng(4).standard_normal((1, 1, 256))
    visible = visible_pairs(Lying(128).counted, 1, 256, 256)
    run = Run(call_of(q, k, v, Lying(128)), do, dlse)
    run.assert_equals(oracles.attention(q, k, v, visible, do=do, dlse=dlse))


def test_lists_hold_the_tables_tiles_longest_rows_first():
    table = tile_table(Window(200) | First(3), 900, 900, 128, 128)
    for tiles, kinds in ((table.by_query, table.kinds), (table.by_key, table.kinds.T)):
        rows, columns = map(np.asarray, gpu_plan.device_lists(tiles))
        rebuilt = np.zeros_like(kinds)
        for row, start, full_end, end in rows.T:
            rebuilt[row, columns[start:full_end]] = 2
            rebuilt[row, columns[full_end:end]] = 1
        np.testing.assert_array_equal(rebuilt, kinds)
        assert (np.diff(rows[3] - rows[1]) <= 0).all()
    # A kernel takes no empty array, and visits nothing of this one.
    rows, columns = gpu_plan.device_lists(tile_table(~Full(), 300, 300, 128, 128).by_query)
    assert columns.shape == (1,) and not np.asarray(rows[1:]).any()


def small(dtype="bfloat16", H=64, E=64, **options) -> ops.Call:
    q, k, v, _ = standard(1, 8, 8, 2, 1, H, E)
    return call_of(q, k, v, Causal(), dtype=dtype, **options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"H": 192}, "192"),
        ({"E": 129}, "129"),
        ({"dropout": 0.1}, "dropout is not supported: the kernels draw no random numbers"),
        ({"q_index": 8}, "positions"),
        ({"k_index": 8}, "positions"),
        ({"q_segments": 8}, "segments are not supported: the kernels load"),
        ({"k_segments": 8}, "segments are not supported: the kernels load"),
    ],
)
def test_refusals_name_their_reason(options: dict, reason: str):
    if "dropout" in options:
        options = {"dropout": Dropout(options["dropout"], jax.random.key(0))}
    for name in {"q_index", "k_index", "q_segments", "k_segments"} & set(options):
        options = {name: jnp.ones((1, options[name]), jnp.int32)}
    with gpu.interpreted():
        assert reason in gpu.cannot(small(**options))


def test_masks_whose_evaluation_would_spill_registers():
    """Comparisons are counted as the formula makes them; the limits are those of the compiler."""
    many = Causal() & (Window(64) | First(4) | Global((100, 200)))
    assert gpu_plan.comparisons(Causal()) == 1
    assert gpu_plan.comparisons(many) == 1 + 2 + 3 + 8

    def reason(mask, T, S, H, E):
        q, k, v, _ = standard(1, T, S, 1, 1, H, E)
        with gpu.interpreted():
            return gpu.cannot(call_of(q, k, v, mask))

    assert reason(many, 8, 8, 128, 128) is None
    assert reason(many, 8, 9, 64, 128) is None and reason(many, 8, 9, 128, 64) is None
    assert "14 comparisons" in reason(many, 8, 9, 65, 128)
    assert "up to 8 do where T differs from S" in reason(many, 8, 9, 65, 128)
    assert reason(Causal() & (Window(3) | First(2)), 8, 9, 128, 128) is None
    scattered = Global(tuple(range(0, 40, 2)))
    assert "up to 40 do" in reason(scattered, 8, 8, 64, 64)


def test_without_a_gpu_it_refuses_and_auto_passes_it_over():
    assert gpu.cannot(small()) == "it needs an NVIDIA Hopper GPU, and this process runs on 'cpu'"
    assert "not been checked" in gpu.unwise(small())


class _Device:
    platform, device_kind = "gpu", "NVIDIA"
    client = None

    def __init__(self, capability: str, version: str):
        self.compute_capability = capability
        self.client = type("Client", (), {"platform_version": version})


@pytest.mark.parametrize(
    ("capability", "version", "reason"),
    [
        ("9.0", "PJRT C API\ncuda 13000", None),
        ("10.0", "PJRT C API\ncuda 13000", "capability 10.0"),
        ("9.0", "PJRT C API\ncuda 12080", "12080"),
    ],
)
def test_only_hopper_with_a_sound_compiler(monkeypatch, capability, version, reason):
    monkeypatch.setattr(jax, "devices", lambda: [_Device(capability, version)])
    got = gpu.cannot(small())
    assert got is None if reason is None else reason in got
