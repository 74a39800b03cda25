"""Text: random crops of files that are on this machine."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np

from tasks import corpus, vocabulary
from tasks.batch import Batch
from tasks.space import Stratum, log2_size
from tasks.task import draw_one, next_token_batch
from tasks.vocabulary import BOS, NUM_SPECIAL, SEP, check_integer


@dataclasses.dataclass(frozen=True)
class Text:
    """``BOS x_1 … x_T``, a crop of T tokens from anywhere in the files; every position counts.

    Files are joined with SEP after each; one in ten is held out for evaluation. Crops are drawn
    independently, so there is no epoch to repeat.

    Attributes:
      vocab_size: number of ids, special ones included; 260 for bytes, that or more for BPE.
      length: T, the number of tokens the model reads.
      files: a pattern of UTF-8 files; None is the source of Python's standard library.
      tokenizer: "bpe" or "bytes".
      split: "train", or "test" for the files that are held out.

    Raises:
      ValueError: an option is out of its bounds, or the files do not do.
    """

    name: ClassVar[str] = "text"
    has_source: ClassVar[bool] = False

    vocab_size: int
    length: int
    files: str | None = None
    tokenizer: str = "bpe"
    split: str = "train"

    def __post_init__(self) -> None:
        check_integer("task.vocab_size", self.vocab_size)
        check_integer("task.length", self.length)
        if self.length < 1:
            raise ValueError(f"task.length={self.length} must be at least 1 for text")
        for option, known in (("tokenizer", corpus.TOKENIZERS), ("split", ("train", "test"))):
            if getattr(self, option) not in known:
                raise ValueError(
                    f"task.text.{option} must be one of {list(known)}, got "
                    f"{getattr(self, option)!r}"
                )
        for split in ("train", "test"):
            found = len(getattr(self.corpus, split))
            if found < self.length:
                raise ValueError(
                    f"task.length={self.length} is longer than the {found} tokens of the {split} "
                    f"files of task.text.files={self.files!r}"
                )

    @property
    def corpus(self) -> corpus.Corpus:
        return corpus.load(self.files, self.tokenizer, self.vocab_size)

    @property
    def tokens(self) -> np.ndarray:
        """All ids of the split."""
        return getattr(self.corpus, self.split)

    @property
    def chance(self) -> float:
        """Share of the most frequent token in the training files."""
        counts = np.bincount(self.corpus.train)
        return float(counts.max() / counts.sum())

    @property
    def delimiters(self) -> tuple[int, ...]:
        """Ids that end a line or a file."""
        return (SEP, *self.corpus.newlines)

    @property
    def _starts(self) -> int:
        """Places where a crop may start."""
        return len(self.tokens) - self.length + 1

    @property
    def first_answer(self) -> int:
        return 0

    @property
    def space(self) -> tuple[Stratum, ...]:
        return (Stratum(1.0, math.log2(self._starts)),)

    def held_out(self) -> Self:
        """The task on the files that training does not see."""
        return dataclasses.replace(self, split="test")

    def at_length(self, length: int) -> Self:
        return dataclasses.replace(self, length=length)

    def sample(self, key: jax.Array, batch_size: int) -> Batch:
        tokens_I = jnp.asarray(self.tokens)
        start_B1 = jax.random.randint(key, (batch_size, 1), 0, self._starts, jnp.int32)
        crop_BT = tokens_I[start_B1 + jnp.arange(self.length)[None, :]].astype(jnp.int32)
        sequence_BU = jnp.pad(crop_BT, ((0, 0), (1, 0)), constant_values=BOS)
        return next_token_batch(sequence_BU, jnp.ones((batch_size, self.length)))

    def token_name(self, token: int) -> str:
        """Short printable name of an id: the text it stands for, line ends as escapes."""
        if token < NUM_SPECIAL:
            return vocabulary.token_name(token)
        return repr(self.corpus.pieces[token - NUM_SPECIAL].decode("utf-8", "replace"))[1:-1]

    def describe(self, seed: int = 0) -> str:
        example = draw_one(self, jax.random.key(seed))
        source = "Python's standard library" if self.files is None else self.files
        return (
            f"text: crops of {source}, {len(self.tokens):,} tokens to {self.split}\n"
            f"{self.length} tokens, vocabulary {self.vocab_size} ({self.tokenizer}), chance "
            f"{self.chance:.4f}, 2^{log2_size(self.space):.1f} crops\n"
            f"{self.corpus.decode(example.targets_BT[0].tolist())}"
        )
