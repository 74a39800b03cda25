"""One suite that every attention variant passes, alone as a layer and twice in a decoder.

A variant is registered with one line in the list of test_layers.py. What does not apply to it is
exempted there by the name of the check, with the reason; an exempted check must fail, so that no
exemption outlives its reason.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.probe import Probe
from models.generate import generate
from models.pure import merge
from tests.attending import same_bits
from tests.oracles import assert_close
from tests.subject import (
    B,
    D,
    N,
    T,
    V,
    Variant,
    chunks,
    ones,
    padded,
    positions_of,
    random,
    subject,
)

SPLIT = 7  # tokens before it may not know those from it on
# Two orders of the same bfloat16 sums: a rounding may fall either way, relative to the largest.
BFLOAT16 = 2e-2
# And beside float32, where no activation is rounded: of 1,500 inputs the worst of MLA was 3.2e-2,
# and one in a hundred above 2e-2.
ROUNDED = 4e-2


def cases(variants: list[Variant], always: set[str]) -> list:
    """Every check of every variant, as parameters of one test.

    Args:
      variants: all.
      always: names of those that every run checks; the others are marked ``broad``.
    """
    names = {check.__name__ for check in CHECKS}
    for variant in variants:
        unknown = set(variant.exempt) - names
        assert not unknown, f"{variant.name} is exempted from {unknown}, which are no checks"
    assert always <= {variant.name for variant in variants}
    return [
        pytest.param(
            check, variant, id=f"{variant.name}-{check.__name__}",
            marks=_marks(check, variant) + (() if variant.name in always else (pytest.mark.broad,)),
        )
        for variant in variants
        for check in CHECKS
    ]  # fmt: skip


def _marks(check, variant):
    if check.__name__ not in variant.exempt:
        return ()
    raises = (AssertionError, ValueError, NotImplementedError)
    reason = variant.exempt[check.__name__]
    return (pytest.mark.xfail(reason=reason, raises=raises, strict=True),)


def near(actual, expected, tolerance: float) -> None:
    """Elementwise within a share of the largest expected value."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    size = np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * size)


# --- who moves whom -------------------------------------------------------------------------------


def causality_by_gradient(variant):
    """Claim 8: outputs before a place have no gradient in tokens from there on."""
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
    """The same in a prompt that is prefilled at once, and in a chunk after it."""
    s, x = subject(variant), random(B, T, D)
    for sizes, place in (([T], SPLIT), ([3], 8)):
        other = np.concatenate([x[:, :place], random(B, T - place, D)], axis=1)
        before, after = (s.chunks(a, sizes, s.layer.init_cache(B, T))[0] for a in (x, other))
        same_bits(before[:, :place], after[:, :place])


def causality_in_a_decoder(variant):
    """By perturbation at every layer, and by the gradient in the embeddings of later tokens."""
    s, do = subject(variant), random(B, T, V)
    do[:, SPLIT:] = 0
    tokens = np.stack([np.random.default_rng().permutation(V)[:T]] * B)
    before, gradient_VD = s.run_decoder(tokens, do=do)
    moved = gradient_VD.any(-1)
    assert moved[tokens[0, :SPLIT]].all() and not moved[tokens[0, SPLIT:]].any()
    tokens[:, SPLIT:] = (tokens[:, SPLIT:] + 1) % V
    after, _ = s.run_decoder(tokens)
    for name, value in before.items():
        same_bits(value[:, :SPLIT], after[name][:, :SPLIT])
        assert not np.isclose(value[:, SPLIT:], after[name][:, SPLIT:]).all()


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
    s, lengths = subject(variant), (T, 7, 2)
    segments = padded(lengths, T, side)
    valid = segments != 0
    x, do = random(B, T, D), random(B, T, D) * valid[..., None]
    clean = s.run(x, segments, do)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    assert not clean["dx"][~valid].any()
    for b, length in ((1, 7), (2, 2)):
        alone = s.plain(x[b : b + 1, valid[b]], row=b)
        assert_close(clean["y"][b, valid[b]], alone[0], what=f"row of {length} tokens alone")
    for garbage in (1e30, np.inf, np.nan):
        dirty = s.run(np.where(valid[..., None], x, np.float32(garbage)), segments, do)
        for name in ("y", "dx"):
            same_bits(dirty[name][valid], clean[name][valid])
        assert not dirty["dx"][~valid].any()
        for name, gradient in clean["dparams"].items():
            what = f"gradient of {name}, padding {garbage}"
            assert_close(dirty["dparams"][name], gradient, what=what)


