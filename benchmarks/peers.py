"""The other side of ``benchmarks/torch_peer``: PyTorch in an interpreter of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

WITHOUT = "PyTorch not measured: --torch_python=PATH names an interpreter that has it"


class PeerError(RuntimeError):
    """The peer could not do what it was asked; says why in one line."""


class Torch:
    """A process that has torch.

    Attributes:
      version: of torch.
      threads: that torch computes with.
    """

    def __init__(self, python: str, process: subprocess.Popen, said: Path):
        self._python, self._process, self._said = python, process, said
        hello = self._answer()
        self.version, self.threads = hello["version"], hello["threads"]

    def __str__(self):
        return f"torch {self.version} on {self.threads} threads"

    def ask(self, **request) -> dict:
        """The answer to one request.

        Raises:
          PeerError: it could not be done, or the process has ended.
        """
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer()

    def seconds(self, name: str, what: str, calls: int = 1) -> float:
        """Of one call of a program that was prepared."""
        return self.ask(run=name, what=what, calls=calls)["seconds"]

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _ended(self) -> PeerError:
        self._process.wait()
        said = self._said.read_text().strip().splitlines()
        why = said[-1] if said else f"exit code {self._process.returncode}"
        return PeerError(f"--torch_python={self._python} does not run torch: {why}")


@contextlib.contextmanager
def torch_peer(python: str | None) -> Iterator[Torch | None]:
    """PyTorch in the interpreter ``python``; None where none is given.

    Raises:
      PeerError: no such interpreter, or one that has no torch.
    """
    if python is None:
        yield None
        return
    if shutil.which(python) is None:
        raise PeerError(f"--torch_python={python}: there is no such program")
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "stderr"
        with said.open("w") as errors:
            process = subprocess.Popen(
                [python, str(Path(__file__).with_name("torch_peer"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        try:
            yield Torch(python, process, said)
        finally:
            process.kill()
            process.communicate()
