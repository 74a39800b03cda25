"""A sliding window of 16 and two global tokens, causal.

    python train.py --config=configs/longformer.py

About 60 seconds of training on 2 cores. Expect
copy accuracy 0.35, induction accuracy 0.26 (means of seeds 0, 1 and 2).

Where the global tokens are the first ones, the causal mask is that of streaming.py, and so are the
numbers; attention.longformer.global_projections=True gives them projections of their own.
The symmetric form for encoders is the variant longformer_encoder (see full.py).
"""

from configs import base


def get_config():
    """A window of 16, and two global tokens."""
    config = base.get_config()
    config.model.pattern = ("longformer",)
    return config
