"""Encoder and decoder with cross-attention: writing a string, or its reverse.

    python train.py --config=configs/cross.py

About 2 minutes of training on 2 cores. Expect
copy accuracy 1.000 (source_copy), reverse accuracy 0.996 (source_reverse; means of seeds 0, 1, 2).
"""

from configs import base


def get_config():
    """Copying and reversing from one sequence to another."""
    config = base.get_config()
    config.model.pattern = ("causal",)
    config.train.objective = "sequence_to_sequence"
    config.train.steps = 2000
    config.task.length = 32
    config.task.copy.share = 0.0
    config.task.induction.share = 0.0
    config.task.source_copy.share = 0.5
    config.task.source_reverse.share = 0.5
    return config
