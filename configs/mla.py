"""Multi-head latent attention: keys and values are restored from a latent of 24 numbers.

    python train.py --config=configs/mla.py

About 60 seconds of training on 2 cores. Expect
copy accuracy 0.997, induction accuracy 0.994 (means of seeds 0, 1 and 2).
The cache holds 24 + 8 numbers per token and layer, those of multi-head attention 128.
"""

from configs import base


def get_config():
    """Keys and values are restored from a small latent."""
    config = base.get_config()
    config.model.pattern = ("mla",)
    return config
