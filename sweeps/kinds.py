"""What a sweep file may describe, and the command that each kind has."""

from __future__ import annotations

from absl import flags
from ml_collections import config_flags

from sweeps import command as studies
from sweeps.claims import command as claims
from sweeps.claims.rows import Claims
from sweeps.folder import SweepFolder
from sweeps.options import Options
from sweeps.study import Study, described
from training.settings import OptionError

# Each has main(path, what the file describes, options) and report(folder, the same, options).
COMMANDS = {Study: studies, Claims: claims}


def run(holder: flags.FlagHolder, options: Options) -> int:
    """Does what the flags ask of a sweep file; returns the exit code.

    Raises:
      OptionError: a mistake in the file or the flags.
    """
    flag = flags.FLAGS[holder.name]
    path = config_flags.get_config_filename(flag) if flag.present else None
    if options.report_only:
        if options.workdir is None:
            raise OptionError("--report_only needs --workdir, a sweep folder")
        folder = SweepFolder(options.workdir)
        folder.read_description()
        asked = described(folder.study if path is None else path, *COMMANDS)
        return COMMANDS[type(asked)].report(folder, asked, options)
    if path is None:
        raise OptionError("--config is needed, such as --config=configs/sweeps/variants.py")
    asked = described(path, *COMMANDS)
    return COMMANDS[type(asked)].main(path, asked, options)
