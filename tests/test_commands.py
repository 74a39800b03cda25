"""train.py and eval.py as a user meets them: what they print, write, refuse and resume."""

import json
import math
import os
import pty
import random
import re
import shutil
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from tests import tiny
from tests.commands import Server
from training.checkpoint import Checkpoints
from training.run_folder import RunFolder
from training.settings import settings
from training.step import init_state

ROOT = Path(__file__).resolve().parent.parent
CONFIG = f"--config={ROOT / 'configs' / 'gqa.py'}"
TRAIN = ("train.py", CONFIG, *tiny.flags())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("commands")) as server:
        yield server


@pytest.fixture(scope="module")
def once(server, tmp_path_factory):
    """A finished run in runs/gqa of a folder, and what the command said."""
    folder = tmp_path_factory.mktemp("once")
    return folder, server.run(*TRAIN, cwd=folder)


@pytest.fixture
def copied(once, tmp_path):
    """A copy of that folder, to be changed."""
    return shutil.copytree(once[0], tmp_path / "copied")


def contents(folder):
    """Bytes and times of all that is in a folder."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def saved_bits(run, at=10, config=None):
    """The state that a run has saved, as bytes."""
    template = jax.eval_shape(lambda: init_state(settings(config or tiny.config())))
    with Checkpoints(run / "checkpoints", keep=1, best_metric=None) as saved:
        state = saved.restore(template, at)
    leaves = jax.tree.leaves((state.step, state.params, state.opt_state))
    return [np.asarray(leaf).tobytes() for leaf in (*leaves, jax.random.key_data(state.key))]


def timeless(run):
    return [
        {k: v for k, v in line.items() if "time" not in k and "per_second" not in k}
        for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    ]


def unfinish(folder):
    """What a kill between the checkpoints of 5 and 10 leaves."""
    shutil.rmtree(folder / "runs" / "gqa" / "checkpoints" / "10")
    (folder / "runs" / "gqa" / "curves.png").unlink()


def png_size(path):
    """Width and height of a PNG whose chunks are whole and whose pixels can be unpacked."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, pixels, kinds = 8, b"", []
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(
            kind + body
        )
        pixels += body if kind == b"IDAT" else b""
        kinds.append(kind)
        at += 12 + size
    assert kinds[0] == b"IHDR" and kinds[-1] == b"IEND"
    width, height, depth, colour = struct.unpack(">IIBB", data[16:26])
    assert len(zlib.decompress(pixels)) == height * (1 + width * depth // 8 * {2: 3, 6: 4}[colour])
    return width, height


def events(folder):
    """(step, tag, value) of all scalars in TensorBoard event files, their checksums aside."""
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            yield from (
                (event.step, value.tag, value.simple_value) for value in event.summary.value
            )
            at += 16 + size


def one_line(ended, code):
    """The message of a command that ended with ``code``: one line and no traceback."""
    assert ended.code == code, ended.err
    assert ended.err.startswith("error: ") and ended.err.endswith("\n")
    assert ended.err.count("\n") == 1, ended.err
    return ended.err


# --- A run from start to end ---------------------------------------------------------------------


def test_a_run_says_how_it_goes_in_plain_lines(once):
    folder, ended = once
    assert (ended.code, ended.err) == (0, "")
    assert "\x1b" not in ended.out and "\r" not in ended.out
    shown = [line for line in ended.out.splitlines() if line.startswith("step")]
    assert [int(re.match(r"step +(\d+)/10 ", line)[1]) for line in shown] == [0, 4, 5, 8, 10]
    assert "compiling" in shown[0]
    for line in shown[1:]:
        assert re.search(
            r"loss \d\.\d{3}  copy [01]\.\d{3} \(chance 0\.083\)  induction [01]\.\d{3} "
            r"\(chance 0\.083\)  [\d,]+ tokens/s  \d+:\d\d left$",
            line,
        )
    last = timeless(folder / "runs" / "gqa")[-1]
    for name in ("copy/accuracy", "copy/sequence_accuracy", "induction/accuracy"):
        assert re.search(rf"{name} .*{last[name]:.4f}", ended.out)
    assert "runs/gqa/curves.png" in ended.out
    assert ended.out.splitlines()[-1].strip() == "python eval.py --workdir=runs/gqa"


def test_a_run_folder_holds_what_it_should(once):
    run = once[0] / "runs" / "gqa"
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints", "config.json", "curves.png", "environment.json", "metrics.jsonl",
        "tensorboard",
    ]  # fmt: skip
    assert json.loads((run / "config.json").read_text()) == json.loads(json.dumps(tiny.config()))
    assert {"5", "10"} <= {path.name for path in (run / "checkpoints").iterdir()}

    about = json.loads((run / "environment.json").read_text())
    assert about["command"] == list(TRAIN)
    assert about["versions"]["jax"] == jax.__version__
    assert {"jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} <= about["versions"].keys()
    assert about["python"] == ".".join(map(str, sys.version_info[:3]))
    assert about["platform"] == "cpu" and about["device_count"] == 1 and about["device_kind"]
    assert about["attention_implementation"].keys() == {"layer0"}
    assert about["started_at_step"] == 0 and about["earlier_sessions"] == []
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    assert about["git"]["commit"] == (commit.stdout.strip() or None)

    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    written = {(step, tag): value for step, tag, value in events(run / "tensorboard")}
    expected = {(line["step"], k): v for line in lines for k, v in line.items() if k != "step"}
    assert written.keys() == expected.keys()
    for key, value in expected.items():
        assert written[key] == pytest.approx(value, rel=1e-6)

    width, height = png_size(run / "curves.png")
    assert 600 <= width <= 2400 and 400 <= height <= 2400


def test_a_finished_run_says_so_and_does_nothing(once, server):
    before = contents(once[0])
    ended = server.run(*TRAIN, cwd=once[0])
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "runs/gqa is finished (10 steps); there is nothing to do\n"
    # Options that change no result are no reason to train on.
    ended = server.run(*TRAIN, "--config.checkpoint.keep=1", cwd=once[0])
    assert ended.code == 0 and "finished" in ended.out
    assert contents(once[0]) == before


def test_on_a_terminal_there_is_a_live_bar(server, copied):
    unfinish(copied)
    ours, theirs = pty.openpty()
    running = server.start(*TRAIN, cwd=copied, terminal=theirs)
    os.close(theirs)
    shown = b""
    try:
        while True:
            piece = os.read(ours, 4096)
            if not piece:
                break
            shown += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    assert running.wait().code == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert b"\x1b[" in shown and "\u2501" in text
    assert "resuming runs/gqa at step 5" in text
    assert "step 5/10" in text and "step 10/10" in text
    assert re.search(r"loss \d\.\d", text) and "left" in text and "copy" in text


# --- Resuming ------------------------------------------------------------------------------------


def test_a_new_process_goes_on_where_the_last_one_was_saved(once, server, copied):
    """Case P1: 10 steps at once, or 5, a new process, and 5."""
    unfinish(copied)
    ended = server.run(*TRAIN, cwd=copied)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[0] == "resuming runs/gqa at step 5"
    assert [int(n) for n in re.findall(r"^step +(\d+)/10", ended.out, re.M)] == [8, 10]
    assert timeless(copied / "runs/gqa") == timeless(once[0] / "runs/gqa")
    assert saved_bits(copied / "runs/gqa") == saved_bits(once[0] / "runs/gqa")
    assert png_size(copied / "runs/gqa/curves.png")
    sessions = json.loads((copied / "runs/gqa/environment.json").read_text())
    assert sessions["started_at_step"] == 5 and len(sessions["earlier_sessions"]) == 1


LONG = {
    "train__steps": 300,
    "checkpoint__every": 7,
    "train__log_every": 10,
    "train__eval_every": 40,
}


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(server, tmp_path):
    """Case P1 and P2 (f): kill −9 until the run is through, then compare with one without."""
    command = ("train.py", CONFIG, *tiny.flags(**LONG))
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert server.run(*command, cwd=tmp_path / "whole").code == 0
    seed = random.randrange(2**32)
    print(f"moments of seed {seed}")
    moments, kills, metrics = random.Random(seed), 0, tmp_path / "killed/runs/gqa/metrics.jsonl"
    for _ in range(5):
        running = server.start(*command, cwd=tmp_path / "killed")
        # From the first step on, wherever in training, saving or writing that may be.
        known = metrics.stat().st_size if metrics.exists() else 0
        while (metrics.stat().st_size if metrics.exists() else 0) <= known and alive(running.pid):
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.8))
        if alive(running.pid):
            running.kill()
        ended = running.wait()
        assert ended.code in (0, -9), ended.err
        assert "Traceback" not in ended.err
        kills += ended.code == -9
        if ended.code == 0:
            break
    assert kills > 0
    if ended.code:
        assert server.run(*command, cwd=tmp_path / "killed").code == 0
    whole, killed = tmp_path / "whole/runs/gqa", tmp_path / "killed/runs/gqa"
    assert timeless(killed) == timeless(whole)
    config = tiny.config(**LONG)
    assert saved_bits(killed, 300, config) == saved_bits(whole, 300, config)


