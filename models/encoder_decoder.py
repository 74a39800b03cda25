"""Encoder and decoder: one sequence in, the logits of another one out (Vaswani et al. 2017)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from attention.context import Context
from attention.memory import Memory, MemoryCache
from attention.multi_head import MultiHeadCross
from attention.norm import RMSNorm
from attention.probe import Probe
from models.block import Block
from models.decoder import Decoder, DecoderOptions, check_ids, reads_memory, run_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoderOptions(DecoderOptions):
    """Shape of an encoder-decoder: what ``DecoderOptions`` has is the decoder's, or both share it.

    Attributes:
      encoder_num_layers: blocks of the encoder.
      encoder_pattern: names of the attention of each of them, cycled over the depth.
      encoder_layers: their options, one for each name.
      cross: options of the cross-attention, which all blocks of the decoder have.
    """

    encoder_num_layers: int
    encoder_pattern: tuple
    encoder_layers: tuple
    cross: MultiHeadCross

    def __post_init__(self):
        super().__post_init__()
        if self.encoder_num_layers < 1:
            raise ValueError(
                f"model.encoder_num_layers must be at least 1, got {self.encoder_num_layers}"
            )
        self.check_layers("encoder_pattern", self.encoder_pattern, self.encoder_layers)
        if not reads_memory(self.cross):
            raise ValueError(f"attention.cross must be cross-attention, got {self.cross}")
        self.check_layers("cross", ("cross",), (self.cross,))
        for option, pattern, layers in (
            ("pattern", self.pattern, self.layers),
            ("encoder_pattern", self.encoder_pattern, self.encoder_layers),
        ):
            for name, layer in zip(pattern, layers, strict=True):
                if reads_memory(layer):
                    raise ValueError(
                        f"model.{option} names {name!r}, which is cross-attention; every block of "
                        "the decoder has one besides its pattern"
                    )

    def every_layer(self) -> tuple:
        """Options of all kinds of layers that the model has."""
        return (*self.layers, *self.encoder_layers, self.cross)

    def encoder_layer(self, index: int):
        """Attention options of block ``index`` of the encoder."""
        return self.encoder_layers[index % len(self.encoder_layers)]

    def build(self, rngs: nnx.Rngs) -> EncoderDecoder:
        """The model."""
        return EncoderDecoder(self, rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CrossBlockCache:
    """What one block of the decoder remembers: of its own sequence, and of the memory."""

    own: Any
    memory: MemoryCache

    @property
    def limit(self) -> int | None:
        """See ``SlotCache.limit``."""
        return self.own.limit

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.own.nbytes + self.memory.nbytes

    def reset(self) -> CrossBlockCache:
        """The same cache, empty."""
        return CrossBlockCache(self.own.reset(), self.memory.reset())


class CrossBlock(Block):
    """x ← x + attention(norm(x)); x ← x + cross(norm(x), memory); x ← x + mlp(norm(x))."""

    def __init__(
        self, options, cross: MultiHeadCross, context: Context, mlp: str, d_ff: int, rngs: nnx.Rngs
    ):
        super().__init__(options, context, mlp, d_ff, rngs)
        self.cross_norm = RMSNorm(context.d_model)
        self.cross = cross.build(context, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        cache: CrossBlockCache | None = None,
        memory: Memory | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, CrossBlockCache | None]:
        """The residual stream after this layer, and the layer's cache."""
        own, remembered = (None, None) if cache is None else (cache.own, cache.memory)
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        y_BTD, own = self.attention(
            self.attention_norm(x_BTD),
            positions_BT,
            segments_BT=segments_BT,
            cache=own,
            probe=probe,
            dropout_key=keys[0],
        )
        x_BTD = x_BTD + y_BTD
        y_BTD, remembered = self.cross(
            self.cross_norm(x_BTD),
            positions_BT,
            segments_BT=segments_BT,
            cache=remembered,
            memory=memory,
            probe=None if probe is None else probe.at("cross"),
            dropout_key=keys[1],
        )
        x_BTD = self.feed_forward(x_BTD + y_BTD)
        return x_BTD, None if cache is None else CrossBlockCache(own, remembered)


