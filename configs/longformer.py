"""A sliding window and global tokens."""

from configs import base


def get_config():
    """A window of 16, and two global tokens."""
    config = base.get_config()
    config.model.pattern = ("longformer",)
    return config
