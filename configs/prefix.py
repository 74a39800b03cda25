"""Prefix-LM."""

from configs import base


def get_config():
    """The first 8 positions see each other in both directions."""
    config = base.get_config()
    config.model.pattern = ("prefix",)
    config.task.copy.min_length = 8
    return config
