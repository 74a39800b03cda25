"""Induction heads: do they appear at one moment, what comes with them, and what goes without them?

    python sweep.py --config=configs/sweeps/emergence.py

Planned for 12 minutes on 2 cores. Rows 5, 14 to 17 and 20 of the claims. Olsson et al. 2022
(arXiv 2209.11895) in small: a width of 64 for 768, and 2.5 million tokens for 10 billion, so that
the change ends half-way through training as theirs does. One layer without smeared keys is trained
twice as long.
"""

from configs import induction
from sweeps.axes import case, chain
from sweeps.emergence_measures import HeadsRemoved, Pruning, copied, emergence
from sweeps.emergence_pictures import EmergenceCurves, PruningCurves
from sweeps.study import Study
from sweeps.verdicts import Above, Below, Between, Exceeds, Outdoes

STEPS = 1200
# Steps between two looks at the heads: no step is known more exactly.
LOOK = 25
SMEARED = {"model.pattern": ("smeared",)}


def get_config():
    """configs/induction.py with fewer evaluations."""
    config = induction.get_config()
    config.train.steps = STEPS
    config.train.eval_every = 300
    config.eval.batches = 4
    config.checkpoint.every = 600
    config.analysis.every = LOOK
    return config


def get_sweep():
    """Eight models with five seeds, and a verdict on each claim."""
    two, one, accuracy = "layers=2", "layers=1", "induction/accuracy"
    smeared_two, smeared_one = "smeared-layers=2", "smeared-layers=1"
    whole = "the paper: more than .4 nats of in-context learning, nearly all by induction heads"
    michel = "Michel et al.: 20 to 40 % without loss"
    paper = "the paper: 2.5 to 5 of 10 billion tokens"
    return Study(
        question="When do induction heads form, what comes with them, and what goes without them?",
        axes=chain(
            case(two),
            case(one, {"model.num_layers": 1, "train.steps": 2 * STEPS}),
            case(smeared_two, SMEARED),
            case(smeared_one, SMEARED | {"model.num_layers": 1}),
            case("heads=8", {"model.num_heads": 8}),
            case("heads=1", {"model.num_heads": 1}),
            case("scale=1", {"attention.mha.scale": 1.0}),
            case("heads=1-scale=1", {"model.num_heads": 1, "attention.mha.scale": 1.0}),
        ),
        seeds=(0, 1, 2, 3, 4),
        metrics=(accuracy, "prefix_matching"),
        columns=("changed", "copying", "previous_token", "in_context_learning", "step_time_ms"),
        events=("half_step", "width_share", "previous_lag", "previous_sum_lag", "learning_lag",
                "induction_heads", "copying_together", "copied_first"),
        measures=(emergence, copied, HeadsRemoved(), Pruning()),
        pictures=(
            EmergenceCurves(((two, one, smeared_two, smeared_one),
                             (two, "heads=1", "scale=1", "heads=1-scale=1"))),
            PruningCurves((two, "heads=8"), chance=1 / 60),
        ),
        verdicts=(
            Above("16, 17: two layers change, with every seed (the paper: all models of two and "
                  "more layers)", two, "changed", 1.0),
            Above("15: a head of two layers looks at the previous token", two, "previous_token",
                  0.3),
            Above("15: and another one at what followed the token before", two, "prefix_matching",
                  0.7),
            Exceeds("16: two layers complete A B … A by B, one layer does not", two, one, accuracy,
                    0.7),
            Below(f"17: they change abruptly, 10 to 90 % within a quarter of training ({paper})",
                  two, "width_share", 0.25),
            Below(f"with 8 heads of width 8 as abruptly ({paper})", "heads=8", "width_share", 0.25),
            Below("16: one layer never changes, not in twice the training (the paper: never)",
                  one, "changed", 0.0),
            Between("15, 16: previous-token heads of the layer below rise with prefix matching: "
                    f"two looks of {LOOK} steps before it at most, or one after it (the paper: "
                    "the circuit forms at once)", two, "previous_lag", -2 * LOOK, LOOK),
            Below("with 8 heads of width 8 too none rises after it (the paper: the circuit forms "
                  "at once)", "heads=8", "previous_lag", LOOK),
            Below("reason: there the heads of the layer share it, and their sum rises before",
                  "heads=8", "previous_sum_lag", 0.0),
            Above("15, 16: and their scores are ranked alike over steps", two,
                  "previous_correlation", 0.7),
            Above(f"17: in-context learning is half-way within the change ({paper}, both)", two,
                  "learning_inside", 1.0),
            Above("17: prefix matching and in-context learning are ranked alike over steps", two,
                  "learning_correlation", 0.7),
            Exceeds("17: two layers learn more in context than one (the paper: from less than .15 "
                    "nats to about .4)", one, two, "in_context_learning", 0.25),
            Above("16: with smeared keys one layer changes (the paper: it does)", smeared_one,
                  "changed", 1.0),
            Exceeds("16: with smeared keys two layers change earlier, by a look or more (the "
                    "paper: earlier)", two, smeared_two, "half_step", LOOK),
            Above("the strongest induction head raises what it attends to (the paper: induction "
                  "heads copy)", two, "copying", 0.5),
            Above("reason: alone it raises others with it; the induction heads together raise the "
                  "attended token most", two, "copied_first", 0.95),
            Below(f"17: without induction heads a fifth of it is left or less ({whole})", two,
                  "kept/induction_full", 0.2),
            Below("17: likewise with all patterns preserved (the same heads: no pattern depends on "
                  "those of the last layer)", two, "kept/induction_preserving", 0.2),
            Above("17: without as many other heads at random four fifths are left (the paper: "
                  "other heads do not matter)", two, "kept/random_full", 0.8),
            Above("reason 17: the induction heads need them to know where to look; with all "
                  "patterns preserved four fifths are left", two, "kept/random_preserving", 0.8),
            Above("17: of 8 heads, fully, where none of those at random has half the "
                  "previous-token score of the best", "heads=8", "kept/idle_full", 0.8),
            Above(f"20: a fifth of 2 × 4 heads can go, least important first, at .02 of accuracy "
                  f"({michel})", two, "pruned/importance_free", 0.2),
            Above(f"20: likewise of 2 × 8 heads ({michel})", "heads=8", "pruned/importance_free",
                  0.2),
            Above("reason 20: heads of width 8 share the work; a third of 16 are induction heads",
                  "heads=8", "induction_heads", 16 / 3),
            Outdoes("20: with a quarter of 2 × 4 heads gone that order is better than random ones "
                    "(Michel et al. give no figure)", two, "pruned/importance@25",
                    "pruned/random@25", 0.05),
            Outdoes("20: likewise of 2 × 8 heads", "heads=8", "pruned/importance@25",
                    "pruned/random@25", 0.05),
            Exceeds("14: four softmaxes of width 16 do better than one of 64 (the article gives no "
                    "figure)", two, "heads=1", accuracy, 0.01),
            Exceeds("5: scale 1 trains worse than 1/√16 (the article gives no figure)", two,
                    "scale=1", accuracy, 0.05),
            Exceeds("5: scale 1 trains worse than 1/√64 (the article's d_k; no figure)", "heads=1",
                    "heads=1-scale=1", accuracy, 0.05),
        ),
    )  # fmt: skip
