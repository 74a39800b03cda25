"""Bidirectional attention."""

from configs import base


def get_config():
    """Masked-token training: two layers of neighbours, one that sees everything."""
    config = base.get_config()
    config.attention.previous = base.multi_head(variant="masked", mask_expression="Window(2)")
    config.attention.next = base.multi_head(variant="masked", mask_expression="Window(1, ahead=1)")
    config.model.pattern = ("previous", "next", "full")
    config.model.num_layers = 3
    config.train.objective = "masked_token"
    config.train.mask_rate = 0.15
    return config
