"""Multi-head softmax attention under any mask: MHA, GQA, MQA and cross-attention are one class."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from attention import masks, ops
from attention.cache import KVCache, SmearedCache
from attention.context import Context, matrix, project
from attention.heads import Heads
from attention.layer_cost import LayerCost, output_flops, projected_heads, softmax_pairs
from attention.masks import Causal, First, Full, Global, Mask, Prefix, Window
from attention.memory import Memory, MemoryCache
from attention.probe import Probe
from attention.reference import Dropout


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHead:
    """Options of multi-head attention; this one is causal, subclasses give other masks.

    Attributes:
      num_kv_heads: K. N is multi-head (MHA), 1 is multi-query (MQA), between is grouped-query
        (GQA) attention; None stands for N.
      rope_width: P, channels of a head that are rotated; None stands for all of them.
      scale: factor of the scores; None stands for 1/√H.
      qk_norm: whether queries and keys are RMS-normalised per head, before the rotation.
      bias: whether the four projections have biases.
      dropout: share of attention weights dropped in training.
      smeared_keys: whether each key is mixed with its predecessor's.
      learned_sink: whether every head has a trained logit that takes weight and gives no value.
    """

    num_kv_heads: int | None = None
    rope_width: int | None = None
    scale: float | None = None
    qk_norm: bool = False
    bias: bool = False
    dropout: float = 0.0
    smeared_keys: bool = False
    learned_sink: bool = False

    reads_memory: ClassVar[bool] = False

    def mask(self) -> Mask:
        """Which positions may meet."""
        return Causal()

    def check(self, context: Context) -> None:
        """Raises ValueError where the options do not fit each other or the model."""
        check_kv_heads(self.kv_heads(context), context)
        check_rotation(self.rope_width, context)
        Dropout(self.dropout, None)
        ops.check_implementation(context.implementation)
        self.mask()

    def kv_heads(self, context: Context) -> int:
        """K."""
        return context.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def rotary_width(self, context: Context) -> int:
        """P."""
        return context.head_width if self.rope_width is None else self.rope_width

    def build(self, context: Context, rngs: nnx.Rngs) -> MultiHeadAttention:
        """The layer."""
        return MultiHeadAttention(self, context, rngs)


def check_kv_heads(kv_heads: int, context: Context) -> None:
    """Raises ValueError unless every key-value head serves as many query heads."""
    if kv_heads < 1 or context.num_heads % kv_heads:
        raise ValueError(
            f"num_kv_heads must divide model.num_heads, got {kv_heads} for "
            f"{context.num_heads} heads"
        )


def check_rotation(rope_width: int | None, context: Context) -> None:
    """Raises ValueError where the rotation does not fit the head, or would not be read."""
    if not context.rotary:
        if rope_width is not None:
            raise ValueError(
                f"rope_width is {rope_width}, but model.position is not 'rope'; leave it unset"
            )
        return
    width = context.head_width if rope_width is None else rope_width
    if rope_width is None and width % 2:
        raise ValueError(
            f"model.head_width must be even to be rotated whole, got {width}; or set rope_width"
        )
    if width > context.head_width:
        raise ValueError(
            f"rope_width must be at most the head width {context.head_width}, got {width}"
        )
    context.rope(width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadFull(MultiHead):
    """Every position sees every position: an encoder (BERT)."""

    def mask(self) -> Mask:
        return Full()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadPrefix(MultiHead):
    """Prefix-LM: the first ``prefix`` positions see each other, the others look back."""

    prefix: int

    def mask(self) -> Mask:
        return Causal() | Prefix(self.prefix)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadWindow(MultiHead):
    """A sliding window of the last ``window`` positions, the query's own included (Mistral)."""

    window: int

    def mask(self) -> Mask:
        return Causal() & Window(self.window)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadStreaming(MultiHead):
    """A sliding window and the ``first`` positions: attention sinks (arXiv 2309.17453)."""

    window: int
    first: int

    def mask(self) -> Mask:
        return Causal() & (Window(self.window) | First(self.first))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadMasked(MultiHead):
    """Any mask, as an expression such as ``"Causal() & (Window(4) | First(1))"``."""

    mask_expression: str

    def mask(self) -> Mask:
        return masks.parse(self.mask_expression)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadCross(MultiHead):
    """Cross-attention: queries from this sequence, keys and values from the memory."""

    reads_memory: ClassVar[bool] = True

    def mask(self) -> Mask:
        return Full()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadLongformer(MultiHead):
    """A window, and ``num_global`` first tokens that see, and are seen by, all; causal.

    Beltagy et al. 2020 (arXiv 2004.05150).

    Attributes:
      window: positions that a query looks back on, its own included.
      num_global: number of global tokens.
      global_projections: whether global tokens ask with projections of their own, as in the paper.
    """

    window: int
    num_global: int
    global_projections: bool = False

    def mask(self) -> Mask:
        return Causal() & (Window(self.window) | Global(self.num_global))

    def build(self, context: Context, rngs: nnx.Rngs) -> MultiHeadAttention:
        layer = LongformerAttention if self.global_projections else MultiHeadAttention
        return layer(self, context, rngs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiHeadLongformerEncoder(MultiHeadLongformer):
    """Longformer for encoders: the window reaches as far ahead as back."""

    def mask(self) -> Mask:
        return Window(self.window, ahead=self.window - 1) | Global(self.num_global)


class MultiHeadAttention(nnx.Module):
    """y = concat_n(head_n) W_O, head_n = softmax(scale · q_n k_{n//G}ᵀ) v_{n//G} (see ``Heads``).

    Vaswani et al. 2017 (arXiv 1706.03762); grouped queries: Ainslie et al. 2023 (arXiv
    2305.13245); multi-query: Shazeer 2019 (arXiv 1911.02150).
    """

    def __init__(self, options: MultiHead, context: Context, rngs: nnx.Rngs):
        options.check(context)
        D, N, H = context.d_model, context.num_heads, context.head_width
        self.options, self.context, self.mask = options, context, options.mask()
        self.heads = Heads(options, context, self.mask, rngs)
        self.w_o_NHD = nnx.Param(matrix(rngs.params(), (N, H, D), N * H))
        self.bias_D = nnx.Param(jnp.zeros(D)) if options.bias else None

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        cache: KVCache | SmearedCache | MemoryCache | None = None,
        memory: Memory | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | SmearedCache | MemoryCache | None]:
        """See the layer contract in ``attention``."""
        head_BTNE, cache = self.heads(
            x_BTD,
            positions_BT,
            segments_BT=segments_BT,
            cache=cache,
            memory=memory,
            probe=probe,
            dropout_key=dropout_key,
        )
        return self.output(head_BTNE, probe), cache

    def output(self, head_BTNE: jax.Array, probe: Probe | None) -> jax.Array:
        """The heads side by side, through the output projection."""
        if probe is not None:
            head_BTNE = probe("head", head_BTNE)
        y_BTD = project(head_BTNE, self.w_o_NHD[...], num_in=2)
        if self.bias_D is None:
            return y_BTD
        return y_BTD + self.bias_D[...].astype(y_BTD.dtype)[None, None]

    def init_cache(
        self, batch: int, length: int, dtype=None
    ) -> KVCache | SmearedCache | MemoryCache:
        """An empty cache for up to ``length`` positions; a ring where the mask forgets."""
        return self.heads.init_cache(batch, length, dtype or self.context.dtype)

    def cache_bytes_per_token(self) -> int:
        """2 · K · H numbers for each position that the cache keeps, in the layer's dtype."""
        return self.heads.cache_bytes_per_token()

    def cache_bytes(self, length: int) -> int:
        """Bytes that one sequence of ``length`` positions keeps: the formula of the cache."""
        return self.heads.cache_bytes(length)

    def cost(self, length: int, memory_length: int | None = None) -> LayerCost:
        """Of one sequence of T positions, and of S of the memory where the layer reads one.

        Weights 2 · D · H · (2 · N · T + 2 · K · S) FLOPs, pairs 4 · N · H each; S = T without
        a memory.
        """
        T, S = length, length if memory_length is None else memory_length
        return LayerCost(weights=output_flops(self.context, T)) + self._heads_cost(self.mask, T, S)

    def decode_flops(self, length: int) -> int:
        """Of one more token whose cache then holds ``length`` positions, or so many of the memory.

        Weights 4 · D · H · (N + K), without the keys and values where they are the memory's;
        4 · N · H for each position that the mask lets the token see.
        """
        new_keys = 0 if self.options.reads_memory else 1
        projected = projected_heads(self.context, self.heads.num_kv_heads, 1, new_keys)
        H, seen = self.context.head_width, self.mask.count(1, length)
        pairs = 4 * self.context.num_heads * H * seen
        return projected.weights + output_flops(self.context, 1) + pairs

    def _heads_cost(self, mask: Mask, T: int, S: int) -> LayerCost:
        N, H = self.context.num_heads, self.context.head_width
        projected = projected_heads(self.context, self.heads.num_kv_heads, T, S)
        return projected + softmax_pairs(mask, N, 2 * H, T, S)

    def implementation(self, batch: int, length: int) -> str:
        """Name of the implementation of softmax attention that training on this shape runs."""
        return self.heads.explain(batch, length).chosen


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LongformerCache:
    """What the local queries see, and what the global ones see through projections of their own."""

    local: KVCache | SmearedCache
    asked: KVCache | SmearedCache

    @property
    def limit(self) -> int | None:
        """See ``SlotCache.limit``."""
        return self.local.limit

    @property
    def nbytes(self) -> int:
        """Bytes of the stored entries."""
        return self.local.nbytes + self.asked.nbytes

    def reset(self) -> LongformerCache:
        """The same cache, empty."""
        return LongformerCache(self.local.reset(), self.asked.reset())


