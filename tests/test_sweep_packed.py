"""One program for many runs: the same steps as each by itself, whoever leaves and whenever."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sweeps.packed import Pack, PackFailed, make_packed_interval, train_together
from sweeps.packs import program_of
from tests import tiny
from training.settings import settings
from training.step import init_state, make_step

RUNS = [
    settings(tiny.config(seed=seed, optimizer__learning_rate=rate))
    for seed, rate in ((0, 1e-3), (1, 1e-3), (0, 1e-2))
]


@pytest.fixture(scope="module")
def packed():
    return make_packed_interval(RUNS)


@jax.jit
def one_step(state, seed, rate):
    return make_step(RUNS[0], seed, rate)(state)


@functools.cache
def alone(run, steps):
    """The state of a run that has taken its steps one by one, and what each has told."""
    state, told = start(run), []
    for _ in range(steps):
        state, numbers = one_step(
            state, jnp.uint32(run.train_seed), jnp.float32(run.optimizer.learning_rate)
        )
        told.append(numbers)
    return state, told


@functools.cache
def first(run):
    return init_state(run)


def start(run):
    """A state that may be donated."""
    return jax.tree.map(jnp.copy, first(run))


def same(ours, theirs):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
        (ours.params, ours.opt_state),
        (theirs.params, theirs.opt_state),
    )
    assert int(ours.step) == int(theirs.step)


def test_runs_that_differ_in_seed_and_learning_rate_share_a_program():
    assert len({program_of(run) for run in RUNS}) == 1
    other = settings(tiny.config(model__d_model=16))
    assert program_of(other) != program_of(RUNS[0])


def test_each_takes_its_own_steps_up_to_its_own_end(packed):
    """At different steps, as after a kill: runs 0 and 1 at step 0, run 2 at step 4."""
    third, _ = alone(RUNS[2], 4)
    states = (start(RUNS[0]), start(RUNS[1]), jax.tree.map(jnp.copy, third))
    found = packed(states, jnp.array([4, 3, 5]))
    for (state, history), run, begin, end in zip(found, RUNS, (0, 0, 4), (4, 3, 5), strict=True):
        expected, told = alone(run, end)
        same(state, expected)
        for name in ("loss", "gradient_norm"):
            taken = [float(numbers[name]) for numbers in told[begin:]]
            padded = [*taken, *[0] * (4 - len(taken))]
            np.testing.assert_allclose(history[name], padded, rtol=1e-4)
    assert np.count_nonzero(found[1][1]["loss"]) == 3
    assert packed._cache_size() == 1


def test_loops_meet_and_one_that_fails_does_not_stop_the_others(packed):
    ended = {}

    def loop(lane, programs, untils=(4, 5)):
        interval, evaluate = programs
        state = start(RUNS[lane])
        for until in untils:
            if lane == 1 and until == 5:
                raise ValueError("diverged")
            state, _ = interval(state, until)
        ended[lane] = state, evaluate(state.params)["copy"].ratios()

    loops = [functools.partial(loop, lane) for lane in range(3)]
    raised = train_together(loops, Pack(RUNS, packed))
    assert [str(error) for error in raised] == ["None", "diverged", "None"]
    for lane in (0, 2):
        expected, _ = alone(RUNS[lane], 5)
        same(ended[lane][0], expected)
        assert 0 <= ended[lane][1]["accuracy"] <= 1


def test_a_program_that_fails_ends_all_loops():
    def broken(states, untils):
        raise MemoryError("no room")

    loops = [lambda programs, run=run: programs[0](start(run), 4) for run in RUNS]
    raised = train_together(loops, Pack(RUNS, broken))
    assert len(raised) == 3
    for error in raised:
        assert isinstance(error, PackFailed)
        assert str(error) == "the packed program failed: no room"
