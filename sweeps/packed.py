"""Runs that differ only in seed or learning rate, trained as one program.

Every run keeps its own loop (``training.loop.train``, in a thread), and with it its folder, its
lines and its checkpoints. Where a loop would take an interval of steps it waits until all others
are there; then ``vmap`` over the whole training step takes the steps of all at once. A run that
has diverged or ended leaves, and the others go on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from training.settings import Settings
from training.state import TrainState
from training.step import make_evaluation, make_step


def make_packed_interval(runs: Sequence[Settings]):
    """``packed(states, untils) → ((state, history), …)``: ``make_interval`` for all runs at once.

    Args:
      runs: equal but for their seeds and learning rates.

    The states are donated. A run may be at another step than the others: each takes its own steps
    up to its own ``until``, and waits where it has taken them.
    """
    first = runs[0]
    seed_R = jnp.asarray([run.train_seed for run in runs], jnp.uint32)
    rate_R = jnp.asarray([run.optimizer.learning_rate for run in runs], jnp.float32)

    def step(state: TrainState, seed: jax.Array, rate: jax.Array, until: jax.Array):
        new, told = make_step(first, seed, rate)(state)
        takes = state.step < until
        new = jax.tree.map(functools.partial(jnp.where, takes), new, state)
        return new, jax.tree.map(lambda x: jnp.where(takes, x, 0), told)

    def skip(states: TrainState):
        nothing_R = jnp.zeros(len(runs), jnp.float32)
        return states, {"loss": nothing_R, "gradient_norm": nothing_R}

    @functools.partial(jax.jit, donate_argnums=0)
    def packed(states: tuple[TrainState, ...], until_R: jax.Array):
        def body(stacked, _):
            return jax.lax.cond(
                (stacked.step < until_R).any(),
                lambda stacked: jax.vmap(step)(stacked, seed_R, rate_R, until_R),
                skip,
                stacked,
            )

        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        stacked, told = jax.lax.scan(body, stacked, length=first.train.log_every)
        told = jax.tree.map(lambda x: x.T, told)
        return tuple(jax.tree.map(lambda x, r=r: x[r], (stacked, told)) for r in range(len(runs)))

    return packed


def one_at_a_time(function: Callable) -> Callable:
    """The function for several threads, of which one may call it while the others wait."""
    lock = threading.Lock()

    @functools.wraps(function)
    def guarded(*args):
        with lock:
            return function(*args)

    return guarded


class PackFailed(RuntimeError):
    """The program of all runs of a pack has failed, which says nothing about any one of them."""


class Pack:
    """Where the loops of packed runs meet.

    Args:
      runs: equal but for their seeds and learning rates.
      packed: their program; None: made here.
    """

    def __init__(self, runs: Sequence[Settings], packed: Callable | None = None):
        self._packed = packed or make_packed_interval(runs)
        self._size = len(runs)
        self._meeting = threading.Condition()
        self._asked: dict[int, tuple[TrainState, int]] = {}
        self._got: dict[int, tuple] = {}
        self._left: set[int] = set()
        self._error: BaseException | None = None
        # Of all runs: one program, compiled once.
        self._evaluate = one_at_a_time(make_evaluation(runs[0]))

    def programs(self, lane: int) -> tuple[Callable, Callable]:
        """What one run's loop calls for its steps and its evaluations, from its own thread."""
        return self._interval(lane), self._evaluate

    def _interval(self, lane: int) -> Callable:
        def interval(state: TrainState, until: int):
            with self._meeting:
                self._asked[lane] = (state, until)
                self._take_steps()
                self._meeting.wait_for(lambda: lane in self._got or self._error is not None)
                if self._error is not None:
                    raise PackFailed(f"the packed program failed: {self._error}") from self._error
                return self._got.pop(lane)

        return interval

    def leave(self, lane: int) -> None:
        """A run has ended, in whatever way; the others no longer wait for it."""
        with self._meeting:
            self._left.add(lane)
            self._take_steps()

    def _take_steps(self) -> None:
        """Takes the steps of all runs, if all that are left have asked for them."""
        if not self._asked or len(self._asked) + len(self._left) < self._size:
            return
        some = next(iter(self._asked.values()))[0]
        # A run that has left keeps its place, with the steps of another that are not taken.
        states = [
            self._asked[lane][0] if lane in self._asked else jax.tree.map(jnp.copy, some)
            for lane in range(self._size)
        ]
        untils = [self._asked[lane][1] if lane in self._asked else 0 for lane in range(self._size)]
        try:
            found = self._packed(tuple(states), jnp.asarray(untils, jnp.int32))
            self._got = {lane: found[lane] for lane in self._asked}
        except BaseException as error:
            self._error = error
        self._asked = {}
        self._meeting.notify_all()


def train_together(loops: Sequence[Callable], pack: Pack) -> list[BaseException | None]:
    """Runs the loops of a pack in threads; returns what each raised.

    Args:
      loops: each called with its programs.
      pack: where they meet.
    """
    raised: list[BaseException | None] = [None] * len(loops)

    def run(lane: int) -> None:
        try:
            loops[lane](pack.programs(lane))
        except BaseException as error:
            raised[lane] = error
        finally:
            pack.leave(lane)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(len(loops))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised
