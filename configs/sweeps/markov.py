"""Markov chains learnt in context, against the exact Bayes lines of unigrams and bigrams.

    python sweep.py --config=configs/sweeps/markov.py

Planned for 5 minutes on 2 cores. Edelman et al. 2024, arXiv:2402.11004: k = 3 symbols, 100 tokens,
attention only, one head, width 16.
"""

from configs import base
from sweeps.axes import axis
from sweeps.measures import markov_lines
from sweeps.pictures import Levels
from sweeps.study import Study
from sweeps.verdicts import Above, Below


def get_config():
    """Three symbols, 2,000 steps at a constant rate, loss on every position."""
    config = base.get_config()
    config.model.mlp = "none"
    config.model.num_heads = 1
    config.model.d_model = 16
    config.task.vocab_size = 7
    config.task.length = 100
    config.task.copy.share = 0.0
    config.task.induction.share = 0.0
    config.task.markov.share = 1.0
    config.train.steps = 2000
    config.optimizer.schedule = "constant"
    return config


def get_sweep():
    """One layer and two, with three seeds."""
    return Study(
        question="Do two layers find the bigram statistics of a chain they have never seen?",
        axes=axis("model.num_layers", 1, 2, label="layers"),
        seeds=(0, 1, 2),
        metrics=("markov/loss",),
        columns=("markov/unigram_loss", "markov/bigram_loss", "markov/excess", "step_time_ms"),
        measures=(markov_lines,),
        pictures=(Levels("markov/loss", (("markov/uniform_loss", "uniform"),
                                         ("markov/unigram_loss", "unigram, Bayes"),
                                         ("markov/bigram_loss", "bigram, Bayes")), "bayes"),),
        verdicts=(
            Below("two layers come within 0.04 nats of the Bayes-optimal bigram line", "layers=2",
                  "markov/excess", 0.04),
            Above("one layer stays well above it", "layers=1", "markov/excess", 0.06),
        ),
    )  # fmt: skip
