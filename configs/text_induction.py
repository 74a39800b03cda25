"""Induction heads on real text: two attention-only layers on the source of Python's library.

    python train.py --config=configs/text_induction.py

About 130 seconds of training on one of 2 cores; cutting the files into tokens takes half a minute
the first time. Expect induction accuracy 0.070 on random blocks, of which training shows none
(chance is 0.002), a prefix-matching score of 0.63 and text accuracy 0.449 (seed 0). With
--config.model.pattern=mha the change has not come by then: 0.002, 0.02 and 0.403.

In small the second argument of Olsson et al. 2022 (arXiv 2209.11895): smeared keys bring the
change forward.
"""

from configs import base


def get_config():
    """Byte pairs of 512 ids, 512 tokens as in the paper, smeared keys; loss on all positions."""
    config = base.get_config()
    config.model.mlp = "none"
    config.model.d_model = 128
    config.model.pattern = ("smeared",)
    config.task.vocab_size = 512
    config.task.length = 512
    config.task.copy.share = 0.0
    config.task.induction.share = 0.0
    config.task.text.share = 1.0
    config.train.loss_on = "all"
    config.train.batch_size = 8
    config.train.steps = 500
    config.optimizer.learning_rate = 4e-3
    config.optimizer.schedule = "constant"
    config.analysis.every = 50
    config.analysis.sequences = 128
    return config
