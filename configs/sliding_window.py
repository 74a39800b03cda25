"""A sliding window."""

from configs import base


def get_config():
    """Every position sees the last 16, its own included."""
    config = base.get_config()
    config.model.pattern = ("window",)
    return config
