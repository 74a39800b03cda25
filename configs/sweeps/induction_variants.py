"""Which variants of attention grow induction heads, and what can they copy?

    python sweep.py --config=configs/sweeps/induction_variants.py

With --pack=on about 45 minutes on 2 cores; docs/induction_variants.md has the table. Blocks of 16
to 32 symbols repeated, and strings copied, in 64 tokens; attention only, 16 sequences a step, 500
steps, the better of the learning rates .006 and .012. A hybrid needs two layers, so it has no row
of one. Rows 16, 24, 25, 27 and 29 of the claims.
"""

from configs import base
from sweeps.axes import axis, case, chain, product
from sweeps.emergence_measures import emergence
from sweeps.emergence_pictures import ByVariant
from sweeps.measures import AccuracyAtLengths
from sweeps.study import Study
from sweeps.verdicts import Above, AllAbove, Below, Exceeds

# Symbols copied: inside the lengths of training (1 to 31), and beyond them.
INSIDE, BEYOND = 24, 48
# Positions: of a window shorter than every period, and of one longer than all.
SHORT, LONG = 8, 40

VARIANTS = {
    "MHA": {"model.pattern": ("mha",)},
    "GQA": {"model.pattern": ("gqa",)},
    "MQA": {"model.pattern": ("mqa",)},
    "MLA": {"model.pattern": ("mla",)},
    "window=8": {"model.pattern": ("window",), "attention.window.window": SHORT},
    "window=40": {"model.pattern": ("window",), "attention.window.window": LONG},
    "Longformer": {
        "model.pattern": ("longformer",),
        "attention.longformer.window": SHORT,
        "attention.longformer.global_projections": True,
    },
    "streaming": {"model.pattern": ("streaming",), "attention.streaming.window": SHORT},
    "linear-elu": {"model.pattern": ("linear",)},
    "linear-taylor": {"model.pattern": ("linear",), "attention.linear.feature_map": "taylor"},
    # As many learned positions as the longest string copied takes, and the sequences of scores.
    "additive": {
        "model.pattern": ("additive",),
        "model.position": "learned",
        "model.max_length": 4 * 25 + 1,
    },
}
HYBRIDS = {
    "linear+MHA": {"model.pattern": ("linear", "mha")},
    "window+MHA": {"model.pattern": ("window", "mha"), "attention.window.window": SHORT},
}


def get_config():
    """Both tasks in equal parts, loss on the answers, few evaluations."""
    config = base.get_config()
    config.model.mlp = "none"
    config.train.steps = 500
    config.train.batch_size = 16
    config.train.log_every = 50
    config.train.eval_every = 250
    config.eval.batches = 4
    config.checkpoint.every = 500
    config.optimizer.schedule = "constant"
    config.analysis.every = 25
    return config


def smeared(changes):
    """The same with smeared keys in every layer."""
    groups = dict.fromkeys(changes["model.pattern"])
    return changes | {f"attention.{group}.smeared_keys": True for group in groups}


def ways(variants, *layers):
    """Every variant with so many layers, without smeared keys and with them."""
    return chain(
        *(
            product(case(name, change), axis("model.num_layers", *layers, label="layers"), way)
            for name, changes in variants.items()
            for change, way in ((changes, case("plain")), (smeared(changes), case("smeared")))
        )
    )


def get_sweep():
    """13 variants, each in up to four ways, two learning rates, three seeds."""
    induction, half = "induction/accuracy", "half_step"
    inside, beyond = (f"copy/accuracy@{length}" for length in (INSIDE, BEYOND))
    two, one = ",layers=2,plain", ",layers=1,plain"
    return Study(
        question="Which variants of attention grow induction heads?",
        axes=chain(ways(VARIANTS, 1, 2), ways(HYBRIDS, 2)),
        seeds=(0, 1, 2),
        learning_rates=(6e-3, 1.2e-2),
        metrics=(induction, inside, beyond),
        events=(half,),
        columns=("changed", "prefix_matching", "copying", "previous_token",
                 "cache_bytes_per_token", "step_time_ms"),
        measures=(emergence, AccuracyAtLengths("copy", (INSIDE, BEYOND))),
        pictures=(
            ByVariant((("changed", "share of seeds that change"), (half, "step of half-rise"),
                       ("prefix_matching", "prefix matching"), (induction, "induction accuracy"),
                       (inside, f"copying {INSIDE} symbols"),
                       (beyond, f"copying {BEYOND}, beyond training"))),
        ),
        verdicts=(
            AllAbove("16, 24, 25: two layers change whether keys are shared, latent or not",
                     tuple(name + two for name in ("MHA", "GQA", "MQA", "MLA")), "changed", 1.0),
            Below("16: one layer does not", "MHA" + one, "changed", 0.0),
            AllAbove("16: one layer with smeared keys does (Olsson et al.)",
                     tuple(f"{name},layers=1,smeared" for name in ("MHA", "GQA", "MQA", "MLA")),
                     "changed", 1.0),
            Above("27: a window longer than every period changes", "window=40" + two, "changed",
                  1.0),
            Below("27: a window shorter than every period never does", "window=8" + two, "changed",
                  0.0),
            Exceeds("27: a global layer over the short window wins it back", "window+MHA" + two,
                    "window=8" + two, induction, 0.3),
            Exceeds("29: linear attention copies worse than softmax", "MHA" + two,
                    "linear-elu" + two, inside, 0.2),
            Above("linear attention under one causal layer changes", "linear+MHA" + two,
                  "changed", 1.0),
        ),
    )  # fmt: skip