def alive(pid):
    """Whether a process is there and not only waiting for its exit code to be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_interrupted_by_the_keyboard(server, tmp_path):
    """One line that says how to go on, and a folder that can go on."""
    command = ("train.py", CONFIG, *tiny.flags(train__steps=10**6))
    running = server.start(*command, cwd=tmp_path)
    while "step      4/" not in running.out() and alive(running.pid):
        time.sleep(0.05)
    running.interrupt()
    assert "interrupted" in one_line(running.wait(), 130)
    with Checkpoints(tmp_path / "runs/gqa/checkpoints", keep=1, best_metric=None) as saved:
        steps = saved.steps()
    assert all(step % 5 == 0 for step in steps)


# --- Refused, and nothing written ----------------------------------------------------------------

# Flags after a command that is right; what the line on stderr has to say.
MISTAKES = {
    "--config.train.stepz=3": ("config.train.stepz", "steps"),
    "--config.steps=3": ("config.steps", "not an option"),
    "--config.model.num_head=3": ("config.model.num_head", "num_heads"),
    "--config.train.steps.x=3": ("config.train.steps.x", "not an option"),
    "--config.train.steps=many": ("train.steps", "many", "whole number"),
    "--config.train.steps=5.5": ("train.steps", "5.5", "whole number"),
    "--config.train.steps=1e3": ("train.steps", "1e3", "whole number"),
    "--config.train.steps=": ("train.steps", "whole number"),
    "--config.train.steps": ("train.steps", "value"),
    "--config.train.steps=-5": ("train.steps", "-5", "at least 1"),
    "--config.model.tied_head=no": ("model.tied_head", "no", "true or false"),
    "--config.optimizer.learning_rate=fast": ("learning_rate", "fast", "number"),
    "--config.optimizer.learning_rate=nan": ("learning_rate", "nan", "finite"),
    "--config.model.num_heads=3": ("model.num_heads", "3", "divide", "8"),
    "--config.attention.gqa.num_kv_heads=3": ("num_kv_heads", "3", "divide", "2 heads"),
    "--config.attention.gqa.rope_width=3": ("rope_width", "3", "even"),
    "--config.attention.mha.dropout=0.5": ("attention.mha.dropout", "model.pattern", "gqa"),
    "--config.model.pattern=mqa,nosuch": ("model.pattern", "nosuch", "gqa"),
    "--config.model.implementation=flash": ("implementation", "flash", "auto"),
    "--config.task.vocab_size=5": ("task.vocab_size", "5", "at least 6"),
    "--config.task.length=2": ("task.length", "2", "at least 3"),
    "--config.task.induction.max_period=17": ("max_period", "17", "at most 16"),
    "--config.eval.seed=-1": ("eval.seed", "-1"),
    "--steps=3": ("steps", "flag"),
    "--workdir=": ("workdir",),
    "extra": ("extra", "--name=value"),
}


@pytest.mark.parametrize("flag", MISTAKES)
def test_a_mistake_ends_in_one_line_and_writes_nothing(server, tmp_path, flag):
    message = one_line(server.run(*TRAIN, flag, cwd=tmp_path), 2)
    missing = [piece for piece in MISTAKES[flag] if piece not in message]
    assert not missing, message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "pieces"),
    [
        (["train.py"], ["--config", "configs/gqa.py"]),
        (["train.py", "--config=configs/nosuch.py"], ["configs/nosuch.py", "no such file"]),
        (["train.py", "--config=nosuch"], ["nosuch", "no such file"]),
        (["train.py", "--config="], ["--config", "no such file"]),
        (["eval.py"], ["--workdir", "runs/gqa"]),
        (["eval.py", "--workdir=runs/nosuch"], ["runs/nosuch", "does not exist"]),
        (["eval.py", f"--workdir={ROOT / 'configs'}"], ["configs", "no run folder"]),
        (["eval.py", "--workdir=x", "--sequences=0"], ["--sequences", "at least 1", "0"]),
        (["eval.py", "--workdir=x", "--sequences=few"], ["--sequences", "whole number", "few"]),
        (["eval.py", "--workdir=x", "extra"], ["extra"]),
    ],
    ids=lambda value: "" if value[0].startswith("-") else " ".join(value)[-40:],
)
def test_a_command_without_what_it_needs(server, tmp_path, argv, pieces):
    message = one_line(server.run(*argv, cwd=tmp_path), 2)
    assert all(piece in message for piece in pieces), message
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_this_run_is_refused_and_untouched(server, once, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path), contents(once[0])
    for workdir, piece in (("mine", "no config.json"), ("file", "is a file")):
        message = one_line(server.run(*TRAIN, f"--workdir={workdir}", cwd=tmp_path), 2)
        assert piece in message and workdir in message
    message = one_line(server.run(*TRAIN, "--config.seed=3", cwd=once[0]), 2)
    assert "seed was 0, now 3" in message and "runs/gqa" in message
    ended = server.run("eval.py", "--workdir=mine", cwd=tmp_path)
    assert "mine" in one_line(ended, 2)
    assert (contents(tmp_path), contents(once[0])) == before


@pytest.mark.parametrize("workdir", ["/dev/null/run", "/proc/run"])
def test_a_place_that_cannot_be_written_to_is_named(server, tmp_path, workdir):
    """Exit code 1: no option is wrong, the disk is."""
    assert workdir in one_line(server.run(*TRAIN, f"--workdir={workdir}", cwd=tmp_path), 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("max_file", [1000, 2600, 30_000], ids=["config", "checkpoint", "picture"])
def test_a_full_disk_ends_in_one_line_and_loses_nothing(server, once, tmp_path, max_file):
    """A file may hold so many bytes; with room again the same command goes on."""
    ended = server.run(*TRAIN, cwd=tmp_path, max_file=max_file)
    assert "Traceback" not in ended.err
    assert ended.code == 1 and ended.err.count("error: ") == ended.err.count("\n") == 1, ended.err
    assert str(tmp_path) in ended.err or "runs/gqa" in ended.err
    assert server.run(*TRAIN, cwd=tmp_path).code == 0
    assert timeless(tmp_path / "runs/gqa") == timeless(once[0] / "runs/gqa")
    assert saved_bits(tmp_path / "runs/gqa") == saved_bits(once[0] / "runs/gqa")
    assert png_size(tmp_path / "runs/gqa/curves.png")


def test_a_run_that_diverges_ends_with_step_and_metric(server, tmp_path):
    """Case O4 from the command line."""
    flags = tiny.flags(optimizer__learning_rate=1e30, optimizer__warmup_steps=0)
    message = one_line(server.run("train.py", CONFIG, *flags, cwd=tmp_path), 1)
    assert re.search(r"(loss|gradient_norm) is (nan|inf) at step [1-4]\b", message)
    assert RunFolder(tmp_path / "runs/gqa").read_metrics()[-1]["step"] < 4


# --- eval.py -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def evaluated(once, server, tmp_path_factory):
    folder = shutil.copytree(once[0], tmp_path_factory.mktemp("evaluated") / "copied")
    return folder, server.run("eval.py", "--workdir=runs/gqa", "--sequences=3", cwd=folder)


def test_an_evaluation_says_and_saves_accuracy_by_length(evaluated):
    folder, ended = evaluated
    assert (ended.code, ended.err) == (0, "")
    run = folder / "runs/gqa"
    found = json.loads((run / "eval.json").read_text())
    assert found["step"] == 10 and found["sequences"] == 3
    rows = {(row["task"], row["length"]): row for row in found["by_length"]}
    assert rows.keys() == {(t, n) for t in ("copy", "induction") for n in (3, 7, 17, 33, 67)}
    for (task, length), row in rows.items():
        assert row["inside"] == (length <= 17)
        assert row["chance"] == pytest.approx(1 / 12)
        for name in ("accuracy", "generated_accuracy"):
            assert 0 <= row[f"{name.removesuffix('accuracy')}sequence_accuracy"] <= row[name] <= 1
        # As long as all is right, what is generated is what is forced.
        assert row["sequence_accuracy"] == row["generated_sequence_accuracy"]
        assert re.search(rf"{task} +│ +{length} │ .*{row['accuracy']:.4f}", ended.out)
    assert png_size(run / "accuracy_by_length.png")

    parts = found["parameters"]
    wide, vocabulary, heads, kv_heads, head = 8, 16, 2, 1, 4
    assert parts["embedding"] == parts["head"] == vocabulary * wide
    assert parts["attention"] == 2 * wide * heads * head + 2 * wide * kv_heads * head
    assert parts["total"] == sum(parts.values()) - parts["total"]
    # float32 keys and values, of one layer.
    assert found["cache_bytes"]["per_token"] == 2 * kv_heads * head * 4
    assert f"{found['cache_bytes']['per_token']} bytes per token" in ended.out
    assert found["cache_bytes"]["allocated"] >= 17 * found["cache_bytes"]["per_token"]
    assert all(0 <= share <= 1 for share in found["training_overlap"].values())
    assert "runs/gqa/eval.json" in ended.out


def test_an_evaluation_changes_nothing_of_the_run(evaluated, once):
    before, after = contents(once[0]), contents(evaluated[0])
    new = {"runs/gqa/eval.json", "runs/gqa/accuracy_by_length.png"}
    assert after.keys() - before.keys() == new
    assert all(after[name][1] == data for name, (_, data) in before.items())


def test_an_evaluation_of_the_training_length_agrees_with_training(once, evaluated):
    """Other sequences, the same model: far from chance both or neither."""
    rows = json.loads((evaluated[0] / "runs/gqa/eval.json").read_text())["by_length"]
    last = timeless(once[0] / "runs/gqa")[-1]
    for row in rows:
        assert math.isclose(row["accuracy"], last[f"{row['task']}/accuracy"], abs_tol=0.4)


@pytest.mark.parametrize("checkpoint", ["best", "5"])
def test_another_checkpoint_can_be_evaluated(server, copied, checkpoint):
    metrics = timeless(copied / "runs/gqa")
    score = {
        line["step"]: line["copy/accuracy"] + line["induction/accuracy"]
        for line in metrics
        if line["step"] in (5, 10)
    }
    best = max(score, key=lambda step: (score[step], step))
    argv = ("eval.py", "--workdir=runs/gqa", "--sequences=3", f"--checkpoint={checkpoint}")
    ended = server.run(*argv, cwd=copied)
    assert ended.code == 0, ended.err
    found = json.loads((copied / "runs/gqa/eval.json").read_text())
    assert found["step"] == (best if checkpoint == "best" else 5)


def test_a_checkpoint_that_is_not_there_is_refused(server, copied):
    before = contents(copied)
    for name in ("7", "newest"):
        ended = server.run("eval.py", "--workdir=runs/gqa", f"--checkpoint={name}", cwd=copied)
        message = one_line(ended, 2)
        assert name in message and "[5, 10]" in message
    shutil.rmtree(copied / "runs/gqa/checkpoints")
    message = one_line(server.run("eval.py", "--workdir=runs/gqa", cwd=copied), 2)
    assert "no checkpoint" in message
    assert contents(copied).keys() <= before.keys()


# --- Without the server --------------------------------------------------------------------------


@pytest.mark.slow
def test_the_files_run_as_commands_with_warnings_as_errors(server, once, copied, tmp_path):
    """What the server stands for, in processes of their own."""
    unfinish(copied)
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(server.cache),
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    # How ml_collections loads a config file.
    quiet = ["-W", "error", "-W", "ignore:the load_module() method:DeprecationWarning"]
    for command in (TRAIN, ("eval.py", "--workdir=runs/gqa", "--sequences=3")):
        ended = subprocess.run(
            [sys.executable, *quiet, str(ROOT / command[0]), *command[1:]],
            cwd=copied, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert (ended.returncode, ended.stderr) == (0, "")
    assert saved_bits(copied / "runs/gqa") == saved_bits(once[0] / "runs/gqa")
    assert timeless(copied / "runs/gqa") == timeless(once[0] / "runs/gqa")
