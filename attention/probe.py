"""Reading and replacing named activations inside a traced call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping

import jax


@dataclasses.dataclass(frozen=True)
class Probe:
    """Named activations to read, or to replace, during one call of a model.

    Names are paths such as ``layer3/pattern`` (B, N, T, S) and ``layer3/head`` (B, T, N, E, before
    the output projection). Make a probe inside the function that is traced, call the model with it
    and return ``values``. A name that the model never offered is reported by ``missing``.

    Attributes:
      read: names to record in ``values``.
      replace: name → function from the activation to what takes its place.
      values: what was read, as it was before any replacement.
      prefix: path of the part of the model that holds this view of the probe.
      offered: every name that the model came by.
    """

    read: Collection[str] = ()
    replace: Mapping[str, Callable[[jax.Array], jax.Array]] = dataclasses.field(
        default_factory=dict
    )
    values: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    offered: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self):
        if isinstance(self.read, str):
            raise TypeError(f"read takes a collection of names, got the text {self.read!r}")

    def at(self, name: str) -> Probe:
        """The same probe, seen from the part of the model called ``name``."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{name}/")

    def wants(self, name: str) -> bool:
        """Whether this activation is to be read or replaced."""
        path = self.prefix + name
        self.offered.add(path)
        return path in self.read or path in self.replace

    def replaces(self, name: str) -> bool:
        """Whether this activation is to be replaced."""
        return self.prefix + name in self.replace

    def __call__(self, name: str, value: jax.Array) -> jax.Array:
        """Passes an activation by: records it if asked, returns what is to be used."""
        if not self.wants(name):
            return value
        path = self.prefix + name
        if path in self.read:
            self.values[path] = value
        return self.replace[path](value) if path in self.replace else value

    def missing(self) -> list[str]:
        """Names that were asked for and that the model does not have."""
        return sorted((set(self.read) | set(self.replace)) - self.offered)