def padding_on_the_right(variant):
    """M3, M4: what stands in padding moves nothing, forward or backward; a row is as if alone."""
    _padding(variant, "right")


def padding_on_the_left(variant):
    """M3, M4: likewise, where causal rows are left without a key."""
    _padding(variant, "left")


def packed_documents(variant):
    """M7: as if each stood alone; another first document moves no bit of the second."""
    s = subject(variant)
    segments = np.array([[1] * 7 + [2] * 2 + [0] * 4] * B, np.int32)
    x, do = random(B, T, D), random(B, T, D)
    do[:, :7] = do[:, 9:] = 0
    whole = s.run(x, segments, do)
    for document in (slice(0, 7), slice(7, 9)):
        alone = s.plain(x[1:2, document], row=1)
        assert_close(whole["y"][1:2, document], alone, what=str(document))
    assert not whole["dx"][:, :7].any() and not whole["dx"][:, 9:].any()
    other = np.concatenate([random(B, 7, D), x[:, 7:]], axis=1)
    # Also where positions run on, which only makes the second document start later.
    for positions in (positions_of(segments), positions_of(ones())):
        a, b = (s.run(y, segments, do, positions) for y in (x, other))
        same_bits(a["y"][:, 7:9], b["y"][:, 7:9])
        same_bits(a["dx"][:, 7:9], b["dx"][:, 7:9])


def packed_documents_in_a_decoder(variant):
    """M7: two equal documents have equal logits; padding tokens do not matter."""
    s = subject(variant)
    document = np.random.default_rng().integers(0, V, (B, 5))
    segments = np.array([[1] * 5 + [2] * 5 + [0] * 3] * B, np.int32)
    tokens = np.concatenate([document, document, np.full((B, 3), 1)], axis=1)
    results = [s.run_decoder(tokens, segments)[0]]
    tokens[:, 10:] = 2
    results.append(s.run_decoder(tokens, segments)[0])
    alone = s.run_decoder(tokens, padded([5] * B, T, "right"))[0]
    for name, value in results[0].items():
        same_bits(value[:, :10], results[1][name][:, :10])
        for start in (0, 5):
            assert_close(value[:, start : start + 5], alone[name][:, :5], what=name)


# --- numbers --------------------------------------------------------------------------------------


def gradients_equal_float64(variant):
    """B1: float32 against float64, and that against central differences.

    The float64 run is mapped row by row and recomputed in the backward pass, so that vmap and
    checkpoint are seen to change nothing.
    """
    s, x, do = subject(variant), random(B, T, D), random(B, T, D)
    segments = padded((T, 7, 2), T, "left")
    do = do * (segments != 0)[..., None]
    single = s.run(x, segments, do)
    with jax.enable_x64(True):
        wide = {name: np.asarray(p, np.float64) for name, p in s.params.items()}
        x, do = x.astype(np.float64), do.astype(np.float64)
        double = s.run(x, segments, do, params=wide, how=s.mapped)
        assert double["y"].dtype == np.float64
        for _ in range(2):
            direction = {name: random(*p.shape, dtype="float64") for name, p in wide.items()}
            dx = random(*x.shape, dtype="float64")
            ends = []
            for step in (1e-5, -1e-5):
                moved = {name: p + step * direction[name] for name, p in wide.items()}
                y = s.run(x + step * dx, segments, do, params=moved, how=s.mapped)["y"]
                ends.append(np.sum(y * do))
            slope = np.sum(double["dx"] * dx) + sum(
                np.sum(gradient * direction[name]) for name, gradient in double["dparams"].items()
            )
            assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(slope, rel=1e-5, abs=1e-5)
    jax.tree.map(assert_close, single, double)


def odd_lengths(variant):
    """T1: each length as it is, and where the rest of a longer row is padding."""
    s, x = subject(variant), random(1, 129, D)
    arguments = jax.tree.map(lambda a: a[:1], s.arguments)
    for length in (1, 2, 7, 127, 129):
        segments = padded([length], 129, "right")
        positions = positions_of(segments)
        long, _ = s.compiled(s.params, x, positions, segments, None, arguments)
        short = s.plain(x[:, :length])
        assert short.shape == (1, length, D)
        assert_close(long[:, :length], short, what=f"length {length}")


def compiled_or_not(variant):
    s, x = subject(variant), random(1, 2, D)
    assert_close(s.plain(x, call=s.call), s.plain(x))