class EncoderDecoder(Decoder):
    """logits = norm(blocks(embedding[tokens], memory)) W_head, memory = norm(encoder(source)).

    Source and tokens share the embedding (Vaswani et al. 2017, arXiv 1706.03762, section 3.4), the
    learned positions if there are any, and the rotation: cross-attention rotates a query by its
    place in the tokens and a key by its place in the source. The probe knows the encoder's
    activations as ``encoder0/pattern``, the decoder's as ``layer0/pattern`` and
    ``layer0/cross/pattern``; likewise ``head``.
    """

    reads_source: ClassVar[bool] = True

    def __init__(self, options: EncoderDecoderOptions, rngs: nnx.Rngs):
        super().__init__(options, rngs)
        self.encoder_blocks = nnx.List(
            Block(options.encoder_layer(i), options.context(), options.mlp, options.d_ff, rngs)
            for i in range(options.encoder_num_layers)
        )
        self.encoder_norm = RMSNorm(options.d_model)

    def encode(
        self,
        source_BS: jax.Array,
        segments_BS: jax.Array | None = None,
        *,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> Memory:
        """What the decoder reads of a source.

        Args:
          source_BS: token ids, one document a row, padded on either side.
          segments_BS: 0 for padding, else a token; default all tokens.
          probe: see the class.
          dropout_key: may be the one that the decoder is given; they draw different masks.

        Raises:
          ValueError: segments of another shape than the source, or ids out of range.
        """
        if segments_BS is None:
            segments_BS = jnp.ones(source_BS.shape, jnp.int32)
        if len(source_BS.shape) != 2 or segments_BS.shape != source_BS.shape:
            raise ValueError(
                "source_BS and its segments must be (B, S) alike, got "
                f"{source_BS.shape} and {segments_BS.shape}"
            )
        check_ids("source id", source_BS, self.options.vocab_size)
        segments_BS = (segments_BS != 0).astype(jnp.int32)
        positions_BS = jnp.maximum(jnp.cumsum(segments_BS, axis=1, dtype=jnp.int32) - 1, 0)
        if dropout_key is not None:
            dropout_key = jax.random.fold_in(dropout_key, self.options.num_layers)
        x_BSD, _ = run_blocks(
            self.encoder_blocks,
            self.embed(source_BS, positions_BS),
            positions_BS,
            name="encoder",
            probe=probe,
            dropout_key=dropout_key,
            segments_BT=segments_BS,
        )
        return Memory(self.encoder_norm(x_BSD), positions_BS, segments_BS)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        *,
        segments_BT: jax.Array | None = None,
        caches: list[CrossBlockCache] | None = None,
        memory: Memory | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, list[CrossBlockCache] | None]:
        """Logits (B, T, V) in float32, and the caches after these tokens.

        Args:
          memory: from ``encode``; with caches it is needed once, and they hold its keys and values
            from then on, until another one is given.
          tokens_BT, positions_BT, segments_BT, caches, probe, dropout_key: as of ``Decoder``.

        Raises:
          ValueError: no memory, or one whose shape does not fit.
        """
        check_memory(memory, caches, tokens_BT.shape[0])
        return self._logits(
            tokens_BT, positions_BT, caches, probe, dropout_key,
            segments_BT=segments_BT, memory=memory,
        )  # fmt: skip

    def caching_layers(self) -> list:
        """The attention layers that keep something when decoding."""
        return super().caching_layers() + [block.cross for block in self.blocks]

    def init_caches(
        self, batch: int, length: int, memory_length: int, dtype=None
    ) -> list[CrossBlockCache]:
        """An empty cache for every block: ``length`` positions, and a memory of that length."""
        return [
            CrossBlockCache(
                block.attention.init_cache(batch, length, dtype),
                block.cross.init_cache(batch, memory_length, dtype),
            )
            for block in self.blocks
        ]

    def implementations(self, batch: int, length: int) -> dict[str, str]:
        """Which implementation each layer runs when training on this shape, for S = T."""
        layers = {f"encoder{i}": b.attention for i, b in enumerate(self.encoder_blocks)}
        for i, block in enumerate(self.blocks):
            layers |= {f"layer{i}": block.attention, f"layer{i}/cross": block.cross}
        return {name: layer.implementation(batch, length) for name, layer in layers.items()}

    def _block(self, index: int, rngs: nnx.Rngs) -> CrossBlock:
        o = self.options
        return CrossBlock(o.layer(index), o.cross, o.context(), o.mlp, o.d_ff, rngs)


def check_memory(memory: Memory | None, caches: list | None, batch: int) -> None:
    """Raises ValueError where there is no memory to read, or its shape does not fit.

    Whether caches that are being traced hold one cannot be checked.
    """
    cache = None if caches is None else caches[0].memory
    if memory is not None:
        memory.check(batch, cache)
    elif cache is None:
        raise ValueError("there is no memory to read; pass memory=model.encode(source_BS)")
    elif not isinstance(cache.segments_BS, jax.core.Tracer) and not cache.segments_BS.any():
        raise ValueError(
            "the caches hold no memory, or only padding; pass memory=model.encode(source_BS) "
            "with the first tokens"
        )
