"""Text files as arrays of tokens: read, split by file into training and test, cut into tokens."""

from __future__ import annotations

import dataclasses
import functools
import glob
import hashlib
import os
import sysconfig
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tasks.vocabulary import NUM_SPECIAL, SEP

# Two thirds of a Python's library are tests, most of them tables; what is installed beside it
# differs from machine to machine.
_NOT_LIBRARY = {"test", "tests", "idlelib", "site-packages", "dist-packages"}
# One file in ten is for testing.
_TEST_SHARE = 10
# Merges of the most frequent pairs are known from a part of the text.
_LEARNED_FROM = 1_000_000


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of the training and of the test files, SEP after every file, and what they mean.

    Attributes:
      train, test: ids, 4 and above for what is in the files.
      pieces: the bytes that each id above the special ones stands for.
    """

    train: np.ndarray
    test: np.ndarray
    pieces: tuple[bytes, ...]

    def decode(self, ids: Sequence[int]) -> str:
        """The text again; special ids are left out."""
        pieces = (self.pieces[i - NUM_SPECIAL] for i in ids if i >= NUM_SPECIAL)
        return b"".join(pieces).decode("utf-8", errors="replace")

    @property
    def newlines(self) -> tuple[int, ...]:
        """The ids that end a line."""
        return tuple(i + NUM_SPECIAL for i, piece in enumerate(self.pieces) if b"\n" in piece)


@functools.lru_cache(maxsize=4)
def load(files: str | None, tokenizer: str, vocab_size: int) -> Corpus:
    """The corpus of the files that a pattern names.

    Args:
      files: a pattern such as ``texts/**/*.txt``; None is the source of Python's standard library.
      tokenizer: a name in ``TOKENIZERS``.
      vocab_size: number of ids, special ones included.

    Raises:
      ValueError: too few files, one that is not UTF-8, or a vocabulary of the wrong size.
    """
    train, test = (_read(paths) for paths in split(find(files)))
    pieces, encode = TOKENIZERS[tokenizer](train, vocab_size)
    return Corpus(encode(train), encode(test), pieces)


def find(files: str | None) -> list[Path]:
    """The files that a pattern names, in an order that does not depend on where they are.

    Raises:
      ValueError: fewer than two.
    """
    if files is None:
        root = Path(sysconfig.get_path("stdlib"))
        found = [p for p in root.rglob("*.py") if not _NOT_LIBRARY & {*p.relative_to(root).parts}]
    else:
        found = [Path(p) for p in glob.glob(files, recursive=True) if Path(p).is_file()]
    if len(found) < 2:
        raise ValueError(
            f"task.text.files={files!r} names {len(found)} files; it must name at least 2, one to "
            "train on and one to test on, such as 'texts/**/*.txt'"
        )
    return sorted(found)


def split(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Files to train on and files to test on, one in ten, by the checksum of a file's name."""
    above = os.path.commonpath([path.parent for path in paths])

    def lot(path: Path) -> tuple[int, str]:
        name = Path(os.path.relpath(path, above)).as_posix()
        return zlib.crc32(name.encode()), name

    tested = set(sorted(paths, key=lot)[: max(1, len(paths) // _TEST_SHARE)])
    return [p for p in paths if p not in tested], [p for p in paths if p in tested]


def _read(paths: Sequence[Path]) -> list[str]:
    texts = []
    for path in paths:
        try:
            texts.append(path.read_bytes().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ValueError(f"task.text.files: {path} is not UTF-8 ({error})") from None
    return texts


def _bytes(texts: Sequence[str], vocab_size: int):
    """One id for every byte."""
    if vocab_size != NUM_SPECIAL + 256:
        raise ValueError(
            f"task.vocab_size must be {NUM_SPECIAL + 256} with task.text.tokenizer='bytes', "
            f"got {vocab_size}"
        )

    def encode(texts: Sequence[str]) -> np.ndarray:
        return _joined(np.frombuffer(text.encode(), np.uint8) for text in texts)

    return tuple(bytes([i]) for i in range(256)), encode


def _bpe(texts: Sequence[str], vocab_size: int):
    """Byte pair encoding on bytes, whose merges do not cross words, as in GPT-2.

    Merges are learned from the first million characters of the training files, in the order of
    their checksums. Sennrich et al. 2016 (arXiv 1508.07909).
    """
    # Here, since only those who train on text pay for it.
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if vocab_size < NUM_SPECIAL + 256:
        raise ValueError(
            f"task.vocab_size must be at least {NUM_SPECIAL + 256} with task.text.tokenizer='bpe', "
            f"got {vocab_size}"
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    shuffled = sorted(texts, key=lambda text: zlib.crc32(text.encode()))
    tokenizer.train_from_iterator(_first(shuffled, _LEARNED_FROM), trainer)

    def encode(texts: Sequence[str]) -> np.ndarray:
        return _kept(
            (tokenizer.to_str(), *texts),
            lambda: _joined(
                np.array(e.ids, np.uint32) for e in tokenizer.encode_batch_fast(list(texts))
            ),
        )

    return _pieces(tokenizer, alphabet), encode


TOKENIZERS = {"bpe": _bpe, "bytes": _bytes}


def _first(texts: Sequence[str], characters: int):
    """Texts up to a number of characters, at least one of them."""
    for text in texts:
        yield text[: max(characters, 1)]
        characters -= len(text)
        if characters <= 0:
            return


def _pieces(tokenizer, alphabet: list[str]) -> tuple[bytes, ...]:
    """The bytes of every token; the library writes each byte as a printable character."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [b for b in range(256) if b not in plain]
    byte_of = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(other)}
    assert byte_of.keys() == set(alphabet)
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return tuple(bytes(byte_of[c] for c in token) for token, _ in tokens)


def _joined(texts) -> np.ndarray:
    """Ids of all texts in a row, moved past the special ones, SEP after each."""
    parts = [np.append(ids.astype(np.int64) + NUM_SPECIAL, SEP) for ids in texts]
    ids = np.concatenate(parts)
    return ids.astype(np.uint16 if ids.max() < 2**16 else np.int32)


def cache_folder() -> Path:
    """Where this project keeps what it can make again."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "attention-lab"


def _kept(made_from: Sequence[str], make) -> np.ndarray:
    """What ``make`` gives, from the cache where it was made of the same texts before."""
    digest = hashlib.sha256()
    for text in made_from:
        digest.update(hashlib.sha256(text.encode()).digest())
    path = cache_folder() / "text" / f"{digest.hexdigest()}.npy"
    if path.exists():
        return np.load(path)
    array = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may make the same one; each renames a whole file into place.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        np.save(file, array)
    Path(file.name).replace(path)
    return array