def bfloat16(variant):
    """N1: decoding is training, and so is float32 but for roundings; activations stay narrow."""
    s, x = subject(variant, "bfloat16"), jnp.asarray(random(B, T, D), jnp.bfloat16)
    whole, _ = s.compiled(s.params, x, positions_of(ones()), ones(), None, s.arguments)
    assert whole.dtype == jnp.bfloat16
    near(whole, subject(variant).run(np.asarray(x, np.float32), ones())["y"], ROUNDED)
    decoded, _ = s.chunks(x, [1], s.layer.init_cache(B, T))
    near(decoded, whole, BFLOAT16)


# --- caches ---------------------------------------------------------------------------------------


def token_by_token(variant):
    """C1, C2, W1, R1: one at a time, past the window, is the whole at once."""
    s, x = subject(variant), random(B, T, D)
    y, _ = s.chunks(x, [1], s.layer.init_cache(B, T))
    assert_close(y, s.run(x, ones())["y"])


def prefill_in_any_chunks(variant):
    """C1, C2: 3 tokens, one more and one less than the window, or all; and one by one after."""
    s, x, w = subject(variant), random(B, T, D), variant.window
    whole = s.run(x, ones())["y"]
    for sizes in {(3, 1), (w + 1,), (max(1, w - 1),), (T,)} - {(1,)}:
        y, _ = s.chunks(x, sizes, s.layer.init_cache(B, T))
        assert_close(y, whole, what=f"chunks of {sizes}")


def decoder_in_any_chunks(variant):
    """C1, R1: the heads of every layer and the logits, in chunks of 1 and of 3."""
    s = subject(variant)
    tokens = np.random.default_rng().integers(0, V, (B, T))
    whole, _ = s.run_decoder(tokens)
    graph, params = s.decoder
    for sizes in ([3, 3, 1], [1]):
        caches, start, parts = merge(graph, params).init_caches(B, T), 0, []
        for size in chunks(sizes, T):
            part = slice(start, start + size)
            out, caches = s.decode(
                params, tokens[:, part], positions_of(ones())[:, part], None, caches
            )
            parts.append(out)
            start += size
        for name, value in whole.items():
            decoded = np.concatenate([part[name] for part in parts], axis=1)
            assert_close(decoded, value, what=f"{name} in chunks of {sizes}")


def cache_bytes(variant):
    """Claim 23: bytes are what the formulas say, and what the arrays take."""
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        layer = subject(variant, dtype).layer
        for length in (1, 3, T, 200):
            cache = layer.init_cache(2, length)
            row = layer.cache_bytes_per_token() * variant.slots(length)
            constant = variant.constant_bytes * size // 4 + variant.wide_bytes
            assert cache.nbytes == 2 * (row + constant), (dtype, length)
            assert layer.cache_bytes(length) == row + constant
            arrays = [a for a in jax.tree.leaves(cache) if jnp.issubdtype(a.dtype, jnp.floating)]
            assert cache.nbytes == sum(a.nbytes for a in arrays)


def cache_keeps_its_types(variant):
    """J1: shapes, dtypes and structure are those of the next step."""
    s, x = subject(variant), random(B, 1, D)
    cache = s.layer.init_cache(B, T)
    zeros = np.zeros((B, 1), np.int32)
    _, after = s.compiled(s.params, x, zeros, ones(B, 1), cache, s.arguments)
    assert jax.tree.structure(cache) == jax.tree.structure(after)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype, old.weak_type) == (new.shape, new.dtype, new.weak_type)


def second_prompt_in_a_used_cache(variant):
    """C1: bit for bit what a new cache gives."""
    s, x, second = subject(variant), random(B, T, D), random(B, 4, D)
    fresh = s.layer.init_cache(B, T)
    _, used = s.chunks(x, [1], fresh)
    for sizes in ([1], [3, 1]):
        expected, _ = s.chunks(second, sizes, fresh)
        for cache in (used, used.reset()):
            same_bits(s.chunks(second, sizes, cache)[0], expected)


def past_the_end_of_the_cache(variant):
    """C4: refused before the step, in a layer and by generate; or there is no end."""
    s, x = subject(variant), random(1, 2, D)
    cache = s.layer.init_cache(1, 4)
    assert cache.limit in (4, None)
    if cache.limit is None:
        assert variant.slots(5) == variant.slots(4)
        return
    arguments = jax.tree.map(lambda a: a[:1], s.arguments)
    for start in (3, 4):
        positions = np.array([[start, start + 1]], np.int32)
        with pytest.raises(ValueError, match=f"position {start + 1} is past the end of a cache"):
            s.call(s.params, x, positions, None, cache, arguments)
    model = merge(*s.decoder)
    with pytest.raises(ValueError, match="5 positions do not fit a cache of length 4"):
        generate(model, np.zeros((1, 3), int), 3, caches=model.init_caches(1, 4))


