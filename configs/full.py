"""Bidirectional attention."""

from configs import base


def get_config():
    """Every position sees every position: masked-token training on the same tasks (BERT)."""
    config = base.get_config()
    config.model.pattern = ("full",)
    config.train.objective = "masked_token"
    config.train.mask_rate = 0.3
    return config
