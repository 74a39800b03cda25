"""The other side of ``benchmarks/torch_peer``: PyTorch in an interpreter of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# PyTorch's workers look for more work for some milliseconds, on the cores that ours takes next.
REST_SECONDS = 0.02
WITHOUT = "no PyTorch: --torch_python=PATH names an interpreter that has it"


class PeerError(RuntimeError):
    """The peer could not do what it was asked; says why in one line."""


class Torch:
    """A process that has torch.

    Attributes:
      version: of torch.
      threads: that torch computes with.
    """

    def __init__(self, python: str, process: subprocess.Popen, said: Path):
        self._process, self._said = process, said
        # What is wrong before the first answer is the interpreter, later it is what was asked.
        self._fault = f"--torch_python={python} does not run torch"
        hello = self._answer()
        try:
            self.version, self.threads = hello["version"], hello["threads"]
        except KeyError:
            raise self._no_answer(hello) from None
        self._fault = "PyTorch stopped in the middle"

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
        """Of one call of a program that was prepared. Raises PeerError."""
        seconds = self.ask(run=name, what=what, calls=calls)["seconds"]
        time.sleep(REST_SECONDS)
        return seconds

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            # A line without an end was cut off by the end of its process.
            raise self._no_answer(line.strip()) if line.endswith("\n") else self._ended()
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _no_answer(self, said: object) -> PeerError:
        return PeerError(f"{self._fault}: it answers {str(said)[:80]!r}")

    def _ended(self) -> PeerError:
        code = self._process.wait()
        said = self._said.read_text(errors="replace").strip().splitlines()
        if code < 0:
            why = f"killed by {signal.Signals(-code).name}"
        else:
            why = said[-1] if said else f"exit code {code}"
        return PeerError(f"{self._fault}: {why}")


@contextlib.contextmanager
def torch_peer(python: str | None) -> Iterator[Torch | None]:
    """PyTorch in the interpreter ``python``; None where none is given.

    Raises:
      PeerError: no such interpreter, no program at all, or one that has no torch.
    """
    if python is None:
        yield None
        return
    if shutil.which(python) is None:
        raise PeerError(f"--torch_python={python}: there is no such program")
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "stderr"
        with said.open("w") as errors:
            try:
                process = subprocess.Popen(
                    [python, str(Path(__file__).with_name("torch_peer"))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    errors="replace",
                )
            except OSError as error:
                raise PeerError(
                    f"--torch_python={python} is no program that runs here: {error.strerror}"
                ) from None
        try:
            yield Torch(python, process, said)
        finally:
            process.kill()
            process.communicate()
