"""The driver with executors that train nothing: failures, retries, packs, and what is kept."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from sweeps import packs, result
from sweeps.drive import drive
from sweeps.executor import Ended
from sweeps.folder import SweepFolder
from sweeps.plan import make_plan
from sweeps.progress import SweepProgress
from tests import tiny_sweep
from training.run_folder import write_json

STUDY = tiny_sweep.get_sweep()
PLAN = make_plan(STUDY, tiny_sweep.get_config().to_dict())
NAMES = [run.name for run in PLAN.runs]
# A pack of two small runs, each step of which is slower than the steps of the two.
SLOWER = packs.Measured(
    runs=2, steps=10, flops=0, at_once=1, start=1.0, alone_compile=1.0, alone_step=0.1,
    packed_compile=2.0, packed_step=0.3,
)  # fmt: skip


class Trainer:
    """Jobs end as soon as they have begun, each as the next of its endings says.

    An ending is "done", or a text with which the run fails; "silent" leaves no record, "killed"
    dies, and "declined" leaves that a pack is slower.
    """

    slots = parallel = 2

    def __init__(self, folder, **endings):
        self.folder, self.endings = folder, {k: list(v) for k, v in endings.items()}
        self.started, self.ended = [], []

    def start(self, job):
        order = json.loads(job.file.read_text())
        self.started.append([run["name"] for run in order["runs"]])
        died = ""
        for run in order["runs"]:
            ending = (self.endings.get(run["name"]) or ["done"]).pop(0)
            if ending == "killed":
                died = "its process was ended by signal 9"
            elif ending == "silent":
                job.log.write_text("some warning\nSegmentation something\n")
            elif ending == "done":
                write_json(self.folder.result(run["name"]), tiny_sweep.record(run))
            elif ending != "declined":
                write_json(self.folder.result(run["name"]), result.failed(run, ending))
            else:
                write_json(self.folder.pack(order["name"]), {"packed": False, **SLOWER.record()})
        self.ended.append(Ended(job, died))

    def wait(self, seconds):
        ended, self.ended = self.ended, []
        return ended

    def stop(self):
        self.stopped = True


@pytest.fixture
def folder(tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    folder.begin(*tiny_sweep.arguments(PLAN))
    return folder


def go(folder, trainer, retries=2, pack="off", plan=PLAN):
    said = io.StringIO()
    with SweepProgress(Console(file=said, width=200)) as progress:
        outcome = drive(plan, folder, trainer, progress, retries, pack)
    return outcome, said.getvalue()


def test_one_failed_run_loses_nothing_and_only_it_runs_again(folder):
    """Case S1."""
    trainer = Trainer(folder, **{NAMES[1]: ["ValueError: heads=3, d_model=16"]})
    outcome, said = go(folder, trainer)
    assert outcome.done == (NAMES[0], *NAMES[2:]) and outcome.failed == (NAMES[1],)
    assert outcome.errors == {NAMES[1]: "ValueError: heads=3, d_model=16"}
    assert f"FAILED    {NAMES[1]}: ValueError: heads=3, d_model=16" in said
    kept = {name: folder.result(name).read_bytes() for name in outcome.done}
    again = Trainer(folder)
    outcome, said = go(folder, again)
    assert again.started == [[NAMES[1]]] and outcome.failed == ()
    assert "4 runs, 3 of them done before" in said
    assert {name: folder.result(name).read_bytes() for name in kept} == kept


def test_a_finished_sweep_starts_nothing(folder):
    go(folder, Trainer(folder))
    again = Trainer(folder)
    outcome, _ = go(folder, again)
    assert again.started == [] and outcome.done == tuple(NAMES) and again.stopped


def test_a_killed_worker_is_started_again_as_often_as_allowed(folder):
    trainer = Trainer(folder, **{NAMES[0]: ["killed", "killed", "done"], NAMES[2]: ["killed"] * 3})
    outcome, said = go(folder, trainer, retries=2)
    assert trainer.started.count([NAMES[0]]) == trainer.started.count([NAMES[2]]) == 3
    assert outcome.failed == (NAMES[2],) and "signal 9" in outcome.errors[NAMES[2]]
    assert folder.read_result(NAMES[2])["status"] == "failed"
    assert said.count(f"again     {NAMES[0]}: its process was ended by signal 9") == 2


def test_a_process_without_a_result_fails_with_its_last_words(folder):
    trainer = Trainer(folder, **{NAMES[3]: ["silent"]})
    outcome, _ = go(folder, trainer)
    assert trainer.started.count([NAMES[3]]) == 1
    assert "without a result: Segmentation something" in outcome.errors[NAMES[3]]
    assert str(folder.log(NAMES[3])) in outcome.errors[NAMES[3]]


def test_a_full_disk_loses_no_other_run_and_no_error(folder):
    blocked = folder.result(NAMES[1])
    blocked.with_name(blocked.name + ".tmp").symlink_to("/dev/full")
    trainer = Trainer(folder, **{NAMES[1]: ["silent"]})
    outcome, _ = go(folder, trainer)
    assert outcome.done == (NAMES[0], *NAMES[2:])
    assert "No space left" in outcome.errors[NAMES[1]]
    assert "Segmentation something" in outcome.errors[NAMES[1]]
    # Where not even the order to train can be written, the others go on too.
    order = folder.job(NAMES[1])
    order.unlink()
    order.with_name(order.name + ".tmp").symlink_to("/dev/full")
    outcome, _ = go(folder, Trainer(folder))
    assert outcome.done == (NAMES[0], *NAMES[2:])
    assert "could not be started" in outcome.errors[NAMES[1]]


def test_runs_of_a_point_are_packed_and_unpacked_where_that_is_slower(folder):
    """The lightest are measured first; its process trains the first run of a pack that loses."""
    trainer = Trainer(folder, **{NAMES[3]: ["declined", "done"]})
    outcome, said = go(folder, trainer, pack="auto")
    assert trainer.started == [NAMES[2:], NAMES[:2], [NAMES[3]]]
    assert outcome.done == tuple(NAMES)
    assert f"apart     {NAMES[3]}: one program would be slower, as measured" in said
    assert f"{NAMES[2]} and 1 more as one program" in said


def test_a_pack_that_is_no_lighter_than_one_that_loses_is_not_tried(folder):
    trainer = Trainer(folder, **{NAMES[3]: ["declined", "done"]})
    trainer.slots = 1
    outcome, said = go(folder, trainer, pack="auto")
    assert trainer.started == [NAMES[2:], [NAMES[3]], [NAMES[0]], [NAMES[1]]]
    assert outcome.done == tuple(NAMES)
    lost = f"one program was slower for {NAMES[2]},and 1 more, which is no heavier"
    assert f"apart     {NAMES[0]} and 1 more: {lost}" in said
    # Asked for, they are packed whatever was measured.
    for name in NAMES:
        folder.result(name).unlink()
    trainer = Trainer(folder)
    go(folder, trainer, pack="on")
    assert trainer.started == [NAMES[:2], NAMES[2:]]


@pytest.mark.parametrize(
    ("ending", "said"),
    [("killed", "ended by signal 9"), ("silent", "without a result: Segmentation something")],
)
def test_a_pack_that_fails_is_trained_run_by_run(folder, ending, said):
    """No memory for all at once says nothing about one: of a choice that the user left to us."""
    trainer = Trainer(folder, **{name: [ending, "done"] for name in NAMES[:2]})
    outcome, printed = go(folder, trainer, pack="auto", retries=0)
    assert trainer.started == [NAMES[2:], NAMES[:2], [NAMES[0]], [NAMES[1]]]
    assert outcome.done == tuple(NAMES)
    assert re.search(
        rf"apart +{NAMES[0]} and 1 more: as one program they failed: .*{said}", printed
    )


def test_a_pack_that_was_asked_for_fails_with_its_last_words(folder):
    trainer = Trainer(folder, **{name: ["silent"] for name in NAMES[:2]})
    outcome, _ = go(folder, trainer, pack="on")
    assert outcome.failed == tuple(NAMES[:2])
    assert "Segmentation something" in outcome.errors[NAMES[0]]


def test_a_pack_that_dies_goes_on_as_a_pack_without_what_is_done(folder):
    plan = make_plan(STUDY, tiny_sweep.get_config().to_dict(), seeds=(0, 1, 2)).at(0)
    first, second, third = (run.name for run in plan.runs)
    trainer = Trainer(folder, **{second: ["killed", "done"], third: ["killed", "done"]})
    outcome, _ = go(folder, trainer, pack="on", plan=plan)
    assert trainer.started == [[first, second, third], [second, third]]
    assert outcome.errors == {}


def test_packs_hold_what_differs_in_seed_and_learning_rate_only():
    study = dataclasses.replace(STUDY, learning_rates=(1e-3, 1e-2))
    plan = make_plan(study, tiny_sweep.get_config().to_dict())
    assert [len(group) for group in packs.group(plan.runs, "on")] == [4, 4]
    assert {run.point for run in packs.group(plan.runs, "on")[0]} == {"gqa"}
    lightest_first = packs.group(plan.runs, "auto")
    assert [{run.point for run in group} for group in lightest_first] == [{"mqa"}, {"gqa"}]
    assert [len(group) for group in packs.group(plan.runs, "off")] == [1] * 8
    many = make_plan(study, tiny_sweep.get_config().to_dict(), seeds=range(9)).at(0)
    assert [len(group) for group in packs.group(many.runs, "on")] == [16, 2]


def test_packing_pays_where_all_runs_are_ready_earlier():
    measured = packs.Measured(
        runs=4, steps=100, flops=10, at_once=1, start=5.0, alone_compile=2.0, alone_step=0.1,
        packed_compile=3.0, packed_step=0.3,
    )  # fmt: skip
    assert measured.alone == 2 + 4 * (5 + 10) and measured.packed == 5 + 33 and measured.pays
    # Two at a time take their steps, and start, in half the time.
    two = dataclasses.replace(measured, at_once=2)
    assert two.record()["seconds_alone"] == 2 + 2 * (5 + 10) < two.record()["seconds_packed"]
    assert not two.pays and packs.Measured.of(two.record()) == two


def test_a_pack_that_loses_decides_only_where_more_is_lost():
    measured = dataclasses.replace(SLOWER, flops=100, steps=100, runs=4, packed_step=0.5)
    assert measured.packed > measured.alone
    assert measured.decides(runs=4, steps=100, flops=100)
    assert measured.decides(runs=2, steps=200, flops=300)
    assert not measured.decides(runs=5, steps=100, flops=100)  # more starts are saved
    assert not measured.decides(runs=4, steps=99, flops=100)
    assert not measured.decides(runs=4, steps=100, flops=99)
    # Where it is compiling that costs too much, longer runs may gain.
    slow = dataclasses.replace(measured, packed_step=0.39, packed_compile=60.0)
    assert not slow.pays and not slow.decides(runs=4, steps=100, flops=100)
    gains = dataclasses.replace(measured, start=10.0)
    assert gains.pays and not gains.decides(runs=4, steps=100, flops=100)
