"""Runs train.py and eval.py as a shell would, without paying for the imports each time.

A server process imports what the commands import and forks for every command; the child then runs
the file as ``__main__``. Nothing of JAX has started before the fork, so a child is what a new
process would be. Warnings are errors in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Ended:
    """What is left of a command: its exit code (−9 when killed) and what it wrote."""

    code: int
    out: str
    err: str


class Running:
    """A command under way."""

    def __init__(self, server: Server, pid: int, out: Path, err: Path):
        self._server, self.pid, self._out, self._err = server, pid, out, err

    def out(self) -> str:
        """What it has written so far."""
        return self._out.read_text()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def wait(self) -> Ended:
        code = self._server.receive()
        return Ended(code, self._out.read_text(), self._err.read_text())


class Server:
    """The process that forks; a context manager. One command at a time."""

    def __init__(self, folder: Path):
        self._folder, self._count = folder, 0
        self.cache = folder / "xla"
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(self.cache),
            "JAX_PLATFORMS": "cpu",
            "MPLCONFIGDIR": str(folder / "matplotlib"),
            "PYTHONPATH": str(ROOT),
            # What is compiled here runs for milliseconds.
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, cwd=ROOT,
        )  # fmt: skip

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def start(
        self, *argv: str, cwd: Path, terminal: int | None = None, max_file: int | None = None
    ) -> Running:
        """Starts ``python argv…`` in ``cwd``.

        Args:
          argv: file of this checkout, then its arguments.
          cwd: where to run it.
          terminal: file descriptor of a pseudo-terminal to write to, instead of to files.
          max_file: bytes that a file may hold, the way a full disk would end a write.
        """
        self._count += 1
        out, err = (self._folder / f"{self._count}.{name}" for name in ("out", "err"))
        out.touch(), err.touch()
        path = None if terminal is None else os.ttyname(terminal)
        command = {
            "argv": list(argv), "cwd": str(cwd), "max_file": max_file,
            "out": path or str(out), "err": path or str(err),
        }  # fmt: skip
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return Running(self, self.receive(), out, err)

    def run(self, *argv: str, cwd: Path, **options) -> Ended:
        """``start``, then wait."""
        return self.start(*argv, cwd=cwd, **options).wait()

    def receive(self) -> int:
        return int(self._process.stdout.readline())


def _serve() -> None:
    import warnings

    import training.loop
    import training.restore  # noqa: F401

    for line in sys.stdin:
        with warnings.catch_warnings(action="ignore"):  # JAX warns of forks: its threads would die
            pid = os.fork()
        if not pid:
            _become(**json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _become(argv: list[str], cwd: str, out: str, err: str, max_file: int | None) -> None:
    import runpy
    import traceback
    import warnings

    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY), stream)
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
    os.chdir(cwd)
    if max_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file, max_file))
    warnings.simplefilter("error")
    # How ml_collections loads a config file.
    warnings.filterwarnings("ignore", message=r"the load_module\(\) method", module="importlib|<")
    sys.argv = list(argv)
    code = 0
    try:
        runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    # As at the end of a process: threads that are not daemons are waited for.
    with contextlib.suppress(BaseException):
        import threading

        threading._shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
