"""Kernel bodies of flash attention on a TPU: forward, the gradient of q, the gradients of k and v.

Scores are held transposed, keys in sublanes and query rows in lanes: sᵀ = k qᵀ. Maxima and sums
over keys then run along sublanes, where they are cheap, and everything that belongs to a query
row (maximum, sum, log-sum-exp, position) is one vector of lanes. The G query heads of a key-value
head are folded into the rows, so a key tile is read once for all of them.

R is the number of query rows of a tile and C its number of keys; an array's name ends in its shape.
Scores are in units of log 2, so that exp2 needs no further factor.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.masks import EMPTY, FULL, PARTIAL, Mask

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Visits:
    """The tiles that one grid axis visits, in scalar memory: int32 arrays with an entry per visit.

    Visits of the same row are neighbours. A row without work has one EMPTY visit, since its output
    must be written too.
    """

    row: jax.Array
    column: jax.Array
    kind: jax.Array


jax.tree_util.register_dataclass(Visits, ["row", "column", "kind"], [])


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the scores of a tile are made of, known before tracing.

    Attributes:
      mask: evaluated on the positions of PARTIAL tiles only.
      scale: of q·k.
      num_keys: S; keys from there on are padding.
    """

    mask: Mask
    scale: float
    num_keys: int

    def transposed_CR(self, k_CH, q_HR) -> jax.Array:
        """scale · k qᵀ in units of log 2."""
        return _dot(k_CH[...], q_HR[...], (1, 0)) * (self.scale * LOG2_E)

    def allowed_CR(self, rows: Rows, k_tile, shape: tuple[int, int]) -> jax.Array:
        """Which pairs of a tile may meet."""
        # Comparisons run on full vectors: Mosaic cannot broadcast booleans.
        k_index = k_tile * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        q_index = jnp.broadcast_to(rows.position_1R[...], shape)
        allowed = self.mask(q_index, k_index)
        if self.num_keys % shape[0]:
            allowed = allowed & (k_index < self.num_keys)
        if rows.tag_1R is not None:
            q_tag = jnp.broadcast_to(rows.tag_1R[...], shape)
            k_tag = jnp.broadcast_to(rows.tag_1C[...].reshape(shape[0], 1), shape)
            allowed = allowed & (q_tag == k_tag) & (q_tag != 0)
        return allowed


@dataclasses.dataclass(frozen=True)
class Rows:
    """Refs that decide which pairs may meet; tags are None where there are no segments."""

    position_1R: jax.Array
    tag_1R: jax.Array | None
    tag_1C: jax.Array | None


