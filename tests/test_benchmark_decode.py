"""What the benchmark of decoding makes of its times and bytes."""

import jax.numpy as jnp
import numpy as np
import pytest

from attention.cache import KVCache, Slots
from attention.masks import Window
from benchmarks import decode, decode_model, decode_rows


def test_a_filled_cache_holds_what_its_mask_keeps():
    slots = Slots.for_mask(Window(4), 32)
    cache = KVCache.create(1, slots, jnp.float32, k_BSKH=(2, 8), v_BSKE=(2, 8))
    held = np.asarray(decode_model.filled(cache, 10).position_BS)
    assert set(held[held >= 0].tolist()) == {6, 7, 8, 9}


def decoded(
    window: float = 0.0,
    linear: float = 0.0,
    mqa: float = 0.5,
    mqa_bytes: int = 100,
    gqa: float = 1.0,
    reading: float = 1.0,
):
    seconds, cache_bytes = {}, {}
    for length in (256, 4096):
        for variant, factor, power, size in (
            ("mha", 2.0, reading, 800), ("gqa", gqa, 1.0, 200), ("mqa", mqa, 1.0, mqa_bytes),
            ("window", 1.0, window, 0), ("linear", 1.0, linear, 0),
        ):  # fmt: skip
            seconds[variant, "ours", length] = [factor * 1e-6 * length**power] * 2
            cache_bytes[variant, length] = size * length or 512
    seconds["gqa", "PyTorch eager", 4096] = [1.5 * 4096e-6] * 2
    peaks = {("gqa", "PyTorch eager", 4096): 3 * 2**19}
    errors = {("gqa", "PyTorch compiled", 4096): "for a reason"}
    return decode_rows.Measured(seconds, cache_bytes, peaks, errors)


@pytest.mark.parametrize(
    ("measured", "wrong"),
    [
        (decoded(), set()),
        # What gets cheaper costs no more at any length.
        (decoded(window=-0.5, linear=-0.5), set()),
        (decoded(window=0.5), {"27"}),
        (decoded(linear=0.5), {"28"}),
        (decoded(mqa=3.0), {"24"}),
        # Less to read, and nothing gained by it.
        (decoded(mqa=1.9, gqa=1.9), {"24"}),
        (decoded(mqa_bytes=200), {"24"}),
    ],
)
def test_rows_of_decoding(measured, wrong: set[str]):
    verdicts = {v.row: v.confirmed for v in decode_rows.verdicts(measured)}
    assert verdicts.pop("25") is None
    assert {row for row, confirmed in verdicts.items() if not confirmed} == wrong


def test_goals_and_table_of_decoding():
    measured = decoded()
    goals = {goal.name: goal.reached for goal in decode_rows.goals(measured)}
    assert goals["decoding beside PyTorch eager at 4,096"] == pytest.approx(1.5)
    assert goals["decoding beside PyTorch compiled at 4,096"] is None
    table = decode.table(measured)
    eager = (
        "| gqa, PyTorch eager | 4,096 | 6,144 (6,144–6,144) | 163 | 1.50 (1.50–1.50) |  | 1.50 |"
    )
    assert eager in table
    assert "| gqa, PyTorch compiled | 4,096 | not measured |" in table
    exponents = decode.exponents(measured)
    assert "| mha, ours | 1.00 |" in exponents and "| window, ours | 0.00 |" in exponents
    assert "PyTorch" not in exponents  # measured at one length


def test_only_what_must_be_read_may_cost():
    said = decode_rows.growth(decoded())
    assert said.startswith("CONFIRMED: ")
    assert "mha (reads all) × 16.00, length^1.00" in said
    assert "linear (does not) × 1.00, length^0.00" in said
    for wrong in (decoded(reading=0.0), decoded(window=0.5), decoded(linear=0.5)):
        assert decode_rows.growth(wrong).startswith("NOT CONFIRMED: ")
    one = {("mha", "ours", 256): [1.0]}
    said = decode_rows.growth(decode_rows.Measured(one, {}))
    assert said.startswith("NOT DECIDED: ") and "two different ones" in said


def test_all_lengths_take_turns(monkeypatch):
    """An exponent compares them, so a slow minute must be slow for all."""
    taken = []

    class Ours:
        cache_bytes, peak = 1, 2

        def __init__(self, run, length):
            self.length = length

        def seconds(self):
            taken.append(self.length)
            return 1.0

    monkeypatch.setattr(decode, "Ours", Ours)
    decode.measure(["window"], [256, 2048], 3, None)
    assert taken == [256, 2048, 2048, 256, 256, 2048]


@pytest.mark.broad
def test_latent_cache_is_as_small_as_the_formula():
    seconds = {("mla", "ours", 64): [1.0], ("mha", "ours", 64): [1.0]}
    tokens = 64 + decode_model.NUM_TOKENS
    right = decode_rows.Measured(seconds, {("mla", 64): 1280 * tokens, ("mha", 64): 8192 * tokens})
    wrong = decode_rows.Measured(seconds, {("mla", 64): 1281 * tokens, ("mha", 64): 8192 * tokens})
    assert {v.row: v.confirmed for v in decode_rows.verdicts(right)}["25"] is True
    assert {v.row: v.confirmed for v in decode_rows.verdicts(wrong)}["25"] is False
