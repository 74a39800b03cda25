"""A sweep of four runs as small as tests.tiny, and folders as such sweeps leave them."""

from configs import gqa
from sweeps.axes import axis
from sweeps.study import Study
from sweeps.verdicts import Above, Ratio
from tests import tiny


def get_config():
    """The base of all runs."""
    config = gqa.get_config()
    config.update_from_flattened_dict(
        {name: value for name, value in tiny.TINY.items() if not name.startswith("attention")}
    )
    return config


def get_sweep():
    """Two points, two seeds."""
    return Study(
        question="does a sweep work?",
        axes=axis("model.pattern", ("gqa",), ("mqa",), label=""),
        seeds=(0, 1),
        metrics=("copy/accuracy", "induction/accuracy"),
        columns=("parameters", "cache_bytes_per_token", "step_time_ms"),
        verdicts=(
            Ratio("heads that share keys halve the cache", "mqa", "gqa",
                  "cache_bytes_per_token", 0.5),
            Above("ten steps are enough", "gqa", "copy/accuracy", 0.99),
        ),
    )  # fmt: skip
