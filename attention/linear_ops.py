"""Linear attention after the feature map: three forms of one function, one signature.

    out_i = Σ_j φ(q_i) · φ(k_j) v_j / Σ_j φ(q_i) · φ(k_j),   j ≤ i when causal, else every j.

The arguments are φ(q) and φ(k), not q and k. `parallel` is the specification (time and memory T²),
`chunked` is what trains (time and memory T), `recurrent` is the RNN that generates. All three take
and return the state of that RNN, S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j), so any form resumes where
any other stopped. Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236.

Letters besides the package's: M feature width, C tokens of a chunk, J chunks.

Heads: query head n reads key-value head n // G. Keys and values are never repeated.

Precision: 16-bit inputs are computed, summed and kept in float32 (float64 in float64); the output
has v's dtype. What a float32 product is on an accelerator, `jax_default_matmul_precision` says.

Segments: `segments_BT` holds 0 at padding, anywhere in the row. Padding writes nothing, its output
is 0, and what stands there (inf and NaN included) reaches neither an output nor a gradient. A token
whose id is not that of the token before it, padding skipped, starts a fresh document; documents
never see each other, and an id that comes back later is a new document. The initial state belongs
to the first document of the call, the final state to its last; a row of padding alone returns its
initial state. To resume at a document's border, pass a zero state. Only padding may hold inf or
NaN: in a token that counts they can reach other rows of the batch row, as 0 · NaN.

A row whose normaliser is 0 (no key, or features all 0) gives output 0 and gradient 0.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

# Chunks that one batch of products covers. More of them buy nothing on a CPU and cost memory: at
# T = 8192 (4 heads of 64) a gradient needs 25 MiB with 16 of them, 98 MiB with all 128 at once.
_CHUNKS_PER_SPAN = 16


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["sum_BKME", "normaliser_BKM"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class LinearState:
    """The state of linear attention: S = Σ_j φ(k_j) v_jᵀ and z = Σ_j φ(k_j), float32 or float64."""

    sum_BKME: jax.Array
    normaliser_BKM: jax.Array

    @classmethod
    def zeros(
        cls, batch: int, num_kv_heads: int, feature_width: int, value_width: int, dtype=jnp.float32
    ) -> "LinearState":
        """The state before any token. Raises ValueError for a dtype that sums would stall in."""
        if jnp.dtype(dtype) not in (jnp.float32, jnp.float64):
            raise ValueError(f"dtype={jnp.dtype(dtype)}: a linear state is float32 or float64")
        leading = (batch, num_kv_heads, feature_width)
        return cls(jnp.zeros((*leading, value_width), dtype), jnp.zeros(leading, dtype))

    # A state has no end: any number of tokens may follow.
    limit = None

    def reset(self) -> "LinearState":
        """The state before any token, of the same shape."""
        return jax.tree.map(jnp.zeros_like, self)

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays: B K M (E + 1) times the item's, whatever the length so far."""
        return sum(x.size * x.dtype.itemsize for x in (self.sum_BKME, self.normaliser_BKM))


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """What every form works on: checked, cleaned of padding, query heads grouped."""

    q_BTKGM: jax.Array
    k_BTKM: jax.Array
    v_BTKE: jax.Array
    document_BT: jax.Array  # counts from 0 and never falls; padding belongs to the one before it
    state: LinearState

    def wide(self) -> "_Inputs":
        """The same with queries, keys and values in the state's dtype, that of all arithmetic."""
        q, k, v = (
            a.astype(self.state.sum_BKME.dtype) for a in (self.q_BTKGM, self.k_BTKM, self.v_BTKE)
        )
        return _Inputs(q, k, v, self.document_BT, self.state)

    def output(self, out_BTKGE: jax.Array, dtype) -> jax.Array:
        B, T, K, G, E = out_BTKGE.shape
        return out_BTKGE.reshape(B, T, K * G, E).astype(dtype)


