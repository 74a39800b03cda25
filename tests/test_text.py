"""Text: files into tokens and back, the split by file, and crops that follow from their key."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tasks import Text, corpus, train_key
from tasks.vocabulary import BOS, NUM_SPECIAL, SEP
from tests import tiny
from training.settings import OptionError, settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """30 files in two folders, with every kind of character; the cache is their own too."""
    root = tmp_path_factory.mktemp("text")
    words = [
        "def",
        "return",
        "self",
        "None",
        "über",
        "naïve",
        "日本",
        "\U0001f600",
        "x",
        "=",
        "1\n",
    ]
    random = np.random.default_rng(0)
    for i in range(30):
        path = root / ("a" if i % 2 else "b/c") / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(" ".join(random.choice(words, 200)) + f"\n# file {i}\r\n", newline="")
    (root / "a" / "not.md").write_bytes(b"\xff\xfe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        yield root


TOKENIZERS = [("bytes", 260), ("bpe", 300)]


def text(folder, tokenizer="bytes", vocab_size=260, length=40, **options):
    return Text(vocab_size, length, f"{folder}/**/*.txt", tokenizer, **options)


# --- Files and tokens -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tokenizer", "vocab_size"), TOKENIZERS)
def test_all_that_is_in_the_files_comes_back(folder, tokenizer, vocab_size):
    """Every file once, in one split, character for character, with SEP after it."""
    found = text(folder, tokenizer, vocab_size).corpus
    texts = {}
    for name, ids in (("train", found.train), ("test", found.test)):
        assert ids.min() >= SEP and ids.max() < vocab_size and ids[-1] == SEP
        ends = np.flatnonzero(ids == SEP)
        texts[name] = [found.decode(part) for part in np.split(ids, ends)[:-1]]
    assert (len(texts["train"]), len(texts["test"])) == (27, 3)
    expected = sorted(path.read_bytes().decode() for path in folder.glob("**/*.txt"))
    assert sorted(texts["train"] + texts["test"]) == expected


def test_byte_pairs_are_shorter_than_bytes(folder):
    pairs, single = text(folder, "bpe", 300).corpus, text(folder).corpus
    assert len(pairs.train) < 0.7 * len(single.train)
    assert len(pairs.pieces) == 296 and len(set(pairs.pieces)) == 296
    assert {bytes([b]) for b in range(256)} <= set(pairs.pieces)
    assert max(map(len, pairs.pieces)) > 3
    assert single.pieces == tuple(bytes([b]) for b in range(256))


def test_the_split_does_not_move_with_the_folder_or_grow_with_the_files(folder, tmp_path):
    """By the name of a file below what all have in common."""
    here = sorted(folder.glob("**/*.txt"))
    moved = [tmp_path / "elsewhere" / path.relative_to(folder) for path in here]
    for one, other in zip(corpus.split(here), corpus.split(moved), strict=True):
        assert [p.relative_to(folder) for p in one] == [
            p.relative_to(tmp_path / "elsewhere") for p in other
        ]
    train, test = corpus.split(here[:2])
    assert len(train) == len(test) == 1
    assert not set(corpus.split(here)[0]) & set(corpus.split(here)[1])


def test_nothing_is_learned_from_the_test_files(folder, tmp_path):
    """Another text in a test file changes no merge."""
    found = text(folder, "bpe", 300).corpus
    tested = corpus.split(sorted(folder.glob("**/*.txt")))[1]
    for path in sorted(folder.glob("**/*.txt")):
        copy = tmp_path / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(b"zqzqzqzq" * 500 if path in tested else path.read_bytes())
    other = text(tmp_path, "bpe", 300).corpus
    assert other.pieces == found.pieces and np.array_equal(other.train, found.train)
    assert not np.array_equal(other.test, found.test)


def test_what_was_encoded_once_is_read_from_the_cache(folder, monkeypatch):
    first = text(folder, "bpe", 280).corpus.train
    corpus.load.cache_clear()

    def never(*_):
        raise AssertionError

    monkeypatch.setattr(corpus, "_joined", never)
    assert np.array_equal(text(folder, "bpe", 280).corpus.train, first)
    corpus.load.cache_clear()


def test_the_library_of_this_python_is_found():
    found = [path.name for path in corpus.find(None)]
    assert {"argparse.py", "dataclasses.py", "typing.py"} <= set(found)
    assert len(found) > 300
    assert not any(
        "site-packages" in path.parts or "test" in path.parts for path in corpus.find(None)
    )


def test_tokens_have_names(folder):
    task = text(folder)
    assert [task.token_name(i) for i in (BOS, SEP, 4 + ord("d"), 4 + ord("\n"))] == [
        "BOS", "SEP", "d", "\\n",
    ]  # fmt: skip


def test_newlines_are_delimiters(folder):
    task = text(folder, "bpe", 300)
    pieces = task.corpus.pieces
    assert SEP in task.delimiters and len(task.delimiters) > 1
    assert {i for i in task.delimiters if i != SEP} == {
        i + NUM_SPECIAL for i, piece in enumerate(pieces) if b"\n" in piece
    }


# --- Crops (case E3) ------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_crop_stands_in_the_files(folder, split):
    task = text(folder, split=split)
    batch = task.sample(jax.random.key(0), 64)
    whole = task.tokens
    assert len(whole) == len(getattr(task.corpus, split))
    windows = np.lib.stride_tricks.sliding_window_view(whole, 40)
    known = {row.tobytes() for row in np.ascontiguousarray(windows.astype(np.int32))}
    assert (np.asarray(batch.tokens_BT[:, 0]) == BOS).all()
    assert np.array_equal(batch.tokens_BT[:, 1:], batch.targets_BT[:, :-1])
    for row in np.asarray(batch.targets_BT):
        assert row.tobytes() in known
    assert (np.asarray(batch.weights_BT) == 1).all()
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == np.int32


def test_every_place_can_be_drawn(folder, monkeypatch):
    """The first token of the split and the last one too."""
    task = text(folder, split="test", length=len(text(folder, split="test").tokens) - 2)
    starts = {task.sample(jax.random.key(i), 8).targets_BT[:, 0].tolist()[0] for i in range(4)}
    assert starts <= set(task.tokens[:3].tolist())
    rows = np.asarray(task.sample(jax.random.key(0), 64).targets_BT)
    windows = np.lib.stride_tricks.sliding_window_view(task.tokens, task.length)
    found = {int((windows == row).all(1).argmax()) for row in rows}
    assert found == {0, 1, 2}


def test_batches_follow_from_seed_and_step(folder):
    task = text(folder)

    compiled = jax.jit(lambda seed, index: task.sample(train_key(seed, index), 8).tokens_BT)

    def batch(seed, index):
        return np.asarray(compiled(np.uint32(seed), index))

    assert np.array_equal(batch(0, 5), batch(0, 5))
    drawn = [batch(seed, index).tobytes() for seed in (0, 1) for index in range(200)]
    assert len(set(drawn)) == 400
    assert np.array_equal(task.sample(train_key(0, 7), 8).tokens_BT, batch(0, 7))


def test_evaluation_sees_files_that_training_does_not(folder):
    task = text(folder)
    assert task.held_out() == text(folder, split="test") and task.held_out() != task
    assert task.held_out().held_out() == task.held_out()
    assert task.at_length(7).length == 7 and task.at_length(7).files == task.files
    counts = np.bincount(task.corpus.train)
    assert task.chance == task.held_out().chance == pytest.approx(counts.max() / counts.sum())
    (stratum,) = task.space
    assert 2**stratum.log2_size == pytest.approx(len(task.tokens) - 39)


def test_a_run_trains_on_the_one_and_is_evaluated_on_the_other(folder):
    config = tiny.config(
        task__vocab_size=260, task__text__share=1.0, task__text__tokenizer="bytes",
        task__text__files=f"{folder}/**/*.txt", task__copy__share=0.0, task__induction__share=0.0,
    )  # fmt: skip
    found = settings(config)
    (trained,) = [t for t in found.task.tasks if t.name == "text"]
    (evaluated,) = [t for t in found.evaluated if t.name == "text"]
    assert (trained.split, evaluated.split) == ("train", "test")
    assert evaluated in found.held_out.tasks and found.held_out.shares == found.task.shares
    from analysis.evaluation import training_overlap

    assert training_overlap(found)["text"] == 0


def test_the_description_shows_a_crop(folder):
    said = text(folder).describe()
    assert "tokens to train" in said and "vocabulary 260 (bytes)" in said
    assert said.splitlines()[2:]


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"vocab_size": 261}, r"task\.vocab_size must be 260 with .*'bytes', got 261"),
        ({"tokenizer": "bpe", "vocab_size": 259}, r"at least 260 with .*'bpe', got 259"),
        ({"tokenizer": "words"}, r"task\.text\.tokenizer must be one of .*'bpe'.*got 'words'"),
        ({"length": 0}, r"task\.length=0 must be at least 1"),
        ({"length": 10**6}, r"task\.length=1000000 is longer than the \d+ tokens of the train"),
    ],
)
def test_options_that_do_not_fit_are_named(folder, options, match):
    with pytest.raises(ValueError, match=match):
        text(folder, **options)


def test_files_that_do_not_do_are_named(folder, tmp_path):
    for files, found in ((f"{tmp_path}/*.txt", 0), (f"{folder}/a/1.txt", 1)):
        with pytest.raises(ValueError, match=rf"task\.text\.files=.* names {found} files"):
            Text(260, 40, files, "bytes")
    with pytest.raises(ValueError, match=r"not\.md is not UTF-8"):
        Text(260, 40, f"{folder}/a/*", "bytes")


def test_a_run_with_no_such_files_stops_before_it_starts(tmp_path):
    config = tiny.config(
        task__vocab_size=260, task__text__share=1.0, task__text__tokenizer="bytes",
        task__text__files=f"{tmp_path}/none/*.txt",
    )  # fmt: skip
    with pytest.raises(OptionError, match=r"task\.text\.files=.* names 0 files"):
        settings(config)
