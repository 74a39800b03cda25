"""Trains a model: ``python train.py --config=configs/gqa.py``."""

from absl import flags
from ml_collections import config_flags

from analysis import emergence_plot, plots
from analysis.watch import Recorder
from training import command, loop
from training.checkpoint import CheckpointError
from training.run_folder import RunFolder
from training.settings import OptionError, settings

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, such as configs/gqa.py; --config.NAME=VALUE overrides an option."
)
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder; default runs/<name of the config>.")


def main() -> None:
    name, config = command.load_config(CONFIG)
    if WORKDIR.value == "":
        raise OptionError("--workdir is empty; name a folder, or leave it out for runs/<config>")
    folder = RunFolder(f"runs/{name}" if WORKDIR.value is None else WORKDIR.value)
    options = settings(config)
    recorder = Recorder(options, folder) if options.analysis.every else None
    lines = loop.train(config, options, folder, observer=recorder)
    if lines is None:
        print(f"{folder.path} is finished ({options.train.steps} steps); there is nothing to do")
        if not folder.curves.exists():
            plots.draw_curves(folder.read_metrics(), options.evaluated, folder.curves)
        if recorder is not None and not folder.emergence_picture.exists():
            emergence_plot.draw(folder.emergence, folder.emergence_picture)
        return
    plots.draw_curves(lines, options.evaluated, folder.curves)
    loop.summary(lines, options, folder)
    if recorder is not None:
        change = emergence_plot.draw(folder.emergence, folder.emergence_picture)
        print(f"{folder.emergence_picture}: {change or 'no head changed to prefix matching'}")
        print(f"watching took {recorder.share():.1%} of the time")


if __name__ == "__main__":
    command.run(main, failures=(loop.Diverged, CheckpointError))
