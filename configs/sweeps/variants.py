"""Accuracy, cache and time of every variant of a causal decoder, under equal conditions.

    python sweep.py --config=configs/sweeps/variants.py

Planned for 9 minutes on 2 cores, with --seeds=2 for 17: then every number has its spread. Rows 6,
24, 25, 27, 29 and 30 of the claims. Encoder-decoders have a task of their own and are not in it.
"""

from configs import base
from sweeps.axes import axis, case, chain
from sweeps.pictures import Scatter
from sweeps.study import Study
from sweeps.verdicts import AllAbove, Exceeds, Ratio

EXACT = ("mha", "gqa", "mqa", "mla", "prefix")


def get_config():
    """Two layers, 800 steps, past the change of those that change."""
    config = base.get_config()
    config.train.steps = 800
    config.task.copy.min_length = 8  # prefix-LM sees its first 8 positions whole
    return config


def get_sweep():
    """Every variant."""
    same = ("window", "streaming", "longformer", "linear", "smeared")
    copy = "copy/accuracy"
    return Study(
        question="What does each variant of attention cost, and what can a model do with it?",
        axes=chain(
            axis("model.pattern", *((name,) for name in (*EXACT, *same)), label=""),
            case("additive", {"model.pattern": ("additive",), "model.position": "learned"}),
            case("window+mha", {"model.pattern": ("window", "mha")}),
            case("hybrid", {"model.pattern": ("linear", "linear", "linear", "mha"),
                            "model.num_layers": 4}),
        ),
        metrics=(copy, "induction/accuracy"),
        columns=("parameters", "cache_bytes_per_token", "cache_bytes", "step_time_ms"),
        pictures=(Scatter("cache_bytes", copy, "copy_against_cache"),
                  Scatter("step_time_ms", copy, "copy_against_time", log=False)),
        verdicts=(
            Exceeds("6: additive scores copy no better than dot products", "mha", "additive", copy,
                    0.0),
            Ratio("24: MQA's cache is that of one of 4 heads", "mqa", "mha",
                  "cache_bytes_per_token", 1 / 4),
            Exceeds("24: GQA is near multi-head attention", "gqa", "mha", copy, -0.02),
            Ratio("25: MLA caches its latent and one rotary key: 24 + 8 numbers for 128", "mla",
                  "mha", "cache_bytes_per_token", 1 / 4),
            Exceeds("25: MLA is near multi-head attention", "mla", "mha", copy, -0.02),
            Exceeds("27: a window of 16 cannot copy what lies further back", "mha", "window", copy,
                    0.3),
            Exceeds("27: a global layer beside the window wins it back", "window+mha", "window",
                    copy, 0.3),
            Exceeds("29: a state of fixed size copies worse", "mha", "linear", copy, 0.2),
            Exceeds("29: a softmax layer among linear ones wins it back", "hybrid", "linear", copy,
                    0.2),
            AllAbove("30: where every position can look up every position, copying works", EXACT,
                     copy, 0.95),
        ),
    )  # fmt: skip
