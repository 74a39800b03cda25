"""Runs on a Ray cluster: Ray places them, and starts those of a lost node elsewhere.

The checkout, its environment and the sweep folder must be on a file system that all nodes share.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

from sweeps.executor import ROOT, Ended, Job, how_it_ended, start_process
from training.settings import OptionError

_PAUSE = 0.2
# Ray has a queue of its own, and is given all jobs.
_QUEUE = 10_000
# Seconds for the cluster's head to answer.
_REACH = 10.0


def check_numbers(cores: int, gpus: float, memory: float) -> None:
    """Raises OptionError where no cluster can give so many."""
    for name, value, least in (
        ("cores_per_run", cores, 1), ("gpus_per_run", gpus, 0), ("memory_per_run", memory, 0),
    ):  # fmt: skip
        if value < least:
            raise OptionError(f"--{name} must be at least {least}, got {value}")


class RayExecutor:
    """Jobs as Ray tasks, each of which watches over a process; see ``executor.Executor``.

    Args:
      address: of the cluster's head, as ``ray.init`` takes it; "auto" finds one on this machine.
      cores, gpus, memory: what a run asks for; memory in GiB. 0 asks for none.

    Raises:
      OptionError: a number that no cluster can give, Ray is not installed, or there is no cluster
        at that address.
    """

    def __init__(self, address: str, cores: int, gpus: float, memory: float):
        check_numbers(cores, gpus, memory)
        try:
            import ray
        except ImportError:
            raise OptionError(
                "--executor=ray needs Ray: pip install -r requirements-cluster.txt"
            ) from None
        self._ray = ray
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            _reach(address)
            ray.init(
                address=address, log_to_driver=False, logging_level="WARNING",
                runtime_env={"env_vars": {"PYTHONPATH": path}},
            )  # fmt: skip
        except (ray.exceptions.RayError, OSError, ValueError, RuntimeError) as error:
            raise OptionError(
                f"--ray_address={address}: no Ray cluster answers there ({error}); "
                "start one with `ray start --head`"
            ) from None
        asked = {"CPU": cores, "GPU": gpus, "memory": int(memory * 2**30)}
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self.parallel = sum(_fits(node, asked) for node in nodes)
        if not self.parallel:
            wanted = ", ".join(f"{value:g} {name}" for name, value in asked.items() if value)
            print(f"no node of the cluster has what a run asks for ({wanted}); waiting for one")
        self.slots = _QUEUE
        # The driver starts what is lost again, elsewhere and from its last checkpoint.
        self._train = ray.remote(
            num_cpus=cores, num_gpus=gpus, memory=asked["memory"] or None, max_retries=0,
        )(_train)  # fmt: skip
        self._cores, self._running = cores, {}

    def start(self, job: Job) -> None:
        self._running[self._train.remote(job, self._cores)] = job

    def wait(self, seconds: float) -> list[Ended]:
        if not self._running:
            return []
        done, _ = self._ray.wait(
            list(self._running), num_returns=len(self._running), timeout=seconds
        )
        return [self._collect(reference) for reference in done]

    def _collect(self, reference) -> Ended:
        job = self._running.pop(reference)
        try:
            return Ended(job, self._ray.get(reference))
        except self._ray.exceptions.RayTaskError as error:
            return Ended(job, f"a node could not start it: {_last_line(error.cause or error)}")
        except self._ray.exceptions.RayError as error:
            return Ended(job, f"the cluster lost it: {str(error).splitlines()[0]}")

    def stop(self) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running = {}
        self._ray.shutdown()


def _fits(node: Mapping[str, float], asked: Mapping[str, float]) -> int:
    """How many runs a node can train at once."""
    return int(min(node.get(name, 0) // value for name, value in asked.items() if value))


def _last_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _reach(address: str) -> None:
    """Raises OSError where nothing listens; Ray would try for minutes, and then end the process."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=_REACH).close()


def _train(job: Job, cores: int) -> str:
    """What a node does with a job: a process, as on one machine. Returns how it died, or ""."""
    process = start_process(job, {**os.environ, "PJRT_NPROC": str(cores)}, [])
    while process.poll() is None:
        time.sleep(_PAUSE)
    return how_it_ended(process)
