"""Additive attention (Bahdanau)."""

from configs import base


def get_config():
    """A small network scores each pair; positions are learned."""
    config = base.get_config()
    config.model.pattern = ("additive",)
    config.model.position = "learned"
    return config
