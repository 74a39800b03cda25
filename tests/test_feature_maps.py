"""Feature maps against their formulas in float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.feature_maps import FEATURE_MAPS, feature_map, feature_width


def draw(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape) * 2


def numpy_softmax(x):
    e = np.exp(x)
    return e / e.sum(-1, keepdims=True)


FORMULAS = {
    "elu": lambda x: np.where(x > 0, x + 1, np.exp(x)),
    "relu": lambda x: np.maximum(x, 0),
    "softmax": lambda x: np.concatenate([numpy_softmax(x), numpy_softmax(-x)], -1),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(2, 3, 6, 5), (2, 3, 2, 5), (7,)])
def test_formula(name, shape):
    x = draw(*shape)
    np.testing.assert_allclose(
        FEATURE_MAPS[name](jnp.float32(x)), FORMULAS[name](x), rtol=2e-6, atol=1e-7
    )


@pytest.mark.parametrize("width", [1, 2, 7])
def test_taylor_products_are_the_second_order_series(width):
    x, y = draw(3, 4, width), draw(4, 3, width).reshape(3, 4, width) - 1
    taylor = FEATURE_MAPS["taylor"]
    with jax.enable_x64(True):
        product = np.asarray(jnp.sum(taylor(jnp.asarray(x)) * taylor(jnp.asarray(y)), -1))
    dot = np.sum(x * y, -1)
    want = 1 + dot / math.sqrt(width) + dot**2 / (2 * width)
    np.testing.assert_allclose(product, want, rtol=1e-12)
    assert product.min() >= 0.5 - 1e-12


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_no_product_is_negative_and_width_is_as_stated(name):
    x = FEATURE_MAPS[name](jnp.float32(draw(50, 6)))
    assert x.shape == (50, feature_width(name, 6))
    assert np.min(np.asarray(x) @ np.asarray(x).T) >= 0


def test_widths():
    widths = {name: feature_width(name, 16) for name in FEATURE_MAPS}
    assert widths == {"elu": 16, "relu": 16, "softmax": 32, "taylor": 153}


@pytest.mark.parametrize("x", [-17.5, -20.0, -43.0])
def test_elu_never_becomes_zero_at_moderately_negative_inputs(x):
    value, slope = jax.value_and_grad(FEATURE_MAPS["elu"])(jnp.float32(x))
    np.testing.assert_allclose([value, slope], [math.exp(x)] * 2, rtol=1e-5)
    assert FEATURE_MAPS["elu"](jnp.float16(x)) > 0


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_gradient_is_finite_and_right_far_out(name):
    x = jnp.float32([-300.0, -20.0, -0.5, 0.7, 20.0, 300.0])
    weight = jnp.float32(draw(feature_width(name, 6)))
    loss = lambda x: jnp.sum(FEATURE_MAPS[name](x) * weight)  # noqa: E731
    got = jax.grad(loss)(x)
    with jax.enable_x64(True):
        x64, step = np.float64(x), 1e-6
        want = [(loss(x64 + step * e) - loss(x64 - step * e)) / (2 * step) for e in np.eye(6)]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "given, computed", [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")]
)
def test_dtypes(given, computed):
    with jax.enable_x64(True):
        for function in FEATURE_MAPS.values():
            assert function(jnp.ones((2, 3), given)).dtype == computed


def test_unknown_name_lists_the_names():
    for call in (feature_map, lambda name: feature_width(name, 4)):
        with pytest.raises(ValueError, match=r"'gelu'.*elu, relu, softmax, taylor"):
            call("gelu")
    with pytest.raises(ValueError, match="head_width=0"):
        feature_width("elu", 0)
    assert feature_map("elu") is FEATURE_MAPS["elu"]
