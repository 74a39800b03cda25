"""Induction heads on real text: two attention-only layers on the source of Python's library.

    python train.py --config=configs/text_induction.py

About 4 minutes of CPU time for its 500 steps, on 2 cores about 2 minutes; cutting the files into
tokens takes half a minute the first time. Expect a prefix-matching score of 0.61, half-way at step
273 (1.1 million tokens; 258 to 296 with three seeds), and an induction accuracy of 0.03 to 0.04 on
random blocks, of which training shows none (chance is 0.002). configs/sweeps/text.py puts
--config.model.pattern=mha beside it.

In small the second argument of Olsson et al. 2022 (arXiv 2209.11895): smeared keys bring the
change forward.
"""

from configs import base

# The loss of one token of text is mostly that token's; the paper averages over more text.
AROUND = 11


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
    config.analysis.around = AROUND
    return config