def _check(q_BTNM, k_BTKM, v_BTKE, state, segments_BT) -> None:
    B, T, N, M = q_BTNM.shape
    K, E = v_BTKE.shape[2:]
    if T < 1 or k_BTKM.shape != (B, T, K, M) or v_BTKE.shape[:2] != (B, T):
        raise ValueError(
            f"shapes do not fit: q{q_BTNM.shape} k{k_BTKM.shape} v{v_BTKE.shape} must be "
            "q(B,T,N,M) k(B,T,K,M) v(B,T,K,E) with T at least 1"
        )
    if N % K:
        raise ValueError(f"{N} query heads cannot share {K} key-value heads: must be a multiple")
    if segments_BT is not None and segments_BT.shape != (B, T):
        raise ValueError(f"segments_BT has shape {segments_BT.shape}: must be {(B, T)}")
    if state is not None:
        shapes = state.sum_BKME.shape, state.normaliser_BKM.shape
        if shapes != ((B, K, M, E), (B, K, M)):
            raise ValueError(
                f"state has shapes {shapes}: must be {(B, K, M, E)} and {(B, K, M)} here"
            )


def _documents(segments_BT: jax.Array) -> jax.Array:
    """Which document of its row a token belongs to, from 0; padding: the one before it."""
    valid_BT = segments_BT != 0
    index_BT = jnp.where(valid_BT, jnp.arange(segments_BT.shape[1])[None], -1)
    before_BT = jnp.pad(lax.cummax(index_BT, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    previous_BT = jnp.take_along_axis(segments_BT, jnp.maximum(before_BT, 0), axis=1)
    starts_BT = valid_BT & (before_BT >= 0) & (segments_BT != previous_BT)
    return jnp.cumsum(starts_BT, axis=1)


def _prepare(q_BTNM, k_BTKM, v_BTKE, state, segments_BT) -> _Inputs:
    _check(q_BTNM, k_BTKM, v_BTKE, state, segments_BT)
    B, T, N, M = q_BTNM.shape
    K, E = v_BTKE.shape[2:]
    dtype = jnp.result_type(jnp.float32, q_BTNM, k_BTKM, v_BTKE, *jax.tree.leaves(state))
    q, k, v = q_BTNM, k_BTKM, v_BTKE
    document_BT = jnp.zeros((B, T), jnp.int32)
    if segments_BT is not None:
        # Zeros are all that padding needs: a zero key writes nothing into either sum, and a zero
        # query has a zero normaliser, hence a zero output. Selected, not multiplied: 0 · NaN.
        valid_BT11 = (segments_BT != 0)[:, :, None, None]
        q, k, v = (jnp.where(valid_BT11, x, 0) for x in (q, k, v))
        document_BT = _documents(segments_BT)
    if state is None:
        state = LinearState.zeros(B, K, M, E, dtype)
    state = jax.tree.map(lambda x: x.astype(dtype), state)
    return _Inputs(q.reshape(B, T, K, N // K, M), k, v, document_BT, state)


def _divide(numerator: jax.Array, normaliser: jax.Array) -> jax.Array:
    absent = (jnp.abs(normaliser) < jnp.finfo(normaliser.dtype).tiny)[..., None]
    # Both the divisor and the quotient are selected, or 0/0 would come back in the gradient.
    return jnp.where(absent, 0, numerator / jnp.where(absent, 1, normaliser[..., None]))


@jax.custom_jvp
def _ratio(numerator: jax.Array, normaliser: jax.Array) -> jax.Array:
    """numerator_..E / normaliser_.., 0 where the normaliser is 0."""
    return _divide(numerator, normaliser)


@_ratio.defjvp
def _ratio_jvp(primals, tangents):
    # The stock rule divides by the normaliser's square, and 1e-20 (features of exp(−23)) squared
    # underflows.
    numerator, normaliser = primals
    numerator_dot, normaliser_dot = tangents
    out = _ratio(numerator, normaliser)
    return out, _divide(numerator_dot - out * normaliser_dot[..., None], normaliser)


def _scores(x: _Inputs, causal: bool) -> jax.Array:
    """φ(q_i) · φ(k_j), 0 where i may not see j: scores_BKGTS."""
    T = x.k_BTKM.shape[1]
    scores_BKGTS = jnp.einsum("btkgm,bskm->bkgts", x.q_BTKGM, x.k_BTKM)
    may_BTS = x.document_BT[:, :, None] == x.document_BT[:, None, :]
    if causal:
        may_BTS &= jnp.tri(T, dtype=bool)[None]
    return jnp.where(may_BTS[:, None, None], scores_BKGTS, 0)


def weights(
    q_BTNM: jax.Array,
    k_BTKM: jax.Array,
    *,
    causal: bool = True,
    segments_BT: jax.Array | None = None,
) -> jax.Array:
    """The attention pattern of this call's keys, pattern_BNTS with S = T; quadratic memory.

    pattern_ij = φ(q_i) · φ(k_j) / Σ_j φ(q_i) · φ(k_j). Rows sum to 1, or are 0 where the row has no
    key. Without an initial state, `parallel` is pattern · v.
    """
    x = _prepare(q_BTNM, k_BTKM, k_BTKM, None, segments_BT).wide()
    scores_BKGTS = _scores(x, causal)
    return _ratio(scores_BKGTS, scores_BKGTS.sum(-1)).reshape(
        q_BTNM.shape[0], q_BTNM.shape[2], q_BTNM.shape[1], k_BTKM.shape[1]
    )


def parallel(
    q_BTNM: jax.Array,
    k_BTKM: jax.Array,
    v_BTKE: jax.Array,
    state: LinearState | None = None,
    *,
    causal: bool = True,
    segments_BT: jax.Array | None = None,
) -> tuple[jax.Array, LinearState]:
    """Linear attention as a T × T product: the form to read and to compare the others with.

    Returns out_BTNE in v's dtype and the final state. Non-causal rows see every key of their
    document and, in the first one, the initial state. Raises ValueError for shapes that do not fit.
    """
    x = _prepare(q_BTNM, k_BTKM, v_BTKE, state, segments_BT).wide()
    scores_BKGTS = _scores(x, causal)
    numerator_BTKGE = jnp.einsum("bkgts,bske->btkge", scores_BKGTS, x.v_BTKE)
    normaliser_BTKG = jnp.einsum("bkgts->btkg", scores_BKGTS)

    first_BT11 = (x.document_BT == 0)[:, :, None, None]
    carried_BTKGE = jnp.einsum("btkgm,bkme->btkge", x.q_BTKGM, x.state.sum_BKME)
    carried_BTKG = jnp.einsum("btkgm,bkm->btkg", x.q_BTKGM, x.state.normaliser_BKM)
    numerator_BTKGE += jnp.where(first_BT11[..., None], carried_BTKGE, 0)
    normaliser_BTKG += jnp.where(first_BT11, carried_BTKG, 0)

    last_B1 = x.document_BT[:, -1:]
    k_BTKM = jnp.where((x.document_BT == last_B1)[:, :, None, None], x.k_BTKM, 0)
    kept = _select(last_B1[:, 0] == 0, x.state)
    state = LinearState(
        kept.sum_BKME + jnp.einsum("btkm,btke->bkme", k_BTKM, x.v_BTKE),
        kept.normaliser_BKM + k_BTKM.sum(1),
    )
    return x.output(_ratio(numerator_BTKGE, normaliser_BTKG), v_BTKE.dtype), state


def _select(keep_B: jax.Array, state: LinearState) -> LinearState:
    """The state where keep_B, zeros elsewhere."""
    return jax.tree.map(
        lambda s: jnp.where(keep_B.reshape((-1,) + (1,) * (s.ndim - 1)), s, 0), state
    )


def recurrent(
    q_BTNM: jax.Array,
    k_BTKM: jax.Array,
    v_BTKE: jax.Array,
    state: LinearState | None = None,
    *,
    causal: bool = True,
    segments_BT: jax.Array | None = None,
) -> tuple[jax.Array, LinearState]:
    """Linear attention as an RNN, one token a step: S += φ(k) vᵀ, z += φ(k), out = φ(q)S / φ(q)·z.

    Constant time and bytes a token. Its gradient keeps every step's state (T K M E numbers), so
    train with `chunked`. Returns out_BTNE in v's dtype and the final state. Raises ValueError for
    shapes that do not fit, NotImplementedError for causal=False: a recurrence has no future.
    """
    if not causal:
        raise NotImplementedError(
            "recurrent with causal=False: a recurrence sees only the past; use parallel or chunked"
        )
    x = _prepare(q_BTNM, k_BTKM, v_BTKE, state, segments_BT).wide()
    continues_BT = x.document_BT == jnp.pad(x.document_BT, ((0, 0), (1, 0)))[:, :-1]

    def step(state, token):
        q_BKGM, k_BKM, v_BKE, continues_B = token
        state = _select(continues_B, state)
        sum_BKME = state.sum_BKME + k_BKM[..., :, None] * v_BKE[..., None, :]
        normaliser_BKM = state.normaliser_BKM + k_BKM
        out_BKGE = _ratio(
            jnp.einsum("bkgm,bkme->bkge", q_BKGM, sum_BKME),
            jnp.einsum("bkgm,bkm->bkg", q_BKGM, normaliser_BKM),
        )
        return LinearState(sum_BKME, normaliser_BKM), out_BKGE

    tokens = (x.q_BTKGM, x.k_BTKM, x.v_BTKE, continues_BT)
    state, out_TBKGE = lax.scan(step, x.state, jax.tree.map(lambda a: a.swapaxes(0, 1), tokens))
    return x.output(out_TBKGE.swapaxes(0, 1), v_BTKE.dtype), state


def chunked(
    q_BTNM: jax.Array,
    k_BTKM: jax.Array,
    v_BTKE: jax.Array,
    state: LinearState | None = None,
    *,
    causal: bool = True,
    segments_BT: jax.Array | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, LinearState]:
    """Linear attention by chunks of C tokens: products within a chunk, a recurrence between chunks.

    Chunks are taken in spans of up to 16: products are batched over a span, spans follow each
    other, and the gradient recomputes a span from the state before it. Time T (C + 2M) E per head;
    memory T (M + E) for arguments and gradients plus one span's scores and states, forward and
    backward. T need not be a multiple of `chunk`. Non-causal attention sweeps twice, the second
    time backwards over what comes after each token.

    The default of 64 comes from two shared CPU cores (4 heads, M = E = 64, float32, T = 4096 and
    8192), before spans were added when the cores were quiet, after it when they were busy. Quiet,
    with the gradient, 64 beat 32 (33 ms against 43 at T = 4096); busy, 32 beat 64; forward they are
    level. 128 was between 15% faster and three times slower, 256 slower in nearly every run. 64
    keeps half the states of 32.

    Returns out_BTNE in v's dtype and the final state. Raises ValueError for shapes that do not fit
    and for chunk < 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk}: must be at least 1")
    x = _prepare(q_BTNM, k_BTKM, v_BTKE, state, segments_BT)
    numerator_BTKGE, normaliser_BTKG, final = _sweep(x, chunk, own=True)
    if not causal:
        future = _sweep(_reversed(x), chunk, own=False)
        numerator_BTKGE += future[0][:, ::-1]
        normaliser_BTKG += future[1][:, ::-1]
    return x.output(_ratio(numerator_BTKGE, normaliser_BTKG), v_BTKE.dtype), final


def _reversed(x: _Inputs) -> _Inputs:
    """The same rows with time running backwards, from an empty state."""
    return _Inputs(
        *(a[:, ::-1] for a in (x.q_BTKGM, x.k_BTKM, x.v_BTKE)),
        (x.document_BT[:, -1:] - x.document_BT)[:, ::-1],
        jax.tree.map(jnp.zeros_like, x.state),
    )


def _sweep(x: _Inputs, chunk: int, *, own: bool) -> tuple[jax.Array, jax.Array, LinearState]:
    """numerator_BTKGE, normaliser_BTKG over j ≤ i (j < i without its own), and the final state."""
    B, T = x.document_BT.shape
    C = min(chunk, T)
    chunks = -(-T // C)
    spans = -(-chunks // _CHUNKS_PER_SPAN)
    J = -(-chunks // spans)  # chunks of one span; all spans are alike, so the last may be padded

    def cut(a, mode="constant"):
        a = jnp.pad(a, ((0, 0), (0, spans * J * C - T)) + ((0, 0),) * (a.ndim - 2), mode=mode)
        return a.reshape(B, spans, J, C, *a.shape[2:]).swapaxes(0, 1)

    def join(a):
        return a.swapaxes(0, 1).reshape(B, spans * J * C, *a.shape[4:])[:, :T]

    def span(state, inputs):
        q_BJCKGM, k_BJCKM, v_BJCKE, document_BJC, before_B = inputs
        # Head-major, chunks first: each product is then a batch of plain matrices, which XLA on the
        # CPU runs several times faster than the same einsum with the heads in the middle.
        # Widened here and not before, so that 16-bit arguments are never copied whole.
        wide = state.sum_BKME.dtype
        numerator_JBKGCE, normaliser_JBKGC, state = _span(
            q_BJCKGM.transpose(1, 0, 3, 4, 2, 5).astype(wide),
            k_BJCKM.transpose(1, 0, 3, 2, 4).astype(wide),
            v_BJCKE.transpose(1, 0, 3, 2, 4).astype(wide),
            document_BJC.swapaxes(0, 1) - before_B[None, :, None],
            state,
            own,
        )
        return state, (
            numerator_JBKGCE.transpose(1, 0, 4, 2, 3, 5),
            normaliser_JBKGC.transpose(1, 0, 4, 2, 3),
        )

    document = cut(x.document_BT, mode="edge")
    before = jnp.pad(document[:, :, -1, -1], ((1, 0), (0, 0)))[:-1]
    inputs = (cut(x.q_BTKGM), cut(x.k_BTKM), cut(x.v_BTKE), document, before)
    # Recomputing a span in the backward pass keeps one span's scores alive, not all of them.
    final, sums = lax.scan(jax.checkpoint(span, prevent_cse=False), x.state, inputs)
    return *map(join, sums), final


def _span(q_JBKGCM, k_JBKCM, v_JBKCE, document_JBC, state, own):
    """The two sums of one span and the state after it; `state` belongs to its document 0."""
    C = document_JBC.shape[-1]
    may_JBCC = document_JBC[..., :, None] == document_JBC[..., None, :]
    may_JBCC &= jnp.tri(C, k=0 if own else -1, dtype=bool)[None, None]
    scores_JBKGCC = jnp.einsum("jbkgcm,jbksm->jbkgcs", q_JBKGCM, k_JBKCM)
    scores_JBKGCC = jnp.where(may_JBCC[:, :, None, None], scores_JBKGCC, 0)

    # A chunk hands on the sums of the document that it ends in, so it receives those of the
    # document that the chunk before it ended in.
    last_JB = document_JBC[..., -1]
    before_JB = jnp.pad(last_JB, ((1, 0), (0, 0)))[:-1]
    handed_JB1C1 = (document_JBC == last_JB[..., None])[:, :, None, :, None]
    handed_JBKCM = jnp.where(handed_JB1C1, k_JBKCM, 0)
    written = LinearState(
        jnp.einsum("jbkcm,jbkce->jbkme", handed_JBKCM, v_JBKCE), handed_JBKCM.sum(-2)
    )

    def step(state, chunk):
        continues_B, written = chunk
        return jax.tree.map(jnp.add, _select(continues_B, state), written), state

    final, carried = lax.scan(step, state, (last_JB == before_JB, written))

    sees_JB11C = (document_JBC == before_JB[..., None])[:, :, None, None]
    carried_JBKGCE = jnp.einsum("jbkgcm,jbkme->jbkgce", q_JBKGCM, carried.sum_BKME)
    carried_JBKGC = jnp.einsum("jbkgcm,jbkm->jbkgc", q_JBKGCM, carried.normaliser_BKM)
    numerator_JBKGCE = jnp.einsum("jbkgcs,jbkse->jbkgce", scores_JBKGCC, v_JBKCE)
    numerator_JBKGCE += jnp.where(sees_JB11C[..., None], carried_JBKGCE, 0)
    normaliser_JBKGC = scores_JBKGCC.sum(-1) + jnp.where(sees_JB11C, carried_JBKGC, 0)
    return numerator_JBKGCE, normaliser_JBKGC, final
