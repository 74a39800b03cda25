"""What the tasks on one random string have in common."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Self

from tasks.space import Stratum
from tasks.symbols import SymbolTask
from tasks.vocabulary import check_integer, check_vocabulary


@dataclasses.dataclass(frozen=True)
class StringTask(SymbolTask):
    """A string ``s_1 … s_n``: n uniform in [min_length, longest], symbols uniform, independent.

    Subclasses say with ``needed`` how many tokens a string takes, and what is made of it.

    Attributes:
      vocab_size: number of ids, special ones included; at least 2 symbols.
      length: T, the number of tokens the model reads.
      min_length: fewest symbols in the string.
      max_length: most symbols in the string; None takes as many as fit (see `longest`).

    Raises:
      ValueError: an option is out of its bounds; the message names it.
    """

    name: ClassVar[str]
    around: ClassVar[int]  # tokens beside the written strings
    written: ClassVar[int]  # how often the string is written among the length tokens

    min_length: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        check_vocabulary(self.vocab_size, 2, self.name)
        check_integer("task.length", self.length)
        if self.fits < 1:
            raise ValueError(
                f"task.length={self.length} is too short for {self.name}: a string of one symbol "
                f"needs at least {self.needed(1)}"
            )
        check_integer(f"task.{self.name}.min_length", self.min_length)
        if self.max_length is not None:
            check_integer(f"task.{self.name}.max_length", self.max_length)
        if self.longest > self.fits:
            raise ValueError(
                f"task.{self.name}.max_length={self.max_length} does not fit "
                f"task.length={self.length}: it must be at most {self.fits}"
            )
        if not 1 <= self.min_length <= self.longest:
            raise ValueError(
                f"task.{self.name}.min_length={self.min_length} must lie between 1 and the "
                f"longest string, {self.longest} (task.{self.name}.max_length={self.max_length}, "
                f"task.length={self.length})"
            )

    @classmethod
    def needed(cls, symbols: int) -> int:
        """Tokens that the model reads of a string of so many symbols."""
        return cls.written * symbols + cls.around

    @property
    def fits(self) -> int:
        """Symbols of the longest string for which ``length`` is enough."""
        return (self.length - self.around) // self.written

    @property
    def longest(self) -> int:
        """Most symbols a string has: ``max_length``, or what fits."""
        return self.fits if self.max_length is None else self.max_length

    @property
    def space(self) -> tuple[Stratum, ...]:
        return self.strata(range(self.min_length, self.longest + 1))

    def with_length(self, string_length: int) -> Self:
        """The task with strings of exactly ``string_length``, in the shortest T that holds them."""
        check_integer("string_length", string_length)
        if string_length < 1:
            raise ValueError(f"string_length={string_length} must be at least 1")
        return dataclasses.replace(
            self,
            length=self.needed(string_length),
            min_length=string_length,
            max_length=string_length,
        )

    def fixed(self, length: int) -> Self:
        """The task with all answers at the same places and as long as ``length`` allows."""
        return self.with_length((length - self.around) // self.written)
