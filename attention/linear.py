"""Linear attention: a fixed-size state in place of a cache that grows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from attention import linear_ops, ops
from attention.cache import LastKey, SmearedCache, check_goes_on
from attention.context import Context, documents, matrix, project, project_together, silence
from attention.feature_maps import feature_map, feature_width
from attention.layer_cost import LayerCost, output_flops, projected_heads
from attention.linear_ops import LinearState
from attention.masks import Causal, Mask
from attention.memory import Memory
from attention.multi_head import check_kv_heads, check_rotation
from attention.probe import Probe
from attention.smear import SmearedKeys


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Options of linear attention.

    Attributes:
      num_kv_heads: K; None stands for the number of query heads.
      rope_width: P, channels of a head that are rotated before the feature map; None for all.
      feature_map: φ, a name in ``attention.feature_maps.FEATURE_MAPS``.
      smeared_keys: whether each key is mixed with its predecessor's.
    """

    # There is no softmax to implement; see ``Context.implementation``.
    reads_implementation: ClassVar[bool] = False

    num_kv_heads: int | None = None
    rope_width: int | None = None
    feature_map: str = "elu"
    smeared_keys: bool = False

    def mask(self) -> Mask:
        """Which positions may meet."""
        return Causal()

    def check(self, context: Context) -> None:
        """Raises ValueError where the options do not fit each other or the model."""
        check_kv_heads(self.kv_heads(context), context)
        check_rotation(self.rope_width, context)
        feature_map(self.feature_map)
        ops.check_implementation(context.implementation)

    def kv_heads(self, context: Context) -> int:
        """K."""
        return context.num_heads if self.num_kv_heads is None else self.num_kv_heads

    def build(self, context: Context, rngs: nnx.Rngs) -> LinearAttention:
        """The layer."""
        return LinearAttention(self, context, rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RecurrentCache:
    """The state of linear attention, and the position of the last token that it holds.

    Attributes:
      state: the two sums.
      position_B: −1 where there is no token yet.
    """

    state: LinearState
    position_B: jax.Array

    # Any number of tokens may follow.
    limit = None

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return self.state.nbytes

    def reset(self) -> RecurrentCache:
        """The same cache, empty."""
        return RecurrentCache(self.state.reset(), jnp.full_like(self.position_B, -1))

    def at(self, positions_BT: jax.Array, valid_BT: jax.Array) -> LinearState:
        """The state that these tokens go on from; rows whose first is at position 0 start anew.

        Raises:
          ValueError: they go back to the middle of what the state holds.
        """
        what = "its state is a sum from which no token can be taken away"
        check_goes_on(positions_BT, valid_BT, self.position_B, what)
        starts_B = (valid_BT & (positions_BT == 0)).any(-1)
        return jax.tree.map(
            lambda x: jnp.where(starts_B.reshape(-1, *[1] * (x.ndim - 1)), 0, x), self.state
        )

    def after(self, state: LinearState, positions_BT, valid_BT) -> RecurrentCache:
        """The cache once these tokens are in ``state``."""
        last_B = jnp.where(valid_BT, positions_BT, -1).max(-1)
        return RecurrentCache(state, jnp.where(valid_BT.any(-1), last_B, self.position_B))


class LinearAttention(nnx.Module):
    """head_i = Σ_{j≤i} φ(q_i)·φ(k_j) v_j / Σ_{j≤i} φ(q_i)·φ(k_j), heads joined by W_O.

    The state S = Σ φ(k_j) v_jᵀ, z = Σ φ(k_j) is all that decoding keeps, in float32. Katharopoulos
    et al. 2020 (arXiv 2006.16236).
    """

    def __init__(self, options: Linear, context: Context, rngs: nnx.Rngs):
        options.check(context)
        D, N, H = context.d_model, context.num_heads, context.head_width
        K = options.kv_heads(context)
        self.options, self.context, self.num_kv_heads = options, context, K
        self.mask = options.mask()
        self.rope = context.rope(H if options.rope_width is None else options.rope_width)
        self.w_q_DNH = nnx.Param(matrix(rngs.params(), (D, N, H), D))
        self.w_k_DKH = nnx.Param(matrix(rngs.params(), (D, K, H), D))
        self.w_v_DKH = nnx.Param(matrix(rngs.params(), (D, K, H), D))
        self.w_o_NHD = nnx.Param(matrix(rngs.params(), (N, H, D), N * H))
        self.smear = SmearedKeys(K) if options.smeared_keys else None

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        *,
        segments_BT: jax.Array | None = None,
        cache: RecurrentCache | SmearedCache | None = None,
        memory: Memory | None = None,
        probe: Probe | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, RecurrentCache | SmearedCache | None]:
        """See the layer contract in ``attention``. There are no weights to drop: no dropout."""
        del dropout_key
        if memory is not None:
            raise ValueError("this layer attends to its own sequence; it takes no memory")
        documents_BT = documents(x_BTD, segments_BT)
        valid_BT = documents_BT != 0
        x_BTD = silence(x_BTD, segments_BT)
        phi = feature_map(self.options.feature_map)
        weights = self.w_q_DNH[...], self.w_k_DKH[...], self.w_v_DKH[...]
        q_BTNH, k_BTKH, v_BTKH = project_together(x_BTD, weights)
        last = None
        if self.smear is not None:
            last = None if cache is None else cache.last
            k_BTKH, last = self.smear(k_BTKH, positions_BT, documents_BT, last)
        if self.rope is not None:
            q_BTNH, k_BTKH = self.rope(q_BTNH, positions_BT), self.rope(k_BTKH, positions_BT)
        q_BTNM, k_BTKM = phi(q_BTNH), phi(k_BTKH)
        recurrent = cache.inner if isinstance(cache, SmearedCache) else cache
        state = None if recurrent is None else recurrent.at(positions_BT, valid_BT)
        observed_BTNE = None
        if probe is not None and probe.wants("pattern"):
            observed_BTNE = self._with_pattern(q_BTNM, k_BTKM, v_BTKH, segments_BT, state, probe)
        form = linear_ops.recurrent if x_BTD.shape[1] == 1 else linear_ops.chunked
        head_BTNE, state = form(q_BTNM, k_BTKM, v_BTKH, state, segments_BT=segments_BT)
        # Reading goes beside the form that runs, so that it changes no bit.
        if observed_BTNE is not None and probe.replaces("pattern"):
            head_BTNE = observed_BTNE
        if probe is not None:
            head_BTNE = probe("head", head_BTNE)
        y_BTD = project(head_BTNE.astype(x_BTD.dtype), self.w_o_NHD[...], num_in=2)
        if cache is None:
            return y_BTD, None
        recurrent = recurrent.after(state, positions_BT, valid_BT)
        return y_BTD, recurrent if self.smear is None else SmearedCache(recurrent, last)

    def init_cache(self, batch: int, length: int, dtype=None) -> RecurrentCache | SmearedCache:
        """The state before any token; its size does not depend on ``length``.

        The state is float32 whatever the dtype, or its sums would stall; only the last raw key of
        smeared keys has the dtype.
        """
        if length < 1:
            raise ValueError(f"a cache needs a length of at least 1, got {length}")
        K, H = self.num_kv_heads, self.context.head_width
        state = LinearState.zeros(batch, K, feature_width(self.options.feature_map, H), H)
        cache = RecurrentCache(state, jnp.full(batch, -1, jnp.int32))
        if self.smear is None:
            return cache
        return SmearedCache(cache, LastKey.none((batch, K, H), dtype or self.context.dtype))

    def cache_bytes_per_token(self) -> int:
        """0: the state does not grow."""
        return 0

    def cache_bytes(self, length: int) -> int:
        """4 · K · M · (E + 1) bytes of one sequence's state, whatever the length."""
        del length
        K, H = self.num_kv_heads, self.context.head_width
        state = 4 * K * feature_width(self.options.feature_map, H) * (H + 1)
        last = 0 if self.smear is None else K * H * jnp.dtype(self.context.dtype).itemsize
        return state + last

    def cost(self, length: int) -> LayerCost:
        """Of one sequence of T positions: linear in T.

        Weights 4 · T · D · H · (N + K) FLOPs. As a recurrence, every token costs 2 · K · M · E to
        write and 2 · N · M · (E + 1) to read. In chunks of C, it costs 2 · N · C · (M + E) more,
        and the backward pass makes the scores and the states of chunks again.
        """
        N, K, H = self.context.num_heads, self.num_kv_heads, self.context.head_width
        M = feature_width(self.options.feature_map, H)
        C = min(linear_ops.chunked.__kwdefaults__["chunk"], length)
        padded = -(-length // C) * C
        computed = padded * (self._state_flops() + 2 * N * C * (M + H))
        projected = projected_heads(self.context, K, length, length)
        # Float32: features, as they are and cut into chunks, values cut into chunks, sums twice;
        # of one span the scores and the carried states.
        kept = 4 * length * (2 * (N + K) * M + K * H + 2 * N * (H + 1))
        span = 4 * min(padded, 16 * C) * (2 * N * C + K * M * H // C)
        return projected + LayerCost(
            weights=output_flops(self.context, length),
            visible=length * self._state_flops(),
            computed=computed,
            recomputed=padded * 2 * M * (N * C + K * H),
            kept=kept,
            in_forward=kept // 2 + span,
            in_backward=2 * span,
        )

    def decode_flops(self, length: int) -> int:
        """Of one more token: 4 · D · H · (N + K) and the state's, whatever the length."""
        del length
        projected = projected_heads(self.context, self.num_kv_heads, 1, 1)
        return projected.weights + output_flops(self.context, 1) + self._state_flops()

    def _state_flops(self) -> int:
        """Of a token that is written to the state and reads it."""
        N, K, H = self.context.num_heads, self.num_kv_heads, self.context.head_width
        return 2 * feature_width(self.options.feature_map, H) * (K * H + N * (H + 1))

    def implementation(self, batch: int, length: int) -> str:
        """The form that training runs."""
        del batch, length
        return "chunked"

    def _with_pattern(self, q_BTNM, k_BTKM, v_BTKH, segments_BT, state, probe) -> jax.Array:
        """Heads by way of the normalised weights of all pairs, which the probe may replace."""
        if state is not None:
            raise ValueError("a state holds no keys: read the pattern of linear attention uncached")
        pattern_BNTS = linear_ops.weights(q_BTNM, k_BTKM, causal=True, segments_BT=segments_BT)
        pattern_BNTS = probe("pattern", pattern_BNTS)
        v_BSNE = jnp.repeat(v_BTKH, q_BTNM.shape[2] // self.num_kv_heads, axis=2)
        return jnp.einsum("bnts,bsne->btne", pattern_BNTS, v_BSNE.astype(pattern_BNTS.dtype))
