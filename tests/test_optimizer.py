"""AdamW against float64 NumPy: schedule, clipping, and decay of matrices only."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from training.optimizer import OptimizerOptions, learning_rate, optimizer
from training.settings import settings
from training.step import state_shapes


def options(**changes):
    return OptimizerOptions(
        **{
            "learning_rate": 0.02,
            "schedule": "cosine",
            "warmup_steps": 3,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.1,
            "clip_norm": 1.0,
            **changes,
        }
    )


def rate_by_hand(options, steps, count):
    """Learning rate of the step that is taken after ``count`` others."""
    if count < options.warmup_steps:
        return options.learning_rate * (count + 1) / (options.warmup_steps + 1)
    if options.schedule == "constant":
        return options.learning_rate
    done = min(1, (count - options.warmup_steps) / max(1, steps - options.warmup_steps))
    return options.learning_rate * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


class AdamWByHand:
    """In float64; ``decayed`` are the names whose values shrink."""

    def __init__(self, options, steps, params, decayed):
        self.options, self.steps, self.decayed, self.count = options, steps, decayed, 0
        self.params = {name: np.array(value, np.float64) for name, value in params.items()}
        self.m = {name: 0 * value for name, value in self.params.items()}
        self.v = {name: 0 * value for name, value in self.params.items()}

    def step(self, gradients):
        o, rate = self.options, rate_by_hand(self.options, self.steps, self.count)
        gradients = {name: np.array(value, np.float64) for name, value in gradients.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        self.count += 1
        for name, g in gradients.items():
            g = g * min(1, o.clip_norm / norm)
            self.m[name] = o.beta1 * self.m[name] + (1 - o.beta1) * g
            self.v[name] = o.beta2 * self.v[name] + (1 - o.beta2) * g**2
            m = self.m[name] / (1 - o.beta1**self.count)
            v = self.v[name] / (1 - o.beta2**self.count)
            decay = o.weight_decay * self.params[name] if name in self.decayed else 0
            self.params[name] = self.params[name] - rate * (m / (np.sqrt(v) + 1e-8) + decay)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_steps_against_float64(schedule):
    rng = np.random.default_rng()
    shapes = {
        "blocks/0/w_q_DNH": (3, 2, 5),
        "w_head_DV": (4, 3),
        "norm/gain_D": (7,),
        "q_NH": (2, 3),
    }
    params = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    chosen = options(schedule=schedule)
    oracle = AdamWByHand(chosen, 6, params, {"blocks/0/w_q_DNH", "w_head_DV"})
    transformation = optimizer(chosen, 6)
    state = transformation.init(params)
    update = jax.jit(transformation.update)
    for size in (0.01, 3, 0.1, 10, 0.05, 1):  # below and above the clipping norm
        gradients = {
            name: jnp.asarray(rng.normal(size=s) * size, jnp.float32) for name, s in shapes.items()
        }
        updates, state = update(gradients, state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        oracle.step(gradients)
        for name, value in oracle.params.items():
            np.testing.assert_allclose(params[name], value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("steps", [2, 10, 1000])
@pytest.mark.parametrize(
    "changes",
    [{}, {"warmup_steps": 0}, {"schedule": "constant"}, {"warmup_steps": 50}],
    ids=["cosine", "no warm-up", "constant", "long warm-up"],
)
def test_learning_rate(changes, steps):
    chosen = options(**changes)
    rates = jax.jit(jax.vmap(learning_rate(chosen, steps)))(np.arange(steps + 1))
    expected = [rate_by_hand(chosen, steps, count) for count in range(steps + 1)]
    np.testing.assert_allclose(rates, expected, rtol=1e-4)
    assert rates.dtype == jnp.float32 and np.all(rates > 0)
    if changes == {}:
        assert math.isclose(float(rates[min(3, steps)]), max(expected), rel_tol=1e-5)


def test_of_a_whole_model_the_matrices_decay_and_nothing_else():
    groups = {f"attention.gqa.{name}": True for name in ("bias", "qk_norm", "learned_sink")}
    config = tiny.config(model__mlp="swiglu", model__position="learned", **groups)
    shapes = state_shapes(settings(config)).params
    params = {name: np.ones(leaf.shape, np.float32) for name, leaf in shapes.items()}
    transformation = optimizer(options(warmup_steps=0, schedule="constant"), 9)

    @jax.jit
    def update(params):
        zero = jax.tree.map(jnp.zeros_like, params)
        return transformation.update(zero, transformation.init(params), params)[0]

    updates = update(params)
    shrinking = {name for name, value in updates.items() if np.any(value)}
    assert all(np.allclose(updates[name], -0.02 * 0.1, rtol=1e-5) for name in shrinking)
    # Biases and gains of several heads are arrays of two axes too, but no matrices.
    kept = {name.rsplit("/", 1)[-1] for name in params.keys() - shrinking}
    assert {name for name in kept if name.startswith("w_")} == set()
    assert {"q_NH", "k_KH", "v_KH", "gain_D", "sink_N"} <= kept
    assert {"w_embed_VD", "w_position_TD", "w_head_DV"} <= shrinking
    assert all(params[name].ndim >= 2 for name in shrinking)
    assert all(params[name].ndim == 1 or "/biases/" in name for name in params.keys() - shrinking)
