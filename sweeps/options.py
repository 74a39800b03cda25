"""The flags of sweep.py as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from training.settings import OptionError


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asks of a sweep file; see the flags of sweep.py.

    Attributes:
      given: names of the flags that the user has set.
      base: reads the options of the file's ``get_config()``, with the user's overrides.
      overrides: dotted option → value.
    """

    given: frozenset[str]
    base: Callable[[], dict]
    overrides: Mapping[str, Any]
    workdir: str | None
    dry_run: bool
    only: str | None
    point: int | None
    seeds: str | None
    equal: str | None
    equal_to: str | None
    equal_within: float
    report_only: bool
    executor: str
    ray_address: str
    workers: int | None
    cores_per_run: int
    gpus_per_run: float
    memory_per_run: float
    retries: int
    pack: str

    def folder(self, name: str) -> str:
        """The folder of the sweep of that name.

        Raises:
          OptionError: --workdir is empty.
        """
        if self.workdir == "":
            raise OptionError("--workdir is empty; name a folder, or leave it out")
        return f"runs/sweeps/{name}" if self.workdir is None else self.workdir

    def refuse_others(self, read: Collection[str], what: str) -> None:
        """Raises OptionError where the user has set a flag that is not among those read."""
        if others := sorted(self.given - set(read)):
            raise OptionError(
                f"--{others[0]} is for studies, and {what}; leave it out, or give it to a study "
                "in configs/sweeps/"
            )
