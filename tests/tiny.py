"""A run so small that compiling and training it takes as little as it can."""

from __future__ import annotations

from configs import gqa
from training.resolve import resolve

TINY = {
    "model.num_layers": 1,
    "model.d_model": 8,
    "model.num_heads": 2,
    "model.mlp": "none",
    "attention.gqa.num_kv_heads": 1,
    "attention.gqa.dropout": 0.25,
    "task.vocab_size": 16,
    "task.length": 17,
    "train.steps": 10,
    "train.batch_size": 4,
    "train.log_every": 4,
    "train.eval_every": 5,
    "optimizer.warmup_steps": 3,
    "eval.batches": 2,
    "eval.batch_size": 4,
    "checkpoint.every": 5,
}


def _changed(changes: dict) -> dict:
    return TINY | {name.replace("__", "."): value for name, value in changes.items()}


def flags(**changes) -> list[str]:
    """TINY as flags; a keyword with ``__`` for each dot changes an option."""
    return [f"--config.{name}={value}" for name, value in _changed(changes).items()]


def options(get_config=gqa.get_config, **changes) -> dict:
    """All options of a config file with those of TINY, as plain dicts."""
    result = get_config()
    result.update_from_flattened_dict(_changed(changes))
    return result.to_dict()


def config(get_config=gqa.get_config, **changes) -> dict:
    """Those of them that a run reads, as the commands would have it."""
    return resolve(options(get_config, **changes))
