"""One suite that every attention variant passes, alone as a layer and twice in a decoder.

A variant is registered with one line in the list of test_layers.py. What does not apply to it is
exempted there by the name of the check, with the reason; an exempted check must fail, so that no
exemption outlives its reason.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention.probe import Probe
from models.decoder import Decoder, DecoderOptions
from models.generate import generate
from models.pure import merge, split
from tests.attending import same_bits
from tests.oracles import assert_close

B, T, D, N, H, V, F = 3, 13, 20, 4, 6, 17, 12
SPLIT = 7  # tokens before it may not know those from it on

# Two orders of the same bfloat16 sums: a rounding may fall either way, relative to the largest.
BFLOAT16 = 2e-2

# Most of the time here is compile time.
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_jit = functools.partial(jax.jit, compiler_options=_QUICK)


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """One entry of the list: a variant with its options, and what is special about it.

    Attributes:
      name: shown in the name of the test.
      options: as in ``attention.VARIANTS``.
      model: changes to the options of the decoder, such as ``{"position": "none"}``.
      window: prefill is tried in chunks of this size and of one more and less.
      slots: length → positions for which a row of the cache keeps ``cache_bytes_per_token``.
      constant_bytes: what a row of the cache holds besides, whatever the length.
      arguments: batch → further arguments of the layer, such as ``memory``.
      exempt: name of a check → why it does not apply.
    """

    name: str
    options: Any
    model: Mapping = dataclasses.field(default_factory=dict)
    window: int = 4
    slots: Callable[[int], int] = lambda length: length
    constant_bytes: int = 0
    arguments: Callable[[int], Mapping] = lambda batch: {}
    exempt: Mapping[str, str] = dataclasses.field(default_factory=dict)


def cases(variants: list[Variant]) -> list:
    """Every check of every variant, as parameters of one test."""
    names = {check.__name__ for check in CHECKS}
    for variant in variants:
        unknown = set(variant.exempt) - names
        assert not unknown, f"{variant.name} is exempted from {unknown}, which are no checks"
    return [
        pytest.param(check, variant, id=f"{variant.name}-{check.__name__}", marks=_marks(*pair))
        for pair in ((check, variant) for variant in variants for check in CHECKS)
        for check, variant in [pair]
    ]


def _marks(check, variant):
    if check.__name__ not in variant.exempt:
        return ()
    raises = (AssertionError, ValueError, NotImplementedError)
    reason = variant.exempt[check.__name__]
    return pytest.mark.xfail(reason=reason, raises=raises, strict=True)


def random(*shape: int, dtype="float32") -> np.ndarray:
    return np.random.default_rng().standard_normal(shape).astype(jnp.dtype(dtype))


def positions_of(segments) -> np.ndarray:
    """How many tokens of its document stand before each token; 0 for padding."""
    segments = np.asarray(segments)
    positions = np.zeros(segments.shape, np.int32)
    for b, t in np.ndindex(segments.shape):
        if segments[b, t] != 0:
            positions[b, t] = (segments[b, :t] == segments[b, t]).sum()
    return positions


def padded(lengths, width: int, side: str) -> np.ndarray:
    """Segments of rows with that many tokens, padded to the width on the side."""
    columns = np.arange(width)[None]
    lengths = np.asarray(lengths)[:, None]
    return (columns < lengths if side == "right" else columns >= width - lengths).astype(np.int32)


class Subject:
    """A layer as a pure function of its parameters, all of them random, compiled when asked to."""

    def __init__(self, variant: Variant, dtype: str = "float32"):
        self.variant = variant
        self.model_options = DecoderOptions(
            vocab_size=V, num_layers=2, d_model=D, num_heads=N, head_width=H, d_ff=F, mlp="swiglu",
            pattern=(variant.name,), layers=(variant.options,), dtype=dtype, **variant.model,
        )  # fmt: skip
        self.graph, self.params = self._pure(
            variant.options.build(self.model_options.context(), nnx.Rngs(0)), 1
        )
        self.arguments = variant.arguments(B)
        self.gradient = _jit(self.evaluate)
        self.step = _jit(self.call)

    @staticmethod
    def _pure(module, seed):
        """No parameter keeps the 0 or 1 that it starts from, or it would not be tested."""
        graph, params = split(module)
        rng = np.random.default_rng(seed)
        return graph, {
            name: np.asarray(p) + 0.2 * rng.standard_normal(p.shape).astype(np.float32)
            for name, p in params.items()
        }

    @property
    def layer(self):
        return merge(self.graph, self.params)

    def call(self, params, x, positions, segments=None, cache=None, rows=slice(None), **options):
        arguments = jax.tree.map(lambda a: a[rows], self.arguments)
        return merge(self.graph, params)(
            x, positions, segments_BT=segments, cache=cache, **arguments, **options
        )

    def plain(self, x, rows=slice(None), **options):
        """The training form on rows of full length, not compiled."""
        positions = np.tile(np.arange(x.shape[1], dtype=np.int32), (x.shape[0], 1))
        return self.call(self.params, x, positions, rows=rows, **options)[0]

    def evaluate(self, params, x, positions, segments, do, wrap=lambda f: f):
        """Output, and gradients of Σ y · do in x and in the parameters."""
        forward = wrap(lambda params, x: self.call(params, x, positions, segments)[0])
        y, backward = jax.vjp(forward, params, x)
        dparams, dx = backward(do)
        return {"y": y, "dx": dx, "dparams": dparams}

    def run(self, x, segments, do=None, positions=None, params=None):
        segments = np.asarray(segments, np.int32)
        positions = positions_of(segments) if positions is None else positions
        do = np.zeros_like(x) if do is None else do
        params = self.params if params is None else params
        return jax.tree.map(np.asarray, self.gradient(params, x, positions, segments, do))

    def through_cache(self, x, sizes, cache, call=None):
        """The tokens in chunks of these sizes, the last one again and again."""
        call = call or self.step
        out, start, sizes = [], 0, list(sizes)
        while start < x.shape[1]:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            chunk = x[:, start : start + size]
            places = np.arange(start, start + chunk.shape[1], dtype=np.int32)
            positions = np.tile(places, (x.shape[0], 1))
            y, cache = call(self.params, chunk, positions, None, cache)
            out.append(jax.tree.map(np.asarray, y))
            start += size
        return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *out), cache

    # The same twice in a decoder.

    @functools.cached_property
    def decoder(self):
        graph, params = self._pure(Decoder(self.model_options, nnx.Rngs(0)), 2)
        return graph, params

    def logits(self, params, tokens, positions, segments=None, caches=None):
        """Logits, and what the heads of every layer say."""
        probe = Probe(read=("layer0/head", "layer1/head"))
        model = merge(self.decoder[0], params)
        out, caches = model(
            tokens, positions, segments_BT=segments, caches=caches, probe=probe
        )
        return {"logits": out, **probe.values}, caches

    @functools.cached_property
    def decoder_step(self):
        return _jit(self.logits)

    def init_caches(self, batch, length):
        return merge(self.decoder[0], self.decoder[1]).init_caches(batch, length)


@functools.lru_cache(maxsize=4)
def subject(variant: Variant, dtype: str = "float32") -> Subject:
    return Subject(variant, dtype)


def ones(batch=B, length=T):
    return np.ones((batch, length), np.int32)


def close(actual, expected, tolerance=None, what=""):
    if tolerance is None:
        return assert_close(actual, expected, what=what)
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    size = max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * size, err_msg=what)


# --- who moves whom -------------------------------------------------------------------------------


def causality_by_gradient(variant):
    """Claim 8: outputs up to t have no gradient in later tokens, and one in every visible one."""
    s, x, do = subject(variant), random(B, T, D), random(B, T, D)
    do[:, SPLIT:] = 0
    dx = s.run(x, ones(), do)["dx"]
    assert not dx[:, SPLIT:].any()
    assert dx[:, :SPLIT].any(-1).all()


def causality_by_perturbation(variant):
    """Claim 8: other later tokens, other later outputs, not one bit of the earlier ones."""
    s, x = subject(variant), random(B, T, D)
    other = np.concatenate([x[:, :SPLIT], random(B, T - SPLIT, D)], axis=1)
    before, after = (s.run(a, ones())["y"] for a in (x, other))
    same_bits(before[:, :SPLIT], after[:, :SPLIT])
    assert not np.isclose(before[:, SPLIT:], after[:, SPLIT:]).all(-1).any()


def causality_through_the_cache(variant):
    """The same where the whole sequence is prefilled at once."""
    s, x = subject(variant), random(B, T, D)
    other = np.concatenate([x[:, :SPLIT], np.full((B, T - SPLIT, D), np.nan, "f")], axis=1)
    positions, cache = positions_of(ones()), s.layer.init_cache(B, T)
    before, after = (s.call(s.params, a, positions, None, cache)[0] for a in (x, other))
    same_bits(before[:, :SPLIT], after[:, :SPLIT])


def causality_in_a_decoder(variant):
    """By perturbation at every layer, and by the gradient in the embeddings of later tokens."""
    s = subject(variant)
    tokens = np.stack([np.random.default_rng().permutation(V)[:T] for _ in range(1)])
    other = tokens.copy()
    other[:, SPLIT:] = (other[:, SPLIT:] + 1) % V
    (graph, params), positions = s.decoder, positions_of(ones(1))
    before, after = (s.logits(params, a, positions)[0] for a in (tokens, other))
    for name, value in before.items():
        same_bits(value[:, :SPLIT], after[name][:, :SPLIT])
        assert not np.isclose(value[:, SPLIT:], after[name][:, SPLIT:]).all()
    do = random(1, SPLIT, V)

    def loss(w_embed_VD):
        model = merge(graph, params | {"w_embed_VD": w_embed_VD})
        return jnp.sum(model(tokens, positions)[0][:, :SPLIT] * do)

    moved = np.asarray(jax.grad(loss)(jnp.asarray(params["w_embed_VD"]))).any(-1)
    assert not moved[tokens[0, SPLIT:]].any()
    assert moved[tokens[0, :SPLIT]].all()


def batch_rows_are_independent(variant):
    s, x, do = subject(variant), random(B, T, D), random(B, T, D)
    before = s.run(x, ones(), do)
    x[1], do[1] = random(T, D), random(T, D)
    after = s.run(x, ones(), do)
    for name in ("y", "dx"):
        same_bits(before[name][::2], after[name][::2])
        assert not np.isclose(before[name][1], after[name][1]).all()


# --- padding and packed documents -----------------------------------------------------------------


def _padding(variant, side):
    s, lengths = subject(variant), (T, 8, 3)
    segments = padded(lengths, T, side)
    valid = segments != 0
    x, do = random(B, T, D), random(B, T, D) * valid[..., None]
    clean = s.run(x, segments, do)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    assert not clean["dx"][~valid].any()
    for garbage in (1e30, np.inf, np.nan):
        dirty = s.run(np.where(valid[..., None], x, np.float32(garbage)), segments, do)
        for name in ("y", "dx"):
            same_bits(dirty[name][valid], clean[name][valid])
        assert not dirty["dx"][~valid].any()
        for name, gradient in clean["dparams"].items():
            close(dirty["dparams"][name], gradient, what=f"gradient of {name}, padding {garbage}")
    for b, length in enumerate(lengths):
        alone = s.plain(x[b : b + 1, valid[b]], rows=slice(b, b + 1))
        close(clean["y"][b, valid[b]], alone[0], what=f"row of {length} tokens alone")


def padding_on_the_right(variant):
    """M3, M4: what stands in padding moves nothing, forward or backward; a row as if alone."""
    _padding(variant, "right")


def padding_on_the_left(variant):
    """M3, M4: likewise, where causal rows are left without a key."""
    _padding(variant, "left")


def packed_documents(variant):
    """M7: as if each stood alone; another first document moves no bit of the second."""
    s = subject(variant)
    segments = np.array([[1] * 5 + [2] * 6 + [0] * 2] * B, np.int32)
    x, do = random(B, T, D), random(B, T, D)
    do[:, :5] = do[:, 11:] = 0
    whole = s.run(x, segments, do)
    for document in (slice(0, 5), slice(5, 11)):
        close(whole["y"][:, document], s.plain(x[:, document]), what=str(document))
    assert not whole["dx"][:, :5].any() and not whole["dx"][:, 11:].any()
    other = x.copy()
    other[:, :5] = random(B, 5, D)
    for positions in (positions_of(segments), positions_of(ones())):
        a, b = (s.run(y, segments, do, positions) for y in (x, other))
        same_bits(a["y"][:, 5:11], b["y"][:, 5:11])
        same_bits(a["dx"][:, 5:11], b["dx"][:, 5:11])


def packed_documents_in_a_decoder(variant):
    """M7: two equal documents have equal logits; padding tokens do not matter."""
    s = subject(variant)
    document = np.random.default_rng().integers(0, V, (1, 5))
    segments = np.array([[1] * 5 + [2] * 5 + [0] * 3], np.int32)
    results = []
    for padding in (1, 2):
        tokens = np.concatenate([document, document, np.full((1, 3), padding)], axis=1)
        results.append(s.logits(s.decoder[1], tokens, positions_of(segments), segments)[0])
    alone = s.logits(s.decoder[1], document, positions_of(ones(1, 5)))[0]
    for name, value in results[0].items():
        same_bits(value[:, :10], results[1][name][:, :10])
        for start in (0, 5):
            close(value[:, start : start + 5], alone[name], what=name)


# --- numbers --------------------------------------------------------------------------------------


def gradients_equal_float64(variant):
    """B1: float32 against the same layer in float64, and that against central differences."""
    s, x, do = subject(variant), random(B, T, D), random(B, T, D)
    segments = padded((T, 8, 3), T, "left")
    do = do * (segments != 0)[..., None]
    single = s.run(x, segments, do)
    with jax.enable_x64(True):
        wide = {name: p.astype(np.float64) for name, p in s.params.items()}
        x64, do64 = x.astype(np.float64), do.astype(np.float64)
        double = s.run(x64, segments, do64, params=wide)
        assert double["y"].dtype == np.float64
        for _ in range(2):
            direction = {name: random(*p.shape, dtype="float64") for name, p in wide.items()}
            dx = random(*x.shape, dtype="float64")
            ends = []
            for step in (1e-5, -1e-5):
                moved = {name: p + step * direction[name] for name, p in wide.items()}
                y = s.run(x64 + step * dx, segments, do64, params=moved)["y"]
                ends.append(np.sum(y * do64))
            slope = np.sum(double["dx"] * dx) + sum(
                np.sum(gradient * direction[name]) for name, gradient in double["dparams"].items()
            )
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(slope, rel=1e-5, abs=1e-5)
    jax.tree.map(close, single, double)


def odd_lengths(variant):
    """T1: each length as it is, and as the rest of a longer row is padding."""
    s, x = subject(variant), random(1, 129, D)
    arguments = jax.tree.map(lambda a: a[:1], s.arguments)
    call = _jit(
        lambda x, segments, positions: s.layer(x, positions, segments_BT=segments, **arguments)[0]
    )
    for length in (1, 2, 7, 127, 129):
        segments = padded([length], 129, "right")
        long = call(x, segments, positions_of(segments))
        short = s.plain(x[:, :length], rows=slice(0, 1))
        assert short.shape == (1, length, D)
        close(long[:, :length], short, what=f"length {length}")


def jit_vmap_and_checkpoint(variant):
    """The same numbers compiled or not, mapped over the batch, and recomputed in the backward."""
    s, x, do = subject(variant), random(B, T, D), random(B, T, D)
    compiled = s.run(x, ones(), do)
    close(s.plain(x), compiled["y"], what="eager, without segments")
    positions = positions_of(ones())
    layer = s.layer

    def one(x_TD, positions_T, arguments):
        arguments = jax.tree.map(lambda a: a[None], arguments)
        return layer(x_TD[None], positions_T[None], **arguments)[0][0]

    close(jax.vmap(one)(x, positions, s.arguments), compiled["y"], what="vmap")
    again = _jit(functools.partial(s.evaluate, wrap=jax.checkpoint))
    jax.tree.map(close, again(s.params, x, positions, ones(), do), compiled)


# --- caches ---------------------------------------------------------------------------------------


def decode_equals_training(variant):
    """C1, C2, W1, R1: one token at a time, past the window, is the whole at once."""
    s, x = subject(variant), random(B, T, D)
    y, _ = s.through_cache(x, [1], s.layer.init_cache(B, T))
    close(y, s.plain(x))


def long_prefill_equals_training(variant):
    """A prompt longer than any window, then the rest."""
    s, x = subject(variant), random(1, 129, D)
    call = functools.partial(s.call, rows=slice(0, 1))
    y, _ = s.through_cache(x, [127, 2], s.layer.init_cache(1, 129), call)
    close(y, s.plain(x, rows=slice(0, 1)))


def decoder_in_any_chunks(variant):
    """C1, R1: heads of every layer and logits, for chunks of 1, 3, about the window, and all."""
    s, w = subject(variant), variant.window
    tokens = np.random.default_rng().integers(0, V, (B, T))
    params = s.decoder[1]
    whole, _ = s.logits(params, tokens, positions_of(ones()))
    for sizes in ([1], [3], [w - 1], [w], [w + 1], [T], [5, 1]):
        caches, start, parts = s.init_caches(B, T), 0, []
        for size in _chunks(sizes, T):
            call = s.decoder_step if size == 1 else s.logits
            places = np.arange(start, start + size, dtype=np.int32)
            part, caches = call(
                params, tokens[:, start : start + size], np.tile(places, (B, 1)), None, caches
            )
            parts.append(part)
            start += size
        for name, value in whole.items():
            close(
                np.concatenate([part[name] for part in parts], axis=1), value,
                what=f"{name} in chunks of {sizes}",
            )  # fmt: skip


def _chunks(sizes, length):
    chunks = []
    while sum(chunks) < length:
        size = sizes[min(len(chunks), len(sizes) - 1)]
        chunks.append(min(size, length - sum(chunks)))
    return [size for size in chunks if size]


def bfloat16(variant):
    """N1: decoding is training to BFLOAT16, and both are near float32; activations stay narrow."""
    s, x = subject(variant, "bfloat16"), random(B, T, D).astype(jnp.bfloat16)
    whole = s.plain(x)
    assert whole.dtype == jnp.bfloat16
    y, _ = s.through_cache(x, [1], s.layer.init_cache(B, T))
    close(y, whole, BFLOAT16)
    close(whole, subject(variant).plain(x.astype(np.float32)), 2 * BFLOAT16)


def cache_bytes(variant):
    """Claim 23: bytes are what the formula says, and what the arrays take."""
    for dtype in ("float32", "bfloat16"):
        layer = subject(variant, dtype).layer
        for length in (1, 3, T, 200):
            cache = layer.init_cache(2, length)
            slots = variant.slots(length)
            scale = 1 if dtype == "float32" or not variant.constant_bytes else 2
            del scale
            expected = 2 * layer.cache_bytes_per_token() * slots
            constant = 2 * variant.constant_bytes * jnp.dtype(dtype).itemsize // 4
            assert cache.nbytes == expected + constant, (dtype, length)
            arrays = [a for a in jax.tree.leaves(cache) if jnp.issubdtype(a.dtype, jnp.floating)]
            assert cache.nbytes == sum(a.nbytes for a in arrays)


def cache_keeps_its_size(variant):
    """J1: types and shapes do not change from step to step."""
    s, x = subject(variant), random(B, 1, D)
    cache = s.layer.init_cache(B, T)
    _, after = s.step(s.params, x, np.zeros((B, 1), np.int32), None, cache)

    def types(tree):
        return jax.tree.map(lambda a: (a.shape, a.dtype, a.weak_type), tree)

    assert jax.tree.structure(cache) == jax.tree.structure(after)
    assert jax.tree.leaves(types(cache)) == jax.tree.leaves(types(after))


def second_prompt_in_a_used_cache(variant):
    """C1: bit for bit what a new cache gives."""
    s, x, second = subject(variant), random(B, T, D), random(B, 5, D)
    fresh = s.layer.init_cache(B, T)
    _, used = s.through_cache(x, [1], fresh)
    for call, sizes in ((s.step, [1]), (s.call, [3, 2])):
        expected, _ = s.through_cache(second, sizes, fresh, call)
        for cache in (used, used.reset()):
            same_bits(s.through_cache(second, sizes, cache, call)[0], expected)


def past_the_end_of_the_cache(variant):
    """C4: refused before the step, unless memory is constant, and then nothing is special."""
    s, x = subject(variant), random(B, 5, D)
    cache = s.layer.init_cache(B, 4)
    if variant.slots(5) < 5:
        assert s.layer.init_cache(B, 10_000).limit is None
    if cache.limit is None:
        return
    assert cache.limit == 4
    start = positions_of(ones(B, 5))
    _, cache = s.call(s.params, x[:, :3], start[:, :3], None, cache)
    with pytest.raises(ValueError, match="position 4 is past the end of a cache of length 4"):
        s.call(s.params, x[:, 3:], start[:, 3:], None, cache)
    _, cache = s.call(s.params, x[:, 3:4], start[:, 3:4], None, cache)
    with pytest.raises(ValueError, match="position 4 is past the end of a cache of length 4"):
        s.call(s.params, x[:, 4:], start[:, 4:], None, cache)
    # Padding takes no room.
    s.call(s.params, x[:, 3:], start[:, 3:], padded([1] * B, 2, "right"), cache)


def _ragged(variant, side):
    s, lengths, more = subject(variant), np.array([T - 4, 5, 1]), 4
    segments = padded(lengths, T - 4, side)
    rows = [random(1, n + more, D) for n in lengths]
    x = np.full((B, T - 4, D), np.nan, np.float32)
    for b, row in enumerate(rows):
        x[b, segments[b] != 0] = row[0, : lengths[b]]
    cache = s.layer.init_cache(B, T)
    # In two chunks, so that the second may hold nothing of a row, or the first.
    parts, positions = [], positions_of(segments)
    for part in (slice(0, 6), slice(6, T - 4)):
        y, cache = s.call(s.params, x[:, part], positions[:, part], segments[:, part], cache)
        parts.append(y)
    prompts = np.concatenate(parts, axis=1)
    steps = []
    for step in range(more):
        new = np.stack([row[0, lengths[b] + step] for b, row in enumerate(rows)])[:, None]
        y, cache = s.step(s.params, new, (lengths + step)[:, None].astype(np.int32), None, cache)
        steps.append(y)
    decoded = np.concatenate(steps, axis=1)
    for b, row in enumerate(rows):
        alone = s.plain(row, rows=slice(b, b + 1))[0]
        close(prompts[b, segments[b] != 0], alone[: lengths[b]], what=f"prompt of row {b}")
        close(decoded[b], alone[lengths[b] :], what=f"decoded row {b}")


def ragged_batch_padded_on_the_left(variant):
    """R2: every row as if alone."""
    _ragged(variant, "left")


def ragged_batch_padded_on_the_right(variant):
    """R2: every row as if alone."""
    _ragged(variant, "right")


def generation(variant):
    """Greedy tokens are those that the whole sequence predicts one by one."""
    s = subject(variant)
    prompt = np.random.default_rng().integers(0, V, (2, 6))
    model = merge(*s.decoder)
    new, _ = generate(model, prompt, 5)
    tokens = np.concatenate([prompt, new], axis=1)
    logits = np.asarray(model(tokens)[0])[:, 5:-1]
    chosen = np.take_along_axis(logits, np.asarray(new)[..., None], axis=-1)[..., 0]
    # Of two logits that are equal to rounding either may be taken.
    np.testing.assert_allclose(chosen, logits.max(-1), rtol=0, atol=1e-4)


# --- seeing inside --------------------------------------------------------------------------------


def reading_changes_no_bit(variant):
    """In the training form and through a cache; and what was read has its shape."""
    s, x = subject(variant), random(B, T, D)
    for cache in (None, "new"):
        def call(probe, cache=cache):
            made = None if cache is None else s.layer.init_cache(B, T)
            return s.call(s.params, x, positions_of(ones()), None, made, probe=probe)[0]

        plain = call(None)
        same_bits(call(Probe()), plain)
        for name in ("head", "pattern"):
            probe = Probe(read=(name,))
            same_bits(call(probe), plain)
            assert probe.missing() == []
            assert probe.values[name].shape[:3] == ((B, T, N) if name == "head" else (B, N, T))


def pattern_rows_sum_to_one(variant):
    """Over the keys of the row's own document; a row without a key is 0."""
    s, x = subject(variant), random(B, T, D)
    segments = padded((T, 8, 3), T, "left")
    probe = Probe(read=("pattern",))
    s.call(s.params, x, positions_of(segments), segments, probe=probe)
    expected = np.broadcast_to((segments != 0)[:, None], (B, N, T))
    close(probe.values["pattern"].sum(-1), expected.astype(np.float32))


