"""What the benchmark of decoding makes of its times and bytes."""

import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache import KVCache, Slots
from attention.masks import Window
from benchmarks import decode


def test_a_filled_cache_holds_what_its_mask_keeps():
    slots = Slots.for_mask(Window(4), 32)
    cache = KVCache.create(1, slots, jnp.float32, k_BSKH=(2, 8), v_BSKE=(2, 8))
    held = np.asarray(decode.filled(cache, 10).position_BS)
    assert set(held[held >= 0].tolist()) == {6, 7, 8, 9}


def decoded(window: float = 0.0, linear: float = 0.0, mqa: float = 0.5, mqa_bytes: int = 100):
    seconds, cache_bytes = {}, {}
    for length in (256, 4096):
        for variant, factor, power, size in (
            ("mha", 2.0, 1.0, 800), ("gqa", 1.0, 1.0, 200), ("mqa", mqa, 1.0, mqa_bytes),
            ("window", 1.0, window, 0), ("linear", 1.0, linear, 0),
        ):  # fmt: skip
            seconds[variant, "ours", length] = [factor * 1e-6 * length**power] * 2
            cache_bytes[variant, length] = size * length or 512
    seconds["gqa", "PyTorch eager", 4096] = [1.5 * 4096e-6] * 2
    return decode.Measured(seconds, cache_bytes)


@pytest.mark.parametrize(
    ("measured", "wrong"),
    [
        (decoded(), set()),
        (decoded(window=0.5), {"27"}),
        (decoded(linear=0.5), {"28"}),
        (decoded(mqa=3.0), {"24"}),
        (decoded(mqa_bytes=200), {"24"}),
    ],
)
def test_rows_of_decoding(measured, wrong: set[str]):
    verdicts = {v.row: v.confirmed for v in decode.verdicts(measured)}
    assert verdicts.pop("25") is None
    assert {row for row, confirmed in verdicts.items() if not confirmed} == wrong
    goals = {goal.name: goal.reached for goal in decode.goals(measured)}
    assert goals["decoding beside PyTorch eager at 4,096"] == pytest.approx(1.5)
    assert goals["decoding beside PyTorch compiled at 4,096"] is None
    assert "| gqa, PyTorch eager | 4,096 | 6,144 (6,144–6,144) | 163 | 1.50" in decode.table(
        measured
    )


@pytest.mark.broad
def test_latent_cache_is_as_small_as_the_formula():
    seconds = {("mla", "ours", 64): [1.0], ("mha", "ours", 64): [1.0]}
    tokens = 64 + decode.NUM_TOKENS
    right = decode.Measured(seconds, {("mla", 64): 1280 * tokens, ("mha", 64): 8192 * tokens})
    wrong = decode.Measured(seconds, {("mla", 64): 1281 * tokens, ("mha", 64): 8192 * tokens})
    assert {v.row: v.confirmed for v in decode.verdicts(right)}["25"] is True
    assert {v.row: v.confirmed for v in decode.verdicts(wrong)}["25"] is False
