"""A sweep on a real Ray cluster of this machine, one of whose nodes is killed in the middle."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from sweeps.folder import SweepFolder
from tests.test_sweeps import NAMES, start, sweep, timeless, tiny

try:
    import ray
except ImportError:
    ray = None


def test_a_missing_ray_and_a_missing_cluster_are_said(tmp_path):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    argv = tiny(tmp_path / "x", "--executor=ray", "--ray_address=127.0.0.1:1")
    if ray is None:
        said = "needs Ray: pip install -r requirements-cluster.txt"
    else:
        said = "--ray_address=127.0.0.1:1: no Ray cluster answers there"
    code, _, err = sweep(environment, *argv)
    assert code == 2 and said in err
    assert not (tmp_path / "x").exists()


RAY = [sys.executable, "-m", "ray.scripts.scripts"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Of the nodes, whose workers inherit it, and of the sweeps: equal programs, equal bits."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("xla")),
    }  # fmt: skip


def started(environment: dict[str, str], *argv: str) -> psutil.Process:
    """Starts a node of a cluster on this machine; the process that Ray has for it."""
    before = {process.pid for process in nodes()}
    done = subprocess.run(
        [*RAY, "start", "--num-cpus=1", "--node-ip-address=127.0.0.1", "--disable-usage-stats",
         "--object-store-memory=100000000", *argv],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (node,) = (process for process in nodes() if process.pid not in before)
    return node


def nodes() -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["name"]) if p.info["name"] == "raylet"]


@pytest.fixture(scope="module")
def cluster(environment):
    """Two nodes of one CPU each: the head's address, and the node that is not the head."""
    if ray is None:
        pytest.skip("Ray is not installed: pip install -r requirements-cluster.txt")
    port = 26379
    address = f"127.0.0.1:{port}"
    # A node's sockets lie in this folder. A socket's path may take 107 bytes, of which Ray's own
    # part takes 65, so that the folder that pytest has for a test is too deep.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        try:
            started(environment, "--head", f"--port={port}", "--include-dashboard=false",
                    f"--temp-dir={folder}")  # fmt: skip
            yield address, started(environment, f"--address={address}")
        finally:
            subprocess.run([*RAY, "stop", "--force"], capture_output=True, timeout=120)


def at_work_on(node: psutil.Process, names: list[str]) -> str | None:
    """The run that a node trains: of the process that a worker of the node watches over."""
    for process in node.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "sweeps.worker" in line:
                return next(name for name in names if name in line)
    return None


@pytest.mark.slow
def test_the_run_of_a_lost_node_goes_on_elsewhere_from_its_last_checkpoint(
    cluster, environment, tmp_path
):
    """A node is killed in the middle of a run; the results are those of an undisturbed sweep."""
    address, node = cluster
    names, longer = NAMES[:2], [
        "--only=gqa", "--pack=off", "--config.train.steps=3000", "--config.train.log_every=50",
        "--config.train.eval_every=1000", "--config.checkpoint.every=50",
    ]  # fmt: skip
    lost = SweepFolder(tmp_path / "lost")
    argv = ["--executor=ray", f"--ray_address={address}", *longer]
    driver = start(environment, *tiny(lost.path, *argv))

    def saved(run):
        return run is not None and any(
            path.name.isdecimal() and int(path.name) > 0
            for path in lost.run(run).checkpoints.glob("*")
        )

    deadline = time.monotonic() + 200
    while not saved(run := at_work_on(node, names)):
        assert time.monotonic() < deadline and driver.poll() is None, driver.communicate()
        time.sleep(0.02)
    node.kill()
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, (out, err)
    assert re.search(rf"again +{run}: the cluster lost it", out), out

    whole = SweepFolder(tmp_path / "whole")
    code, _, err = sweep(environment, *tiny(whole.path, *longer))
    assert code == 0, err
    for name in names:
        ours, theirs = lost.read_result(name), whole.read_result(name)
        assert timeless(ours) == timeless(theirs)
        resumed = name == run
        assert (ours["environment"]["started_at_step"] > 0) == resumed
        assert len(ours["environment"]["earlier_sessions"]) == resumed
