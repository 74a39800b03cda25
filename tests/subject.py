"""A variant under test: a layer, and a decoder of two of them, as pure functions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention.probe import Probe
from models.decoder import Decoder, DecoderOptions
from models.pure import merge, split

B, T, D, N, H, V = 3, 13, 20, 4, 6, 17


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One entry of the list: a variant with its options, and what is special about it.

    Attributes:
      name: shown in the name of the test.
      options: as in ``attention.VARIANTS``.
      model: changes to the options of the decoder, such as ``{"position": "none"}``.
      window: prefill is tried in chunks of this size and of one more and less.
      slots: length → positions for which a row of the cache keeps ``cache_bytes_per_token``.
      constant_bytes: what a row of a float32 cache holds besides, whatever the length.
      wide_bytes: the same, of what is float32 whatever the dtype of the cache.
      arguments: batch → further arguments of the layer, such as ``memory``; float32 arrays in
        them take the dtype of the activations.
      exempt: name of a check → why it does not apply.
    """

    name: str
    options: Any
    model: Mapping = dataclasses.field(default_factory=dict)
    window: int = 2
    slots: Callable[[int], int] = lambda length: length
    constant_bytes: int = 0
    wide_bytes: int = 0
    arguments: Callable[[int], Mapping] = lambda batch: {}
    exempt: Mapping[str, str] = dataclasses.field(default_factory=dict)


def random(*shape: int, dtype="float32") -> np.ndarray:
    return np.random.default_rng().standard_normal(shape).astype(jnp.dtype(dtype))


def positions_of(segments) -> np.ndarray:
    """How many tokens of its document stand before each token; 0 for padding."""
    segments = np.asarray(segments)
    positions = np.zeros(segments.shape, np.int32)
    for b, t in np.ndindex(segments.shape):
        if segments[b, t] != 0:
            positions[b, t] = (segments[b, :t] == segments[b, t]).sum()
    return positions


def padded(lengths, width: int, side: str) -> np.ndarray:
    """Segments of rows with that many tokens, padded to the width on the side."""
    columns = np.arange(width)[None]
    lengths = np.asarray(lengths)[:, None]
    return (columns < lengths if side == "right" else columns >= width - lengths).astype(np.int32)


