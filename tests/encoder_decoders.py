"""A small encoder-decoder with random parameters, and what tests ask of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention.multi_head import MultiHead, MultiHeadCross, MultiHeadFull, MultiHeadWindow
from models.encoder_decoder import EncoderDecoder, EncoderDecoderOptions
from models.pure import merge

B, T, S, D, N, H, F, V = 3, 7, 5, 12, 4, 6, 10, 17
WINDOW = 3
SYMBOLS = 12  # tokens are drawn below it; ids from it on stand in padding alone
LENGTHS = (5, 3, 1)  # of the sources

SHAPE = {
    "vocab_size": V, "num_layers": 2, "d_model": D, "num_heads": N, "head_width": H,
    "mlp": "swiglu", "d_ff": F, "pattern": ("causal", "window"),
    "layers": (MultiHead(num_kv_heads=2), MultiHeadWindow(window=WINDOW)),
}  # fmt: skip
OPTIONS = EncoderDecoderOptions(
    **SHAPE,
    encoder_num_layers=2,
    encoder_pattern=("full",),
    encoder_layers=(MultiHeadFull(num_kv_heads=1),),
    cross=MultiHeadCross(num_kv_heads=2),
)
HEADS = ("layer0/head", "layer0/cross/head", "layer1/head", "layer1/cross/head")


def random(*shape):
    return np.random.default_rng().standard_normal(shape).astype(np.float32)


def ids(*shape, low=0, high=SYMBOLS):
    return np.random.default_rng().integers(low, high, shape).astype(np.int32)


def shapes(make):
    """Structure and shapes of a module by path; nothing is computed."""
    graph, state = nnx.split(nnx.eval_shape(make))
    flat = nnx.to_flat_state(state)
    return graph, {"/".join(map(str, path)): leaf.shape for path, leaf in flat}


def graph_of(options):
    return shapes(lambda: EncoderDecoder(options, nnx.Rngs(0)))[0]


def random_parameters(shapes_by_path):
    """No parameter at 0, and gains about 1."""
    rng = np.random.default_rng(1)
    return {
        path: jnp.asarray(0.4 * rng.standard_normal(shape) + path.endswith("gain_D"), "float32")
        for path, shape in shapes_by_path.items()
    }


GRAPH, SHAPES = shapes(lambda: EncoderDecoder(OPTIONS, nnx.Rngs(0)))
PARAMS = random_parameters(SHAPES)


def model():
    return merge(GRAPH, PARAMS)


def padded(side="right", lengths=LENGTHS):
    columns, lengths = np.arange(S)[None], np.asarray(lengths)[:, None]
    return (columns < lengths if side == "right" else columns >= S - lengths).astype(np.int32)


def places(start, stop, batch=B):
    return np.tile(np.arange(start, stop, dtype=np.int32), (batch, 1))


def logits(params, tokens, source, source_segments, segments=None):
    model = merge(GRAPH, params)
    return model(tokens, segments_BT=segments, memory=model.encode(source, source_segments))[0]


forward = jax.jit(logits)


encode = jax.jit(lambda source, segments: model().encode(source, segments))


@jax.jit
def backward(params, tokens, source, source_segments, do):
    out, pull = jax.vjp(lambda p: logits(p, tokens, source, source_segments), params)
    return out, pull(do)[0]
