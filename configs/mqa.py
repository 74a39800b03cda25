"""Multi-query attention."""

from configs import base


def get_config():
    """All query heads share one head of keys and values."""
    config = base.get_config()
    config.model.pattern = ("mqa",)
    return config
