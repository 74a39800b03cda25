"""Which runs are trained as one program, and whether that is faster here: measured, not assumed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sweeps.fairness import bill
from sweeps.plan import Run
from training.settings import Settings
from training.step import init_state, make_interval

MODES = ("auto", "on", "off")
# Runs in one program at most: their states are in memory together.
MOST = 16
# Steps that are timed, after one that is not.
_STEPS = 4


def group(runs: Sequence[Run], mode: str) -> list[tuple[Run, ...]]:
    """The runs, those together that differ only in seed and learning rate, unless mode is "off".

    Where each way is to be measured the lightest come first: where they lose, heavier ones do.
    """
    if mode == "off":
        return [(run,) for run in runs]
    by_program: dict[Settings, list[Run]] = {}
    for run in runs:
        by_program.setdefault(program_of(run.settings), []).append(run)
    packs = [
        tuple(same[i : i + MOST]) for same in by_program.values() for i in range(0, len(same), MOST)
    ]
    return sorted(packs, key=weight) if mode == "auto" else packs


def weight(pack: Sequence[Run]) -> tuple[int, int]:
    """FLOPs of a step of one run, and its steps."""
    settings = pack[0].settings
    return bill(settings).flops_per_step, settings.train.steps


def program_of(settings: Settings) -> Settings:
    """The settings less what may differ within a pack."""
    optimizer = dataclasses.replace(settings.optimizer, learning_rate=1.0)
    return dataclasses.replace(settings, init_seed=0, train_seed=0, optimizer=optimizer)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured before a pack was trained, in seconds.

    Attributes:
      runs: how many.
      steps: of a run.
      flops: of a step of one run, as ``fairness.Bill`` counts them.
      at_once: how many of them could train at the same time, each in a process of its own.
      start: of a process, until it can compile.
      alone_compile, alone_step: of one run by itself.
      packed_compile, packed_step: of all as one program.
    """

    runs: int
    steps: int
    flops: int
    at_once: int
    start: float
    alone_compile: float
    alone_step: float
    packed_compile: float
    packed_step: float

    @property
    def alone(self) -> float:
        """Until all have trained by themselves; the first compiles, for the others it is cached."""
        rounds = -(-self.runs // self.at_once)
        return self.alone_compile + rounds * (self.start + self.steps * self.alone_step)

    @property
    def packed(self) -> float:
        """Until all have trained as one program."""
        return self.start + self.packed_compile + self.steps * self.packed_step

    @property
    def pays(self) -> bool:
        """Whether one program is faster."""
        return self.packed < self.alone

    def decides(self, runs: int, steps: int, flops: int) -> bool:
        """Whether a pack of ``runs``, not measured, is known to be slower since this one is.

        What a pack saves are starts of processes, one for each run; what it loses, it loses in
        every step, and more in longer ones.
        """
        loses = self.packed_step > -(-self.runs // self.at_once) * self.alone_step
        heavier = steps >= self.steps and flops >= self.flops
        return not self.pays and loses and heavier and runs <= self.runs

    @classmethod
    def of(cls, record: Mapping) -> Measured:
        """What ``record`` was made of."""
        return cls(**{field.name: record[field.name] for field in dataclasses.fields(cls)})

    def record(self) -> dict:
        """As JSON."""
        found = {"seconds_packed": self.packed, "seconds_alone": self.alone}
        return found | dataclasses.asdict(self)


def measure(runs: Sequence[Settings], at_once: int, start: float, packed: Callable) -> Measured:
    """Times both ways on this process's share of the machine.

    Args:
      runs: of the pack.
      at_once, start: as in ``Measured``.
      packed: the program of all, which is compiled by this and can be used afterwards.
    """
    states = tuple(init_state(run) for run in runs)
    alone = make_interval(runs[0])
    alone_compile, alone_step = time_steps(lambda s, until: alone(s, until)[0], states[0], runs[0])
    states = tuple(init_state(run) for run in runs)

    def take(states: tuple, until: int) -> tuple:
        untils = jnp.full(len(runs), until, jnp.int32)
        return tuple(state for state, _ in packed(states, untils))

    packed_compile, packed_step = time_steps(take, states, runs[0])
    return Measured(
        len(runs), runs[0].train.steps, bill(runs[0]).flops_per_step, at_once, start,
        alone_compile, alone_step, packed_compile, packed_step,
    )  # fmt: skip


def time_steps(take: Callable, state, settings: Settings) -> tuple[float, float]:
    """Seconds to compile with a first step, and of one further step, the fastest of several.

    Args:
      take: ``take(state, until) → state``, compiled when it is first called.
      state: at step 0.
      settings: of the run.
    """
    times = []
    for until in range(1, 1 + min(settings.train.steps, 1 + _STEPS)):
        begun = time.perf_counter()
        state = jax.block_until_ready(take(state, until))
        times.append(time.perf_counter() - begun)
    return times[0], float(np.min(times[1:] or times))
