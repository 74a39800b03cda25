"""Multi-query attention: all query heads share one head of keys and values.

    python train.py --config=configs/mqa.py

About 60 seconds of training on 2 cores. Expect
copy accuracy 0.998, induction accuracy 0.995.
"""

from configs import base


def get_config():
    """All query heads share one head of keys and values."""
    config = base.get_config()
    config.model.pattern = ("mqa",)
    return config
