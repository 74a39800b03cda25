"""The decoder language model: tokens in, logits of the next token out."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention.context import Context, matrix, project
from attention.norm import RMSNorm
from attention.probe import Probe
from attention.rope import Rope
from models.block import Block
from models.mlp import MLPS

POSITIONS = ("rope", "learned", "none")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderOptions:
    """Shape of a decoder.

    Attributes:
      vocab_size: V, special tokens included.
      num_layers: L.
      d_model: D.
      num_heads: N.
      head_width: H; None stands for D / N.
      pattern: names of the attention of each layer, cycled over the depth.
      layers: their options, one for each name.
      mlp: "gelu", "swiglu" or "none" (attention only).
      d_ff: F.
      tied_head: whether the output head is the embedding transposed.
      position: "rope", "learned" (added to the embedding) or "none".
      max_length: number of learned positions.
      rope_base, rope_layout: see ``attention.rope.Rope``.
      dtype: of activations; parameters are float32.
      implementation: of softmax attention, see ``attention.ops.attend``.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    pattern: tuple
    layers: tuple
    head_width: int | None = None
    mlp: str = "gelu"
    d_ff: int = 0
    tied_head: bool = False
    position: str = "rope"
    max_length: int = 0
    rope_base: float = 10_000.0
    rope_layout: str = "half_split"
    dtype: str = "float32"
    implementation: str = "auto"

    def __post_init__(self):
        sizes = ["vocab_size", "num_layers", "d_model", "num_heads"]
        sizes += ["d_ff"] if self.mlp != "none" else []
        sizes += ["max_length"] if self.position == "learned" else []
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)}")
        for name, known in (
            ("mlp", MLPS), ("position", POSITIONS), ("dtype", ("float32", "bfloat16"))
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ValueError(
                    f"model.{name} must be one of {list(known)}, got {getattr(self, name)!r}"
                )
        if self.head_width is None and self.d_model % self.num_heads:
            raise ValueError(
                f"model.num_heads must divide model.d_model, got {self.num_heads} heads for "
                f"{self.d_model}; choose another or set model.head_width"
            )
        if self.head_width is not None and self.head_width < 1:
            raise ValueError(f"model.head_width must be at least 1, got {self.head_width}")
        try:
            Rope(2, self.rope_base, self.rope_layout)
        except ValueError as error:
            raise ValueError(f"model.{error}") from None
        self.check_layers("pattern", self.pattern, self.layers)
        self.check_implementation_is_read()

    def every_layer(self) -> tuple:
        """Options of all kinds of layers that the model has."""
        return self.layers

    def check_implementation_is_read(self) -> None:
        """Raises ValueError where one is named and no layer has a softmax to implement."""
        if self.implementation != "auto" and not any(
            getattr(layer, "reads_implementation", True) for layer in self.every_layer()
        ):
            raise ValueError(
                f"model.implementation is {self.implementation!r}, but no layer of the pattern "
                f"{self.pattern} has a softmax to implement; set it to 'auto'"
            )

    def check_layers(self, option: str, pattern: tuple, layers: tuple) -> None:
        """Raises ValueError where a pattern is empty, or one of its layers does not fit."""
        if not pattern or len(pattern) != len(layers):
            raise ValueError(
                f"model.{option} must name at least one attention group, got {pattern} for "
                f"{len(layers)} layers"
            )
        for name, layer in zip(pattern, layers, strict=True):
            try:
                layer.check(self.context())
            except ValueError as error:
                raise ValueError(f"attention.{name}: {error}") from None

    def context(self) -> Context:
        """What the attention layers are told."""
        head_width = self.d_model // self.num_heads if self.head_width is None else self.head_width
        return Context(
            d_model=self.d_model,
            num_heads=self.num_heads,
            head_width=head_width,
            rotary=self.position == "rope",
            rope_base=self.rope_base,
            rope_layout=self.rope_layout,
            dtype=self.dtype,
            implementation=self.implementation,
        )

    def layer(self, index: int):
        """Attention options of layer ``index``."""
        return self.layers[index % len(self.layers)]

    def all_layers(self) -> list:
        """Attention options of all layers in turn."""
        return [self.layer(i) for i in range(self.num_layers)]

    def build(self, rngs: nnx.Rngs) -> Decoder:
        """The model."""
        return Decoder(self, rngs)


def reads_memory(layer) -> bool:
    """Whether a layer with these options is cross-attention."""
    return getattr(layer, "reads_memory", False)


class Decoder(nnx.Module):
    """logits = norm(blocks(embedding[tokens])) W_head."""

    reads_source: ClassVar[bool] = False

    def __init__(self, options: DecoderOptions, rngs: nnx.Rngs):
        self.options = options
        V, D = options.vocab_size, options.d_model
        self.w_embed_VD = nnx.Param(matrix(rngs.params(), (V, D), D))
        learned = options.position == "learned"
        self.w_position_TD = (
            nnx.Param(matrix(rngs.params(), (options.max_length, D), D)) if learned else None
        )
        self.blocks = nnx.List(self._block(i, rngs) for i in range(options.num_layers))
        self.norm = RMSNorm(D)
        self.w_head_DV = None if options.tied_head else nnx.Param(matrix(rngs.params(), (D, V), D))

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        *,
        segments_BT: jax.Array | None = None,
        caches: list | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, list | None]:
        """Logits (B, T, V) in float32, and the caches after these tokens.

        Args:
          tokens_BT: token ids. Ids outside the vocabulary raise ValueError, or make their row NaN
            where the ids are being traced.
          positions_BT: default 0 … T − 1, counted anew in every document; needed with caches.
          segments_BT, probe, dropout_key: see the layer contract in ``attention``.
          caches: one a layer, from ``init_caches`` or an earlier call.
        """
        return self._logits(
            tokens_BT, positions_BT, caches, probe, dropout_key, segments_BT=segments_BT
        )

    def _block(self, index: int, rngs: nnx.Rngs) -> Block:
        options = self.options
        return Block(options.layer(index), options.context(), options.mlp, options.d_ff, rngs)

    def _logits(self, tokens_BT, positions_BT, caches, probe, dropout_key, **common):
        """What a call returns; ``common`` are the arguments that all layers share."""
        check_ids("token id", tokens_BT, self.options.vocab_size)
        if positions_BT is None:
            if caches is not None:
                raise ValueError("with caches, positions_BT must say where the tokens stand")
            positions_BT = count_positions(tokens_BT.shape, common.get("segments_BT"))
        elif caches is None and common.get("segments_BT") is None:
            # A layer that is told nothing else takes the first token for position 0.
            common["segments_BT"] = jnp.ones(tokens_BT.shape, jnp.int32)
        x_BTD, caches = run_blocks(
            self.blocks,
            self.embed(tokens_BT, positions_BT),
            positions_BT,
            name="layer",
            caches=caches,
            probe=probe,
            dropout_key=dropout_key,
            **common,
        )
        return self.unembed(self.norm(x_BTD)), caches

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Activations of tokens where they stand, with learned positions if there are any."""
        x_BTD = lookup(self.w_embed_VD[...], tokens_BT)
        if self.w_position_TD is not None:
            check_ids("position", positions_BT, self.options.max_length)
            x_BTD = x_BTD + lookup(self.w_position_TD[...], positions_BT)
        return x_BTD.astype(self.options.dtype)

    def unembed(self, x_BTD: jax.Array) -> jax.Array:
        """Logits of normalised activations; float32 sums whatever the dtype of x."""
        head = self.w_embed_VD[...].T if self.w_head_DV is None else self.w_head_DV[...]
        return project(x_BTD.astype(jnp.promote_types(jnp.float32, x_BTD.dtype)), head)

    def init_caches(self, batch: int, length: int, dtype=None) -> list:
        """An empty cache for every layer, for sequences of up to ``length`` positions."""
        return [block.attention.init_cache(batch, length, dtype) for block in self.blocks]

    def caching_layers(self) -> list:
        """The attention layers that keep something when decoding."""
        return [block.attention for block in self.blocks]

    def implementations(self, batch: int, length: int) -> dict[str, str]:
        """Which implementation of attention each layer runs when training on this shape."""
        return {
            f"layer{i}": block.attention.implementation(batch, length)
            for i, block in enumerate(self.blocks)
        }


def run_blocks(
    blocks,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    *,
    name: str,
    caches: list | None = None,
    probe: Probe | None = None,
    dropout_key: jax.Array | None = None,
    **common,
) -> tuple[jax.Array, list | None]:
    """The residual stream after blocks that the probe knows as name0, name1, …, and their caches.

    Every block draws its own dropout; ``common`` goes to all of them.
    """
    new_caches = None if caches is None else []
    for i, block in enumerate(blocks):
        x_BTD, cache = block(
            x_BTD,
            positions_BT,
            cache=None if caches is None else caches[i],
            probe=None if probe is None else probe.at(f"{name}{i}"),
            dropout_key=None if dropout_key is None else jax.random.fold_in(dropout_key, i),
            **common,
        )
        if caches is not None:
            new_caches.append(cache)
    return x_BTD, new_caches


def count_positions(shape: tuple[int, int], segments_BT: jax.Array | None) -> jax.Array:
    """Positions (B, T) of the tokens in their documents, from 0; padding is not counted."""
    index_BT = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if segments_BT is None:
        return index_BT
    valid_BT = segments_BT != 0
    count_BT = jnp.cumsum(valid_BT, axis=1) - 1
    latest_BT = jax.lax.cummax(jnp.where(valid_BT, index_BT, 0), axis=1)
    before_BT = jnp.pad(latest_BT[:, :-1], ((0, 0), (1, 0)))
    changes_BT = segments_BT != jnp.take_along_axis(segments_BT, before_BT, axis=1)
    starts_BT = valid_BT & changes_BT
    start_BT = jax.lax.cummax(jnp.where(starts_BT, count_BT, 0), axis=1)
    return jnp.maximum(count_BT - start_BT, 0)


def lookup(table_VD: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Rows of a table; an id outside of it gives NaN, never another id's row."""
    # Negative ids would count from the end.
    ids_BT = jnp.where(ids_BT < 0, table_VD.shape[0], ids_BT)
    return table_VD.at[ids_BT].get(mode="fill", fill_value=jnp.nan)


def check_ids(name: str, ids: jax.Array, size: int) -> None:
    """Raises ValueError where concrete ids lie outside [0, size)."""
    if isinstance(ids, jax.core.Tracer):
        return
    outside = np.asarray(ids)[(np.asarray(ids) < 0) | (np.asarray(ids) >= size)]
    if outside.size:
        raise ValueError(f"{name} {outside.flat[0]} is outside 0 … {size - 1}")