class LongformerAttention(MultiHeadAttention):
    """Multi-head attention whose global tokens ask with W_Q, W_K and W_V of their own.

    Row i is softmax(q_g k_gᵀ) v_g for a global i and softmax(q kᵀ) v otherwise; W_O is shared.
    """

    def __init__(self, options: MultiHeadLongformer, context: Context, rngs: nnx.Rngs):
        super().__init__(options, context, rngs)
        n = options.num_global
        # Queries below n, whatever the key: the only rows that these heads answer.
        asked = self.mask & (Prefix(n) | (Global(n) & ~First(n)))
        self.global_heads = Heads(options, context, asked, rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        cache: LongformerCache | None = None,
        memory: Memory | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, LongformerCache | None]:
        """See the layer contract in ``attention``; the second pattern is ``global/pattern``.

        Of ``pattern`` the rows of global tokens feed nothing, of ``global/pattern`` all others.
        """
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        common = {"segments_BT": segments_BT, "memory": memory}
        local_BTNE, local = self.heads(
            x_BTD,
            positions_BT,
            cache=None if cache is None else cache.local,
            probe=probe,
            dropout_key=keys[0],
            **common,
        )
        global_BTNE, asked = self.global_heads(
            x_BTD,
            positions_BT,
            cache=None if cache is None else cache.asked,
            probe=None if probe is None else probe.at("global"),
            dropout_key=keys[1],
            **common,
        )
        places_BT = positions_BT
        if segments_BT is None and cache is None:
            # As the mask counts them.
            places_BT = jnp.broadcast_to(jnp.arange(x_BTD.shape[1]), positions_BT.shape)
        is_global = (places_BT < self.options.num_global)[..., None, None]
        head_BTNE = jnp.where(is_global, global_BTNE, local_BTNE)
        cache = None if cache is None else LongformerCache(local, asked)
        return self.output(head_BTNE, probe), cache

    def init_cache(self, batch: int, length: int, dtype=None) -> LongformerCache:
        """Two caches: the second holds what the global tokens see."""
        dtype = dtype or self.context.dtype
        return LongformerCache(
            self.heads.init_cache(batch, length, dtype),
            self.global_heads.init_cache(batch, length, dtype),
        )

    def cache_bytes(self, length: int) -> int:
        """Bytes that one sequence of ``length`` positions keeps: the formula of both caches."""
        return self.heads.cache_bytes(length) + self.global_heads.cache_bytes(length)

    def cost(self, length: int, memory_length: int | None = None) -> LayerCost:
        """That of the local heads, and of the global ones, which project every position too."""
        own = super().cost(length, memory_length)
        return own + self._heads_cost(self.global_heads.mask, length, length)

    def decode_flops(self, length: int) -> int:
        """As without global projections, and 2 · D · H · (N + 2 · K) for these."""
        projected = projected_heads(self.context, self.global_heads.num_kv_heads, 1, 1)
        return super().decode_flops(length) + projected.weights
