"""The other side of ``gpu_torch.py``: PyTorch on the same card, in an interpreter of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.gpu_cases import Case
from benchmarks.gpu_report import Times
from benchmarks.peers import PeerError

SCRIPT = Path(__file__).with_name("gpu_torch.py")
START_SECONDS = 120  # to load torch from a cold disk


def check_torch(python: str) -> None:
    """Raises PeerError unless the interpreter loads all that ``gpu_torch.py`` needs."""
    named = f"--torch_python={python}"
    if shutil.which(python) is None:
        raise PeerError(f"{named}: there is no such program")
    try:
        done = subprocess.run(
            [python, str(SCRIPT)], input="[]", capture_output=True, text=True, timeout=START_SECONDS
        )
    except OSError as error:
        raise PeerError(f"{named} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise PeerError(f"{named} does not load torch in {START_SECONDS} seconds") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        why = said[-1] if said else f"exit code {done.returncode}"
        raise PeerError(f"{named} does not run torch: {why}")
    if not done.stdout.startswith('{"torch":'):
        first = next(iter(done.stdout.splitlines()), "")
        raise PeerError(f"{named} does not run benchmarks/gpu_torch.py, it answers {first!r}")


def answers(
    python: str, cases: Iterable[Case], seconds: float, script: Path = SCRIPT
) -> Iterator[tuple[str, str, Times]]:
    """(name of the case, peer, times) one by one, as they are measured.

    Args:
      python: an interpreter that has torch.
      seconds: after which the process is ended, whatever it is at.
    """
    process = subprocess.Popen(
        [python, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    over = threading.Event()

    def end() -> None:
        # The processes in which it compiles hold its output open, so they end with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def end_at_last() -> None:
        over.set()
        end()

    timer = threading.Timer(seconds, end_at_last)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps([case.for_torch for case in cases]))
            process.stdin.close()
        for line in process.stdout:
            answer = _answer(line)
            if answer is None:
                print(f"PyTorch's process says: {line.rstrip()}")
            else:
                yield answer
        if process.wait():
            why = f"exit code {process.returncode}"
            if over.is_set():
                why = f"its time, {seconds:.0f} seconds, was over"
            print(f"PyTorch's process ended early: {why}. Its columns may be incomplete.")
    finally:
        timer.cancel()
        end()
        process.stdout.close()
        process.wait()


def _answer(line: str) -> tuple[str, str, Times] | None:
    """What a line says, or None for one that is no answer: libraries print too."""
    try:
        fields = json.loads(line)
        return fields.pop("case"), fields.pop("peer"), Times(**fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
