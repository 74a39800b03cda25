"""A trained model out of its run folder."""

from __future__ import annotations

import dataclasses

from flax import nnx

from models.pure import merge
from training.checkpoint import BEST_METRIC, Checkpoints
from training.run_folder import RunFolder
from training.settings import OptionError, Settings, settings
from training.step import graph_of, state_shapes


@dataclasses.dataclass(frozen=True)
class Restored:
    """A model and where it comes from."""

    settings: Settings
    step: int
    params: dict
    model: nnx.Module


def restore(folder: RunFolder, checkpoint: str = "last") -> Restored:
    """The model of a run folder at its "last" or "best" checkpoint, or at a step.

    A step may be that of a checkpoint or of a snapshot.

    Raises:
      OptionError: no run folder, no checkpoint yet, or none at that step.
      CheckpointError: the checkpoint cannot be read.
    """
    options = settings(folder.read_config())
    with (
        Checkpoints(folder.checkpoints, keep=1, best_metric=BEST_METRIC) as saved,
        Checkpoints(folder.snapshots, keep=1, best_metric=None) as snapshots,
    ):
        steps = saved.steps()
        if not steps:
            raise OptionError(f"--workdir={folder.path} has no checkpoint yet; train it first")
        named = {"last": steps[-1], "best": saved.best_step()}
        if checkpoint == "best" and named["best"] is None:
            raise OptionError(f"--checkpoint=best: no checkpoint in {folder.path} was evaluated")
        known = sorted({*steps, *snapshots.steps()})
        if checkpoint not in named and checkpoint not in map(str, known):
            raise OptionError(
                f"--checkpoint must be 'last', 'best' or one of the steps {known}, "
                f"got {checkpoint!r}"
            )
        step = named[checkpoint] if checkpoint in named else int(checkpoint)
        holder = saved if step in steps else snapshots
        state = holder.restore(state_shapes(options), step)
    model = merge(graph_of(options), state.params)
    return Restored(options, step, state.params, model)
