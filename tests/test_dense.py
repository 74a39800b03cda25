"""Parts that every token passes alone, whose backward passes are written by hand for speed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from attention.context import project, project_together
from attention.norm import RMSNorm
from models import pure
from models.mlp import gelu


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def test_gelu_is_that_of_jax():
    x = jnp.linspace(-8, 8, 1001)
    np.testing.assert_allclose(gelu(x), jax.nn.gelu(x), rtol=2e-6, atol=2e-6)
    slopes = jax.vmap(jax.grad(gelu))(x), jax.vmap(jax.grad(jax.nn.gelu))(x)
    # 1 + tanh cancels where x is below −4.
    np.testing.assert_allclose(*slopes, rtol=2e-6, atol=5e-6)
    assert gelu(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def plain_norm(x, gain_D):
    return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * gain_D[None, None]


def test_norm_and_its_gradients_are_those_of_the_formula():
    x, dy, gain_D = draw(3, 5, 24), draw(3, 5, 24, seed=1), 1 + 0.1 * draw(24, seed=2)
    graph, _ = pure.split(RMSNorm(24))

    def ours(x, gain_D):
        return pure.merge(graph, {"gain_D": gain_D})(x)

    for ours_is, right in zip(
        jax.tree.leaves(gradients(ours, dy, x, gain_D)),
        jax.tree.leaves(gradients(plain_norm, dy, x, gain_D)),
        strict=True,
    ):
        np.testing.assert_allclose(ours_is, right, rtol=1e-5, atol=1e-6)


def gradients(function, dy, *arguments):
    y, backward = jax.vjp(function, *arguments)
    return y, backward(dy)


def test_norm_keeps_the_dtype_and_sums_in_float32():
    x = (1 + 0.01 * draw(2, 256)).astype(jnp.bfloat16)
    y = RMSNorm(256)(x)
    assert y.dtype == jnp.bfloat16
    right = plain_norm(x.astype(jnp.float32)[None], jnp.ones(256))[0]
    np.testing.assert_array_equal(y, right.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_product_and_its_gradients_are_those_of_einsum(dtype):
    x, w, dy = (
        x.astype(dtype) for x in (draw(2, 3, 4, 5), draw(4, 5, 6, seed=1), draw(2, 3, 6, seed=2))
    )

    def plain(x, w):
        return jnp.einsum("btnh,nhd->btd", x, w)

    tolerance = 1e-6 if dtype == jnp.float32 else 0.05
    for ours_is, right in zip(
        jax.tree.leaves(gradients(lambda x, w: project(x, w, num_in=2), dy, x, w)),
        jax.tree.leaves(gradients(plain, dy, x, w)),
        strict=True,
    ):
        assert ours_is.dtype == right.dtype
        np.testing.assert_allclose(
            ours_is.astype(jnp.float32), right.astype(jnp.float32), rtol=tolerance, atol=tolerance
        )


def test_products_together_are_the_products():
    x, ws = draw(2, 3, 8), (draw(8, 4, 2, seed=1), draw(8, 2, 2, seed=2), draw(8, 5, seed=3))
    for together, w in zip(project_together(x, ws), ws, strict=True):
        assert together.shape == (2, 3, *w.shape[1:])
        np.testing.assert_allclose(together, project(x, w), rtol=1e-6, atol=1e-6)
    check_grads(lambda x, *ws: project_together(x, ws), (x, *ws), order=1, modes=["rev"], rtol=0.02)