jax.tree_util.register_dataclass(Rows, ["position_1R", "tag_1R", "tag_1C"], [])


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What the backward pass knows of each row: p = exp2(s − base) · share, ds = p (do·v − centre).

    Scores are in powers of two. Not exp(s − lse): at scores of 10,000 float32 steps by 1e-3, and
    so would the weights.
    """

    base_1R: jax.Array
    share_1R: jax.Array
    centre_1R: jax.Array


jax.tree_util.register_dataclass(Statistics, ["base_1R", "share_1R", "centre_1R"], [])


def _dot(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Contracts one axis of each, products and sums in float32."""
    exact = x.dtype == jnp.float32
    return jax.lax.dot_general(
        x,
        y,
        (((axes[0],), (axes[1],)), ((), ())),
        # A TPU multiplies float32 as bfloat16 unless told otherwise.
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _opens(visits: Visits, visit) -> jax.Array:
    return (visit == 0) | (visits.row[visit] != visits.row[jnp.maximum(visit - 1, 0)])


def _closes(visits: Visits, visit) -> jax.Array:
    last = pl.num_programs(2) - 1
    return (visit == last) | (visits.row[visit] != visits.row[jnp.minimum(visit + 1, last)])


def _on_tile(kind, segmented: bool, work) -> None:
    """Runs ``work(masked)``: FULL tiles skip the mask, EMPTY ones everything."""
    if segmented:
        pl.when(kind != EMPTY)(lambda: work(True))
    else:
        pl.when(kind == FULL)(lambda: work(False))
        pl.when(kind == PARTIAL)(lambda: work(True))


def forward(
    scores: Scores,
    visits,
    rows,
    q_HR,
    k_CH,
    v_EC,
    sink_1R,
    out_ER,
    lse_1R,
    base_1R,
    share_1R,
    top_1R,
    sum_1R,
    acc_ER,
):
    """out = softmax(scale · q kᵀ) v and the log-sum-exp, by the online softmax over key tiles.

    Base and share make the weights again, see ``Statistics``.
    """
    visit = pl.program_id(2)

    @pl.when(_opens(visits, visit))
    def _():
        top_1R[...] = jnp.full_like(top_1R, -jnp.inf)
        sum_1R[...] = jnp.zeros_like(sum_1R)
        acc_ER[...] = jnp.zeros_like(acc_ER)

    def work(masked: bool):
        s_CR = scores.transposed_CR(k_CH, q_HR)
        if masked:
            allowed_CR = scores.allowed_CR(rows, visits.column[visit], s_CR.shape)
            s_CR = jnp.where(allowed_CR, s_CR, -jnp.inf)
        before = top_1R[...]
        top = jnp.maximum(before, s_CR.max(0, keepdims=True))
        # A row that has met no key yet: −inf − (−inf) would be NaN.
        base = jnp.where(top == -jnp.inf, 0, top)
        p_CR = jnp.exp2(s_CR - base)
        shrink = jnp.exp2(before - base)
        top_1R[...] = top
        sum_1R[...] = shrink * sum_1R[...] + p_CR.sum(0, keepdims=True)
        acc_ER[...] = shrink * acc_ER[...] + _dot(v_EC[...], p_CR.astype(v_EC.dtype), (1, 0))

    _on_tile(visits.kind[visit], rows.tag_1R is not None, work)

    @pl.when(_closes(visits, visit))
    def _():
        seen = top_1R[...] != -jnp.inf
        sink = sink_1R[...] * LOG2_E
        top = jnp.where(seen, jnp.maximum(top_1R[...], sink), 0)
        shrink = jnp.exp2(top_1R[...] - top)
        total = jnp.where(seen, sum_1R[...] * shrink + jnp.exp2(sink - top), 1)
        out_ER[...] = (acc_ER[...] * (shrink / total)).astype(out_ER.dtype)
        lse_1R[...] = jnp.where(seen, (top + jnp.log2(total)) / LOG2_E, -jnp.inf)
        # A row without a key has the weights exp2(s − inf) = 0.
        base_1R[...] = jnp.where(seen, top, jnp.inf)
        share_1R[...] = 1 / total


def _weights_and_score_gradients(
    scores: Scores, masked, k_tile, rows, q_HR, k_CH, v_CE, do_ER, statistics: Statistics
) -> tuple[jax.Array, jax.Array]:
    """p and ds, recomputed from the row's statistics."""
    s_CR = scores.transposed_CR(k_CH, q_HR)
    if masked:
        allowed_CR = scores.allowed_CR(rows, k_tile, s_CR.shape)
        s_CR = jnp.where(allowed_CR, s_CR, -jnp.inf)
    p_CR = jnp.exp2(s_CR - statistics.base_1R[...]) * statistics.share_1R[...]
    ds_CR = p_CR * (_dot(v_CE[...], do_ER[...], (1, 0)) - statistics.centre_1R[...])
    if masked:
        # The product with a hidden value can overflow, and 0 · inf is NaN.
        ds_CR = jnp.where(allowed_CR, ds_CR, 0)
    return p_CR, ds_CR


def query_gradient(
    scores: Scores,
    visits,
    rows,
    q_HR,
    k_CH,
    v_CE,
    do_ER,
    statistics: Statistics,
    k_HC,
    dq_HR,
    acc_HR,
):
    """dq = scale · ds k, summed over the key tiles of a query tile."""
    visit = pl.program_id(2)

    @pl.when(_opens(visits, visit))
    def _():
        acc_HR[...] = jnp.zeros_like(acc_HR)

    def work(masked: bool):
        _, ds_CR = _weights_and_score_gradients(
            scores, masked, visits.column[visit], rows, q_HR, k_CH, v_CE, do_ER, statistics
        )
        acc_HR[...] += _dot(k_HC[...], ds_CR.astype(k_HC.dtype), (1, 0))

    _on_tile(visits.kind[visit], rows.tag_1R is not None, work)

    @pl.when(_closes(visits, visit))
    def _():
        dq_HR[...] = (acc_HR[...] * scores.scale).astype(dq_HR.dtype)


def key_value_gradients(
    scores: Scores,
    visits,
    rows,
    q_HR,
    k_CH,
    v_CE,
    do_ER,
    statistics: Statistics,
    dk_CH,
    dv_CE,
    dk_acc_CH,
    dv_acc_CE,
):
    """dk = scale · dsᵀ q and dv = pᵀ do, summed over the query tiles of a key tile."""
    visit = pl.program_id(2)

    @pl.when(_opens(visits, visit))
    def _():
        dk_acc_CH[...] = jnp.zeros_like(dk_acc_CH)
        dv_acc_CE[...] = jnp.zeros_like(dv_acc_CE)

    def work(masked: bool):
        p_CR, ds_CR = _weights_and_score_gradients(
            scores, masked, visits.row[visit], rows, q_HR, k_CH, v_CE, do_ER, statistics
        )
        dv_acc_CE[...] += _dot(p_CR.astype(do_ER.dtype), do_ER[...], (1, 1))
        dk_acc_CH[...] += _dot(ds_CR.astype(q_HR.dtype), q_HR[...], (1, 1))

    _on_tile(visits.kind[visit], rows.tag_1R is not None, work)

    @pl.when(_closes(visits, visit))
    def _():
        dk_CH[...] = (dk_acc_CH[...] * scores.scale).astype(dk_CH.dtype)
        dv_CE[...] = dv_acc_CE[...].astype(dv_CE.dtype)
