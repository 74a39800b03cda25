"""Locks of a folder: who is at work in it, since when.

The lock is the operating system's (``flock``), so that it ends with its process, however that
ends; the file's text says whose it is.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from training.settings import OptionError

# What ``locked`` waits between two looks, in seconds.
_PAUSE = 0.05


@contextlib.contextmanager
def locked(
    path: Path, what: str, *, shared: bool = False, wait: float = 0.0, sharers: str = ""
) -> Iterator[str]:
    """Holds a lock while the block runs.

    Args:
      path: of the lock file; it stays when the lock is given back.
      what: what is locked, for the message.
      shared: others may hold it too, if they also share it.
      wait: seconds to wait for the one who has it.
      sharers: pattern of the lock files beside it in which those who share it say who they are.

    Yields:
      A sentence on an owner that ended without giving its lock back; "" where there was none.

    Raises:
      OptionError: someone else has it; says who, where, and for how long.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        mode = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(file, mode)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    who = _owner(path) or _owners(path.parent.glob(sharers) if sharers else ())
                    raise OptionError(
                        f"{what} is in use by {who} (lock: {path}); wait for it, or end it"
                    ) from None
                time.sleep(_PAUSE)
        left = _owner(path)
        _write(path, "" if shared else _me())
        try:
            yield f"{what} was left locked: {left}, which has ended; taking over" if left else ""
        finally:
            _write(path, "")


def _me() -> str:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})


def _write(path: Path, text: str) -> None:
    # Best effort: on a full disk the lock holds all the same, without its owner's name.
    with contextlib.suppress(OSError):
        path.write_text(text)


def _owners(paths: Iterable[Path]) -> str:
    """Who wrote the lock files last, in words."""
    return " and ".join(filter(None, map(_owner, sorted(paths)))) or "others"


def _owner(path: Path) -> str:
    """Who wrote the lock file last, in words; "" where nobody did."""
    try:
        owner = json.loads(path.read_text())
        age = datetime.timedelta(seconds=round(time.time() - owner["since"]))
        return f"process {owner['pid']} on {owner['host']}, for {age}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
