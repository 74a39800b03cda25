"""Queries, keys and values of softmax attention, and what each head makes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from attention import ops
from attention.cache import KVCache, LastKey, Slots, SmearedCache
from attention.context import (
    Context,
    documents,
    matrix,
    project,
    project_together,
    silence,
)
from attention.masks import Mask
from attention.memory import Memory, MemoryCache
from attention.norm import RMSNorm
from attention.probe import Probe
from attention.reference import Dropout
from attention.smear import SmearedKeys


class Heads(nnx.Module):
    """head_n = softmax(scale · q_n k_{n//G}ᵀ) v_{n//G}, with q, k, v = x W_Q, x W_K, x W_V.

    With ``options.reads_memory`` keys and values come from the memory instead.
    """

    def __init__(self, options, context: Context, mask: Mask, rngs: nnx.Rngs):
        D, N, H = context.d_model, context.num_heads, context.head_width
        K = options.kv_heads(context)
        self.options, self.context, self.mask = options, context, mask
        self.num_kv_heads = K
        self.rope = context.rope(options.rotary_width(context))
        self.w_q_DNH = nnx.Param(matrix(rngs.params(), (D, N, H), D))
        self.w_k_DKH = nnx.Param(matrix(rngs.params(), (D, K, H), D))
        self.w_v_DKH = nnx.Param(matrix(rngs.params(), (D, K, H), D))
        shapes = {"q_NH": (N, H), "k_KH": (K, H), "v_KH": (K, H)}
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
        segments_BT: jax.Array | None,
        cache: KVCache | SmearedCache | MemoryCache | None,
        memory: Memory | None,
        probe: Probe | None,
        dropout_key: jax.Array | None,
    ) -> tuple[jax.Array, KVCache | SmearedCache | MemoryCache | None]:
        """Output of every head (B, T, N, H), and the cache; see the contract in ``attention``."""
        x_BTD = silence(x_BTD, segments_BT)
        gather = self._from_memory if self.options.reads_memory else self._from_own
        q_BTNH, k_BSKH, v_BSKE, where, cache = gather(
            x_BTD, positions_BT, segments_BT, cache, memory
        )
        options = {
            "q_segments": segments_BT,
            **where,
            "scale": self.options.scale,
            "sink_N": None if self.sink_N is None else self.sink_N[...],
            "dropout": self._dropout(dropout_key),
        }
        arguments = (q_BTNH, k_BSKH, v_BSKE, self.mask)
        if probe is not None and probe.wants("pattern"):
            observed_BTNE = ops.attend_with_pattern(
                *arguments, lambda pattern: probe("pattern", pattern), **options
            )
            if probe.replaces("pattern"):
                return observed_BTNE, cache
        # Reading goes beside the implementation that runs, so that it changes no bit.
        head_BTNE = ops.attend(*arguments, implementation=self.context.implementation, **options)
        return head_BTNE, cache

    def init_cache(self, batch: int, length: int, dtype) -> KVCache | SmearedCache | MemoryCache:
        """See the layer contract in ``attention``."""
        K, H = self.num_kv_heads, self.context.head_width
        if self.options.reads_memory:
            return MemoryCache.create(batch, length, K, H, dtype)
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
        if self.options.reads_memory:
            return length * self.cache_bytes_per_token()
        slots = Slots.for_mask(self.mask, length).capacity
        last = 0 if self.smear is None else self._key_bytes()
        return slots * self.cache_bytes_per_token() + last

    def _key_bytes(self) -> int:
        width = self.num_kv_heads * self.context.head_width
        return width * jnp.dtype(self.context.dtype).itemsize

    def explain(self, batch: int, length: int) -> ops.Explanation:
        """Which implementation runs when training on this shape, and why not the others."""
        N, K, H = self.context.num_heads, self.num_kv_heads, self.context.head_width
        q, k = (jax.ShapeDtypeStruct((batch, length, n, H), self.context.dtype) for n in (N, K))
        sink = None if self.sink_N is None else jax.ShapeDtypeStruct((N,), "float32")
        return ops.explain(
            q,
            k,
            k,
            self.mask,
            sink_N=sink,
            dropout=self._dropout(jax.random.key(0)),
            implementation=self.context.implementation,
        )

    def _from_own(self, x_BTD, positions_BT, segments_BT, cache, memory):
        """Queries, and keys and values of the same sequence, where they stand, and the cache."""
        if memory is not None:
            raise ValueError("this layer attends to its own sequence; it takes no memory")
        documents_BT = documents(x_BTD, segments_BT)
        valid_BT = documents_BT != 0
        last = cache.last if isinstance(cache, SmearedCache) else None
        weights = self.w_q_DNH[...], self.w_k_DKH[...], self.w_v_DKH[...]
        q_BTNH, *keys_values = project_together(x_BTD, weights)
        q_BTNH = self._queries(q_BTNH, positions_BT)
        k_BTKH, v_BTKH, last = self._keys_values(*keys_values, positions_BT, documents_BT, last)
        if cache is None:
            where = {"k_segments": segments_BT}
            if segments_BT is not None and not self.mask.ordinal():
                # Such a mask counts the positions of each document, without the padding between.
                where |= {"q_index": positions_BT, "k_index": positions_BT}
            return q_BTNH, k_BTKH, v_BTKH, where, None
        inner = cache.inner if self.smear is not None else cache
        inner, seen, index_BS = inner.append(positions_BT, valid_BT, k_BSKH=k_BTKH, v_BSKE=v_BTKH)
        cache = inner if self.smear is None else SmearedCache(inner, last)
        where = {"q_index": positions_BT, "k_index": index_BS}
        return q_BTNH, seen["k_BSKH"], seen["v_BSKE"], where, cache

    def _from_memory(self, x_BTD, positions_BT, segments_BT, cache, memory):
        """Queries, keys and values of the memory, where they stand, and the cache that has them."""
        if memory is None and cache is None:
            raise ValueError("cross-attention needs a memory, or a cache that holds one")
        if memory is not None:
            memory.check(x_BTD.shape[0], cache)
            memory_BSD = silence(memory.x_BSD, memory.segments_BS)
            k_BSKH, v_BSKH, _ = self._keys_values(
                *project_together(memory_BSD, (self.w_k_DKH[...], self.w_v_DKH[...])),
                memory.positions_BS,
                memory.segments_BS,
                None,
            )
            held = MemoryCache(k_BSKH, v_BSKH, memory.positions_BS, memory.segments_BS)
            if cache is not None:
                cache = jax.tree.map(lambda old, new: new.astype(old.dtype), cache, held)
        held = held if cache is None else cache
        where = {"k_segments": None, "q_index": positions_BT}
        where["k_index"] = jnp.where(held.segments_BS != 0, held.positions_BS, -1)
        q_BTNH = self._queries(project(x_BTD, self.w_q_DNH[...]), positions_BT)
        return q_BTNH, held.k_BSKH, held.v_BSKE, where, cache

    def _queries(self, q_BTNH, positions_BT):
        """Projected queries, normalised and rotated as the options say."""
        q_BTNH = self._biased(q_BTNH, "q_NH")
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        return q_BTNH if self.rope is None else self.rope(q_BTNH, positions_BT)

    def _keys_values(self, k_BSKH, v_BSKH, positions_BS, segments_BS, last):
        """Projected keys, smeared, normalised and rotated; values; the last raw key."""
        k_BSKH, v_BSKH = self._biased(k_BSKH, "k_KH"), self._biased(v_BSKH, "v_KH")
        if self.smear is not None:
            k_BSKH, last = self.smear(k_BSKH, positions_BS, segments_BS, last)
        if self.k_norm is not None:
            k_BSKH = self.k_norm(k_BSKH)
        if self.rope is not None:
            k_BSKH = self.rope(k_BSKH, positions_BS)
        return k_BSKH, v_BSKH, last

    def _biased(self, projected: jax.Array, name: str) -> jax.Array:
        if not self.options.bias:
            return projected
        return projected + jnp.expand_dims(self.biases[name][...].astype(projected.dtype), (0, 1))

    def _dropout(self, key: jax.Array | None) -> Dropout | None:
        if key is None or self.options.dropout == 0:
            return None
        return Dropout(self.options.dropout, key)
