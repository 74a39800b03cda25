"""The plain decoder: another name of mha."""

from configs import base


def get_config():
    """Every query head has keys and values of its own."""
    config = base.get_config()
    config.model.pattern = ("causal",)
    return config
