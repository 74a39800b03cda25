"""What runs jobs: how a machine is divided, what a cluster is asked for, and what neither has."""

from __future__ import annotations

import re
import sys

import pytest

from sweeps import cluster, command, estimate, executor_flags, local
from sweeps.executor import Job, available_cores
from sweeps.plan import make_plan
from tests import tiny_sweep
from tests.tiny_sweep import options
from training.settings import OptionError


def test_what_a_machine_or_a_cluster_cannot_give_is_refused(monkeypatch):
    def resources(executor, **changes):
        return options(executor=executor, **changes)

    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    for wanted, said in (
        (resources("ray"), "needs Ray: pip install -r requirements-cluster.txt"),
        (resources("ray", workers=2), "--workers is for this machine"),
        (resources("local", gpus_per_run=1.0), "set --executor=ray"),
        (resources("local", workers=0), "--workers must be at least 1, got 0"),
        (resources("local", cores_per_run=0), "--cores_per_run must be at least 1 and at most"),
        (resources("slurm"), "local or ray, got 'slurm'"),
    ):
        with pytest.raises(OptionError, match=re.escape(said)):
            executor_flags.make(wanted)


def test_what_a_run_asks_of_a_cluster():
    """Rejected before Ray is asked; then counted by what the nodes have."""
    pytest.importorskip("ray")
    for changes, said in (
        ({"cores_per_run": 0}, "--cores_per_run must be at least 1, got 0"),
        ({"gpus_per_run": -1.0}, "--gpus_per_run must be at least 0, got -1.0"),
        ({"memory_per_run": -2.0}, "--memory_per_run must be at least 0, got -2.0"),
    ):
        with pytest.raises(OptionError, match=re.escape(said)):
            executor_flags.make(options(executor="ray", **changes))
    node = {"CPU": 8.0, "GPU": 1.0, "memory": 2.0**34}
    assert cluster._fits(node, {"CPU": 2, "GPU": 0.0, "memory": 0}) == 4
    assert cluster._fits(node, {"CPU": 2, "GPU": 0.5, "memory": 0}) == 2
    assert cluster._fits(node, {"CPU": 2, "GPU": 0.0, "memory": 2**33}) == 2
    assert cluster._fits({"CPU": 8.0}, {"CPU": 2, "GPU": 1.0, "memory": 0}) == 0


def test_gpus_are_those_that_the_user_may_use(monkeypatch):
    monkeypatch.setattr(local, "_accelerators", lambda: ("gpu", 2))
    for mine, names in (
        (None, ["0", "1"]),
        ("2,3", ["2", "3"]),
        ("MIG-a, MIG-b", ["MIG-a", "MIG-b"]),
    ):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if mine:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mine)
        shares = local.LocalExecutor()._shares
        assert [extra["CUDA_VISIBLE_DEVICES"] for extra, _ in shares] == names
    monkeypatch.setattr(local, "available_cores", lambda: list(range(8)))
    with pytest.raises(OptionError, match="--cores_per_run=4 divides the cores of a CPU"):
        local.LocalExecutor(cores_per_run=4)


def test_a_process_that_cannot_be_started_keeps_no_place(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    executor = local.LocalExecutor(workers=1)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            executor.start(Job("x", tmp_path / "x.json", tmp_path / "nosuch" / "x.txt"))
    assert executor._free == [0]


def test_this_machine_is_divided_among_its_processes(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(local, "available_cores", lambda: [0, 2, 3, 5, 7])
    assert local.LocalExecutor().slots == 5
    two = local.LocalExecutor(cores_per_run=2)
    assert two.slots == 2 and [cores for _, cores in two._shares] == [[0, 2], [3, 5]]
    with pytest.raises(OptionError, match="at most the 5 cores of this machine, got 8"):
        local.LocalExecutor(cores_per_run=8)
    assert local.LocalExecutor(workers=7).slots == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": -3}, "--workers must be at least 1, got -3"),
        ({"cores_per_run": 10**6}, "cores of this machine, got 1000000"),
        ({"executor": "ray", "workers": 2}, "--workers is for this machine"),
        ({"executor": "ray", "gpus_per_run": -1.0}, "--gpus_per_run must be at least 0"),
        ({"ray_address": "auto"}, "--ray_address is for --executor=ray"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(changes, said):
    """Before the plan is made, and without asking a cluster."""
    with pytest.raises(OptionError, match=re.escape(said)):
        command.main("tiny_sweep.py", tiny_sweep.get_sweep(), options(dry_run=True, **changes))


def test_an_estimate_is_of_as_many_runs_as_go_at_once(monkeypatch):
    monkeypatch.setattr(estimate, "available_cores", lambda: list(range(8)))
    plan = make_plan(tiny_sweep.get_sweep(), tiny_sweep.get_config().to_dict(), seeds=range(5))
    rate = 60.0, 0.0  # each of the ten runs takes a minute to compile
    whole = 10 * (1 + estimate._START / 60)
    for at_once, on in ((2, 2), (8, 8), (64, 8)):
        said = f"About {whole:.1f} core minutes, {whole / on:.1f} on {on} cores: "
        assert estimate.sentence(plan, rate, at_once).startswith(said)
    assert "as many at a time as the cluster has" in estimate.sentence(plan, rate, None)
    assert executor_flags.kind(options(cores_per_run=2)).at_once(options(cores_per_run=2)) == (
        len(available_cores()) // 2
    )