class Subject:
    """A layer, and a decoder of two of them, as pure functions that compile once a shape."""

    def __init__(self, variant: Variant, dtype: str = "float32"):
        self.variant = variant
        self.options = DecoderOptions(
            vocab_size=V, num_layers=2, d_model=D, num_heads=N, head_width=H, mlp="none",
            pattern=(variant.name,), layers=(variant.options,), dtype=dtype, **variant.model,
        )  # fmt: skip
        layer = variant.options.build(self.options.context(), nnx.Rngs(0))
        self.graph, self.params = randomised(layer, seed=1)
        self.arguments = variant.arguments(B)
        self.compiled = jax.jit(self.call)
        self.gradient = jax.jit(functools.partial(self.evaluate, forward=self.forward))
        self.mapped = jax.jit(functools.partial(self.evaluate, forward=self.forward_by_rows))
        self.decode = jax.jit(self.call_decoder)
        self.decoder_gradient = jax.jit(self.evaluate_decoder)

    @property
    def layer(self):
        return merge(self.graph, self.params)

    def call(self, params, x, positions, segments, cache, arguments, **options):
        layer = merge(self.graph, params)
        arguments = jax.tree.map(
            lambda a: jnp.asarray(a, x.dtype if a.dtype == jnp.float32 else a.dtype), arguments
        )
        return layer(x, positions, segments_BT=segments, cache=cache, **arguments, **options)

    def plain(self, x, row=0, call=None, **options):
        """One row in the training form, without segments."""
        arguments = jax.tree.map(lambda a: a[row : row + 1], self.arguments)
        positions = np.arange(x.shape[1], dtype=np.int32)[None]
        call = call or self.compiled
        return np.asarray(call(self.params, x, positions, None, None, arguments, **options)[0])

    def forward(self, params, x, positions, segments, arguments):
        return self.call(params, x, positions, segments, None, arguments)[0]

    def forward_by_rows(self, params, *batch):
        def one(*row):
            row = jax.tree.map(lambda a: a[None], row)
            return self.forward(params, *row)[0]

        return jax.checkpoint(jax.vmap(one))(*batch)

    def evaluate(self, params, x, positions, segments, do, *, forward):
        """Output, and gradients of Σ y · do in x and in the parameters."""
        y, backward = jax.vjp(
            lambda params, x: forward(params, x, positions, segments, self.arguments), params, x
        )
        dparams, dx = backward(do)
        return {"y": y, "dx": dx, "dparams": dparams}

    def run(self, x, segments, do=None, positions=None, params=None, how=None):
        """``evaluate`` on a whole batch."""
        segments = np.asarray(segments, np.int32)
        positions = positions_of(segments) if positions is None else positions
        do = np.zeros_like(x) if do is None else do
        params = self.params if params is None else params
        how = self.gradient if how is None else how
        return jax.tree.map(np.asarray, how(params, x, positions, segments, do))

    def chunks(self, x, sizes, cache, segments=None):
        """Output of the whole batch through the cache in chunks of these sizes."""
        segments = ones(*x.shape[:2]) if segments is None else segments
        positions, out, start = positions_of(segments), [], 0
        for size in chunks(sizes, x.shape[1]):
            part = slice(start, start + size)
            y, cache = self.compiled(
                self.params, x[:, part], positions[:, part], segments[:, part], cache,
                self.arguments,
            )  # fmt: skip
            out.append(np.asarray(y))
            start += size
        return np.concatenate(out, axis=1), cache

    # The same twice in a decoder.

    @functools.cached_property
    def decoder(self):
        return randomised(Decoder(self.options, nnx.Rngs(0)), seed=2)

    def call_decoder(self, params, tokens, positions, segments=None, caches=None):
        """Logits and the heads of every layer, and the caches."""
        probe = Probe(read=("layer0/head", "layer1/head"))
        model = merge(self.decoder[0], params)
        logits, caches = model(tokens, positions, segments_BT=segments, caches=caches, probe=probe)
        return {"logits": logits, **probe.values}, caches

    def evaluate_decoder(self, params, tokens, positions, segments, do):
        """The same, and the gradient of Σ logits · do in the embeddings."""

        def forward(w_embed_VD):
            return self.call_decoder(
                params | {"w_embed_VD": w_embed_VD}, tokens, positions, segments
            )[0]

        out, backward = jax.vjp(forward, params["w_embed_VD"])
        zeros = jax.tree.map(jnp.zeros_like, out)
        return out, backward(zeros | {"logits": do})[0]

    def run_decoder(self, tokens, segments=None, do=None):
        segments = ones(*tokens.shape) if segments is None else segments
        do = np.zeros((*tokens.shape, V), np.float32) if do is None else do
        out = self.decoder_gradient(self.decoder[1], tokens, positions_of(segments), segments, do)
        return jax.tree.map(np.asarray, out)


def randomised(module: nnx.Module, seed: int):
    """Graph and parameters; none keeps the 0 or 1 that it starts from, or it were not tested."""
    graph, params = split(module)
    rng = np.random.default_rng(seed)
    return graph, {
        name: jnp.asarray(p + 0.2 * rng.standard_normal(p.shape).astype(np.float32))
        for name, p in params.items()
    }


@functools.lru_cache(maxsize=4)
def subject(variant: Variant, dtype: str = "float32") -> Subject:
    return Subject(variant, dtype)


def ones(batch: int = B, length: int = T) -> np.ndarray:
    return np.ones((batch, length), np.int32)


def chunks(sizes: list[int], length: int) -> list[int]:
    """These sizes, the last one again and again, up to the length."""
    taken = []
    while sum(taken) < length:
        taken.append(min(sizes[min(len(taken), len(sizes) - 1)], length - sum(taken)))
    return taken
