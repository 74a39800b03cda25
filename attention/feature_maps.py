"""Feature maps of linear attention: φ with φ(q) · φ(k) in place of exp(q · k).

Each map takes `x_..H`, the raw queries or keys of every head with the head width last, and returns
`φ(x)_..M`, elementwise over all leading axes, so queries and keys with different numbers of heads
go through the same function. Inputs of 16 bits come back as float32, since 16-bit features
underflow where float32 ones do not; float64 stays. M is the feature width, `feature_width`.

Every scalar product φ(x) · φ(y) is ≥ 0, so the normaliser of a row is 0 only when its features
or all of its keys' are 0.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np


def _at_least_float32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def elu(x: jax.Array) -> jax.Array:
    """elu(x) + 1: φ(x) = x + 1 for x > 0, exp(x) otherwise. M = H.

    Written with exp, not as elu(x) + 1: that sum is exactly 0 in float32 below about −17, and a
    row of zeros has no normaliser. This form is positive down to −87; products of two features,
    and with them whole rows, down to about −43.

    Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236.
    """
    x = _at_least_float32(x)
    # exp sees no positive input, so the branch that is not taken cannot overflow in the gradient.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def relu(x: jax.Array) -> jax.Array:
    """φ(x) = max(x, 0). M = H.

    A head whose features are all negative gives a row of zeros, whose attention output is 0.

    Kasai et al. 2021, "Finetuning Pretrained Transformers into RNNs" (T2R), arXiv 2103.13076,
    whose map is ReLU of a learned projection; here the query and key projections are that one.
    """
    return jax.nn.relu(_at_least_float32(x))


def softmax(x: jax.Array) -> jax.Array:
    """φ(x) = [softmax(x), softmax(−x)], each over the H features of a head. M = 2H.

    Hedgehog's map in its normalised form: exp(x) and exp(−x), each divided by its own sum over the
    features, which bounds the features and their products. Hedgehog learns a projection H → H
    before it; here the query and key projections are that one. To be told apart from Efficient
    Attention (arXiv 1812.01243), whose softmax of keys runs over time and so cannot be causal.

    Zhang et al. 2024, "The Hedgehog & the Porcupine", arXiv 2402.04347.
    """
    x = _at_least_float32(x)
    return jnp.concatenate([jax.nn.softmax(x, axis=-1), jax.nn.softmax(-x, axis=-1)], axis=-1)


def taylor(x: jax.Array) -> jax.Array:
    """Second-order Taylor series of exp(x · y / √H): φ(x) · φ(y) = 1 + s + s² / 2, s = x · y / √H.

    φ(x) = [1, x_i / H^¼, x_i² / √(2H), x_i x_j / √H for i < j]. M = 1 + H + H (H + 1) / 2: a pair
    i > j equals its mirror image, so it is kept once with weight 2 (in Based: H² products). The
    products φ(x) · φ(y) are ≥ ½, so every row has a normaliser.

    Arora et al. 2024, "Simple linear attention language models balance the recall-throughput
    tradeoff" (Based), arXiv 2402.18668; Keles et al. 2022, arXiv 2209.04881.
    """
    x = _at_least_float32(x)
    width = x.shape[-1]
    first, second = np.triu_indices(width)
    weight = np.where(first == second, 1 / math.sqrt(2 * width), 1 / math.sqrt(width))
    weight = jnp.asarray(weight, x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    pairs = x[..., first] * x[..., second] * weight
    return jnp.concatenate([jnp.ones_like(x[..., :1]), x / width**0.25, pairs], axis=-1)


FEATURE_MAPS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": elu,
    "relu": relu,
    "softmax": softmax,
    "taylor": taylor,
}


def feature_map(name: str) -> Callable[[jax.Array], jax.Array]:
    """The feature map of that name. Raises ValueError, with the names there are, for another."""
    if name not in FEATURE_MAPS:
        raise ValueError(f"feature_map={name!r} is unknown; choose from {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]


def feature_width(name: str, head_width: int) -> int:
    """M, the number of features the map of that name makes of a head of width H.

    H for elu and relu, 2H for softmax, 1 + H + H (H + 1) / 2 for taylor: read off the map, which
    is traced, not run. Raises ValueError for an unknown name or head_width < 1.
    """
    function = feature_map(name)
    if head_width < 1:
        raise ValueError(f"head_width={head_width}: must be at least 1")
    head = jax.ShapeDtypeStruct((head_width,), jnp.float32)
    return jax.eval_shape(function, head).shape[-1]
