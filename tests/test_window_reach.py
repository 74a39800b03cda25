"""The negative control of configs/sliding_window.py: what a window cannot reach is not learned."""

from __future__ import annotations

import math

import jax.numpy as jnp
import pytest

from configs import sliding_window
from training.resolve import resolve
from training.settings import settings
from training.step import init_state, make_evaluation, make_interval


@pytest.mark.slow
def test_periods_beyond_the_reach_stay_at_chance():
    """Two layers of a window of 8 reach 2 · 7 = 14 positions; the shortest period is 16."""
    config = sliding_window.get_config()
    config.attention.window.window = 8
    config.task.copy.share = 0.0
    found = settings(resolve(config.to_dict()))
    layer, induction = found.model.layers[0], found.evaluated[-1]
    assert found.model.num_layers * (layer.window - 1) < induction.shortest - 1
    state, interval = init_state(found), make_interval(found)
    for until in (50, 100, 150):
        state, history = interval(state, jnp.int32(until))
    counts = make_evaluation(found)(state.params)["induction"].ratios()
    assert counts["accuracy"] < 2.5 * induction.chance
    assert counts["loss"] == pytest.approx(math.log(60), abs=0.1)
    assert float(history["loss"].mean()) == pytest.approx(math.log(60), abs=0.1)
