"""Scores of heads: hand-made patterns with known answers, and a model of every variant."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from analysis import head_scores as scores
from attention.probe import Probe
from models import pure
from tasks.vocabulary import BOS, NUM_SPECIAL
from tests import decoders


def one_hot(targets, T):
    """A pattern (1, 1, T, T) whose row i looks at targets(i)."""
    pattern = np.zeros((1, 1, T, T), np.float32)
    for i in range(T):
        pattern[0, 0, i, targets(i)] = 1
    return jnp.asarray(pattern)


def uniform(T):
    return jnp.asarray(np.tri(T, dtype=np.float32) / np.arange(1, T + 1)[:, None])[None, None]


# --- Case E4: a block of 5, twice -----------------------------------------------------------------

BLOCK = jnp.asarray([[7, 9, 5, 11, 6]])
TWICE = jnp.concatenate([BLOCK, BLOCK], 1)
AFTER_BOS = jnp.concatenate([jnp.full((1, 1), BOS), TWICE], 1)


@pytest.mark.parametrize("tokens", [TWICE, AFTER_BOS], ids=["without BOS", "with BOS"])
@pytest.mark.parametrize(
    ("name", "back", "expected"), [("induction", 4, 1), ("previous", 1, 0), ("duplicate", 5, 0)]
)
def test_only_an_induction_head_matches_prefixes(tokens, name, back, expected):
    pattern = one_hot(lambda i: max(i - back, 0), tokens.shape[1])
    assert scores.prefix_matching(pattern, tokens) == expected, name


def test_uniform_attention_has_its_chance_level():
    """The mean of 1/(t + 1) over t = 5 … 9, and one further with a BOS."""
    for tokens, expected in (
        (TWICE, np.mean([1 / (t + 1) for t in range(5, 10)])),
        (AFTER_BOS, np.mean([1 / (t + 2) for t in range(5, 10)])),
    ):
        found = scores.prefix_matching(uniform(tokens.shape[1]), tokens)[0]
        assert found == pytest.approx(expected, rel=1e-6)
        assert scores.prefix_matching_chance(tokens) == pytest.approx(expected, rel=1e-6)
    assert scores.prefix_matching_chance(TWICE) == pytest.approx(0.129127, abs=1e-6)


def test_all_earlier_occurrences_count_and_the_first_does_not():
    """In the third block a head may look at either follower, or share between them."""
    tokens = jnp.concatenate([BLOCK] * 3, 1)
    far = one_hot(lambda i: i - 9 if i >= 10 else max(i - 4, 0), 15)
    near = one_hot(lambda i: max(i - 4, 0), 15)
    for pattern in (far, near, (far + near) / 2):
        assert scores.prefix_matching(pattern, tokens) == pytest.approx(1)
    # What the first block does is not looked at.
    spoilt = near.at[0, 0, :5].set(0)
    assert scores.prefix_matching(spoilt, tokens) == 1
    assert np.isnan(scores.prefix_matching(uniform(5), BLOCK))


def test_heads_are_scored_apart_and_sequences_together():
    heads = jnp.concatenate([one_hot(lambda i, b=b: max(i - b, 0), 10) for b in (4, 1)], 1)
    both = jnp.concatenate([heads, heads[:, ::-1]])
    tokens = jnp.concatenate([TWICE, TWICE + 3])
    assert scores.prefix_matching(heads, TWICE).tolist() == [1, 0]
    assert scores.prefix_matching(both, tokens).tolist() == [0.5, 0.5]


def test_previous_and_first_token():
    previous = one_hot(lambda i: max(i - 1, 0), 6)
    sink = one_hot(lambda i: 0, 6)
    assert scores.previous_token(previous) == 1 and scores.first_token(sink) == 1
    # Row 1 of either pattern looks at position 0, which is its predecessor and the first.
    assert scores.first_token(previous) == pytest.approx(1 / 5)
    assert scores.previous_token(sink) == pytest.approx(1 / 5)
    expected = np.mean([1 / (i + 1) for i in range(1, 6)])
    assert scores.previous_token(uniform(6)) == pytest.approx(expected)
    assert scores.first_token(uniform(6)) == pytest.approx(expected)


def test_entropy():
    expected = np.mean([np.log(i + 1) for i in range(1, 6)])
    assert scores.entropy(uniform(6)) == pytest.approx(expected, rel=1e-6)
    assert scores.entropy(one_hot(lambda i: 0, 6)) == 0


def test_delimiters():
    """Of the rows that have a delimiter behind them; the delimiter itself is not behind itself."""
    is_delimiter = jnp.asarray([[False, True, False, False, True, False]])
    to_last = one_hot(lambda i: 1 if i in (2, 3, 4) else 4 if i == 5 else i, 6)
    assert scores.delimiter(to_last, is_delimiter) == 1
    expected = np.mean([1 / 3, 1 / 4, 1 / 5, 2 / 6])
    assert scores.delimiter(uniform(6), is_delimiter) == pytest.approx(expected, rel=1e-6)
    assert scores.delimiter_chance(is_delimiter) == pytest.approx(expected, rel=1e-6)
    assert scores.delimiter(one_hot(lambda i: i, 6), is_delimiter) == 0
    assert np.isnan(scores.delimiter(uniform(3), jnp.asarray([[False, False, True]])))


# --- Copying --------------------------------------------------------------------------------------


def test_copying_of_logits_made_by_hand():
    eye = jnp.eye(8)[None, :, None]
    assert scores.copying(eye) == pytest.approx(1) and scores.copying(-eye) == -1
    assert scores.copying(jnp.zeros((1, 8, 1, 8))) == -1
    # The own token is raised as much as one other: half of the rise.
    pair = jnp.eye(8) + jnp.roll(jnp.eye(8), 1, axis=1)
    assert scores.copying(pair[None, :, None]) == pytest.approx(1)
    # As much as three others: a quarter.
    four = sum(jnp.roll(jnp.eye(8), i, axis=1) for i in range(4))
    assert scores.copying(four[None, :, None]) == pytest.approx(0, abs=1e-6)
    # A constant on all logits is no rise.
    assert scores.copying(eye + 5) == pytest.approx(1)


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("variant", ["gqa", "mla", "linear", "additive"])
def test_an_identity_circuit_copies_and_its_negative_does_not(variant, bos):
    """W_O and the head undo what W_V and the embedding do: of one head so, of the other less so.

    With as many channels as ids and orthogonal embeddings the circuit is exact.
    """
    model = decoders.decoder(variant, vocab_size=32, d_model=32, num_heads=2, head_width=32)
    eye = jnp.eye(32)
    model.w_embed_VD[...], model.w_head_DV[...] = eye, eye
    if model.w_position_TD is not None:
        model.w_position_TD[...] = 0 * model.w_position_TD[...]
    attention = model.blocks[0].attention
    holder = getattr(attention, "heads", attention)
    if variant == "mla":
        attention.w_dkv_DR[...] = eye
        attention.w_uv_RNE[...] = jnp.stack([eye, eye], 1)
        attention.w_o_NED[...] = jnp.stack([eye, -eye])
    else:
        kv_heads = holder.w_v_DKH[...].shape[1]
        holder.w_v_DKH[...] = jnp.stack([eye] * kv_heads, 1)
        attention.w_o_NHD[...] = jnp.stack([eye, -eye])
    sequences = scores.score_sequences(32, bos=bos)
    graph, params = pure.split(model)

    @jax.jit
    def copying(params):
        logits = scores.attended_logits(pure.merge(graph, params), sequences)
        return jnp.stack([scores.copying(logits_BTNT) for logits_BTNT in logits])

    found = copying(params)
    assert found.shape == (1, 2)
    assert found[0, 0] == pytest.approx(1) and found[0, 1] == -1


# --- Sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bos", [True, False])
def test_the_sequences_are_those_of_the_paper(bos):
    sequences = scores.score_sequences(64, bos=bos)
    assert sequences.repeated_BT.shape == (10, 100 + bos)
    assert sequences.single_BT.shape == (10, 25 + bos)
    for repeated, single in zip(sequences.repeated_BT, sequences.single_BT, strict=True):
        if bos:
            assert repeated[0] == single[0] == BOS
        block = single[int(bos) :]
        assert len(set(block.tolist())) == 25 and block.min() >= NUM_SPECIAL and block.max() < 64
        assert np.array_equal(repeated[int(bos) :], np.tile(block, 4))
    assert len({tuple(row) for row in sequences.single_BT.tolist()}) == 10
    again = scores.score_sequences(64, bos=bos)
    assert np.array_equal(sequences.repeated_BT, again.repeated_BT)


def test_shorter_sequences_where_positions_are_learned():
    assert scores.score_sequences(64, bos=True, longest=100).repeated_BT.shape == (10, 76)
    assert scores.score_sequences(64, bos=False, longest=100).repeated_BT.shape == (10, 100)
    assert scores.score_sequences(64, bos=True, longest=999).repeated_BT.shape == (10, 101)
    with pytest.raises(ValueError, match="51 positions; the model has 50"):
        scores.score_sequences(64, bos=True, longest=50)
    with pytest.raises(ValueError, match=r"task\.vocab_size must be at least 29, got 28"):
        scores.score_sequences(28, bos=True)


# --- Models of every variant ----------------------------------------------------------------------


def values_by_hand(attention, x_BTD):
    """Value of every token for every head, (B, T, N, E), and W_O (N, E, D)."""
    if hasattr(attention, "w_uv_RNE"):
        c = x_BTD @ attention.w_dkv_DR[...]
        c = c / np.sqrt((c**2).mean(-1, keepdims=True) + 1e-6)
        w_o = np.asarray(attention.w_o_NED[...])
        return np.einsum("btr,rne->btne", c, attention.w_uv_RNE[...]), w_o
    holder = getattr(attention, "heads", attention)
    v = np.einsum("btd,dkh->btkh", x_BTD, holder.w_v_DKH[...])
    w_o = np.asarray(attention.w_o_NHD[...])
    return v.repeat(len(w_o) // v.shape[2], 2), w_o


def normed(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def read(model, tokens, names):
    """Activations by name, read without replacing any."""
    graph, params = pure.split(model)

    @jax.jit
    def run(params, tokens):
        probe = Probe(read=names)
        pure.merge(graph, params)(tokens, probe=probe)
        return probe.values

    return {name: np.asarray(value, np.float64) for name, value in run(params, tokens).items()}


def by_hand(model, sequences):
    """Scores by loops over patterns and by the weights themselves."""
    values = read(model, sequences.repeated_BT, ["layer0/pattern", "layer1/pattern"])
    result = {name: [] for name in ("prefix_matching", "previous_token", "first_token", "entropy")}
    for layer in range(2):
        pattern = values[f"layer{layer}/pattern"]
        tokens = sequences.repeated_BT
        B, N, T, _ = pattern.shape
        prefix = [[] for _ in range(N)]
        for b in range(B):
            for i in range(T):
                js = [j for j in range(1, i + 1) if tokens[b, j - 1] == tokens[b, i]]
                for n in range(N if js else 0):
                    prefix[n].append(sum(pattern[b, n, i, j] for j in js))
        result["prefix_matching"].append([np.mean(p) for p in prefix])
        rows = range(1, T)
        result["previous_token"].append(
            [np.mean([[pattern[b, n, i, i - 1] for i in rows] for b in range(B)]) for n in range(N)]
        )
        result["first_token"].append(pattern[:, :, 1:, 0].mean((0, 2)))
        logs = np.log(np.where(pattern > 0, pattern, 1))
        result["entropy"].append(-(pattern * logs).sum(-1)[:, :, 1:].mean((0, 2)))
    result["copying"] = copying_by_hand(model, sequences.single_BT, int(sequences.bos))
    return {name: np.asarray(value) for name, value in result.items()}


def copying_by_hand(model, tokens, start):
    head_BTNE = read(model, tokens, ["layer0/head"])["layer0/head"]
    x = np.asarray(model.w_embed_VD[...])[tokens]
    if model.w_position_TD is not None:
        x = x + np.asarray(model.w_position_TD[...])[: tokens.shape[1]]
    gain, head = np.asarray(model.norm.gain_D[...]), np.asarray(model.w_head_DV[...])
    found = []
    for layer in range(2):
        attention = model.blocks[layer].attention
        v_BTNE, w_o_NED = values_by_hand(attention, normed(x))
        logits = np.einsum("btne,ned->btnd", v_BTNE, w_o_NED) * gain @ head
        shares = []
        for n in range(logits.shape[2]):
            mine = []
            for row, ids in zip(logits[:, start:, n], tokens[:, start:], strict=True):
                for t, token_logits in enumerate(row[:, ids]):
                    rise = np.maximum(token_logits - token_logits.mean(), 0)
                    mine.append(rise[t] / rise.sum())
            shares.append(np.clip(4 * np.mean(mine) - 1, -1, 1))
        found.append(shares)
        _, w_o = values_by_hand(attention, normed(x))
        if layer == 0:
            x = x + np.einsum("btne,ned->btd", head_BTNE, w_o)
    return found


def scored(graph, params, sequences):
    return jax.jit(lambda p: scores.head_scores(pure.merge(graph, p), sequences))(params)


# One of every kind of weights, with and without BOS; the others are broad.
FIRST = {("gqa", False), ("mla", True), ("linear", False)}


@pytest.mark.parametrize(
    ("variant", "bos"),
    [
        pytest.param(*pair, marks=() if pair in FIRST else pytest.mark.broad)
        for pair in itertools.product(decoders.NAMES, (True, False))
    ],
)
def test_a_model_of_every_variant_against_numpy(variant, bos):
    model = decoders.decoder(variant, vocab_size=40, num_layers=2)
    gain = np.random.default_rng(1).uniform(0.5, 2, model.norm.gain_D[...].shape)
    model.norm.gain_D[...] = jnp.asarray(gain, jnp.float32)
    sequences = scores.score_sequences(40, bos=bos, repeats=2)
    found = scored(*pure.split(model), sequences)
    expected = by_hand(model, sequences)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == (2, 4) and np.isfinite(value).all()
        np.testing.assert_allclose(found[name], value, atol=2e-5, err_msg=name)


def test_a_bias_is_no_head_output():
    """The bias of W_O belongs to no head."""
    model = decoders.decoder("mha", vocab_size=40, bias=True)
    attention = model.blocks[0].attention
    attention.bias_D[...] = jnp.arange(1.0, 17.0)
    head = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 4, 4)), jnp.float32)
    positions = jnp.arange(3)[None]
    found = scores.head_outputs(attention, head, positions, 16)
    expected = np.einsum("btne,ned->btnd", head, attention.w_o_NHD[...])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_global_tokens_are_scored_by_the_pattern_that_they_ask_with():
    """Longformer with projections of its own for global tokens; with equal ones nothing differs."""
    plain = decoders.decoder("longformer", vocab_size=40, num_layers=2, num_global=3)
    own = decoders.decoder(
        "longformer", vocab_size=40, num_layers=2, num_global=3, global_projections=True
    )
    sequences = scores.score_sequences(40, bos=True, repeats=2)
    _, params = pure.split(plain)
    graph, random = pure.split(own)
    same = {name: params[name.replace("global_heads", "heads")] for name in random}
    wanted = scored(*pure.split(plain), sequences)
    for name, value in scored(graph, same, sequences).items():
        np.testing.assert_allclose(value, wanted[name], atol=2e-5, err_msg=name)

    tokens_BT = jnp.asarray(sequences.repeated_BT)
    probe = Probe(read=("layer0/pattern", "layer0/global/pattern"))
    own(tokens_BT, probe=probe)
    local, asked = (probe.values[name] for name in ("layer0/pattern", "layer0/global/pattern"))
    assert np.abs(asked[:, :, 1:3] - local[:, :, 1:3]).max() > 0.01
    expected = jnp.concatenate([asked[:, :, :3], local[:, :, 3:]], axis=2)
    np.testing.assert_allclose(scores.read_patterns(own, tokens_BT)[1][0], expected, atol=1e-6)
