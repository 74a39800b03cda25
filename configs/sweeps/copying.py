"""Copying beyond the lengths of training: trained on at most 32 symbols, tested to 256.

    python sweep.py --config=configs/sweeps/copying.py

Planned for 20 minutes on 2 cores. Jelassi et al. 2024, Repeat After Me, arXiv:2402.01032; row 29
of the claims.
"""

from configs import base
from sweeps.axes import case, chain
from sweeps.measures import AccuracyAtLengths
from sweeps.pictures import Series
from sweeps.study import Study
from sweeps.verdicts import Above, Below, Exceeds

# Keys that carry their predecessor find the symbol before by what it is, in one layer.
SMEARED = {"attention.mha.smeared_keys": True}
LENGTHS = (8, 16, 32, 48, 64, 128, 256)


def get_config():
    """Copying alone, strings of 1 to 32 symbols, 1,200 steps."""
    config = base.get_config()
    config.task.length = 65
    config.task.induction.share = 0.0
    config.train.steps = 1200
    return config


def get_sweep():
    """Three ways to tell positions, three kinds of memory, and a reason, with two seeds."""
    tokens = 2 * max(LENGTHS) + 1
    return Study(
        question="Who still copies strings longer than any in training?",
        axes=chain(
            case("rope"),
            case("none", {"model.position": "none"}),
            case("learned", {"model.position": "learned", "model.max_length": tokens}),
            case("window", {"model.pattern": ("window",)}),
            case("linear", {"model.pattern": ("linear",)}),
            case("hybrid", {"model.pattern": ("linear", "mha")}),
            case("smeared", SMEARED),
            case("smeared-none", SMEARED | {"model.position": "none"}),
        ),
        seeds=(0, 1),
        metrics=("copy/accuracy", *(f"copy/accuracy@{length}" for length in (32, 64, 256))),
        columns=("cache_bytes_per_token", "step_time_ms"),
        measures=(AccuracyAtLengths("copy", LENGTHS),),
        pictures=(Series("copy/accuracy@", "accuracy_by_length", trained=32, chance=1 / 60),
                  Series("copy/sequence_accuracy@", "whole_strings_by_length", trained=32)),
        verdicts=(
            Above("softmax attention copies inside the lengths of training", "rope",
                  "copy/accuracy@32", 0.95),
            Exceeds("29: a state of fixed size copies clearly worse, inside them too", "rope",
                    "linear", "copy/accuracy@32", 0.2),
            Exceeds("rotary positions decay slowly where a fixed state has fallen (Jelassi)",
                    "rope", "linear", "copy/accuracy@48", 0.2),
            Exceeds("reason: rotary lookups go by distance, and none beyond 33 was trained; the "
                    "same layers without positions can only look by content, and copy on",
                    "smeared-none", "smeared", "copy/accuracy@48", 0.2),
            Below("a fixed state is near chance at twice the length (Jelassi)", "linear",
                  "copy/accuracy@64", 0.1),
            Below("positions that were never trained tell nothing", "learned", "copy/accuracy@64",
                  0.1),
            Exceeds("29: a softmax layer among linear ones wins copying back", "hybrid", "linear",
                    "copy/accuracy@32", 0.2),
        ),
    )  # fmt: skip
