"""Rotary embedding against float64 rotations of complex numbers. Case letters: R1, R4, X2."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.masks import Causal, Full
from attention.ops import attend_with_lse
from attention.rope import Rope
from tests.oracles import chk, standard

LAYOUTS = ["half_split", "interleaved"]
_rotate = jax.jit(lambda rope, x, positions: rope(x, positions), static_argnums=0)
_attend = jax.jit(attend_with_lse, static_argnames="mask")


def rotate(rope: Rope, x_BTNH, positions) -> np.ndarray:
    """The rotation under test, from NumPy to NumPy; float64 is cast to float32."""
    x_BTNH = np.asarray(x_BTNH)
    x_BTNH = x_BTNH.astype(np.float32) if x_BTNH.dtype == np.float64 else x_BTNH
    return np.asarray(_rotate(rope, x_BTNH, np.asarray(positions, np.int32)))


def attended(q, k, v, mask, **options) -> tuple[np.ndarray, np.ndarray]:
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    return tuple(map(np.asarray, _attend(q, k, v, mask=mask, **options)))


both_layouts = pytest.mark.parametrize("layout", LAYOUTS)


def rotated(x_BTNH, positions, width: int, layout: str, base: float = 1e4) -> np.ndarray:
    """Each pair as a complex number, turned by exp(i · p · base^(−2n/width)), in float64."""
    x = np.array(x_BTNH, np.float64)
    first = np.arange(width // 2) if layout == "half_split" else np.arange(0, width, 2)
    second = first + (width // 2 if layout == "half_split" else 1)
    positions = np.broadcast_to(np.asarray(positions, np.float64), x.shape[:2])
    turn = np.exp(1j * positions[..., None, None] * base ** (-np.arange(0, width, 2) / width))
    z = (x[..., first] + 1j * x[..., second]) * turn
    x[..., first], x[..., second] = z.real, z.imag
    return x


def single(values, position, **options) -> np.ndarray:
    """One head of one token, rotated."""
    x = np.reshape(np.asarray(values, np.float32), (1, 1, 1, -1))
    return rotate(Rope(**({"width": x.shape[-1]} | options)), x, [position])[0, 0, 0]


@pytest.mark.parametrize(
    ("layout", "position", "expected"),
    [
        ("half_split", 1, (-1.984110649, 1.959900667, 2.462377902, 4.019799668)),
        ("interleaved", 1, (-1.142639664, 1.922075597, 2.959850668, 4.029799502)),
        ("half_split", 3, (-1.413352521, 1.879118067, -2.828857482, 4.058191135)),
        ("interleaved", 3, (-1.272232513, -1.838864985, 2.878668100, 4.088186636)),
    ],
)
def test_published_numbers(layout, position, expected):
    """R4."""
    got = single([1, 2, 3, 4], position, layout=layout)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


def test_half_split_is_the_default():
    np.testing.assert_array_equal(
        single([1, 2, 3, 4], 3), single([1, 2, 3, 4], 3, layout="half_split")
    )


@both_layouts
@pytest.mark.parametrize(("width", "base"), [(10, 1e4), (6, 500.0), (2, 1e4)])
def test_against_float64(layout, width, base):
    """Any width up to that of the head; the channels beyond pass unchanged."""
    x = np.random.default_rng().standard_normal((2, 7, 3, 10))
    positions = np.array([[0, 1, 2, 3, 4, 5, 6], [9, 8, 30, 31, 32, 2, 100]])
    got = rotate(Rope(width, base, layout), x, positions)
    np.testing.assert_allclose(got, rotated(x, positions, width, layout, base), atol=3e-5)
    np.testing.assert_array_equal(got[..., width:], x[..., width:].astype(np.float32))


@both_layouts
def test_positions_of_all_rows_or_of_each(layout):
    x, rope = np.random.default_rng().standard_normal((3, 5, 2, 8)), Rope(8, layout=layout)
    positions = np.array([4, 0, 7, 7, 2])
    shared = rotate(rope, x, positions)
    np.testing.assert_array_equal(rotate(rope, x, positions[None]), shared)
    np.testing.assert_array_equal(rotate(rope, x, np.tile(positions, (3, 1))), shared)


@both_layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_position_zero_is_the_identity(layout, dtype):
    x = np.random.default_rng().standard_normal((2, 3, 2, 8)).astype(jnp.dtype(dtype))
    got = rotate(Rope(8, layout=layout), x, np.zeros(3))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, x)


@both_layouts
def test_the_norm_is_kept(layout):
    x = np.random.default_rng().standard_normal((2, 5, 2, 8)).astype(np.float32)
    got = rotate(Rope(6, layout=layout), x, [0, 3, 17, 400, 2000])
    norms = np.linalg.norm(np.asarray(got, np.float64), axis=-1)
    np.testing.assert_allclose(norms, np.linalg.norm(x, axis=-1), rtol=1e-6)


def test_frequencies_come_from_the_rotary_width():
    """X2: width 4 turns by 1 and 0.01 a step, whatever the width of the head."""
    got = single([1, 1, 0, 0, *range(6)], 1, width=4)
    np.testing.assert_allclose(np.arctan2(got[2:4], got[:2]), [1, 0.01], rtol=1e-5)
    ten = single([1, 1, 1, 1, 1, 0, 0, 0, 0, 0], 1)
    np.testing.assert_allclose(
        np.arctan2(ten[5:], ten[:5]), 1e4 ** (-np.arange(0, 10, 2) / 10), rtol=1e-5
    )
    assert np.arctan2(ten[6], ten[1]) == pytest.approx(0.1584893, rel=1e-5)


def test_angles_are_float32_for_bfloat16_inputs():
    """bfloat16 holds 8 bits: a position of 30,001 would become 29,952, half a turn off."""
    x = np.random.default_rng().standard_normal((1, 4, 1, 64)).astype(jnp.bfloat16)
    positions = np.array([30_000, 30_001, 30_063, 131_071])
    got = rotate(Rope(64), x, positions)
    assert got.dtype == jnp.bfloat16
    # Rounding of the result to 8 bits, and of the angle (at most 131,071) to 24.
    tolerance = 2**-8 * float(np.abs(x).max()) * np.sqrt(2) + 131_071 * 2**-22
    np.testing.assert_allclose(
        np.asarray(got, np.float64), rotated(x, positions, 64, "half_split"), atol=tolerance
    )


@pytest.mark.parametrize("position", [1000, 30_000])
def test_angles_are_as_good_as_float32_allows(position):
    """Frequency and angle are each rounded once, so errors stay under 2^−23 of the angle."""
    x = np.random.default_rng().uniform(-1, 1, (1, 1, 1, 64)).astype(np.float32)
    got = rotate(Rope(64), x, [position])
    expected = rotated(x, [position], 64, "half_split")
    angle = position * 1e4 ** (-np.arange(0, 64, 2) / 64)
    bound = np.tile(angle, 2) * 2**-23 * np.sqrt(2) + 1e-6
    error = np.abs(np.asarray(got, np.float64) - expected)[0, 0, 0]
    assert (error <= bound).all(), (error / bound).max()


def test_full_forward_and_one_token_at_a_time():
    """R1: the query's own position, not 0 and not one more."""
    q, k, v, _ = standard(1, 6, 6, 2, 2, 8, 4)
    turn, positions = functools.partial(rotate, Rope(8)), np.arange(6)
    full, _ = attended(turn(q, positions), turn(k, positions), v, Causal())
    assert chk(full) == pytest.approx(-0.164056284, abs=1e-5)
    for offset in (0, 1000):
        keys = turn(k, positions + offset)
        for t in range(6):
            query = turn(q[:, t : t + 1], [t + offset])
            row, _ = attended(query, keys, v, Causal(), q_index=np.array([t]))
            np.testing.assert_allclose(row[:, 0], full[:, t], atol=1e-5)
    stuck, _ = attended(turn(q, positions * 0), turn(k, positions), v, Causal())
    ahead, _ = attended(turn(q, positions + 1), turn(k, positions), v, Causal())
    assert chk(stuck) == pytest.approx(-0.186529366, abs=1e-5)
    assert chk(ahead) == pytest.approx(0.120101475, abs=1e-5)