def _ragged(variant, side):
    s, lengths, more, width = subject(variant), np.array([9, 5, 1]), 4, T - 4
    rows = random(B, T, D)
    expected = s.run(rows, padded(lengths + more, T, "right"))["y"]
    segments = padded(lengths, width, side)
    x = np.full((B, width, D), np.nan, np.float32)
    for b, length in enumerate(lengths):
        x[b, segments[b] != 0] = rows[b, :length]
    # In chunks, of which some hold nothing of a row.
    prompts, cache = s.chunks(x, [3], s.layer.init_cache(B, T), segments)
    for step in range(more):
        places = (lengths + step).astype(np.int32)
        new = np.take_along_axis(rows, places[:, None, None], axis=1)
        y, cache = s.compiled(s.params, new, places[:, None], ones(B, 1), cache, s.arguments)
        for b, place in enumerate(places):
            assert_close(y[b, 0], expected[b, place], what=f"row {b}, token {place}")
    for b, length in enumerate(lengths):
        got = prompts[b, segments[b] != 0]
        assert_close(got, expected[b, :length], what=f"prompt of row {b}")


def ragged_batch_padded_on_the_left(variant):
    """R2: every row as if alone."""
    _ragged(variant, "left")


def ragged_batch_padded_on_the_right(variant):
    """R2: every row as if alone."""
    _ragged(variant, "right")


# --- seeing inside --------------------------------------------------------------------------------


def reading_changes_no_bit(variant):
    """And what was read has its shape."""
    s, x = subject(variant), random(1, 2, D)
    plain = s.plain(x, call=s.call)
    same_bits(s.plain(x, call=s.call, probe=Probe()), plain)
    for name in ("head", "pattern"):
        probe = Probe(read=(name,))
        same_bits(s.plain(x, call=s.call, probe=probe), plain)
        assert probe.missing() == []
        assert probe.values[name].shape[:3] == ((1, 2, N) if name == "head" else (1, N, 2))


def _pattern_of_a_padded_row(variant):
    s, segments = subject(variant), padded([5], 7, "left")
    arguments = jax.tree.map(lambda a: a[:1], s.arguments)

    @jax.jit
    def read(x):
        probe = Probe(read=("pattern",))
        s.call(s.params, x, positions_of(segments), segments, None, arguments, probe=probe)
        return probe.values["pattern"]

    return np.asarray(read(random(1, 7, D)))[0]


def pattern_rows_sum_to_one(variant):
    """Over the keys of the row's own document; a row of padding is 0."""
    pattern_NTS = _pattern_of_a_padded_row(variant)
    assert (pattern_NTS >= 0).all()
    assert_close(pattern_NTS.sum(-1), np.tile([0.0] * 2 + [1.0] * 5, (N, 1)))


def padding_has_no_weight(variant):
    """Claim 10: exactly 0."""
    pattern_NTS = _pattern_of_a_padded_row(variant)
    assert not pattern_NTS[..., :2].any()
    assert pattern_NTS[..., 2:].any((0, 1)).all()


def replacing(variant):
    """The output is linear in the heads, and they in the pattern; a name may be read as well."""
    s, x = subject(variant), random(1, 2, D)

    def output(name, factor):
        probe = Probe(read=(name,), replace={name: lambda a: a * factor})
        return s.plain(x, call=s.call, probe=probe), np.asarray(probe.values[name])

    for name in ("head", "pattern"):
        (zero, read), (one, again), (two, _) = (output(name, factor) for factor in (0, 1, 2))
        same_bits(read, again)
        assert_close(one, s.plain(x), what=f"{name} replaced by itself")
        assert_close(two - zero, 2 * (one - zero), what=f"{name} doubled")
        assert not np.isclose(one, zero).all(-1).any()


def names_that_do_not_exist(variant):
    s, x = subject(variant), random(1, 2, D)
    probe = Probe(read=("pattern", "patern"), replace={"haed": lambda a: a})
    s.plain(x, call=s.call, probe=probe)
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
    compiled_or_not,
    bfloat16,
    token_by_token,
    prefill_in_any_chunks,
    decoder_in_any_chunks,
    cache_bytes,
    cache_keeps_its_types,
    second_prompt_in_a_used_cache,
    past_the_end_of_the_cache,
    ragged_batch_padded_on_the_left,
    ragged_batch_padded_on_the_right,
    reading_changes_no_bit,
    pattern_rows_sum_to_one,
    padding_has_no_weight,
    replacing,
    names_that_do_not_exist,
)
