"""The executors that a command may ask for, and what of its options each takes."""

from __future__ import annotations

from sweeps import cluster, local
from sweeps.executor import Executor, available_cores
from sweeps.options import Options
from training.settings import OptionError


class _Local:
    """This machine's processes; the functions take the options of the command."""

    @staticmethod
    def check(options: Options) -> None:
        if "ray_address" in options.given:
            raise OptionError("--ray_address is for --executor=ray; set it, or leave both out")
        if options.gpus_per_run or options.memory_per_run:
            raise OptionError(
                "--gpus_per_run and --memory_per_run are asked of a cluster; "
                "set --executor=ray, or leave them out"
            )
        local.check_numbers(options.workers, options.cores_per_run)

    @staticmethod
    def at_once(options: Options) -> int | None:
        return options.workers or len(available_cores()) // options.cores_per_run

    @staticmethod
    def make(options: Options) -> Executor:
        return local.LocalExecutor(options.workers, options.cores_per_run)


class _Ray:
    """A cluster, which is not asked before something is to run."""

    @staticmethod
    def check(options: Options) -> None:
        if options.workers is not None:
            raise OptionError("--workers is for this machine; a cluster fills itself")
        cluster.check_numbers(options.cores_per_run, options.gpus_per_run, options.memory_per_run)

    @staticmethod
    def at_once(options: Options) -> int | None:
        return None

    @staticmethod
    def make(options: Options) -> Executor:
        return cluster.RayExecutor(
            options.ray_address, options.cores_per_run, options.gpus_per_run, options.memory_per_run
        )


EXECUTORS = {"local": _Local, "ray": _Ray}


def kind(options: Options) -> type[_Local] | type[_Ray]:
    """What the options name: how it is checked, what it runs at once, and how it is made.

    Raises:
      OptionError: there is no such executor.
    """
    if options.executor not in EXECUTORS:
        names = " or ".join(EXECUTORS)
        raise OptionError(f"--executor must be {names}, got {options.executor!r}")
    return EXECUTORS[options.executor]


def make(options: Options) -> Executor:
    """The executor that the options ask for.

    Raises:
      OptionError: there is no such executor, or it cannot be had.
    """
    kind(options).check(options)
    return kind(options).make(options)
