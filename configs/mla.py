"""Multi-head latent attention."""

from configs import base


def get_config():
    """Keys and values are restored from a small latent."""
    config = base.get_config()
    config.model.pattern = ("mla",)
    return config
