"""Three layers of linear attention to one of softmax attention."""

from configs import base


def get_config():
    """The pattern is one option."""
    config = base.get_config()
    config.model.pattern = ("linear", "linear", "linear", "causal")
    config.model.num_layers = 4
    return config
