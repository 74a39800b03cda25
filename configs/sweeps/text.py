"""The same change on real text, and what smeared keys have to do with it.

    python sweep.py --config=configs/sweeps/text.py

Planned for 12 minutes on 2 cores. Two attention-only layers on the source of Python's standard
library, three seeds of each arm; the arm without smeared keys is trained as long. Rows 15 to 17 of
the claims. Olsson et al. 2022 (arXiv 2209.11895), arguments 1 and 2, in small.
"""

from configs import text_induction
from sweeps.axes import case, chain
from sweeps.emergence_measures import LateLessEarly, emergence
from sweeps.emergence_pictures import EmergenceCurves
from sweeps.study import Study
from sweeps.verdicts import Above, Below, Exceeds


def get_config():
    """configs/text_induction.py."""
    return text_induction.get_config()


def get_sweep():
    """With smeared keys and without, three seeds."""
    smeared, plain, accuracy = "smeared", "plain", "induction/accuracy"
    return Study(
        question="Do induction heads form on real text, and sooner with smeared keys?",
        axes=chain(case(smeared), case(plain, {"model.pattern": ("mha",)})),
        seeds=(0, 1, 2),
        metrics=(accuracy, "text/accuracy", "text/loss"),
        columns=("changed", "prefix_matching", "previous_token", "late_less_early",
                 "step_time_ms"),
        events=("half_step", "width_share"),
        measures=(emergence, LateLessEarly(around=text_induction.AROUND)),
        pictures=(EmergenceCurves(((smeared, plain),), around=text_induction.AROUND),),
        verdicts=(
            Above("16, 17: with smeared keys the change comes, with every seed (the paper: it "
                  "comes earlier)", smeared, "changed", 1.0),
            Below("17: without them it has not come by then", plain, "changed", 0.0),
            Exceeds("17: what has changed learns more in context, by .1 nats or more (around "
                    "tokens 500 and 50)", plain, smeared, "late_less_early", 0.1),
            Exceeds("16: and continues random blocks, of which it has never seen one", smeared,
                    plain, accuracy, 0.03),
        ),
    )  # fmt: skip
