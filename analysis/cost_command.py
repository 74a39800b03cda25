"""The flags of ``python -m analysis.cost``; apart, so that importing the cost defines none."""

from absl import flags
from ml_collections import config_flags

from analysis.cost import DTYPES, Cost, cost, rows
from analysis.cost_presets import PRESETS
from training import command, progress
from training.settings import OptionError, settings

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, such as configs/gqa.py; --config.NAME=VALUE overrides an option."
)
_PRESET = flags.DEFINE_string("preset", None, f"A published shape: {', '.join(PRESETS)}.")
_LENGTH = flags.DEFINE_integer(
    "length", None, "Tokens in a sequence; default that of the config's task or of the preset."
)
_BATCH = flags.DEFINE_integer("batch", 1, "Sequences.")
_DTYPE = flags.DEFINE_string(
    "dtype", None, f"Of activations and cache: {', '.join(DTYPES)}; default that of the model."
)
_SOURCE = flags.DEFINE_integer(
    "source_length", None, "Tokens that an encoder reads; default as many as --length."
)


def main() -> None:
    """Runs the command."""
    command.run(_run)


def _run() -> None:
    if _PRESET.value is None:
        name, config = command.load_config(_CONFIG)
        options = settings(config)
        model, longest, note = options.model, options.task.length, f"configs/{name}.py"
    else:
        preset = _preset(_PRESET.value)
        name, model, longest, note = _PRESET.value, preset.options, preset.length, preset.source
    length = longest if _LENGTH.value is None else _LENGTH.value
    try:
        bill = cost(model, length, _BATCH.value, _DTYPE.value, _SOURCE.value)
    except (ValueError, NotImplementedError) as error:
        raise OptionError(f"cost of {name}: {error}") from None
    _print(name, note, bill)


def _preset(name: str):
    if flags.FLAGS["config"].present:
        raise OptionError(f"--preset={name} and --config exclude each other; give one of them")
    if name not in PRESETS:
        raise OptionError(f"--preset must be one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def _print(name: str, note: str, bill: Cost) -> None:
    title = f"{name}: {bill.batch:,} × {bill.length:,} tokens in {bill.dtype} ({note})"
    progress.table(title, rows(bill), ("what", "number", "about"))
