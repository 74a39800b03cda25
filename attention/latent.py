"""Multi-head latent attention (MLA): all heads read one small latent, and only that is kept."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from attention import ops
from attention.cache import LastKey, LatentCache, Slots, SmearedCache
from attention.context import Context, documents, matrix, project, silence
from attention.layer_cost import LayerCost, itemsize, softmax_pairs
from attention.masks import Causal, Mask
from attention.memory import Memory
from attention.norm import RMSNorm
from attention.probe import Probe
from attention.reference import Dropout
from attention.smear import SmearedKeys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Options of multi-head latent attention.

    Attributes:
      latent_rank: R, width of the latent that keys and values are restored from.
      rope_width: P, width of the rotary key that all heads share; None stands for H/2, made even.
      query_rank: width of the latent of the queries; None projects them from x at once.
      scale: factor of the scores; None stands for 1/√(H + P).
      dropout: share of attention weights dropped in training.
      smeared_keys: whether each key is mixed with its predecessor's.
    """

    latent_rank: int
    rope_width: int | None = None
    query_rank: int | None = None
    scale: float | None = None
    dropout: float = 0.0
    smeared_keys: bool = False

    def mask(self) -> Mask:
        """Which positions may meet."""
        return Causal()

    def check(self, context: Context) -> None:
        """Raises ValueError where the options do not fit each other or the model."""
        for name in ("latent_rank", "query_rank"):
            rank = getattr(self, name)
            if rank is not None and rank < 1:
                raise ValueError(f"{name} must be at least 1, got {rank}")
        if context.rotary:
            context.rope(self.rotary_width(context))
        elif self.rope_width is not None:
            raise ValueError(
                f"rope_width is {self.rope_width}, but model.position is not 'rope'; leave it unset"
            )
        Dropout(self.dropout, None)
        ops.check_implementation(context.implementation)

    def rotary_width(self, context: Context) -> int:
        """P; 0 where positions do not enter by rotation, for there is no shared key then."""
        if not context.rotary:
            return 0
        return max(2, context.head_width // 4 * 2) if self.rope_width is None else self.rope_width

    def build(self, context: Context, rngs: nnx.Rngs) -> MultiHeadLatentAttention:
        """The layer."""
        return MultiHeadLatentAttention(self, context, rngs)


class MultiHeadLatentAttention(nnx.Module):
    """y = concat_n(head_n) W_O, head_n = softmax(scale · q_n k_nᵀ) v_n, with

      c = RMSNorm(x W_dkv),  k_n = [c W_uk,n ; r],  v_n = c W_uv,n,  r = rotate(x W_kr),
      q_n = [u W_uq,n ; rotate(u W_qr,n)],  u = x or RMSNorm(x W_dq).

    Without a cache keys and values are materialised (naive form). With one, W_uk is absorbed into
    the query and W_uv into the output, since q (c W_uk)ᵀ = (q W_ukᵀ) cᵀ: all heads attend to the
    one key [c ; r] with the one value c, and a token costs R + P numbers.

    DeepSeek-V2, 2024 (arXiv 2405.04434).
    """

    def __init__(self, options: Latent, context: Context, rngs: nnx.Rngs):
        options.check(context)
        self.options, self.context, self.mask = options, context, options.mask()
        D, N, H = context.d_model, context.num_heads, context.head_width
        R, P = options.latent_rank, options.rotary_width(context)
        self.rope = context.rope(P)
        self.scale = (H + P) ** -0.5 if options.scale is None else options.scale

        def weights(*shape: int, fan_in: int) -> nnx.Param:
            return nnx.Param(matrix(rngs.params(), shape, fan_in))

        has_query_latent = options.query_rank is not None
        # Without a latent of their own queries are projected from x, and their R is D.
        query_R = options.query_rank if has_query_latent else D
        self.w_dq_DR = weights(D, query_R, fan_in=D) if has_query_latent else None
        self.q_norm = RMSNorm(query_R) if has_query_latent else None
        self.w_uq_RNH = weights(query_R, N, H, fan_in=query_R)
        self.w_qr_RNP = weights(query_R, N, P, fan_in=query_R) if P else None
        self.w_dkv_DR = weights(D, R, fan_in=D)
        self.latent_norm = RMSNorm(R)
        self.w_kr_DP = weights(D, P, fan_in=D) if P else None
        self.w_uk_RNH = weights(R, N, H, fan_in=R)
        self.w_uv_RNE = weights(R, N, H, fan_in=R)
        self.w_o_NED = weights(N, H, D, fan_in=N * H)
        self.smear = SmearedKeys(N) if options.smeared_keys else None
        self.rope_smear = SmearedKeys(1) if options.smeared_keys and P else None

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        cache: LatentCache | SmearedCache | None = None,
        memory: Memory | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, LatentCache | SmearedCache | None]:
        """See the layer contract in ``attention``."""
        if memory is not None:
            raise ValueError("this layer attends to its own sequence; it takes no memory")
        documents_BT = documents(x_BTD, segments_BT)
        valid_BT = documents_BT != 0
        x_BTD = silence(x_BTD, segments_BT)
        q_BTNH, q_rope_BTNP = self._queries(x_BTD, positions_BT)
        latent_BTR = self.latent_norm(project(x_BTD, self.w_dkv_DR[...]))
        last = cache.last if isinstance(cache, SmearedCache) else None
        rope_key_BTP, last = self._rope_key(x_BTD, positions_BT, documents_BT, last)
        attend = functools.partial(
            self._attend, probe, q_segments=segments_BT, dropout=self._dropout(dropout_key)
        )
        if cache is None:
            k_BTNH = project(latent_BTR, self.w_uk_RNH[...])
            if self.smear is not None:
                k_BTNH, _ = self.smear(k_BTNH, positions_BT, documents_BT)
            attend = functools.partial(attend, k_segments=segments_BT)
            head_BTNE = self._naive(attend, q_BTNH, q_rope_BTNP, k_BTNH, latent_BTR, rope_key_BTP)
        else:
            latents = cache if self.rope_smear is None else cache.inner
            latents, _, index_BS = latents.append(
                positions_BT, valid_BT, latent_BSR=latent_BTR, rope_key_BSP=rope_key_BTP
            )
            cache = latents if self.rope_smear is None else SmearedCache(latents, last)
            attend = functools.partial(attend, q_index=positions_BT, k_index=index_BS)
            head_BTNE = self._absorbed(attend, q_BTNH, q_rope_BTNP, latents).astype(x_BTD.dtype)
        if probe is not None:
            head_BTNE = probe("head", head_BTNE)
        return project(head_BTNE, self.w_o_NED[...], num_in=2), cache

    def init_cache(self, batch: int, length: int, dtype=None) -> LatentCache | SmearedCache:
        """An empty cache for up to ``length`` positions."""
        dtype = dtype or self.context.dtype
        P = self.options.rotary_width(self.context)
        cache = LatentCache.create(
            batch,
            Slots.for_mask(self.mask, length),
            dtype,
            latent_BSR=(self.options.latent_rank,),
            rope_key_BSP=(P,),
        )
        if self.rope_smear is None:
            return cache
        return SmearedCache(cache, LastKey.none((batch, 1, P), dtype))

    def cache_bytes_per_token(self) -> int:
        """R + P numbers, whatever the number of heads, in the layer's dtype."""
        numbers = self.options.latent_rank + self.options.rotary_width(self.context)
        return numbers * jnp.dtype(self.context.dtype).itemsize

    def cache_bytes(self, length: int) -> int:
        """Bytes that one sequence of ``length`` positions keeps: slots, and a last raw rope key."""
        slots = Slots.for_mask(self.mask, length).capacity
        last = 0 if self.rope_smear is None else self.options.rotary_width(self.context)
        last *= jnp.dtype(self.context.dtype).itemsize
        return slots * self.cache_bytes_per_token() + last

    def cost(self, length: int) -> LayerCost:
        """Of one sequence of T positions in the naive form, keys and values written out.

        Weights 2 · T · (query + D · (R + P) + 2 · R · N · H + N · H · D) FLOPs, where query is
        D · N · (H + P), or (D + N · (H + P)) · its rank; pairs 2 · N · (2 · H + P) each.
        """
        N, H = self.context.num_heads, self.context.head_width
        R, P = self.options.latent_rank, self.options.rotary_width(self.context)
        # Queries and keys of width H + P, queries once more; values, heads; the latent twice.
        kept = itemsize(self.context) * length * (3 * N * (H + P) + 2 * N * H + 2 * (R + P))
        return softmax_pairs(self.mask, N, 2 * H + P, length, length) + LayerCost(
            weights=2 * length * (self._projections() + 2 * R * N * H),
            kept=kept,
            in_forward=kept // 2,
        )

    def decode_flops(self, length: int) -> int:
        """Of one more token in the absorbed form, whose cache then holds ``length`` positions.

        W_uk and W_uv meet the token alone; 2 · N · (2 · R + P) for each position that it sees.
        """
        N, H = self.context.num_heads, self.context.head_width
        R, P = self.options.latent_rank, self.options.rotary_width(self.context)
        # A smeared key is met by a query that is R wider.
        wide = 2 * R + P if self.smear is None else 3 * R + P
        pairs = N * wide * self.mask.count(1, length)
        return 2 * (self._projections() + 2 * R * N * H + pairs)

    def _projections(self) -> int:
        """Numbers in the matrices that meet a token in both forms."""
        D, N, H = self.context.d_model, self.context.num_heads, self.context.head_width
        R, P = self.options.latent_rank, self.options.rotary_width(self.context)
        rank, queries = self.options.query_rank, N * (H + P)
        query = D * queries if rank is None else (D + queries) * rank
        return query + D * (R + P) + N * H * D

    def implementation(self, batch: int, length: int) -> str:
        """Name of the implementation of softmax attention that training on this shape runs."""
        N, H = self.context.num_heads, self.context.head_width
        widths = (H + self.options.rotary_width(self.context), H)
        qk, v = (jax.ShapeDtypeStruct((batch, length, N, w), self.context.dtype) for w in widths)
        return ops.explain(
            qk,
            qk,
            v,
            self.mask,
            scale=self.scale,
            dropout=self._dropout(jax.random.key(0)),
            implementation=self.context.implementation,
        ).chosen

    def _queries(self, x_BTD, positions_BT) -> tuple[jax.Array, jax.Array]:
        """The part of the queries that meets the latent, and the rotated part."""
        u_BTR = x_BTD
        if self.w_dq_DR is not None:
            u_BTR = self.q_norm(project(x_BTD, self.w_dq_DR[...]))
        q_BTNH = project(u_BTR, self.w_uq_RNH[...])
        if self.rope is None:
            return q_BTNH, q_BTNH[..., :0]
        return q_BTNH, self.rope(project(u_BTR, self.w_qr_RNP[...]), positions_BT)

    def _rope_key(
        self, x_BTD, positions_BT, documents_BT, last
    ) -> tuple[jax.Array, jax.Array | None]:
        """The rotated key that all heads share, and the last raw one where keys are smeared."""
        if self.rope is None:
            return x_BTD[..., :0], None
        key_BT1P = project(x_BTD, self.w_kr_DP[...])[:, :, None]
        if self.rope_smear is not None:
            key_BT1P, last = self.rope_smear(key_BT1P, positions_BT, documents_BT, last)
        return self.rope(key_BT1P, positions_BT)[:, :, 0], last

    def _naive(
        self, attend: Callable, q_BTNH, q_rope_BTNP, k_BTNH, latent_BTR, rope_key_BTP
    ) -> jax.Array:
        """Heads (B, T, N, E) with the keys and values of every head written out."""
        v_BTNE = project(latent_BTR, self.w_uv_RNE[...])
        rope_key_BTNP = jnp.broadcast_to(rope_key_BTP[:, :, None], q_rope_BTNP.shape)
        return attend(
            jnp.concatenate([q_BTNH, q_rope_BTNP], -1),
            jnp.concatenate([k_BTNH, rope_key_BTNP], -1),
            v_BTNE,
        )

    def _absorbed(self, attend: Callable, q_BTNH, q_rope_BTNP, cache: LatentCache) -> jax.Array:
        """Heads (B, T, N, E) from the latents themselves, as multi-query attention of width R + P.

        A smeared key is σ k_j + (1 − σ) k_{j−1}, so its score is that of the query
        [σ q ; (1 − σ) q] with [c_j ; c_{j−1}], and σ may differ from head to head.
        """
        q_BTNR = jnp.einsum("btnh,rnh->btnr", q_BTNH, self.w_uk_RNH[...].astype(q_BTNH.dtype))
        queries, keys = [q_BTNR], [cache.latent_BSR]
        if self.smear is not None:
            share = jax.nn.sigmoid(self.smear.alpha_K[...])[None, None, :, None]
            share = share.astype(q_BTNR.dtype)
            queries, keys = [share * q_BTNR, (1 - share) * q_BTNR], [*keys, _predecessors(cache)]
        out_BTNR = attend(
            jnp.concatenate([*queries, q_rope_BTNP], -1),
            jnp.concatenate([*keys, cache.rope_key_BSP], -1)[:, :, None],
            cache.latent_BSR[:, :, None],
        )
        return jnp.einsum("btnr,rne->btne", out_BTNR, self.w_uv_RNE[...].astype(out_BTNR.dtype))

    def _attend(self, probe: Probe | None, q_BTNH, k_BSKH, v_BSKE, **options) -> jax.Array:
        options["scale"] = self.scale
        arguments = (q_BTNH, k_BSKH, v_BSKE, self.mask)
        if probe is not None and probe.wants("pattern"):
            observed = ops.attend_with_pattern(
                *arguments, lambda pattern: probe("pattern", pattern), **options
            )
            if probe.replaces("pattern"):
                return observed
        # Reading goes beside the implementation that runs, so that it changes no bit.
        return ops.attend(*arguments, implementation=self.context.implementation, **options)

    def _dropout(self, key: jax.Array | None) -> Dropout | None:
        if key is None or self.options.dropout == 0:
            return None
        return Dropout(self.options.dropout, key)


def _predecessors(cache: LatentCache) -> jax.Array:
    """The latent before that of each slot (B, S, R); one without a predecessor is its own.

    A causal mask keeps all positions, so the slot of a position is the position itself.
    """
    held_BS = (cache.position_BS >= 0)[:, :-1]
    before_BSR = jnp.where(held_BS[..., None], cache.latent_BSR[:, :-1], cache.latent_BSR[:, 1:])
    return jnp.concatenate([cache.latent_BSR[:, :1], before_BSR], axis=1)
