"""Compiled programs are kept between processes, unless and where the user says otherwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Of a process of its own: what is switched on would stay on for the tests that follow.
CODE = """
import json, jax
from training.command import enable_compilation_cache
enable_compilation_cache()
place = jax.config.jax_compilation_cache_dir
print(json.dumps([place, jax.config.jax_persistent_cache_min_compile_time_secs]))
"""
PLACE, SECONDS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"


@pytest.mark.parametrize(
    ("chosen", "place", "seconds"),
    [
        ({}, "home/attention-lab/xla", 0.3),
        pytest.param({SECONDS: "1.0"}, "home/attention-lab/xla", 1.0, marks=pytest.mark.broad),
        ({PLACE: "elsewhere", SECONDS: "0"}, "elsewhere", 0.0),
        pytest.param({PLACE: "elsewhere"}, "elsewhere", 0.3, marks=pytest.mark.broad),
    ],
)
def test_the_user_goes_before_the_defaults(chosen: dict[str, str], place: str, seconds: float):
    environment = {n: v for n, v in os.environ.items() if n not in (PLACE, SECONDS)}
    ran = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env=environment | {"XDG_CACHE_HOME": "home"} | chosen,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == [place, seconds]
