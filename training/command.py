"""How a command ends on a mistake: one line that helps, an exit code, no traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from training.settings import OptionError


def run(main: Callable[[], None], failures: tuple[type[Exception], ...] = ()) -> None:
    """Parses the flags and runs ``main``.

    Mistakes in flags and options exit with 2, ``failures`` and a full or unwritable disk with 1,
    each with one line on stderr. Any other exception is a fault of ours and keeps its traceback.
    """

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            _exit(2, f"unexpected argument {argv[1]!r}; options are written --name=value")
        logging.set_verbosity(logging.WARNING)
        enable_compilation_cache()
        try:
            main()
        except OptionError as error:
            _exit(2, str(error))
        except (*failures, OSError) as error:
            _exit(1, str(error))
        except KeyboardInterrupt:
            _exit(130, "interrupted; the same command goes on from the last checkpoint")

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _exit(2, str(error))
    except FileNotFoundError as error:
        _exit(2, f"--config: there is no file {error.filename}; see the folder configs/")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        # How ml_collections says that an override does not fit the config.
        _exit(2, f"--config: {' '.join(str(error).split())}")


def _exit(code: int, message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def resolved(config: ConfigDict, holder: flags.FlagHolder) -> dict:
    """The config as plain dicts, with only the attention groups that the pattern uses.

    Raises:
      OptionError: an override of a group that is not in the pattern: it would do nothing.
    """
    plain = config.to_dict()
    pattern = plain["model"]["pattern"]
    pattern = [pattern] if isinstance(pattern, str) else list(pattern)
    for option in config_flags.get_override_values(flags.FLAGS[holder.name]):
        part, _, rest = option.partition(".")
        group = rest.partition(".")[0]
        if part == "attention" and group not in pattern:
            raise OptionError(
                f"--config.{option} would do nothing: model.pattern is {tuple(pattern)}, "
                f"which does not name {group!r}"
            )
    groups: Mapping = plain["attention"]
    plain["attention"] = {name: group for name, group in groups.items() if name in pattern}
    missing = [name for name in pattern if name not in groups]
    if missing:
        raise OptionError(
            f"model.pattern names {missing[0]!r}; the attention groups are "
            f"{', '.join(sorted(groups))}"
        )
    return plain


def config_name(holder: flags.FlagHolder) -> str:
    """Name of the config file, without folder and ending."""
    return Path(config_flags.get_config_filename(flags.FLAGS[holder.name])).stem


def enable_compilation_cache() -> None:
    """Keeps compiled programs between processes, where the user has not chosen a place already."""
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "attention-lab" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
