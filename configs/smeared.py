"""Smeared keys: one layer does what takes two without them.

    python train.py --config=configs/smeared.py

About 40 seconds of training on 2 cores. Expect
copy accuracy 0.971, induction accuracy 0.956 (means of seeds 0, 1 and 2); chance is 0.004.

The vocabulary is larger than elsewhere since one layer matches a single token: with 60 symbols a
block of 24 holds most tokens' doubles, and induction stays at 0.90.
"""

from configs import base


def get_config():
    """One layer, whose keys are mixed with their predecessors."""
    config = base.get_config()
    config.model.pattern = ("smeared",)
    config.model.num_layers = 1
    config.task.vocab_size = 256
    return config
