"""Additive attention: a small network scores every pair of a query and a key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from attention import masks, ops
from attention.cache import KVCache, LastKey, Slots, SmearedCache
from attention.context import Context, documents, matrix, project, silence
from attention.layer_cost import LayerCost, output_flops, projected_heads
from attention.masks import Mask
from attention.memory import Memory
from attention.multi_head import check_kv_heads
from attention.probe import Probe
from attention.reference import Dropout, allowed_pairs, isolate, masked_softmax
from attention.smear import SmearedKeys

# Elements of tanh(q + k) that exist at once: what stays in a CPU's cache (4 MiB in float32) has its
# gradient two and a half times sooner than what does not.
BLOCK_ELEMENTS = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Additive:
    """Options of additive attention.

    Attributes:
      num_kv_heads: K; None stands for N.
      mask_expression: which positions may meet, such as ``"Causal() & Window(8)"``.
      dropout: share of attention weights dropped in training.
      smeared_keys: whether each key is mixed with its predecessor's.
    """

    num_kv_heads: int | None = None
    mask_expression: str = "Causal()"
    dropout: float = 0.0
    smeared_keys: bool = False

    def mask(self) -> Mask:
        """Which positions may meet."""
        return masks.parse(self.mask_expression)

    def check(self, context: Context) -> None:
        """Raises ValueError where the options do not fit each other or the model."""
        check_kv_heads(self.kv_heads(context), context)
        if context.rotary:
            raise ValueError(
                "model.position is 'rope', but additive scores have no rotation; "
                "set model.position='learned' (or 'none')"
            )
        ops.check_implementation(context.implementation)
        if context.implementation not in ("auto", "reference"):
            raise ValueError(
                f"model.implementation is {context.implementation!r}, but additive attention has "
                "only 'reference'; set it to that or to 'auto'"
            )
        Dropout(self.dropout, None)
        self.mask()

    def kv_heads(self, context: Context) -> int:
        """K."""
        return context.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def build(self, context: Context, rngs: nnx.Rngs) -> AdditiveAttention:
        """The layer."""
        return AdditiveAttention(self, context, rngs)


class AdditiveAttention(nnx.Module):
    """y = concat_n(head_n) W_O, head_n,i = Σ_j softmax_j(a_nᵀ tanh(q_n,i + k_{n//G},j)) v_{n//G},j.

    q, k, v = x W_Q, x W_K, x W_V. With one head this is the alignment model of Bahdanau et al. 2014
    (arXiv 1409.0473), asked by every position of the sequence itself.
    """

    def __init__(self, options: Additive, context: Context, rngs: nnx.Rngs):
        options.check(context)
        D, N, H = context.d_model, context.num_heads, context.head_width
        K = options.kv_heads(context)
        self.options, self.context, self.mask = options, context, options.mask()
        self.num_kv_heads = K
        self.w_q_DNH = nnx.Param(matrix(rngs.params(), (D, N, H), D))
        self.w_k_DKH = nnx.Param(matrix(rngs.params(), (D, K, H), D))
        self.w_v_DKH = nnx.Param(matrix(rngs.params(), (D, K, H), D))
        self.w_o_NHD = nnx.Param(matrix(rngs.params(), (N, H, D), N * H))
        self.score_NH = nnx.Param(matrix(rngs.params(), (N, H), H))
        self.smear = SmearedKeys(K) if options.smeared_keys else None

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        cache: KVCache | SmearedCache | None = None,
        memory: Memory | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache | SmearedCache | None]:
        """See the layer contract in ``attention``."""
        if memory is not None:
            raise ValueError("this layer attends to its own sequence; it takes no memory")
        documents_BT = documents(x_BTD, segments_BT)
        valid_BT = documents_BT != 0
        x_BTD = silence(x_BTD, segments_BT)
        q_BTNH, k_BSKH, v_BSKE = (
            project(x_BTD, w[...]) for w in (self.w_q_DNH, self.w_k_DKH, self.w_v_DKH)
        )
        last = cache.last if isinstance(cache, SmearedCache) else None
        if self.smear is not None:
            k_BSKH, last = self.smear(k_BSKH, positions_BT, documents_BT, last)
        if cache is None:
            allowed_BTS = self._allowed(positions_BT, segments_BT)
        else:
            entries = cache if self.smear is None else cache.inner
            entries, seen, index_BS = entries.append(
                positions_BT, valid_BT, k_BSKH=k_BSKH, v_BSKE=v_BSKE
            )
            cache = entries if self.smear is None else SmearedCache(entries, last)
            k_BSKH, v_BSKE = seen["k_BSKH"], seen["v_BSKE"]
            allowed_BTS = allowed_pairs(self.mask, positions_BT, index_BS, segments_BT)
        wants_pattern = probe is not None and probe.wants("pattern")
        head_BTNE = additive_attention(
            q_BTNH,
            k_BSKH,
            v_BSKE,
            self.score_NH[...],
            allowed_BTS,
            dropout=self._dropout(dropout_key),
            observe=functools.partial(probe, "pattern") if wants_pattern else None,
        ).astype(x_BTD.dtype)
        if probe is not None:
            head_BTNE = probe("head", head_BTNE)
        return project(head_BTNE, self.w_o_NHD[...], num_in=2), cache

    def init_cache(self, batch: int, length: int, dtype=None) -> KVCache | SmearedCache:
        """An empty cache for up to ``length`` positions; a ring where the mask forgets."""
        dtype = dtype or self.context.dtype
        K, H = self.num_kv_heads, self.context.head_width
        slots = Slots.for_mask(self.mask, length)
        cache = KVCache.create(batch, slots, dtype, k_BSKH=(K, H), v_BSKE=(K, H))
        if self.smear is None:
            return cache
        return SmearedCache(cache, LastKey.none((batch, K, H), dtype))

    def cache_bytes_per_token(self) -> int:
        """2 · K · H numbers for each position that the cache keeps, in the layer's dtype."""
        return 2 * self._key_bytes()

    def cache_bytes(self, length: int) -> int:
        """Bytes that one sequence of ``length`` positions keeps: slots, and a last raw key."""
        slots = Slots.for_mask(self.mask, length).capacity
        last = 0 if self.smear is None else self._key_bytes()
        return slots * self.cache_bytes_per_token() + last

    def _key_bytes(self) -> int:
        width = self.num_kv_heads * self.context.head_width
        return width * jnp.dtype(self.context.dtype).itemsize

    def cost(self, length: int) -> LayerCost:
        """Of one sequence of T positions.

        Weights 4 · T · D · H · (N + K) FLOPs; a pair N · (3 · H + 2 · H): the addition, the
        product with a_n and the sum of each score, and the weighted sum of the values. The N · H
        tanh of a pair are not counted.
        """
        N, H, T = self.context.num_heads, self.context.head_width, length
        block = min(T, max(1, BLOCK_ELEMENTS // (N * T * H)))
        # The queries are padded to whole blocks; of several, one exists at a time, and the
        # backward pass repeats them.
        hidden, in_blocks = N * H * T * -(-T // block) * block, block < T
        projected = projected_heads(self.context, self.num_kv_heads, T, T)
        return projected + LayerCost(
            weights=output_flops(self.context, T),
            visible=5 * N * H * self.mask.count(T),
            computed=3 * hidden + 2 * N * H * T * T,
            recomputed=3 * hidden if in_blocks else 0,
            kept=4 * (2 * N * T * T + (0 if in_blocks else hidden)),
            in_forward=4 * 2 * N * T * T,
            in_backward=2 * 4 * min(hidden, BLOCK_ELEMENTS),
        )

    def decode_flops(self, length: int) -> int:
        """Of one more token: 4 · D · H · (N + K), and 5 · N · H for each position it sees."""
        projected = projected_heads(self.context, self.num_kv_heads, 1, 1)
        pairs = 5 * self.context.num_heads * self.context.head_width * self.mask.count(1, length)
        return projected.weights + output_flops(self.context, 1) + pairs

    def implementation(self, batch: int, length: int) -> str:
        """Always the reference: additive scores are no matrix product that a kernel could tile."""
        return "reference"

    def _allowed(self, positions_BT, segments_BT) -> jax.Array:
        """Which pairs of the sequence itself may meet, (B or 1, T, T)."""
        index = jnp.arange(positions_BT.shape[1])
        if segments_BT is not None and not self.mask.ordinal():
            # Such a mask counts the positions of each document, without the padding between.
            index = positions_BT
        return allowed_pairs(self.mask, index, index, segments_BT, segments_BT)

    def _dropout(self, key: jax.Array | None) -> Dropout | None:
        if key is None or self.options.dropout == 0:
            return None
        return Dropout(self.options.dropout, key)


def additive_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKE: jax.Array,
    score_NH: jax.Array,
    allowed_BTS: jax.Array,
    *,
    dropout: Dropout | None = None,
    observe: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """out_BTNE = softmax(a_nᵀ tanh(q_n + k_{n//G})) v_{n//G} over the allowed pairs.

    As ``reference.dense_attention``: in float32 or wider, 0 for a row that sees no key, isolated
    from what the mask hides, and ``observe`` is shown the weights_BNTS and may replace them.
    """
    dtype = jnp.promote_types(jnp.float32, q_BTNH.dtype)
    q_BTNH, k_BSKH, v_BSKE, _, bad_BTK = isolate(q_BTNH, k_BSKH, v_BSKE, allowed_BTS)
    scores_BNTS = additive_scores(
        q_BTNH.astype(dtype), k_BSKH.astype(dtype), score_NH.astype(dtype)
    )
    weights_BNTS, _ = masked_softmax(scores_BNTS, allowed_BTS)
    if observe is not None:
        weights_BNTS = observe(weights_BNTS)
    if dropout is not None:
        weights_BNTS = dropout(weights_BNTS)
    B, N, T, S = weights_BNTS.shape
    K = k_BSKH.shape[2]
    weights_BKGTS = weights_BNTS.reshape(B, K, N // K, T, S)
    out_BTKGE = jnp.einsum("bkgts,bske->btkge", weights_BKGTS, v_BSKE.astype(dtype))
    out_BTKGE = jnp.where(bad_BTK[..., None, None], jnp.nan, out_BTKGE)
    return out_BTKGE.reshape(B, T, N, -1).astype(v_BSKE.dtype)


def additive_scores(q_BTNH: jax.Array, k_BSKH: jax.Array, score_NH: jax.Array) -> jax.Array:
    """scores_BNTS = a_nᵀ tanh(q_n + k_{n//G}).

    tanh(q + k) has B · N · T · S · H elements. Where that is more than ``BLOCK_ELEMENTS``, a block
    of queries is taken at a time, at least one, and the backward pass computes its tanh again.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    k_BNSH = jnp.repeat(k_BSKH, N // K, axis=2).swapaxes(1, 2)
    q_BNTH = q_BTNH.swapaxes(1, 2)

    def scores(q_BNTH: jax.Array) -> jax.Array:
        hidden_BNTSH = jnp.tanh(q_BNTH[:, :, :, None] + k_BNSH[:, :, None])
        return jnp.sum(hidden_BNTSH * score_NH[None, :, None, None], axis=-1)

    block = max(1, BLOCK_ELEMENTS // (B * N * S * H))
    if block >= T:
        return scores(q_BNTH)
    num_blocks = -(-T // block)
    padded = jnp.pad(q_BNTH, ((0, 0), (0, 0), (0, num_blocks * block - T), (0, 0)))
    blocks = jnp.moveaxis(padded.reshape(B, N, num_blocks, block, H), 2, 0)
    scores_BNTS = jnp.moveaxis(jax.lax.map(jax.checkpoint(scores), blocks), 0, 2)
    return scores_BNTS.reshape(B, N, num_blocks * block, S)[:, :, :T]
