"""Smeared keys."""

from configs import base


def get_config():
    """One layer, whose keys are mixed with their predecessors."""
    config = base.get_config()
    config.model.pattern = ("smeared",)
    config.model.num_layers = 1
    config.task.vocab_size = 256
    return config
