"""Associative recall (Zoology's MQAR, reduced): accuracy against the bytes a model remembers in.

    python sweep.py --config=configs/sweeps/recall.py

Planned for 20 minutes on 2 cores. Arora et al. 2023, arXiv:2312.04927, Table of section 5 reduced
to 4 pairs, 32 tokens and 128 ids; every point at the best of a grid of learning rates.
"""

from configs import base
from sweeps.axes import axis, case, chain, product
from sweeps.measures import recall_plateau
from sweeps.pictures import Scatter
from sweeps.study import Study
from sweeps.verdicts import Above, Below, Exceeds


def get_config():
    """Two layers without an MLP, one head, recall alone."""
    config = base.get_config()
    config.model.mlp = "none"
    config.model.num_heads = 1
    config.task.vocab_size = 128
    config.task.length = 32
    config.task.copy.share = 0.0
    config.task.induction.share = 0.0
    config.task.recall.share = 1.0
    config.train.steps = 1500
    return config


def get_sweep():
    """Four ways to remember, three widths, and a reason; four learning rates."""
    recall = "recall/accuracy"
    return Study(
        question="How many bytes of state does recall take?",
        axes=chain(
            product(
                chain(
                    case("softmax"),
                    case("linear", {"model.pattern": ("linear",)}),
                    case("hybrid", {"model.pattern": ("linear", "mha")}),
                    case("smeared", {"model.pattern": ("smeared",), "model.num_layers": 1}),
                ),
                axis("model.d_model", 16, 32, 64),
            ),
            case("taylor-d_model=32", {"model.pattern": ("linear",), "model.d_model": 32,
                                       "attention.linear.feature_map": "taylor"}),
        ),
        learning_rates=(1e-3, 3e-3, 1e-2, 3e-2),
        metrics=(recall,),
        columns=("recall/plateau", "cache_bytes", "parameters", "step_time_ms"),
        measures=(recall_plateau,),
        pictures=(Scatter("cache_bytes", recall, "recall_against_state"),),
        verdicts=(
            Above("softmax attention recalls at width 64 (Zoology)", "softmax,d_model=64", recall,
                  0.95),
            Exceeds("a fixed state of the same width recalls less (Zoology, at 64)",
                    "softmax,d_model=64", "linear,d_model=64", recall, 0.1),
            Exceeds("already at a quarter of that width", "softmax,d_model=16",
                    "linear,d_model=16", recall, 0.1),
            Above("reason: what it lacks is the previous token, not room; one layer of that width "
                  "recalls where keys carry it", "smeared,d_model=16", recall, 0.95),
            Exceeds("a wider state holds more (Zoology)", "linear,d_model=64", "linear,d_model=16",
                    recall, 0.1),
            Exceeds("reason: it lacks no room but a sharper kernel", "taylor-d_model=32",
                    "linear,d_model=32", recall, 0.5),
            Above("one layer with smeared keys recalls (Okpekpe and Orvieto)",
                  "smeared,d_model=64", recall, 0.95),
            Below("a narrow linear state guesses among the four values of its row",
                  "linear,d_model=16", recall, 0.3),
        ),
    )  # fmt: skip