@both_layouts
@pytest.mark.parametrize("width", [8, 4])
def test_scores_depend_on_the_distance_alone(layout, width, record_property):
    """Claim 12. With a single key the log-sum-exp is the score; values are not rotated."""
    rng = np.random.default_rng()
    q, k = (np.tile(rng.standard_normal((1, 1, 2, 8)), (5, 1, 1, 1)) for _ in range(2))
    v = rng.standard_normal((5, 1, 2, 3)).astype(np.float32)
    rope = Rope(width, layout=layout)
    # Four times a distance of 3, and once of 4.
    q = rotate(rope, q, [[3], [10], [103], [1003], [4]])
    k = rotate(rope, k, [[0], [7], [100], [1000], [0]])
    out, scores_BN1 = attended(q, k, v, Full())
    differing = np.abs(scores_BN1[:4] - scores_BN1[0]).max()
    record_property("figures", f"equal distances differ by {differing:.0e} at most")
    np.testing.assert_array_equal(out, v)
    np.testing.assert_allclose(scores_BN1[:4], scores_BN1[[0, 0, 0, 0]], atol=1e-3)
    assert np.abs(scores_BN1[4] - scores_BN1[0]).max() > 1e-2


def test_a_mix_of_layouts_is_not_shift_invariant():
    """R4: so the test above would see one."""
    x = [1, 2, 3, 4]
    scores = [
        single(x, n + 3, layout="half_split") @ single(x, n, layout="interleaved") for n in (0, 5)
    ]
    assert abs(scores[0] - scores[1]) > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 3}, "rope_width must be even and at least 2, got 3"),
        ({"width": 0}, "rope_width must be even and at least 2, got 0"),
        ({"width": -2}, "rope_width must be even and at least 2, got -2"),
        ({"width": 4, "base": 1.0}, r"rope_base must be greater than 1, got 1\.0"),
        ({"width": 4, "base": float("nan")}, "rope_base must be greater than 1, got nan"),
        (
            {"width": 4, "layout": "neox"},
            r"rope_layout must be one of \['half_split', 'interleaved'\], got 'neox'",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Rope(**options)


def test_a_width_beyond_the_head():
    with pytest.raises(ValueError, match="rope_width 8 is wider than the head, 6 channels"):
        Rope(8)(jnp.zeros((1, 2, 1, 6)), jnp.arange(2))


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 3), (2, 2)])
def test_positions_of_another_shape(shape):
    with pytest.raises(ValueError, match="positions"):
        Rope(4)(jnp.zeros((2, 3, 1, 4)), jnp.zeros(shape, int))
