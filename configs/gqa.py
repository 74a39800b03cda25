"""Grouped-query attention."""

from configs import base


def get_config():
    """Two query heads share one head of keys and values."""
    config = base.get_config()
    config.model.pattern = ("gqa",)
    return config
