"""A sliding window: every position sees the last 16, its own included.

    python train.py --config=configs/sliding_window.py

About 60 seconds of training on 2 cores. Expect
copy accuracy 0.31, induction accuracy 0.27 (means of seeds 0, 1 and 2).

What stands farther back than depth x (window - 1) = 2 x 15 = 30 positions cannot be reached at
all; one layer alone reaches 15. With a window of 8 the reach is 14, shorter than every period:

    python train.py --config=configs/sliding_window.py --config.attention.window.window=8 \\
        --config.task.copy.share=0 --workdir=runs/window_8

Then the loss stays at log(60) = 4.09 nats and the accuracy at chance, 0.017.
"""

from configs import base


def get_config():
    """Every position sees the last 16, its own included."""
    config = base.get_config()
    config.model.pattern = ("window",)
    return config
