"""How a command ends on a mistake: one line that helps, an exit code, no traceback."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from tasks.corpus import cache_folder
from training.resolve import resolve
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
        except failures as error:
            _exit(1, str(error))
        except OSError as error:
            where = "" if error.filename is None else f" {error.filename}"
            _exit(1, f"cannot read or write{where}: {error.strerror or error}")
        except KeyboardInterrupt:
            _exit(130, "interrupted; the same command goes on from the last checkpoint")

    app.run(guarded, flags_parser=_parse)


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        _exit(2, _plain(str(error)))
    except OSError:
        # With overrides the config file is read while the flags are.
        path = _config_path(argv)
        if path is None or path.is_file():
            raise
        _exit(2, f"--config={path}: there is no such file; see configs/")
    except (AttributeError, KeyError) as error:
        # How ml_collections says that the config has no such option, sometimes with a hint.
        option = _unknown_option(argv)
        if option is None:
            raise
        said = str(error).strip("\"'").replace("\\n", "\n").replace("\\'", "'")
        hint = said.partition("\n")[2]
        _exit(2, f"{option} is not an option of this config. {hint}")


def _config_path(argv: list[str]) -> Path | None:
    paths = [a.partition("=")[2] for a in argv if a.startswith(("--config=", "-config="))]
    return Path(paths[-1]) if paths else None


def _unknown_option(argv: list[str]) -> str | None:
    """The first override that names nothing in the config."""
    path = _config_path(argv)
    if path is None:
        return None
    config = runpy.run_path(str(path))["get_config"]()
    for option in (a.partition("=")[0] for a in argv if a.startswith("--config.")):
        holder = config
        for part in option.split(".")[1:]:
            if not isinstance(holder, ConfigDict) or part not in holder:
                return option
            holder = holder[part]
    return None


def _plain(message: str) -> str:
    """Python's words for a value of the wrong type, in the user's words."""
    option, _, problem = message.removeprefix("flag ").partition(": ")
    for python, plain in (
        ("invalid literal for int()", "must be a whole number, such as 100"),
        ("could not convert string to float", "must be a number, such as 1e-3"),
        ("Non-boolean argument", "must be true or false"),
    ):
        if python in problem:
            return f"{option}: the value {plain}"
    return message


def _exit(code: int, message: str) -> None:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def numbers(name: str, bare: int, help: str) -> flags.Flag:
    """A flag of whole numbers that may be repeated; without a value it stands for ``bare``."""

    class Parser(flags.IntegerParser):
        def parse(self, argument):
            # A flag without a value reaches its parser as the word true.
            return bare if argument == "true" else super().parse(argument)

    return flags.MultiFlag(Parser(), flags.ArgumentSerializer(), name, [], help, boolean=True)


def load_config(holder: flags.FlagHolder) -> tuple[str, dict]:
    """Name of the config file, and the options that the run reads, as plain dicts.

    Raises:
      OptionError: no such file, a pattern that names no group, or an override that does nothing.
    """
    flag = flags.FLAGS[holder.name]
    if not flag.present:
        raise OptionError(f"--{holder.name} is needed, such as --{holder.name}=configs/gqa.py")
    path = Path(config_flags.get_config_filename(flag))
    if not path.is_file():
        raise OptionError(f"--{holder.name}={path}: there is no such file; see configs/")
    try:
        return path.stem, resolve(holder.value.to_dict(), config_flags.get_override_values(flag))
    except ValueError as error:
        raise OptionError(str(error)) from None


def enable_compilation_cache() -> None:
    """Keeps compiled programs between processes.

    The user's own place and threshold, of JAX_COMPILATION_CACHE_DIR and
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS, stay as they are.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    # Unlike the place it is never None, so only the environment tells whether somebody chose it.
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
