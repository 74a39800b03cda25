"""A sweep on a real Ray cluster of this machine, with a worker killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from sweeps.folder import SweepFolder
from tests.test_sweeps import NAMES, ROOT, start, sweep, tiny

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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A head with two CPUs; its address."""
    if ray is None:
        pytest.skip("Ray is not installed: pip install -r requirements-cluster.txt")
    script = [sys.executable, "-m", "ray.scripts.scripts"]
    port = 26379
    temporary = tmp_path_factory.mktemp("ray")
    subprocess.run(
        [*script, "start", "--head", f"--port={port}", "--num-cpus=2",
         "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--disable-usage-stats",
         f"--temp-dir={temporary}"],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    yield f"127.0.0.1:{port}"
    subprocess.run([*script, "stop", "--force"], capture_output=True, timeout=120)


def trainers(path: Path) -> list[psutil.Process]:
    """Ray's own worker processes that are watching over a job of the sweep."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if "sweeps.worker" in line and any(str(path) in part for part in line):
                found.append(process.parent())
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_its_run_goes_on(cluster, tmp_path):
    path = tmp_path / "sweep"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla"),
    }  # fmt: skip
    argv = tiny(path, "--executor=ray", f"--ray_address={cluster}", "--pack=off")
    driver = start(environment, *argv)
    deadline = time.monotonic() + 200
    while not (watching := trainers(path)):
        assert time.monotonic() < deadline and driver.poll() is None, driver.communicate()
        time.sleep(0.02)
    killed = watching[0]
    killed.send_signal(signal.SIGKILL)
    out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, (out, err)
    assert not killed.is_running()
    folder = SweepFolder(path)
    assert all(folder.is_done(name) for name in NAMES)
    assert ROOT.exists() and (path / "report.html").exists()
