"""Induction heads on real text: two attention-only layers on the source of Python's library.

    python train.py --config=configs/text_induction.py

About 2 minutes on 2 cores.
"""

from configs import base


def get_config():
    """Byte pairs of 512 ids, 128 tokens, smeared keys; the loss on all positions."""
    config = base.get_config()
    config.model.mlp = "none"
    config.model.d_model = 128
    config.model.pattern = ("smeared",)
    config.task.vocab_size = 512
    config.task.length = 128
    config.task.copy.share = 0.0
    config.task.induction.share = 0.0
    config.task.text.share = 1.0
    config.train.loss_on = "all"
    config.train.batch_size = 32
    config.train.steps = 800
    config.optimizer.learning_rate = 4e-3
    config.optimizer.schedule = "constant"
    config.analysis.every = 50
    config.analysis.sequences = 128
    return config
