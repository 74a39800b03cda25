"""Induction heads forming: two layers, attention only, watched while they are trained.

    python train.py --config=configs/induction.py

About 40 seconds on 2 cores. emergence.png shows the change.

Olsson et al. 2022 (arXiv 2209.11895), in small.
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
