"""Runs a command that must not outlive who started it: ``python -m sweeps.leash COMMAND …``.

The command ends, with all that it has started, when this process's standard input does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def main(command: Sequence[str]) -> int:
    """The exit code of the command; of one that a signal has ended, this process dies likewise."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_parent, args=(child.pid,), daemon=True).start()
    code = child.wait()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to be taken off
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def _end_with_parent(group: int) -> None:
    # Not sys.stdin, whose lock would be held when Python ends.
    while os.read(0, 1):
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
