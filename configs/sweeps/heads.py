"""How many heads, how many of keys and values, and whether scores are scaled.

    python sweep.py --config=configs/sweeps/heads.py

Planned for 9 minutes on 2 cores. Rows 5, 13, 14 and 24 of the claims.
"""

from configs import base
from sweeps.axes import axis, case, chain
from sweeps.study import Study
from sweeps.verdicts import Exceeds, Ratio

# 4 heads of 4 numbers.
NARROW = {"model.head_width": 4}


def get_config():
    """Two layers of width 64, 800 steps."""
    config = base.get_config()
    config.train.steps = 800
    return config


def get_sweep():
    """1 to 8 heads at equal width, 1 to 4 of keys and values, scale on and off; two seeds."""
    copy, induction = "copy/accuracy", "induction/accuracy"
    return Study(
        question="What do heads, shared keys and the scale of the scores do?",
        axes=chain(
            axis("model.num_heads", 1, 2, 4, 8, label="heads"),
            axis("attention.mha.num_kv_heads", 1, 2, label="kv"),
            case("scale=1", {"attention.mha.scale": 1.0}),
            case("narrow", NARROW),
            case("narrow-kv=1", NARROW | {"attention.mha.num_kv_heads": 1}),
        ),
        seeds=(0, 1),
        metrics=(copy, induction),
        verdicts=(
            Ratio("13: one head of width d has as many parameters as 4 of d/4", "heads=1",
                  "heads=4", "parameters", 1.0),
            Ratio("13: and 8 of d/8", "heads=8", "heads=4", "parameters", 1.0),
            Exceeds("14: several softmaxes can look at several places at once", "heads=4",
                    "heads=1", induction, 0.01),
            Exceeds("5: without the scale training is worse", "heads=4", "scale=1", copy, 0.05),
            Ratio("24: one head of keys and values in 4 has a quarter of the cache", "kv=1",
                  "heads=4", "cache_bytes_per_token", 1 / 4),
            Exceeds("24: one in 4 loses some quality (the article gives no figure)", "heads=4",
                    "kv=1", copy, 0.005),
            Exceeds("reason 24: a key of 16 numbers tells 60 symbols apart, whoever shares it; "
                    "with 4 numbers sharing costs accuracy", "narrow", "narrow-kv=1", copy, 0.05),
            Exceeds("24: two in 4 are near all of them", "kv=2", "heads=4", copy, -0.02),
        ),
    )  # fmt: skip
