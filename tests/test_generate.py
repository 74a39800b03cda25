"""Generation: the same tokens and logits as the whole sequence at once, whatever the padding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.linear import Linear
from attention.multi_head import MultiHead, MultiHeadPrefix, MultiHeadStreaming
from models.decoder import Decoder, DecoderOptions
from models.generate import generate
from models.pure import merge, split
from tests.attending import same_bits

V = 7


STREAMING = MultiHeadStreaming(window=3, first=1)
SMEARED = MultiHead(num_kv_heads=1, smeared_keys=True)


@functools.cache
def decoder(layer=None, **changes) -> Decoder:
    options = DecoderOptions(
        **{
            "vocab_size": V, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 12,
            "pattern": ("a",), "layers": (layer or MultiHead(num_kv_heads=1),), **changes,
        }
    )  # fmt: skip
    return Decoder(options, nnx.Rngs(1))


def random_tokens(*shape) -> np.ndarray:
    return np.random.default_rng().integers(0, V, shape)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, params, tokens):
    return merge(graph, params)(tokens)[0]


def whole(model, tokens) -> np.ndarray:
    """Logits without a cache; rows are filled up, so that one program serves all lengths."""
    wide = np.zeros((1, 40 if len(tokens) <= 40 else len(tokens)), int)
    if model.options.position == "learned":
        wide = wide[:, : model.options.max_length]
    wide[0, : len(tokens)] = tokens
    return np.asarray(_logits(*split(model), wide))[0, : len(tokens)]


def follows(model, prompt, new) -> None:
    """Each new token is the likeliest after what stands before it, by the whole sequence."""
    tokens = np.concatenate([prompt, np.asarray(new)])
    if model.options.position == "learned":
        tokens = tokens[: model.options.max_length]
    logits = whole(model, tokens)[len(prompt) - 1 : -1]
    new = tokens[len(prompt) :]
    chosen = np.take_along_axis(logits, np.asarray(new)[:, None], axis=-1)[:, 0]
    # Of two logits that are equal to rounding either may be taken.
    np.testing.assert_allclose(chosen, logits.max(-1), rtol=0, atol=1e-4)


NEW = 4  # tokens to add, to prompts of 5; one shape, so that one program serves many tests


def test_greedy():
    prompt = random_tokens(2, 5)
    new, caches = generate(decoder(), prompt, NEW)
    assert new.shape == (2, NEW) and new.dtype == jnp.int32
    for row in range(2):
        follows(decoder(), prompt[row], new[row])
    # The last token is returned, and not read.
    assert np.asarray(caches[0].position_BS).tolist() == [list(range(8))] * 2


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_ragged_prompts(position):
    """R2: prompts of 3 and 5 tokens in one batch, four more each: as each row alone."""
    model = decoder(position=position, **({"max_length": 8} if position == "learned" else {}))
    for side in ("left", "right"):
        prompts = [random_tokens(3), random_tokens(5)]
        batch, segments = np.full((2, 5), V - 1), np.zeros((2, 5), np.int32)
        for b, prompt in enumerate(prompts):
            part = slice(0, len(prompt)) if side == "right" else slice(5 - len(prompt), 5)
            batch[b, part], segments[b, part] = prompt, 1
        new, _ = generate(model, batch, NEW, prompt_segments_BT=segments)
        for b, prompt in enumerate(prompts):
            follows(model, prompt, new[b])
        batch[segments == 0] = 0
        same_bits(generate(model, batch, NEW, prompt_segments_BT=segments)[0], new)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_ragged_logits(position):
    """R2, in logits: prefill and four steps, each row as that row alone to 1e-4."""
    model = decoder(position=position, **({"max_length": 9} if position == "learned" else {}))
    graph, params = split(model)

    @functools.partial(jax.jit)
    def call(tokens, positions, segments, caches):
        return merge(graph, params)(tokens, positions, segments_BT=segments, caches=caches)

    for side in ("left", "right"):
        rows = [random_tokens(3 + 4), random_tokens(5 + 4)]
        tokens, segments = np.zeros((2, 5), int), np.zeros((2, 5), np.int32)
        for b, n in enumerate((3, 5)):
            part = slice(0, n) if side == "right" else slice(5 - n, 5)
            tokens[b, part], segments[b, part] = rows[b][:n], 1
        positions = np.maximum(np.cumsum(segments, 1) - 1, 0).astype(np.int32)
        prefill, caches = call(tokens, positions, segments, model.init_caches(2, 9))
        logits = [[np.asarray(prefill[b, segments[b] == 1])] for b in range(2)]
        for step in range(4):
            new = np.array([[rows[0][3 + step]], [rows[1][5 + step]]])
            places = np.array([[3 + step], [5 + step]], np.int32)
            out, caches = call(new, places, None, caches)
            for b in range(2):
                logits[b].append(np.asarray(out[b]))
        for b in range(2):
            got, alone = np.concatenate(logits[b]), whole(model, rows[b])
            np.testing.assert_allclose(got, alone, rtol=0, atol=1e-4, err_msg=f"{side}, row {b}")


def test_traces(monkeypatch):
    """J1: 20 tokens trace the model twice, for the prompt and for the step; another prompt,
    padding, weights, key, temperature or a used cache trace nothing."""
    calls, call = [], Decoder.__call__

    def counted(self, *arguments, **options):
        calls.append(1)
        return call(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "__call__", counted)
    options = dataclasses.replace(decoder().options, rope_base=999.0)  # seen by no other test
    model, other = (Decoder(options, nnx.Rngs(seed)) for seed in (8, 9))
    sample = functools.partial(generate, prompt_BT=random_tokens(2, 5), num_tokens=20)
    _, caches = sample(model, temperature=1.0, key=jax.random.key(1))
    assert 1 <= len(calls) <= 2
    before = len(calls)
    sample(other, temperature=0.5, key=jax.random.key(2))
    sample(model, temperature=1, key=jax.random.key(2), caches=caches)
    segments = np.array([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    sample(model, temperature=0.7, key=jax.random.key(3), prompt_segments_BT=segments)
    assert len(calls) == before


# --- sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_first_tokens_have_the_distribution_of_the_logits(temperature):
    """softmax(logits / temperature), within five deviations for each token."""
    prompt, rows = random_tokens(1, 1), 4000
    key = jax.random.key(int(np.random.default_rng().integers(2**31)))
    new, _ = generate(decoder(), prompt.repeat(rows, 0), 3, temperature=temperature, key=key)
    counts = np.bincount(np.asarray(new)[:, 0], minlength=V)
    logits = whole(decoder(), prompt[0])[-1].astype(np.float64) / temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    assert (np.abs(counts - rows * p) <= 5 * np.sqrt(rows * p * (1 - p)) + 1).all()


def test_steps_draw_independently():
    """Where all tokens are equally likely, so are all pairs of consecutive ones."""
    model = Decoder(decoder().options, nnx.Rngs(0))
    model.w_head_DV[...] = jnp.zeros_like(model.w_head_DV[...])
    prompt, rows = np.zeros((4000, 1), int), 4000
    new = np.asarray(generate(model, prompt, 3, temperature=1.0, key=jax.random.key(5))[0])
    for a, b in ((0, 1), (1, 2), (0, 2)):
        pairs = np.bincount(new[:, a] * V + new[:, b], minlength=V * V)
        expected = rows / V**2
        assert (np.abs(pairs - expected) < 5.5 * np.sqrt(expected)).all()


def test_keys():
    """The same key, the same tokens; rows draw their own; near 0 only the likeliest is drawn."""
    prompt = random_tokens(1, 5).repeat(2, 0)
    sample = functools.partial(generate, decoder(), prompt, 20)
    first, again, other = (sample(temperature=2.0, key=jax.random.key(k))[0] for k in (1, 1, 2))
    same_bits(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[0], first[1])
    cold, _ = sample(temperature=1e-4, key=jax.random.key(1))
    tokens = np.concatenate([prompt[0], np.asarray(cold)[0]])
    logits = whole(decoder(), tokens)[4:-1]
    chosen = np.take_along_axis(logits, np.asarray(cold)[0][:, None], axis=-1)[:, 0]
    np.testing.assert_allclose(chosen, logits.max(-1), rtol=0, atol=5e-3)


def test_greedy_needs_no_key():
    prompt = random_tokens(2, 5)
    greedy, _ = generate(decoder(), prompt, NEW)
    same_bits(generate(decoder(), prompt, NEW, key=jax.random.key(1))[0], greedy)


# --- memory --------------------------------------------------------------------------------------


def test_past_the_window_at_constant_memory():
    """C2, K2: a prompt longer than the window, and many windows more."""
    model, prompt = decoder(STREAMING), random_tokens(2, 5)
    new, caches = generate(model, prompt, 30)
    assert caches[1].position_BS.shape == (2, 4)
    for row in range(2):
        follows(model, prompt[row], new[row])
        assert sorted(np.asarray(caches[1].position_BS)[row].tolist()) == [0, 31, 32, 33]


@pytest.mark.parametrize("layer", [STREAMING, Linear()], ids=str)
def test_twenty_times_the_training_length(layer):
    """Claims 19 and 28: as far as one likes, with the bytes of a short sequence."""
    model, length = decoder(layer), 32
    held = [sum(cache.nbytes for cache in model.init_caches(1, n)) for n in (length, 20 * length)]
    assert held[0] == held[1] > 0
    prompt = random_tokens(1, 5)
    new, caches = generate(model, prompt, 20 * length)
    assert sum(cache.nbytes for cache in caches) == held[0]
    follows(model, prompt[0], new[0])


@pytest.mark.parametrize(
    "layer",
    [pytest.param(MultiHead(num_kv_heads=1), marks=pytest.mark.broad), STREAMING, SMEARED],
    ids=str,
)
def test_an_old_cache_for_a_new_prompt(layer):
    """C1: also for a shorter prompt, and where first tokens were pinned."""
    model = decoder(layer)
    _, caches = generate(model, random_tokens(2, 5), NEW)
    prompt, segments = random_tokens(2, 5), np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    new, _ = generate(model, prompt, NEW, prompt_segments_BT=segments, caches=caches)
    expected, _ = generate(model, prompt, NEW, prompt_segments_BT=segments)
    same_bits(new, expected)
    follows(model, prompt[0, 2:], new[0])


def test_a_cache_that_is_too_short():
    """C4: refused before anything runs; the last new token needs no room, and padding none."""
    model, prompt = decoder(), random_tokens(2, 5)
    caches = model.init_caches(2, 8)
    with pytest.raises(ValueError, match="layer0: 9 positions do not fit a cache of length 8"):
        generate(model, prompt, 5, caches=caches)
    new, _ = generate(model, prompt, NEW, caches=caches)
    follows(model, prompt[0], new[0])
    short, segments = model.init_caches(2, 6), np.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]])
    with pytest.raises(ValueError, match="layer0: 8 positions do not fit a cache of length 6"):
        generate(model, prompt, NEW, caches=short)
    new, _ = generate(model, prompt, NEW, prompt_segments_BT=segments, caches=short)
    follows(model, prompt[0, 2:], new[0])
    ring = decoder(STREAMING)
    new, _ = generate(ring, prompt, NEW, caches=ring.init_caches(2, 5))
    follows(ring, prompt[1], new[1])


def test_learned_positions_have_an_end():
    """The last position that is read, and no further."""
    model, prompt = decoder(position="learned", max_length=8), random_tokens(2, 5)
    new, _ = generate(model, prompt, NEW)
    follows(model, prompt[0], new[0])
    with pytest.raises(ValueError, match="position 8 is outside the 8 learned positions"):
        generate(model, prompt, 5)


# --- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
        ({"num_tokens": -3}, "num_tokens must be at least 1, got -3"),
        ({"temperature": -1.0, "key": 0}, "temperature must be .*, got -1.0"),
        ({"temperature": float("nan"), "key": 0}, "temperature must be .*, got nan"),
        ({"temperature": float("inf"), "key": 0}, "temperature must be .*, got inf"),
        ({"temperature": 0.7}, "sampling at temperature 0.7 needs a key"),
        ({"prompt_BT": np.array([[1, V]])}, "token id 7 is outside 0 … 6"),
        ({"prompt_BT": np.array([[-1, 2]])}, "token id -1 is outside 0 … 6"),
        ({"prompt_BT": np.array([1, 2])}, r"must be \(B, T\) alike"),
        ({"prompt_BT": np.zeros((1, 0), int)}, "every prompt needs at least one token"),
        ({"prompt_BT": np.zeros((0, 2), int)}, "every prompt needs at least one token"),
        ({"prompt_segments_BT": np.array([[0, 0]])}, "every prompt needs at least one token"),
        ({"prompt_segments_BT": np.array([[1, 1, 1]])}, r"alike, got \(1, 2\) and \(1, 3\)"),
    ],
    ids=str,
)
def test_mistakes(changes, message):
    arguments = {"prompt_BT": np.array([[1, 2]]), "num_tokens": 2} | changes
    if arguments.get("key") == 0:
        arguments["key"] = jax.random.key(0)
    with pytest.raises(ValueError, match=message):
        generate(decoder(), **arguments)


def test_a_prompt_shorter_than_the_prefix():
    """Its first tokens would have to see ones that are not there yet."""
    model = decoder(MultiHeadPrefix(prefix=4))
    with pytest.raises(ValueError, match=r"layer0: the first 4 positions .* one has 3"):
        generate(model, random_tokens(2, 3), NEW)
    prompt = random_tokens(2, 5)
    new, _ = generate(model, prompt, NEW)
    follows(model, prompt[0], new[0])