def padding_has_no_weight(variant):
    """Claim 10: exactly 0."""
    s, x = subject(variant), random(B, T, D)
    segments = padded((T, 8, 3), T, "left")
    probe = Probe(read=("pattern",))
    s.call(s.params, x, positions_of(segments), segments, probe=probe)
    pattern_BSNT = np.asarray(probe.values["pattern"]).transpose(0, 3, 1, 2)
    assert not pattern_BSNT[segments == 0].any()
    assert pattern_BSNT[segments == 1].any((1, 2)).all()


def replacing(variant):
    """The output is linear in the heads, and they in the pattern; a name may be both."""
    s, x = subject(variant), random(B, T, D)
    positions = positions_of(ones())

    def output(name, factor):
        probe = Probe(read=(name,), replace={name: lambda a: a * factor})
        y = s.call(s.params, x, positions, probe=probe)[0]
        return np.asarray(y), np.asarray(probe.values[name])

    for name in ("head", "pattern"):
        (zero, read), (one, again), (two, _) = (output(name, factor) for factor in (0, 1, 2))
        same_bits(read, again)
        close(one, s.plain(x), what=f"{name} replaced by itself")
        close(two - zero, 2 * (one - zero), what=f"{name} doubled")
        assert not np.isclose(one, zero).all(-1).any()


def names_that_do_not_exist(variant):
    s, x = subject(variant), random(1, 2, D)
    probe = Probe(read=("pattern", "patern"), replace={"haed": lambda a: a})
    s.plain(x, rows=slice(0, 1), probe=probe)
    assert probe.missing() == ["haed", "patern"]


CHECKS = (
    causality_by_gradient,
    causality_by_perturbation,
    causality_through_the_cache,
    causality_in_a_decoder,
    batch_rows_are_independent,
    padding_on_the_right,
    padding_on_the_left,
    packed_documents,
    packed_documents_in_a_decoder,
    gradients_equal_float64,
    odd_lengths,
    jit_vmap_and_checkpoint,
    decode_equals_training,
    long_prefill_equals_training,
    decoder_in_any_chunks,
    bfloat16,
    cache_bytes,
    cache_keeps_its_size,
    second_prompt_in_a_used_cache,
    past_the_end_of_the_cache,
    ragged_batch_padded_on_the_left,
    ragged_batch_padded_on_the_right,
    generation,
    reading_changes_no_bit,
    pattern_rows_sum_to_one,
    padding_has_no_weight,
    replacing,
    names_that_do_not_exist,
)
