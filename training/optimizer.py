"""AdamW with warm-up, a cosine or constant schedule, clipping, and decay on matrices only."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from models.pure import is_matrix


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Options of the optimizer.

    Attributes:
      learning_rate: the highest, reached after the warm-up.
      schedule: "cosine" (down to a tenth at the last step) or "constant".
      warmup_steps: steps of linear warm-up from 0.
      beta1, beta2: AdamW's decay rates of the two moments.
      weight_decay: of the matrices, as a rate times the learning rate.
      clip_norm: the gradient is scaled down to this global norm where it is larger.
    """

    learning_rate: float
    schedule: str
    warmup_steps: int
    beta1: float
    beta2: float
    weight_decay: float
    clip_norm: float

    def __post_init__(self):
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"optimizer.schedule must be one of {list(SCHEDULES)}, got {self.schedule!r}"
            )
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"optimizer.{name} must be above 0, got {getattr(self, name)}")
        for name in ("weight_decay", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"optimizer.{name} must not be negative, got {getattr(self, name)}"
                )
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"optimizer.{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )


def _constant(steps: int) -> optax.Schedule:
    del steps
    return optax.constant_schedule(1.0)


def _cosine(steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(1.0, max(steps, 1), alpha=0.1)


SCHEDULES = {"constant": _constant, "cosine": _cosine}


def learning_rate(
    options: OptimizerOptions, steps: int, highest: float | jax.Array | None = None
) -> optax.Schedule:
    """Learning rate of the step after ``count`` steps were taken; ``steps`` is their total.

    ``highest`` stands in for ``options.learning_rate``; it may be traced.
    """
    highest = options.learning_rate if highest is None else highest
    after = SCHEDULES[options.schedule](steps - options.warmup_steps)

    def schedule(count: jax.Array) -> jax.Array:
        warm = jnp.minimum((count + 1) / (options.warmup_steps + 1), 1)
        shape = after(jnp.maximum(count - options.warmup_steps, 0))
        return jnp.asarray(highest * warm * shape, jnp.float32)

    return schedule


def optimizer(
    options: OptimizerOptions, steps: int, highest: float | jax.Array | None = None
) -> optax.GradientTransformation:
    """The optax transformation for parameters by path; arguments as in ``learning_rate``."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip_norm),
        optax.adamw(
            learning_rate(options, steps, highest),
            b1=options.beta1,
            b2=options.beta2,
            weight_decay=options.weight_decay,
            mask=lambda params: {path: is_matrix(path) for path in params},
        ),
    )
