"""Commands that end before they compile anything, without the seconds that loading takes.

They run as a shell runs them, in a process of their own with its own flags and outputs, but that
process is forked from one that has loaded what they import.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["analysis.evaluation", "analysis.patterns", "analysis.watch", "sweeps.kinds", "training.loop"]
)


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code and what was printed to both outputs by ``python ARGV…``, in the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = _PROCESSES.Process(target=_script, args=(argv, str(out), str(err)))
        process.start()
        process.join(timeout=120)
        assert process.exitcode is not None, f"{argv} does not end"
        return process.exitcode, out.read_text(), err.read_text()


def _script(argv: tuple[str, ...], out: str, err: str) -> None:
    os.chdir(ROOT)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = list(argv)
    sys.path[0:0] = [str(ROOT)]
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
