"""Checkpoints that can be trusted: written behind the training loop's back, verified on reading.

A checkpoint is one orbax step folder with two items, committed together by one rename:

    <folder>/<step>/state      the leaves of the TrainState, as ``{"params/w": array, ...}``
    <folder>/<step>/manifest   the type and the checksum of every leaf, and the metrics
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from training import manifest
from training.manifest import CheckpointError, DamagedError
from training.quiet_orbax import quiet_orbax
from training.state import TrainState

__all__ = ["BEST_METRIC", "CheckpointError", "Checkpoints"]

# What the loop tracks: the mean accuracy of the evaluated tasks.
BEST_METRIC = "accuracy"

_STEP_NAME = re.compile(r"0|[1-9][0-9]*")


class Checkpoints:
    """The checkpoints of one run: the last ``keep`` of them and the best one.

    A context manager; leaving it waits for the save under way. Making one and reading from it
    change nothing on disk: the first ``save`` creates the folder, moves every step folder that
    cannot be read aside (``9`` becomes ``broken-9``, nothing in it is deleted) and removes the
    temporary folders of saves that were cut short.

    One process writes to a folder at a time. A write that fails in the background is raised as
    CheckpointError by the next call of any method, once; after that the next save may be tried.

    Args:
      folder: where the step folders are, usually ``<workdir>/checkpoints``.
      keep: how many of the latest checkpoints to keep, at least 1.
      best_metric: the name of a metric, higher is better; the checkpoint with the highest value
        (the latest of equals) is kept as well. None: only the latest ones are kept.

    Raises:
      ValueError: ``keep`` is below 1.
    """

    def __init__(self, folder: str | Path, *, keep: int, best_metric: str | None):
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep}: at least 1 checkpoint must be kept")
        self._folder = Path(folder).absolute()
        self._keep = keep
        self._best_metric = best_metric
        self._manager: ocp.CheckpointManager | None = None
        self._saving: int | None = None
        self._damaged: dict[int, str] = {}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, exception_type, exception, traceback) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if exception is None:
                raise
            logging.error("%s", error)  # the exception on its way out must stay the first one

    def save(self, step: int, state: TrainState, metrics: dict[str, float]) -> None:
        """Starts saving ``state``; it may be donated as soon as this returns.

        Waits for the previous save, copies the state to the host, and leaves the writing to
        background threads. The step just restored is on disk already and is not saved again.

        Args:
          step: the number of the checkpoint, above that of every other; equal to ``state.step``.
          state: every leaf a strongly typed array on this process's devices.
          metrics: values measured on this state, kept beside it. An empty dict says that nothing
            was measured: the checkpoint is then kept as one of the latest only.

        Raises:
          ValueError: ``state`` is at another step, or ``metrics`` lacks the best metric.
          CheckpointError: the previous save failed, this one could not start, the step is not
            newer than the latest, a value is not finite, or a leaf is weakly typed. Older
            checkpoints stay as they are.
        """
        self.wait()
        if int(state.step) != step:
            raise ValueError(f"save(step={step}): the state is at step {int(state.step)}")
        leaves, _ = manifest.flatten(state)
        kinds = manifest.strong_kinds(leaves)
        copies = manifest.host_copies(leaves)
        if metrics and self._best_metric not in (None, *metrics):
            raise ValueError(
                f"best_metric={self._best_metric!r} is not among the metrics {sorted(metrics)}"
            )
        self._check_finite(step, copies, metrics)
        try:
            self._manager = self._manager or self._open()
            latest = max(self._manager.all_steps(), default=-1)
            started = step > latest and self._manager.save(
                step,
                args=ocp.args.Composite(
                    # Orbax cannot store arrays of size zero; their type says all there is.
                    state=ocp.args.StandardSave({n: a for n, a in copies.items() if a.size}),
                    manifest=ocp.args.JsonSave(manifest.write(step, metrics, kinds, copies)),
                ),
                metrics=metrics or None,
            )
        except Exception as error:
            raise CheckpointError(self._failed(step, error)) from error
        if not started:
            raise CheckpointError(
                f"step {step} is not saved: {self._folder} already has the checkpoint of step "
                f"{latest}, and only newer steps are added"
            )
        self._saving = step
        self._damaged.pop(step, None)

    def restore_latest(self, template: TrainState) -> TrainState | None:
        """The newest checkpoint that can be read, or None if there is none at all.

        Folders that hold no complete checkpoint and checkpoints that are damaged are passed over
        with a warning that says which and why. Arguments and errors as in ``restore``.

        Raises:
          CheckpointError: there are checkpoints and none can be read.
        """
        self.wait()
        for path in self._entries():
            if ".orbax-checkpoint-tmp" in path.name:
                logging.warning("skipping %s: a save that was cut short", path)
        skipped = []
        for step, path in sorted(self._step_folders().items(), reverse=True):
            try:
                return self._read(step, template)
            except DamagedError as error:
                skipped.append(f"{step}: {error}")
                logging.warning("skipping checkpoint %s: %s", path, error)
        if skipped:
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be read ({'; '.join(skipped)}); "
                "to train from the start, move that folder away"
            )
        return None

    def restore(self, template: TrainState, step: int) -> TrainState:
        """The state at ``step``, with the structure, types and placement of ``template``.

        A step that was jitted for the template's leaves takes the restored ones without a new
        trace, and can donate them.

        Args:
          template: arrays or ShapeDtypeStructs; those with a sharding say where to restore to,
            the others go to the default device.
          step: one of ``steps()``.

        Raises:
          CheckpointError: there is no such checkpoint, it is damaged, or it does not fit the
            template (then the leaves are named, with their saved and expected types).
        """
        self.wait()
        if step not in self._step_folders():
            raise CheckpointError(
                f"{self._folder} has no checkpoint of step {step}; it has {self.steps()}"
            )
        try:
            return self._read(step, template)
        except DamagedError as error:
            path = self._folder / str(step)
            raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order; damaged arrays show only on reading."""
        self.wait()
        return sorted(self._inspect()[0])

    def metrics(self, step: int) -> dict[str, float]:
        """What was measured on the state of ``step``, one of ``steps()``."""
        return self._inspect()[0][step]

    def best_step(self) -> int | None:
        """The step with the highest ``best_metric`` of those on disk, the latest of equals."""
        self.wait()
        complete, _ = self._inspect()
        measured = {s: m for s, m in complete.items() if self._best_metric in m}
        return max(measured, key=lambda s: (measured[s][self._best_metric], s), default=None)

    def wait(self) -> None:
        """Blocks until the save under way is on disk. Raises CheckpointError if it failed."""
        if self._saving is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            step, self._saving = self._saving, None
            # Orbax has struck what this save would have replaced from its list; a new manager
            # finds it again.
            self._shut()
            raise CheckpointError(self._failed(step, error)) from error
        self._saving = None

    def close(self) -> None:
        """Waits, then ends the background threads. Raises CheckpointError as ``wait`` does."""
        self.wait()
        self._shut()

    def _open(self) -> ocp.CheckpointManager:
        """Clears the way for new steps; orbax would count what it cannot read as the latest."""
        for step, reason in self._inspect()[1].items():
            path = self._folder / str(step)
            aside = _unused(self._folder / f"broken-{step}")
            logging.warning("moving %s to %s: %s", path, aside, reason)
            path.rename(aside)
        policies: list[Any] = [LatestN(self._keep)]
        name = self._best_metric
        best_fn = (lambda metrics: metrics[name]) if name is not None else None
        if best_fn is not None:
            policies.append(
                BestN(get_metric_fn=best_fn, n=1, keep_checkpoints_without_metrics=False)
            )
        quiet_orbax()
        return ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                best_fn=best_fn,
                preservation_policy=AnyPreservationPolicy(policies),
                # A folder that cannot be made in the background leaves threads that wait five
                # minutes for it and keep the process from ending.
                async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
                cleanup_tmp_directories=True,
            ),
        )

    def _shut(self) -> None:
        """Ends the manager if there is one; the next save opens a new one."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.close()

    def _check_finite(self, step: int, copies: dict[str, np.ndarray], metrics) -> None:
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        for name, array in copies.items():
            if jnp.issubdtype(array.dtype, jnp.inexact) and not np.isfinite(array).all():
                bad.append(name)
        if bad:
            raise CheckpointError(
                f"step {step} is not saved to {self._folder}: not finite: {', '.join(bad[:6])}"
                + (f" and {len(bad) - 6} more" if len(bad) > 6 else "")
                + "; earlier checkpoints are intact"
            )

    def _failed(self, step: int, error: Exception) -> str:
        reason = manifest.one_line(error)
        return f"saving the checkpoint of step {step} to {self._folder} failed: {reason}"

    def _entries(self) -> list[Path]:
        return sorted(self._folder.iterdir()) if self._folder.is_dir() else []

    def _step_folders(self) -> dict[int, Path]:
        return {int(p.name): p for p in self._entries() if _STEP_NAME.fullmatch(p.name)}

    def _inspect(self) -> tuple[dict[int, dict[str, float]], dict[int, str]]:
        """The metrics of every complete step, and why each of the others is not one."""
        complete, broken = {}, {}
        for step, path in self._step_folders().items():
            try:
                if step in self._damaged:
                    raise DamagedError(self._damaged[step])
                complete[step] = manifest.read(path)["metrics"]
            except DamagedError as error:
                broken[step] = str(error)
        return complete, broken

    def _read(self, step: int, template: TrainState) -> TrainState:
        try:
            return _read(self._folder / str(step), template)
        except DamagedError as error:
            self._damaged[step] = str(error)
            self._shut()  # the manager counts this step; the next one will not
            raise


def _read(path: Path, template: TrainState) -> TrainState:
    saved = manifest.read(path)["leaves"]
    leaves, treedef = manifest.flatten(template)
    manifest.check_fits(path, saved, leaves)
    arrays = manifest.host_target(leaves)
    stored = {name: array for name, array in arrays.items() if array.size}
    quiet_orbax()
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
            arrays |= reader.restore(path / "state", args=ocp.args.StandardRestore(stored))
    except Exception as error:
        raise DamagedError(manifest.one_line(error)) from error
    for name, array in arrays.items():
        if manifest.checksum(array) != saved[name][1]:
            raise DamagedError(f"{name} is not what was saved")
    return treedef.unflatten(manifest.place(arrays[name], leaf) for name, leaf in leaves.items())


def _unused(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
