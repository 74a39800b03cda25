"""Multi-head softmax attention under any mask: MHA, GQA, MQA and cross-attention are one class."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from attention import ops, reference
from attention.cache import KVCache, Slots, SmearedCache
from attention.context import Context, matrix, project
from attention.masks import Causal, Mask
from attention.norm import RMSNorm
from attention.probe import Probe
from attention.smear import SmearedKeys


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

    def mask(self) -> Mask:
        """Which positions may meet."""
        return Causal()

    def check(self, context: Context) -> None:
        """Raises ValueError where the options do not fit each other or the model."""
        kv_heads = self.kv_heads(context)
        if kv_heads < 1 or context.num_heads % kv_heads:
            raise ValueError(
                f"num_kv_heads must divide model.num_heads, got {kv_heads} for "
                f"{context.num_heads} heads"
            )
        if context.rotary:
            width = self.rotary_width(context)
            if width > context.head_width:
                raise ValueError(
                    f"rope_width must be at most the head width {context.head_width}, got {width}"
                )
            context.rope(width)
        elif self.rope_width is not None:
            raise ValueError(
                f"rope_width is {self.rope_width}, but model.position is not 'rope'; leave it unset"
            )
        reference.Dropout(self.dropout, None)
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


class MultiHeadAttention(nnx.Module):
    """y = concat_n(softmax(scale · q_n k_{n//G}ᵀ) v_{n//G}) W_O, with q, k, v = x W_Q, x W_K, x W_V.

    Vaswani et al. 2017 (arXiv 1706.03762); grouped queries: Ainslie et al. 2023 (arXiv 2305.13245);
    multi-query: Shazeer 2019 (arXiv 1911.02150).
    """

    def __init__(self, options: MultiHead, context: Context, rngs: nnx.Rngs):
        options.check(context)
        D, N, H = context.d_model, context.num_heads, context.head_width
        K = options.kv_heads(context)
        self.options, self.context, self.mask = options, context, options.mask()
        self.num_kv_heads = K
        self.rope = context.rope(options.rotary_width(context))
        self.w_q_DNH = nnx.Param(matrix(rngs.params(), (D, N, H), D))
        self.w_k_DKH = nnx.Param(matrix(rngs.params(), (D, K, H), D))
        self.w_v_DKH = nnx.Param(matrix(rngs.params(), (D, K, H), D))
        self.w_o_NHD = nnx.Param(matrix(rngs.params(), (N, H, D), N * H))
        shapes = {"q_NH": (N, H), "k_KH": (K, H), "v_KH": (K, H), "o_D": (D,)}
        self.biases = nnx.Dict(
            {name: nnx.Param(jnp.zeros(shape)) for name, shape in shapes.items() if options.bias}
        )
        self.q_norm = RMSNorm(H) if options.qk_norm else None
        self.k_norm = RMSNorm(H) if options.qk_norm else None
        self.smear = SmearedKeys(K) if options.smeared_keys else None
        self.sink_N = nnx.Param(jnp.zeros(N)) if options.learned_sink else None

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        cache: KVCache | SmearedCache | None = None,
        memory: jax.Array | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | SmearedCache | None]:
        """See the layer contract in ``attention``."""
        if memory is not None:
            raise ValueError("this layer attends to its own sequence; it takes no memory")
        q_BTNH = self._project(x_BTD, self.w_q_DNH, "q_NH")
        k_BTKH = self._project(x_BTD, self.w_k_DKH, "k_KH")
        v_BTKH = self._project(x_BTD, self.w_v_DKH, "v_KH")
        valid_BT = jnp.ones(x_BTD.shape[:2], bool) if segments_BT is None else segments_BT != 0
        last_key = None
        if self.smear is not None:
            last_key = None if cache is None else cache.last_key_BKH
            k_BTKH, last_key = self.smear(k_BTKH, positions_BT, valid_BT, last_key)
        if self.q_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if self.rope is not None:
            q_BTNH, k_BTKH = self.rope(q_BTNH, positions_BT), self.rope(k_BTKH, positions_BT)
        k_segments, index = segments_BT, {}
        if cache is not None:
            inner = cache.inner if self.smear is not None else cache
            inner, entries, index_BS = inner.append(
                positions_BT, valid_BT, k_BSKH=k_BTKH, v_BSKE=v_BTKH
            )
            k_BTKH, v_BTKH = entries["k_BSKH"], entries["v_BSKE"]
            k_segments, index = None, {"q_index": positions_BT, "k_index": index_BS}
            cache = inner if self.smear is None else SmearedCache(inner, last_key)
        elif segments_BT is not None and not self.mask.relative():
            index = {"q_index": positions_BT, "k_index": positions_BT}
        sequences = {"q_segments": segments_BT, "k_segments": k_segments, **index}
        head_BTNE = self._heads(q_BTNH, k_BTKH, v_BTKH, sequences, probe, dropout_key)
        y_BTD = project(head_BTNE, self.w_o_NHD[...], num_in=2)
        return y_BTD + self._bias("o_D", y_BTD.dtype), cache

    def init_cache(self, batch: int, length: int, dtype=None) -> KVCache | SmearedCache:
        """An empty cache for up to ``length`` positions; a ring where the mask forgets."""
        K, H = self.num_kv_heads, self.context.head_width
        dtype = self.context.dtype if dtype is None else dtype
        slots = Slots.for_mask(self.mask, length)
        cache = KVCache.create(batch, slots, dtype, k_BSKH=(K, H), v_BSKE=(K, H))
        if self.smear is None:
            return cache
        return SmearedCache(cache, jnp.zeros((batch, K, H), dtype))

    def cache_bytes_per_token(self) -> int:
        """2 · K · H numbers for each position that the cache keeps, in the layer's dtype."""
        numbers = 2 * self.num_kv_heads * self.context.head_width
        return numbers * jnp.dtype(self.context.dtype).itemsize

    def implementation(self, batch: int, length: int) -> str:
        """Name of the implementation of softmax attention that training on this shape runs."""
        return self._explain(batch, length).chosen

    def _explain(self, batch: int, length: int) -> ops.Explanation:
        N, K, H = self.context.num_heads, self.num_kv_heads, self.context.head_width
        dropout = self._dropout(jax.random.key(0)) if self.options.dropout else None
        q, k = (jax.ShapeDtypeStruct((batch, length, n, H), self.context.dtype) for n in (N, K))
        return ops.explain(
            q, k, k, self.mask, dropout=dropout, implementation=self.context.implementation
        )

    def _project(self, x_BTD: jax.Array, w: nnx.Param, bias: str) -> jax.Array:
        projected = project(x_BTD, w[...])
        return projected + self._bias(bias, projected.dtype)

    def _bias(self, name: str, dtype) -> jax.Array | int:
        if not self.options.bias:
            return 0
        return jnp.expand_dims(self.biases[name][...].astype(dtype), (0, 1))

    def _dropout(self, key: jax.Array | None) -> reference.Dropout | None:
        if key is None or self.options.dropout == 0:
            return None
        return reference.Dropout(self.options.dropout, key)

    def _heads(self, q_BTNH, k_BSKH, v_BSKE, sequences, probe, dropout_key) -> jax.Array:
        """Output of every head, before W_O."""
        options = {
            **sequences,
            "scale": self.options.scale,
            "sink_N": None if self.sink_N is None else self.sink_N[...],
            "dropout": self._dropout(dropout_key),
        }
        if probe is not None and probe.wants("pattern"):
            head_BTNE = ops.attend_with_pattern(
                q_BTNH, k_BSKH, v_BSKE, self.mask, lambda p: probe("pattern", p), **options
            )
        else:
            head_BTNE = ops.attend(
                q_BTNH,
                k_BSKH,
                v_BSKE,
                self.mask,
                implementation=self.context.implementation,
                **options,
            )
        return head_BTNE if probe is None else probe("head", head_BTNE)
