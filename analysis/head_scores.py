"""What an attention head does, as numbers: the scores of Olsson et al. 2022 and their kin.

The first half scores patterns, whatever they come from; `head_scores` scores the heads of a model.

In-context Learning and Induction Heads (arXiv 2209.11895).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attention.multi_head import LongformerAttention
from attention.probe import Probe
from tasks.vocabulary import BOS, NUM_SPECIAL

# The paper's: 25 random tokens, 4 times; a score is the mean over 10 such sequences.
BLOCK, REPEATS, SEQUENCES = 25, 4, 10
# Of every run the same, so that curves of different runs can be compared.
_SEED = 2209


def prefix_matching(pattern_BNTS: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Mean attention from a token to what followed its earlier occurrences, (N,).

    From i to all j ≤ i with tokens[j − 1] = tokens[i], over the i that have such a j: the first
    occurrence of a token counts nowhere. NaN where no token occurs twice.
    """
    follows_BTS = followers(tokens_BT)
    mass_BNT = _mass(pattern_BNTS, follows_BTS)
    return _mean_over(mass_BNT, follows_BTS.any(-1))


def prefix_matching_chance(tokens_BT: jax.Array) -> jax.Array:
    """The prefix-matching score of uniform causal attention."""
    return prefix_matching(_uniform(tokens_BT.shape[1]), tokens_BT[:1])[0]


def followers(tokens_BT: jax.Array) -> jax.Array:
    """Whether key j followed an earlier occurrence of token i, (B, T, T)."""
    same_BTS = tokens_BT[:, :, None] == tokens_BT[:, None, :-1]
    return jnp.tril(jnp.pad(same_BTS, ((0, 0), (0, 0), (1, 0))))


def previous_token(pattern_BNTS: jax.Array) -> jax.Array:
    """Mean attention i → i − 1, (N,), over all i but the first."""
    return jnp.diagonal(pattern_BNTS, offset=-1, axis1=2, axis2=3).mean((0, 2))


def first_token(pattern_BNTS: jax.Array) -> jax.Array:
    """Mean attention to position 0, (N,), over all i but the first: the mass of a sink."""
    return pattern_BNTS[:, :, 1:, 0].mean((0, 2))


def entropy(pattern_BNTS: jax.Array) -> jax.Array:
    """Mean entropy of the weights in nats, (N,), over all i but the first; at most ln(i + 1)."""
    rows_BNTS = pattern_BNTS[:, :, 1:]
    return -jax.scipy.special.xlogy(rows_BNTS, rows_BNTS).sum(-1).mean((0, 2))


def delimiter(pattern_BNTS: jax.Array, is_delimiter_BS: jax.Array) -> jax.Array:
    """Mean attention to delimiters, (N,), over the i that have one before them.

    Of an attention that is uniform over what it sees, the share of delimiters among that. NaN
    where no delimiter is followed by a token.
    """
    T = is_delimiter_BS.shape[1]
    before_BTS = is_delimiter_BS[:, None, :] & jnp.tri(T, k=-1, dtype=bool)[None]
    return _mean_over(_mass(pattern_BNTS, before_BTS), before_BTS.any(-1))


def delimiter_chance(is_delimiter_BS: jax.Array) -> jax.Array:
    """The delimiter score of uniform causal attention."""
    B, T = is_delimiter_BS.shape
    return delimiter(jnp.broadcast_to(_uniform(T), (B, 1, T, T)), is_delimiter_BS)[0]


def copying(logits_BTNT: jax.Array) -> jax.Array:
    """How much heads raise the logit of the token they attend to, (N,), from −1 to 1.

    Args:
      logits_BTNT: [b, t, n, u] is what head n adds to the logit of token u of the sequence while
        it attends to token t.

    Of the logits the mean over the sequence is subtracted and what is negative set to 0; the share
    of u = t in what is left is averaged over t, and [0, ½] is scaled to [−1, 1]. A head that
    raises nothing has share 0.
    """
    rise_BTNT = jax.nn.relu(logits_BTNT - logits_BTNT.mean(-1, keepdims=True))
    own_BNT = jnp.diagonal(rise_BTNT, axis1=1, axis2=3)
    total_BNT = rise_BTNT.sum(-1).swapaxes(1, 2)
    share_BNT = jnp.where(total_BNT > 0, own_BNT / jnp.where(total_BNT > 0, total_BNT, 1), 0)
    return jnp.clip(4 * share_BNT.mean((0, 2)) - 1, -1, 1)


