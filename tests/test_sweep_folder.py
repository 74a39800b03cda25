"""A sweep's folder and its lock: how it begins, what is refused, who is at work in it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sweeps.folder import SweepFolder
from sweeps.plan import make_plan
from tests import tiny_sweep
from training.lock import locked
from training.run_folder import write_json
from training.settings import OptionError

PLAN = make_plan(tiny_sweep.get_sweep(), tiny_sweep.get_config().to_dict())
NAMES = [run.name for run in PLAN.runs]


@pytest.fixture
def folder(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    folder.begin(*tiny_sweep.arguments(PLAN))
    return folder


def train_all(folder):
    for run in PLAN.runs:
        write_json(folder.result(run.name), tiny_sweep.record(run.order()))


def contents(path):
    return {str(p): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def test_a_folder_of_something_else_is_refused_and_untouched(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    before = contents(tmp_path)
    for path, said in ((tmp_path, "no sweep.json"), (tmp_path / "letter.txt", "is a file")):
        with pytest.raises(OptionError, match=said):
            SweepFolder(path).check_usable_for("tiny", PLAN)
    SweepFolder(tmp_path / "new").check_usable_for("tiny", PLAN)
    assert contents(tmp_path) == before


def test_a_beginning_that_was_cut_short_can_be_begun_again(tmp_path, monkeypatch):
    """Whatever it had written: nothing, half a description, or all but the last of it."""
    folder = SweepFolder(tmp_path / "sweep")
    arguments = tiny_sweep.arguments(PLAN)
    (tmp_path / "sweep").mkdir()
    folder.description.with_name("sweep.json.tmp").write_text("{half")
    folder.check_usable_for("tiny", PLAN)

    def full(path, text):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("sweeps.folder.write_text", full)
        folder.begin(*arguments)
    folder.check_usable_for("tiny", PLAN)
    folder.begin(*arguments)
    assert folder.study.read_text() == Path(tiny_sweep.__file__).read_text()


def test_points_of_a_job_array_begin_together(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    arguments = tiny_sweep.arguments(PLAN)
    failures = []

    def begin():
        try:
            for _ in range(20):
                folder.check_usable_for("tiny", PLAN)
                folder.begin(*arguments)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and folder.read_description()["name"] == "tiny"


def test_results_of_points_that_are_no_more_are_not_dropped(folder):
    train_all(folder)
    lost = "results of runs that this sweep does not have: "
    with pytest.raises(OptionError, match=lost + "mqa,seed=0, mqa,seed=1"):
        folder.check_usable_for("tiny", PLAN.at(0))
    fewer = make_plan(tiny_sweep.get_sweep(), tiny_sweep.get_config().to_dict(), seeds=(1,))
    with pytest.raises(OptionError, match=f"{lost}gqa,seed=0, mqa,seed=0.* the same points, --se"):
        folder.check_usable_for("tiny", fewer)
    for name in NAMES[2:]:
        folder.result(name).unlink()
    folder.check_usable_for("tiny", PLAN.at(0))


def test_another_sweep_or_other_options_are_refused_by_name(folder):
    folder.check_usable_for("tiny", PLAN)
    with pytest.raises(OptionError, match="holds the sweep tiny, not other"):
        folder.check_usable_for("other", PLAN)
    train_all(folder)
    config = tiny_sweep.get_config()
    config.train.steps = 20
    other = make_plan(tiny_sweep.get_sweep(), config.to_dict())
    with pytest.raises(OptionError, match=r"gqa,seed=0.*train.steps was 10, now 20"):
        folder.check_usable_for("tiny", other)
    folder.check_usable_for("tiny", PLAN)
    folder.result(NAMES[0]).write_text("{half")
    with pytest.raises(OptionError, match="cannot be read"):
        folder.check_usable_for("tiny", PLAN)


def test_two_sweeps_exclude_each_other_and_say_who_has_it(folder):
    with folder.locked(None) as left:
        assert left == []
        said = rf"process {os.getpid()} on .* for 0:00:"
        for point in (None, "gqa"):
            with pytest.raises(OptionError, match=said), folder.locked(point):
                pass
    with folder.locked(None) as left:
        assert left == []


def test_points_of_a_job_array_share_the_folder_but_not_a_point(folder):
    with folder.locked("gqa"), folder.locked("mqa"):
        with pytest.raises(OptionError, match="the point gqa"), folder.locked("gqa"):
            pass
        me = f"process {os.getpid()} on "
        said = rf"the sweep folder .* in use by {me}.*, for 0:00:\d\d and {me}"
        with pytest.raises(OptionError, match=said), folder.locked(None):
            pass
    with folder.locked(None):
        pass


def test_the_lock_of_a_dead_process_is_taken_over_with_a_word(folder):
    # Never left: the process ends while it has the lock, as by kill -9.
    take = (
        "import os, sys; from sweeps.folder import SweepFolder; "
        "held = SweepFolder(sys.argv[1]).locked(None); held.__enter__(); os._exit(0)"
    )
    ended = subprocess.Popen(
        [sys.executable, "-c", take, str(folder.path)], cwd=Path(__file__).parent.parent
    )
    assert ended.wait() == 0
    pid = ended.pid
    with folder.locked(None) as left:
        assert len(left) == 1 and f"process {pid} on " in left[0] and "taking over" in left[0]


def test_a_lock_is_waited_for(tmp_path):
    held = contextlib.ExitStack()
    held.enter_context(locked(tmp_path / "lock", "it"))
    threading.Timer(0.2, held.close).start()
    with locked(tmp_path / "lock", "it", wait=30):
        pass
