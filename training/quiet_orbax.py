"""Two things orbax says on stderr about a failure that we raise as a CheckpointError anyway."""

from __future__ import annotations

import logging as std_logging
import sys
from typing import Any

from absl import logging


def quiet_orbax() -> None:
    """Drops both for the rest of the process; calling it again changes nothing.

    They come from threads that may outlive the call that failed, so a narrow filter that stays
    is the only one without a race.
    """
    logging.get_absl_logger().addFilter(_is_not_a_traceback_of_orbax)
    previous = sys.unraisablehook
    if isinstance(previous, _IgnoresLateCallbacks):
        return
    sys.unraisablehook = _IgnoresLateCallbacks(previous)


def _is_not_a_traceback_of_orbax(record: std_logging.LogRecord) -> bool:
    """Orbax logs a save that failed in the background with four tracebacks before it raises."""
    return record.levelno < std_logging.ERROR or "/orbax/checkpoint/" not in record.pathname


class _IgnoresLateCallbacks:
    """Orbax closes its event loop at the first array that cannot be read or written; TensorStore
    then finds no loop to report the other arrays to."""

    def __init__(self, previous: Any):
        self._previous = previous

    def __call__(self, unraisable: Any) -> None:
        error, traceback = unraisable.exc_value, unraisable.exc_traceback
        late = (
            isinstance(error, RuntimeError)
            and str(error) == "Event loop is closed"
            and traceback is not None
            and traceback.tb_frame.f_code.co_name == "call_soon_threadsafe"
        )
        if not late:
            self._previous(unraisable)
