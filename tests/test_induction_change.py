"""The claim of the project, in small: two layers change abruptly, one layer never does."""

import pytest

from analysis import emergence_table
from analysis.emergence import find_change, strongest_head
from analysis.watch import Recorder
from configs import induction
from training import loop
from training.resolve import resolve
from training.run_folder import RunFolder
from training.settings import settings

STEPS = 600
# Of the half-way point, in steps.
WINDOW = (300, 580)


def watched(path, num_layers, seed):
    """The table of a run of configs/induction.py with as few evaluations as there can be."""
    config = induction.get_config()
    config.seed = seed
    config.model.num_layers = num_layers
    config.train.update(steps=STEPS, log_every=25, eval_every=STEPS)
    config.eval.batches = 1
    config.checkpoint.every = STEPS
    config.analysis.every = 25
    plain = resolve(config.to_dict())
    options, folder = settings(plain), RunFolder(path)
    loop.train(plain, options, folder, observer=Recorder(options, folder))
    return emergence_table.read(folder.emergence)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_two_layers_change_within_a_window_of_steps(tmp_path, seed):
    table = watched(tmp_path / "run", 2, seed)
    prefix = table.heads("prefix_matching")
    layer, head = strongest_head(prefix)
    change = find_change(table["step"], prefix[:, layer, head])
    assert layer == 1
    assert change is not None and WINDOW[0] < change.half < WINDOW[1]
    assert change.width < STEPS / 2 and change.high > 0.6
    # The previous-token heads stand in the layer below, and in-context learning comes with them.
    previous = table.heads("previous_token")[-1]
    assert previous[0].max() > 0.25 > 0.1 > previous[1].max()
    assert table["in_context_learning"][-1] < -3 < table["in_context_learning"][8]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_one_layer_does_not(tmp_path, seed):
    table = watched(tmp_path / "run", 1, seed)
    prefix = table.heads("prefix_matching")
    assert prefix.max() < 0.15
    assert find_change(table["step"], prefix[:, *strongest_head(prefix)]) is None
