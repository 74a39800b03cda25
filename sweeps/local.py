"""A pool of processes on this machine, each limited to its share of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from sweeps.executor import Ended, Job, available_cores, how_it_ended, start_process
from training.settings import OptionError

_PAUSE = 0.05


class LocalExecutor:
    """As many processes as the machine has shares; see ``executor.Executor``.

    On a CPU a share is ``cores_per_run`` cores, on NVIDIA GPUs one GPU; a TPU is one share.

    Args:
      workers: processes at once; None: as many as there are shares.
      cores_per_run: of each process.

    Raises:
      OptionError: a number below 1, or more cores than there are.
    """

    def __init__(self, workers: int | None = None, cores_per_run: int = 1):
        check_numbers(workers, cores_per_run)
        platform, devices = _accelerators()
        cores = available_cores()
        if platform == "cpu":
            shares = [
                cores[i : i + cores_per_run]
                for i in range(0, len(cores) - cores_per_run + 1, cores_per_run)
            ]
            self._shares = [({"PJRT_NPROC": str(len(share))}, share) for share in shares]
        elif platform == "gpu":
            self._shares = [({"CUDA_VISIBLE_DEVICES": gpu}, []) for gpu in _gpus(devices)]
        else:
            self._shares = [({}, [])]
        if platform != "cpu" and cores_per_run != 1:
            raise OptionError(
                f"--cores_per_run={cores_per_run} divides the cores of a CPU, but the runs are "
                f"given {platform.upper()}s here; leave it out, or set JAX_PLATFORMS=cpu"
            )
        self.slots = len(self._shares) if workers is None else workers
        self.parallel = self.slots
        self._free = list(range(self.slots))
        self._running: dict[subprocess.Popen, tuple[Job, int]] = {}

    def start(self, job: Job) -> None:
        slot = self._free[0]
        # More workers than shares is the user's wish; they share.
        extra, cores = self._shares[slot % len(self._shares)]
        process = start_process(job, {**os.environ, **extra}, cores)
        self._free.remove(slot)
        self._running[process] = job, slot

    def wait(self, seconds: float) -> list[Ended]:
        deadline = time.monotonic() + seconds
        while True:
            ended = [process for process in self._running if process.poll() is not None]
            if ended or time.monotonic() >= deadline:
                return [self._collect(process) for process in ended]
            time.sleep(_PAUSE)

    def _collect(self, process: subprocess.Popen) -> Ended:
        job, slot = self._running.pop(process)
        process.stdin.close()
        self._free.append(slot)
        return Ended(job, how_it_ended(process))

    def stop(self) -> None:
        for process in self._running:
            process.kill()
        for process in list(self._running):
            process.wait()
            self._collect(process)


def check_numbers(workers: int | None, cores_per_run: int) -> None:
    """Raises OptionError where this machine cannot run so many processes of so many cores."""
    cores = len(available_cores())
    if not 1 <= cores_per_run <= cores:
        raise OptionError(
            f"--cores_per_run must be at least 1 and at most the {cores} cores of this machine, "
            f"got {cores_per_run}"
        )
    if workers is not None and workers < 1:
        raise OptionError(f"--workers must be at least 1, got {workers}")


def _gpus(count: int) -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in mine.split(",")] if mine else [str(i) for i in range(count)]


def _accelerators() -> tuple[str, int]:
    """The platform that jax chooses and how many devices it has; asked in another process.

    A process that has looked holds the device, and those of the runs would find it taken.
    """
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu", 1
    asked = subprocess.run(
        [sys.executable, "-c", "import jax; print(jax.default_backend(), jax.device_count())"],
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if asked.returncode:
        raise OptionError(f"jax finds no device to train on: {asked.stderr.strip()[-300:]}")
    platform, count = asked.stdout.split()[-2:]
    return platform, int(count)
