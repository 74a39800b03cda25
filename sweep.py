"""Runs a sweep and reports it: ``python sweep.py --config=configs/sweeps/variants.py``."""

import sys

from absl import flags
from ml_collections import config_flags

from sweeps import command as sweeping
from training import command
from training.settings import OptionError

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Sweep file; --config.NAME=VALUE overrides an option in every run."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Sweep folder; default runs/sweeps/<name>.")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "List the points with cost and time; run nothing.")
ONLY = flags.DEFINE_string("only", None, "Run only the points or runs that match, such as 'mha*'.")
POINT = flags.DEFINE_integer("point", None, "Run one point, by its number in --dry_run.")
SEEDS = flags.DEFINE_string("seeds", None, "How many seeds, such as 8, or a list, such as 0,3,7.")
EQUAL = flags.DEFINE_string("equal", None, "Make points equal in parameters or cache_bytes.")
EQUAL_TO = flags.DEFINE_string("equal_to", None, "The point that --equal takes as reference.")
REPORT_ONLY = flags.DEFINE_bool("report_only", False, "Write the report of --workdir again.")
EXECUTOR = flags.DEFINE_string("executor", "local", "local, or ray for a cluster.")
RAY_ADDRESS = flags.DEFINE_string("ray_address", "auto", "Of the cluster's head, or auto.")
WORKERS = flags.DEFINE_integer("workers", None, "Processes at once; default what fits.")
CORES = flags.DEFINE_integer("cores_per_run", 1, "Cores of each process.")
GPUS = flags.DEFINE_float("gpus_per_run", 0.0, "GPUs that a run asks a cluster for.")
MEMORY = flags.DEFINE_float("memory_per_run", 0.0, "GiB that a run asks a cluster for.")
RETRIES = flags.DEFINE_integer("retries", 2, "How often a run whose process died is continued.")
PACK = flags.DEFINE_string("pack", "auto", "Runs of a point as one program: auto, on or off.")


def main() -> None:
    if REPORT_ONLY.value:
        if WORKDIR.value is None:
            raise OptionError("--report_only needs --workdir, a sweep folder")
        given = flags.FLAGS["config"].present
        path = config_flags.get_config_filename(flags.FLAGS["config"]) if given else None
        sys.exit(sweeping.report(WORKDIR.value, path))
    request = sweeping.read_request(CONFIG, SEEDS.value, EQUAL.value, EQUAL_TO.value)
    plan = sweeping.choose(request, ONLY.value, POINT.value)
    if DRY_RUN.value:
        sweeping.dry_run(request, plan)
        return
    workdir = f"runs/sweeps/{request.name}" if WORKDIR.value is None else WORKDIR.value
    resources = sweeping.Resources(
        EXECUTOR.value, RAY_ADDRESS.value, WORKERS.value, CORES.value, GPUS.value, MEMORY.value
    )
    sys.exit(
        sweeping.sweep(
            request, plan, workdir, resources, RETRIES.value, PACK.value, POINT.value is not None
        )
    )


if __name__ == "__main__":
    command.run(main)