@dataclasses.dataclass(frozen=True)
class ScoreSequences:
    """The random sequences that heads are scored on.

    Attributes:
      repeated_BT: distinct symbols, the same block several times.
      single_BT: the block once.
      bos: whether each begins with BOS.
    """

    repeated_BT: np.ndarray
    single_BT: np.ndarray
    bos: bool


def score_sequences(
    vocab_size: int, *, bos: bool, longest: int | None = None, repeats: int = REPEATS
) -> ScoreSequences:
    """The paper's sequences, or shorter ones for models that have no position for so many tokens.

    Args:
      vocab_size: V; the special ids are not drawn.
      bos: whether a BOS stands before them.
      longest: most tokens that the model can read; as many repetitions as fit, at least 2.
      repeats: of the block, where they fit.

    Raises:
      ValueError: the vocabulary has too few symbols, or two blocks do not fit.
    """
    symbols = vocab_size - NUM_SPECIAL
    if symbols < BLOCK:
        raise ValueError(
            f"scores of heads need {BLOCK} different symbols, so task.vocab_size must be at least "
            f"{BLOCK + NUM_SPECIAL}, got {vocab_size}"
        )
    if longest is not None:
        repeats = min(repeats, (longest - bos) // BLOCK)
    if repeats < 2:
        raise ValueError(
            f"scores of heads need {2 * BLOCK + bos} positions; the model has {longest}"
        )
    random = np.random.default_rng(_SEED)
    block = np.stack([random.permutation(symbols)[:BLOCK] for _ in range(SEQUENCES)]) + NUM_SPECIAL
    start = np.full((SEQUENCES, int(bos)), BOS)
    return ScoreSequences(
        repeated_BT=np.concatenate([start, *[block] * repeats], axis=1, dtype=np.int32),
        single_BT=np.concatenate([start, block], axis=1, dtype=np.int32),
        bos=bos,
    )


def head_scores(model, sequences: ScoreSequences) -> dict[str, jax.Array]:
    """Every score of every head of a decoder, each (L, N); may be traced.

    Patterns are read by the probe (of linear attention they are its normalised kernel weights),
    copying is measured by `attended_logits`, so any variant will do. Patterns are those of the
    repeated sequences.
    """
    tokens_BT = jnp.asarray(sequences.repeated_BT)
    _, patterns = read_patterns(model, tokens_BT)
    return {
        "prefix_matching": jnp.stack([prefix_matching(p, tokens_BT) for p in patterns]),
        "copying": jnp.stack([copying(x) for x in attended_logits(model, sequences)]),
        "previous_token": jnp.stack([previous_token(p) for p in patterns]),
        "first_token": jnp.stack([first_token(p) for p in patterns]),
        "entropy": jnp.stack([entropy(p) for p in patterns]),
    }


def pattern_names(model) -> list[tuple[str, ...]]:
    """The activations that are a layer's patterns, for each layer of a decoder.

    They are two where global tokens ask with projections of their own: the first is that of all
    other tokens.
    """
    return [
        (f"layer{i}/pattern", f"layer{i}/global/pattern")
        if isinstance(block.attention, LongformerAttention)
        else (f"layer{i}/pattern",)
        for i, block in enumerate(model.blocks)
    ]


def read_patterns(model, tokens_BT: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Logits (B, T, V) of a decoder, and the pattern (B, N, T, S) of every layer; may be traced.

    Of two patterns of a layer each row is that which its token asks with.

    Patterns that are replaced by themselves are computed once; of patterns that are only read the
    heads would be made a second time, by the implementation that training runs.
    """
    layers = pattern_names(model)
    names = [name for layer in layers for name in layer]
    probe = Probe(read=names, replace=dict.fromkeys(names, lambda pattern: pattern))
    logits_BTV, _ = model(tokens_BT, probe=probe)
    patterns = []
    for block, (name, *asked) in zip(model.blocks, layers, strict=True):
        pattern_BNTS = probe.values[name]
        for other in asked:
            is_global_T = jnp.arange(tokens_BT.shape[1]) < block.attention.options.num_global
            pattern_BNTS = jnp.where(
                is_global_T[None, None, :, None], probe.values[other], pattern_BNTS
            )
        patterns.append(pattern_BNTS)
    return logits_BTV, patterns


def attended_logits(model, sequences: ScoreSequences) -> list[jax.Array]:
    """What every head adds to the logits of a sequence's tokens, (B, T, N, T), for each layer.

    Entry [b, t, n, u] is for token u while head n attends to token t alone. The probe replaces the
    pattern of one layer at a time by the identity, so the head's output is its value of that
    token, made from the residual stream as it is there; the layer itself carries it through W_O,
    and the unembedding (with the gain of the last norm) gives the direct path. BOS is left out.
    """
    tokens_BT = jnp.asarray(sequences.single_BT)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    identity_11TS = jnp.eye(tokens_BT.shape[1])[None, None]
    gain_D = model.norm.gain_D[...]
    kept = slice(int(sequences.bos), None)
    columns_BT = tokens_BT[:, kept]
    logits = []
    for i, (block, names) in enumerate(zip(model.blocks, pattern_names(model), strict=True)):
        probe = Probe(
            read=(f"layer{i}/head",),
            replace=dict.fromkeys(
                names, lambda pattern: jnp.broadcast_to(identity_11TS, pattern.shape)
            ),
        )
        model(tokens_BT, probe=probe)
        head_BTNE = probe.values[f"layer{i}/head"]
        output_BTND = head_outputs(block.attention, head_BTNE, positions_BT, gain_D.shape[0])
        output_BTND = output_BTND * gain_D[None, None, None]
        B, T, N, D = output_BTND.shape
        logits_BTNV = model.unembed(output_BTND.reshape(B, T * N, D)).reshape(B, T, N, -1)
        index_B11T = columns_BT[:, None, None]
        logits.append(jnp.take_along_axis(logits_BTNV[:, kept], index_B11T, axis=-1))
    return logits


def head_outputs(attention, head_BTNE: jax.Array, positions_BT: jax.Array, d_model: int):
    """What each head alone adds to the residual stream, (B, T, N, D).

    Asked of the layer, whatever it calls its W_O: the probe puts one head's output in, and what
    comes out with all of them 0, a bias, is subtracted.
    """
    B, T, N, _ = head_BTNE.shape
    nothing_BTD = jnp.zeros((B, T, d_model), head_BTNE.dtype)

    def output(heads_BTNE):
        probe = Probe(replace={"head": lambda _: heads_BTNE})
        return attention(nothing_BTD, positions_BT, probe=probe)[0]

    each_N = jax.vmap(lambda only_N: output(head_BTNE * only_N[None, None, :, None]))
    alone_NBTD = each_N(jnp.eye(N, dtype=head_BTNE.dtype))
    return jnp.moveaxis(alone_NBTD - output(jnp.zeros_like(head_BTNE))[None], 0, 2)


def _mass(pattern_BNTS: jax.Array, chosen_BTS: jax.Array) -> jax.Array:
    return jnp.where(chosen_BTS[:, None], pattern_BNTS, 0).sum(-1)


def _mean_over(mass_BNT: jax.Array, counted_BT: jax.Array) -> jax.Array:
    return jnp.where(counted_BT[:, None], mass_BNT, 0).sum((0, 2)) / counted_BT.sum()


def _uniform(T: int) -> jax.Array:
    return (jnp.tri(T) / jnp.arange(1, T + 1)[:, None])[None, None]
