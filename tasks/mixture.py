"""A mixture: every row's task is drawn by lot."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp

from tasks.batch import Batch
from tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Rows of several tasks in one batch, each row's task drawn independently by ``shares``.

    Independent draws keep the expected shares exact for every batch size. Accuracy and chance
    belong to the single tasks, so a mixture has neither: evaluate each of ``tasks``.

    Attributes:
      tasks: tasks of one vocabulary and one length.
      shares: one non-negative weight per task; they need not sum to 1.

    Raises:
      ValueError: no task, shares that are no shares, tasks that differ in vocabulary or length, or
        rows with a source and rows without one.
    """

    name: ClassVar[str] = "mixture"

    tasks: tuple[Task, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        # Lists come from configs; a static jit argument must hash.
        object.__setattr__(self, "tasks", tuple(self.tasks))
        object.__setattr__(self, "shares", tuple(self.shares))
        if len(self.tasks) != len(self.shares) or not self.tasks:
            raise ValueError(
                f"task.shares={self.shares} must hold one share for each of the "
                f"{len(self.tasks)} tasks, at least one"
            )
        for share in self.shares:
            if not isinstance(share, (int, float)) or not 0 <= share < math.inf:
                raise ValueError(
                    f"task.shares={self.shares} must be finite numbers that are not negative"
                )
        if not 0 < math.fsum(self.shares) < math.inf:
            raise ValueError(f"task.shares={self.shares} must have a positive, finite sum")
        for option in ("vocab_size", "length"):
            values = [getattr(task, option) for task in self.tasks]
            if len(set(values)) > 1:
                found = ", ".join(f"{task.name} has {getattr(task, option)}" for task in self.tasks)
                raise ValueError(f"task.{option} must be the same for all mixed tasks, but {found}")
        drawn = [task for task, share in zip(self.tasks, self.shares, strict=True) if share > 0]
        if len({task.has_source for task in drawn}) > 1:
            with_source = ", ".join(task.name for task in drawn if task.has_source)
            without = ", ".join(task.name for task in drawn if not task.has_source)
            raise ValueError(
                f"{with_source} cannot be mixed with {without}: the former have a source for an "
                "encoder, the latter have none; set the share of one kind to 0"
            )

    @property
    def vocab_size(self) -> int:
        return self.tasks[0].vocab_size

    @property
    def length(self) -> int:
        return self.tasks[0].length

    @property
    def first_answer(self) -> int:
        return min(task.first_answer for task in self.tasks)

    def at_length(self, length: int) -> Self:
        tasks = tuple(task.at_length(length) for task in self.tasks)
        return dataclasses.replace(self, tasks=tasks)

    def held_out(self) -> Self:
        """The mixture on what training never draws; a task that draws from its key alone stays."""
        tasks = (getattr(task, "held_out", lambda task=task: task)() for task in self.tasks)
        return dataclasses.replace(self, tasks=tuple(tasks))

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        return self.sample_with_source(key, batch_size)[0]

    def sample_with_source(self, key: jax.Array, batch_size: int) -> tuple[Batch, jax.Array]:
        """A batch, and for each row the index in ``tasks`` of the task it was drawn from."""
        lot_key, *task_keys = jax.random.split(key, 1 + len(self.tasks))
        # Tasks without a share are left out before rounding could give them a row.
        drawn = [index for index, share in enumerate(self.shares) if share > 0]
        total = math.fsum(self.shares)
        bounds = [upper / total for upper in itertools.accumulate(self.shares[i] for i in drawn)]
        lot_B1 = jax.random.uniform(lot_key, (batch_size, 1), jnp.float32)
        upper_1N = jnp.array(bounds[:-1], jnp.float32)[None, :]
        lot_B = jnp.sum(lot_B1 >= upper_1N, axis=1, dtype=jnp.int32)

        batch = self.tasks[drawn[0]].sample(task_keys[drawn[0]], batch_size)
        for place, index in enumerate(drawn[1:], start=1):
            other = self.tasks[index].sample(task_keys[index], batch_size)
            is_other_B1 = (lot_B == place)[:, None]
            batch = jax.tree.map(
                lambda mine, theirs, choice=is_other_B1: jnp.where(choice, theirs, mine),
                batch,
                other,
            )
        return batch, jnp.array(drawn, jnp.int32)[lot_B]

    def describe(self, seed: int = 0) -> str:
        total = math.fsum(self.shares)
        parts = zip(self.tasks, self.shares, strict=True)
        return "\n".join(f"{share / total:.0%} {task.describe(seed)}" for task, share in parts)
