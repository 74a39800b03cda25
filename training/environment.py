"""What a run ran on: recorded, since results depend on it."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "ml_collections")


def describe(implementations: dict[str, str], step: int) -> dict:
    """Versions, device, commit, command and the implementation of attention of every layer.

    Args:
      implementations: layer name → name of the implementation that runs.
      step: the step from which this session starts.
    """
    devices = jax.devices()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "started_at_step": step,
        "command": sys.argv,
        "attention_implementation": implementations,
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "cpu_count": os.cpu_count(),
        "matmul_precision": jax.config.jax_default_matmul_precision or "default",
        "git": git_commit(),
    }


def git_commit() -> dict[str, object]:
    """The commit of this checkout, and whether files differ from it; nulls outside of git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "modified": None}
