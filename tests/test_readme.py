"""The worked example of the README, followed to the letter in a copy of the project."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
ROOMS = ("attention", "models", "tasks", "training", "analysis", "configs", "tests")


def steps() -> list[tuple[str, str]]:
    """Each block of the section, and the file that it belongs to."""
    section = README.partition("## Adding a variant")[2].partition("\n## ")[0]
    return re.findall(r"`([a-z_/]+\.py)`:\n\n```(?:python)?\n(.*?)```", section, re.S)


def insert(path: Path, line: str, before: str) -> None:
    text = path.read_text()
    assert text.count(before) == 1 and line.count("\n") == 1
    path.write_text(text.replace(before, line + before))


@pytest.mark.slow
def test_the_worked_example_of_a_variant_works(tmp_path):
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / room, tmp_path / room, ignore=ignored)
    for name in ("train.py", "eval.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    files = dict(steps())
    assert sorted(files) == [
        "attention/__init__.py", "attention/far.py", "configs/far.py", "tests/variants.py"
    ]  # fmt: skip
    insert(tmp_path / "attention/__init__.py", files.pop("attention/__init__.py"), "    }.items()")
    insert(
        tmp_path / "tests/variants.py", files.pop("tests/variants.py"), "]  # fmt: skip\n\n\ndef"
    )
    for name, text in files.items():
        assert not (tmp_path / name).exists()
        (tmp_path / name).write_text(text)

    def run(*argv):
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    small = ("train.steps=2", "train.batch_size=2", "train.log_every=1", "eval.batches=1",
             "model.d_model=16", "task.length=16")  # fmt: skip
    shown = run("train.py", "--config=configs/far.py", *(f"--config.{option}" for option in small))
    assert "step 2/2" in shown
    chosen = "far and (causality or token_by_token or cache_bytes or a_config or flops)"
    shown = run(
        "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-k", chosen,
        "-m", "not interpreted and not slow",
        "tests/test_layers.py", "tests/test_configs.py", "tests/test_cost.py",
    )  # fmt: skip
    assert int(re.search(r"(\d+) passed", shown)[1]) >= 10
