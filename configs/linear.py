"""Linear attention."""

from configs import base


def get_config():
    """A state of fixed size in place of the cache."""
    config = base.get_config()
    config.model.pattern = ("linear",)
    return config
