"""Runs a sweep and reports it: ``python sweep.py --config=configs/sweeps/variants.py``."""

import dataclasses
import sys

from absl import flags
from ml_collections import config_flags

from sweeps import kinds
from sweeps.options import Options
from training import command

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Sweep file; --config.NAME=VALUE overrides an option in every run."
)
flags.DEFINE_string("workdir", None, "Sweep folder; default runs/sweeps/<name>.")
flags.DEFINE_bool("dry_run", False, "List the points with cost and time; run nothing.")
flags.DEFINE_string("only", None, "Only the points, runs or claims that match, such as 'mha* mla'.")
flags.DEFINE_integer("point", None, "Run one point, by its number in --dry_run.")
flags.DEFINE_string("seeds", None, "How many seeds, such as 8, or a list, such as 0,3,7.")
flags.DEFINE_string("equal", None, "Make points equal in parameters or cache_bytes.")
flags.DEFINE_string("equal_to", None, "The point that --equal takes as reference.")
flags.DEFINE_float("equal_within", 0.1, "Share by which a point may miss the reference.")
flags.DEFINE_bool("report_only", False, "Write the report of --workdir again.")
flags.DEFINE_string("executor", "local", "local, or ray for a cluster.")
flags.DEFINE_string("ray_address", "auto", "Of the cluster's head, or auto.")
flags.DEFINE_integer("workers", None, "Processes at once; default what fits.")
flags.DEFINE_integer("cores_per_run", 1, "Cores of each process.")
flags.DEFINE_float("gpus_per_run", 0.0, "GPUs that a run asks a cluster for.")
flags.DEFINE_float("memory_per_run", 0.0, "GiB that a run asks a cluster for.")
flags.DEFINE_integer("retries", 2, "How often a run whose process died is continued.")
flags.DEFINE_string("pack", "auto", "Runs of a point as one program: auto, on or off.")


def main() -> None:
    holders = {field.name: flags.FLAGS[field.name] for field in dataclasses.fields(Options)
               if field.name in flags.FLAGS}  # fmt: skip
    config = flags.FLAGS["config"]
    present = frozenset(name for name, flag in holders.items() if flag.present)
    options = Options(
        given=present,
        base=lambda: CONFIG.value.to_dict(),
        overrides=config_flags.get_override_values(config) if config.present else {},
        **{name: flag.value for name, flag in holders.items()},
    )
    sys.exit(kinds.run(CONFIG, options))


if __name__ == "__main__":
    command.run(main)
