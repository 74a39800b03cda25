"""The folder of a run: what is in it, and when it may be written to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training.settings import OptionError

# Options that may change between two sessions of a run, since no result depends on them.
NEUTRAL = (
    "train.log_every",
    "train.eval_every",
    "checkpoint.every",
    "checkpoint.keep",
    "analysis.every",
)


class RunFolder:
    """Paths of a run folder, and the reading and writing of its JSON files.

    ``config.json`` resolved options · ``environment.json`` versions, device, what ran ·
    ``metrics.jsonl`` one object a line · ``checkpoints/`` · ``tensorboard/`` · ``curves.png`` ·
    ``emergence.csv``, ``emergence.png`` and ``snapshots/`` of runs that are watched ·
    ``eval.json`` and ``accuracy_by_length.png`` from eval.py · ``lock`` who trains here.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.tensorboard = self.path / "tensorboard"
        self.snapshots = self.path / "snapshots"
        self.curves = self.path / "curves.png"
        self.emergence = self.path / "emergence.csv"
        self.emergence_picture = self.path / "emergence.png"
        self.evaluation = self.path / "eval.json"
        self.lock = self.path / "lock"
        self.accuracy_by_length = self.path / "accuracy_by_length.png"

    def check_usable_for(self, config: Mapping) -> None:
        """Raises OptionError where training with ``config`` must not write here.

        That is a file, a folder of something else, or a run whose options differ in more than
        those of ``NEUTRAL``; they are named.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise OptionError(f"--workdir={self.path} is a file; name a folder")
        if not self.config.exists():
            # A first start on a full disk may leave half a file behind.
            beginnings = {self.lock.name, _temporary(self.config).name}
            if any(path.name not in beginnings for path in self.path.iterdir()):
                raise OptionError(
                    f"--workdir={self.path} holds files but no config.json, so it is no run "
                    "folder; choose another --workdir"
                )
            return
        differing = differences(self.read_config(), config)
        if differing:
            raise OptionError(
                f"--workdir={self.path} holds a run with other options: {'; '.join(differing)}. "
                "Choose another --workdir, or remove that folder"
            )

    def read_config(self) -> dict:
        """The options of the run.

        Raises:
          OptionError: there is no such folder, or it is not that of a run.
        """
        if not self.path.is_dir():
            raise OptionError(f"--workdir={self.path} does not exist; train.py makes run folders")
        if not self.config.exists():
            raise OptionError(f"--workdir={self.path} has no config.json, so it is no run folder")
        try:
            config = json.loads(self.config.read_text())
        except ValueError as error:
            raise OptionError(f"{self.config} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise OptionError(f"{self.config} holds no options, so this is no run folder")
        return config

    def begin(self, config: Mapping, environment: Mapping) -> None:
        """Makes the folder and writes what is known before the first step."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.config, jsonable(config))
        earlier = []
        if self.environment.exists():
            try:
                last = json.loads(self.environment.read_text())
                earlier = [*last.pop("earlier_sessions", []), last]
            except ValueError:
                earlier = [{"unreadable": self.environment.read_text(errors="replace")}]
        write_json(self.environment, {**environment, "earlier_sessions": earlier})

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, without one that a kill has cut short."""
        return list(self._whole_lines())

    def forget_metrics_after(self, step: int) -> None:
        """Drops the lines past ``step``: those steps will be taken again."""
        lines = [line for line in self._whole_lines() if line["step"] <= step]
        write_text(self.metrics, "".join(json.dumps(line) + "\n" for line in lines))

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Adds a line, at once on its way to the disk."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _whole_lines(self) -> Iterator[dict[str, Any]]:
        if not self.metrics.exists():
            return
        for text in self.metrics.read_text().splitlines():
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                return


def flatten(tree: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a nest of dicts."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def differences(saved: Mapping, wanted: Mapping) -> list[str]:
    """Where two sets of options differ in what a result depends on, one text for each option."""
    old, new = dict(flatten(saved)), dict(flatten(jsonable(wanted)))
    return [
        f"{name} was {old.get(name, 'absent')}, now {new.get(name, 'absent')}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name not in NEUTRAL
    ]


def jsonable(tree: Mapping) -> dict:
    """The tree as JSON would give it back: tuples become lists."""
    return json.loads(json.dumps(tree))


def write_json(path: Path, tree: Any) -> None:
    """Writes readable JSON; a reader finds the old file or the new one, never half of one."""
    write_text(path, json.dumps(tree, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step."""
    _temporary(path).write_text(text)
    _temporary(path).replace(path)


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")
