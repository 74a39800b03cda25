"""A sliding window and the first tokens: attention sinks."""

from configs import base


def get_config():
    """A window of 16, and the first two positions."""
    config = base.get_config()
    config.model.pattern = ("streaming",)
    return config
