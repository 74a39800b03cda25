"""The page of claims, on evidence made of small scripts: run, failed, killed, resumed, redrawn."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.report import Verdict
from benchmarks.report import write as write_benchmark
from configs.sweeps import claims as shipped
from sweeps import results, study
from sweeps.axes import AxisError
from sweeps.claims import command, drive, record
from sweeps.claims.evidence import AtLeast, Bench, Pytest, StudyEvidence, Training
from sweeps.claims.judge import Judged
from sweeps.claims.rows import NO_ROW, Claims, Finding, Found, Row, Table
from sweeps.claims.text import TextModel, WithLearnedSinks
from sweeps.folder import SweepFolder
from tests.tiny_sweep import options
from training.lock import locked
from training.run_folder import RunFolder, write_json
from training.settings import OptionError

ROOT = Path(__file__).resolve().parent.parent
FILE = Path(__file__)
# Writes one finding (row or null, measured, confirmed, reason) and leaves a mark that it has run.
SAYS = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True, exist_ok=True)
with (folder / "runs.txt").open("a") as file: file.write("x")
(folder / "found.json").write_text(sys.argv[2])
"""


@dataclasses.dataclass(frozen=True)
class Script:
    """Evidence that says what it is told to, by a process of its own."""

    name: str
    says: tuple = ()
    code: str = SAYS
    whole: bool = False
    minutes: float = 0.5
    needs: tuple[str, ...] = ()
    table: Table | None = None
    links = ("README.md", "tests/test_claims.py::test_x")

    def commands(self, folder: Path):
        return (("-c", self.code, str(folder), json.dumps(self.says)),)

    def read(self, folder: Path) -> Found:
        lines = json.loads((folder / "found.json").read_text())
        said = (Finding(row, "it is so", text, ok, why) for row, text, ok, why in lines)
        return Found(tuple(said), self.table)


GOOD = Script("good", ((None, "0.75", True, False),), table=Table(("n", "b|c"), (("1", "<2>"),)))
BAD = Script("bad", (
    (2, "0.25 <of> 1", False, False), (2, "as thought", True, True),
    (NO_ROW, "as in a paper", True, False), (NO_ROW, "of what is so", True, True),
    (NO_ROW, "not as in a paper", False, False), (NO_ROW, "why it is not", True, True),
))  # fmt: skip
FAILS = Script("fails", code="import sys; sys.exit('no such luck')")
DIES = Script("dies", code="import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
ABSENT = Script("absent", needs=("configs/sweeps/nosuch.py",))
PAGE = Claims(
    "Some claims",
    (
        Row(1, "the first | claim", "0.7", (GOOD,)),
        Row(2, "the second", "1", (GOOD, BAD), "it is too small."),
        Row(3, "the third", "–", (GOOD, FAILS)),
        Row(4, "the fourth", "–", (DIES,)),
        Row(5, "the fifth", "–", (ABSENT,)),
        Row(12, "the twelfth", "–", (BAD,)),
    ),
)


def run(path: Path, page: Claims = PAGE, **changes) -> int:
    return command.main(str(FILE), page, options(workdir=str(path), **changes))


def runs_of(path: Path, name: str) -> int:
    return len((path / "evidence" / name / "runs.txt").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("claims") / "page"
    return path, run(path)


def rows_of(path: Path) -> dict[str, list[str]]:
    """The cells of the page's first table, by number of row."""
    lines = (path / "claims.md").read_text().splitlines()
    found = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines]
    return {cells[0]: cells for cells in found if cells[0].isdigit() and len(cells) == 7}


def test_every_row_has_its_verdict_its_figures_and_its_command(whole):
    path, code = whole
    rows = rows_of(path)
    assert list(rows) == ["1", "2", "3", "4", "5", "12"]
    verdicts = {number: cells[4] for number, cells in rows.items()}
    no = dict.fromkeys(("2", "3", "4", "5", "12"), "**NOT CONFIRMED**")
    assert verdicts == {"1": "**CONFIRMED**"} | no
    assert rows["1"][1:4] == [r"the first \| claim", "0.7", "✓ it is so: 0.75"]
    assert rows["2"][3] == "✓ it is so: 0.75<br>✗ it is so: 0.25 &lt;of&gt; 1"
    assert "no such luck" in rows["3"][3] and rows["3"][3].startswith(
        "✓ it is so: 0.75<br>✗ fails:"
    )
    assert "was ended by signal 9" in rows["4"][3]
    assert rows["5"][3] == "✗ absent: is missing: there is no configs/sweeps/nosuch.py"
    assert rows["12"][3] == "✗ bad: says nothing of row 12"
    assert "README.md" in rows["1"][5] and rows["1"][6].startswith("`python -c ")
    # Evidence that failed tells by the exit code; a claim that is not confirmed does not.
    assert code == 1


def test_what_differs_comes_with_its_reason_and_the_test_of_it(whole):
    text = (whole[0] / "claims.md").read_text()
    section = text.partition("### Row 2: the second")[2].partition("###")[0]
    assert section.split("\n")[2:5] == [
        "- ✗ it is so: 0.25 &lt;of&gt; 1",
        "- Reason: it is too small.",
        "- Tested: ✓ it is so: as thought",
    ]
    assert "1 of 6 rows are confirmed. Without a result: fails, dies, absent." in text
    assert "### Row 1:" not in text and "| n | b\\|c |" in text


def test_what_no_row_claims_is_told_where_it_is_not_as_in_a_paper(whole):
    """A study may judge more than the articles claim; no row's verdict depends on that."""
    for name, line in (("claims.md", "\n- {}"), ("claims.html", "<li>{}</li>")):
        text = (whole[0] / name).read_text()
        section = text.partition("What no row claims, and is not as in the papers")[2]
        assert line.format("✗ it is so: not as in a paper") in section
        assert line.format("Reason, tested: ✓ it is so: why it is not") in section
        assert "✓ it is so: as in a paper" not in text
        assert "✓ it is so: of what is so" not in text


def test_the_page_for_a_browser_says_the_same(whole):
    page = (whole[0] / "claims.html").read_text()
    assert page.count('<strong class="yes">CONFIRMED</strong>') == 1
    assert page.count('<strong class="no">NOT CONFIRMED</strong>') == 5
    assert (
        "0.25 &lt;of&gt; 1" in page and "&lt;2&gt;" in page and 'README.md">README.md</a>' in page
    )
    assert 'tests/test_claims.py">tests/test_claims.py::test_x</a>' in page


def test_links_hold_where_the_page_lies(whole):
    for name in ("claims.md", "claims.html"):
        links = re.findall(r"[(\"]((?:\.\./)+[\w/.]*README\.md)", (whole[0] / name).read_text())
        assert links and all((whole[0] / link).resolve() == ROOT / "README.md" for link in links)


def test_what_is_done_is_not_run_again_and_what_failed_is(tmp_path, capsys):
    assert run(tmp_path / "x", only="1,3") == 1
    assert run(tmp_path / "x", only="1 3") == 1
    assert runs_of(tmp_path / "x", "good") == 1
    out = capsys.readouterr().out
    assert "2 pieces of evidence, 1 of them done before" in out
    assert out.count("FAILED    fails: its process ended with code 1: no such luck") == 2
    # Of rows that were not asked for the page says that they have not run.
    assert rows_of(tmp_path / "x")["4"][3] == "✗ dies: has not run"
    # A row that fails is no row of those asked for.
    assert run(tmp_path / "x", only="[12]") == 0


def test_a_page_is_redrawn_from_its_folder(whole, capsys):
    path, _ = whole
    before = {name: (path / name).read_text() for name in ("claims.md", "claims.html")}
    for name in before:
        (path / name).unlink()
    assert command.report(SweepFolder(path), PAGE, options(workdir=str(path))) == 0
    assert {name: (path / name).read_text() for name in before} == before
    assert runs_of(path, "good") == 1
    assert "NOT CONFIRMED: 2: the second\n    it is so: 0.75" in capsys.readouterr().out


def test_the_whole_page_goes_to_the_documents(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(command, "ROOT", tmp_path)
    page = dataclasses.replace(PAGE, rows=PAGE.rows[:3], docs="docs")
    run(tmp_path / "x", page, only="1")
    assert not list((tmp_path / "docs").iterdir())
    run(tmp_path / "x", page)
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {"claims.md", "claims.html"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"only": "7"}, "--only=7: no row is '7'; there are 1, 2, 3, 4, 5, 12"),
        ({"only": "1,x*"}, "no row is 'x*'"),
        ({"seeds": "2"}, "--seeds is for studies"),
        ({"workdir": ""}, "--workdir is empty"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(tmp_path, changes, said):
    path = tmp_path / "x"
    with pytest.raises(OptionError, match=re.escape(said)):
        command.main(str(FILE), PAGE, options(**{"workdir": str(path)} | changes))
    assert not path.exists()


def test_folders_of_others_are_refused(tmp_path):
    other = SweepFolder(tmp_path / "other")
    other.begin({"name": "variants"}, FILE)
    with pytest.raises(OptionError, match="holds the sweep variants, not test_claims"):
        run(other.path)
    assert run(tmp_path / "x", only="1") == 0
    changed = dataclasses.replace(GOOD, says=((None, "0.8", True, False),))
    page = Claims("Some claims", (Row(1, "the first", "0.7", (changed,)),))
    with pytest.raises(OptionError, match=r"good\.json is the result of -c"):
        run(tmp_path / "x", page)
    with (
        locked(tmp_path / "x" / "locks" / "sweep", "it"),
        pytest.raises(OptionError, match="is in use by process"),
    ):
        run(tmp_path / "x", only="1")


def test_rows_that_make_no_page_are_refused():
    for rows, said in (
        ((Row(1, "a", "", (GOOD,)), Row(1, "b", "", (GOOD,))), "two rows 1"),
        ((Row(1, "a", "", ()),), "row 1 cites no evidence"),
        ((Row(1, "a", "", (GOOD, dataclasses.replace(GOOD, whole=True))),), "are named good"),
    ):
        with pytest.raises(AxisError, match=said):
            Claims("?", rows)


def test_a_dry_run_lists_rows_commands_and_time(tmp_path, capsys):
    whole = dataclasses.replace(BAD, whole=True, minutes=3.0)
    page = Claims("Some claims", (Row(1, "the first", "", (GOOD, FAILS, whole)),))
    assert run(tmp_path / "x", page, dry_run=True) == 0
    out = capsys.readouterr().out
    assert "1  the first  [good, fails, bad]" in out and "good, 0.5 minutes: python -c" in out
    assert "About 4 minutes on 2 cores" in out and not (tmp_path / "x").exists()
    # What needs the machine for itself comes last.
    assert [each.name for each in drive.in_order(page.evidence)] == ["good", "fails", "bad"]


SLEEPS = "import sys, time; print('asleep', flush=True); time.sleep(600)"


def test_a_killed_driver_leaves_nothing_running_and_is_continued(tmp_path):
    file = tmp_path / "page.py"
    file.write_text(
        "from configs.sweeps.claims import get_config\n"
        "from tests import test_claims as t\nfrom sweeps.claims.rows import Claims, Row\n"
        "def get_sweep():\n"
        "    slow = t.Script('slow', code=t.SLEEPS)\n"
        "    return Claims('?', (Row(1, 'a', '', (t.GOOD,)), Row(2, 'b', '', (slow,))))\n"
    )
    argv = [sys.executable, "sweep.py", f"--config={file}", f"--workdir={tmp_path / 'x'}"]
    driver = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    folder, deadline = SweepFolder(tmp_path / "x"), time.monotonic() + 120
    done = folder.result("good"), tmp_path / "x" / "claims.md"
    while not (all(x.exists() for x in done) and "asleep" in _text(folder.log("slow"))):
        assert time.monotonic() < deadline and driver.poll() is None, driver.stdout.read()
        time.sleep(0.05)
    orphans = psutil.Process(driver.pid).children(recursive=True)
    assert any("sleep(600)" in " ".join(each.cmdline()) for each in orphans)
    driver.send_signal(signal.SIGKILL)
    driver.communicate()
    assert not psutil.wait_procs(orphans, timeout=60)[1]
    # The page was there before the kill, and the evidence that was done is kept.
    assert "has not run" in (tmp_path / "x" / "claims.md").read_text()
    quick = Script("slow", code=SLEEPS.replace("600", "0"))
    page = Claims("?", (Row(1, "a", "", (GOOD,)), Row(2, "b", "", (quick,))))
    assert command.main(str(file), page, options(workdir=str(tmp_path / "x"))) == 1
    assert runs_of(tmp_path / "x", "good") == 1
    assert "cannot be read: FileNotFoundError" in record.read(folder, quick).error


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# --- Kinds of evidence ---------------------------------------------------------------------------


def test_tests_count_their_cases_and_hand_on_their_figures(tmp_path):
    """By pytest itself, on a file of five cases."""
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('x', [1, 1])\n"
        "def test_good(x, record_property): record_property('figures', f'{x} MiB')\n"
        "@pytest.mark.parametrize('x', [1, 2])\n"
        "def test_bad(x): assert x == 1\n"
        "@pytest.mark.skip\n"
        "def test_skipped(): pass\n"
    )
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\njunit_family='xunit1'\n")
    names = ("good", "bad", "skipped", "absent")
    evidence = Pytest("some", tuple(f"test_some.py::test_{name}" for name in names))
    (argv,) = evidence.commands(tmp_path)
    subprocess.run(
        [sys.executable, *argv[:-1], "-p", "no:xdist"], cwd=tmp_path, capture_output=True
    )
    good, bad, skipped, absent = evidence.read(tmp_path).findings
    assert (good.measured, good.confirmed) == ("1 MiB; 2 of 2 cases pass", True)
    assert (bad.measured, bad.confirmed) == ("1 of 2 cases pass", False)
    assert (skipped.measured, skipped.confirmed) == ("0 of 1 cases pass", False)
    assert (absent.measured, absent.confirmed) == ("it has not run", False)
    assert good.row is None and good.what == evidence.links[0] == "test_some.py::test_good"
    assert not good.reason
    assert dataclasses.replace(evidence, reason=True).read(tmp_path).findings[0].reason


def test_no_row_is_confirmed_by_reasons_alone():
    row = Row(1, "a claim", "a figure", ())
    told = Finding(1, "it holds", "3", True, False)
    why = Finding(1, "for this reason", "3", True, True)
    assert Judged(row, (told,), (), {}).confirmed and Judged(row, (told,), (why,), {}).confirmed
    assert not Judged(row, (), (why,), {}).confirmed
    assert not Judged(row, (told,), (), {"evidence": "has not run"}).confirmed


def test_a_benchmark_hands_on_its_verdicts(tmp_path):
    verdicts = [Verdict("21", "time grows", True, "T^2.01"), Verdict("22", "bytes", None, "none")]
    write_benchmark(tmp_path, "attention", ["# Title"], [], verdicts)
    grows, other = Bench("a", "attention", ("--short",), 1.0).read(tmp_path).findings
    assert (grows.row, grows.what, grows.measured, grows.confirmed) == (
        21, "time grows", "T^2.01", True,
    )  # fmt: skip
    assert (other.row, other.confirmed) == (22, False)


def test_a_study_hands_on_the_verdicts_that_name_a_row(tmp_path, monkeypatch):
    from tests.filled_sweep import STUDY, fill

    folder = fill(tmp_path / "sweep")
    first, second = STUDY.verdicts
    titled = (
        dataclasses.replace(first, claim=f"24, 25: {first.claim}"),
        dataclasses.replace(second, claim=f"reason 5: {second.claim}"),
        dataclasses.replace(first, claim=f"reason: {first.claim}"),
    )
    monkeypatch.setattr(study, "load", lambda path: dataclasses.replace(STUDY, verdicts=titled))
    found = StudyEvidence("tiny", ("--seeds=1",), 1.0).read(folder.path)
    halve, again, reason, other = found.findings
    assert dataclasses.replace(again, row=24) == halve and again.row == 25
    assert (halve.row, halve.what, halve.confirmed, halve.reason) == (
        24, "heads that share keys halve the cache", True, False,
    )  # fmt: skip
    assert halve.measured.startswith("0.5: ") and "(wanted: cache_bytes_per_token" in halve.measured
    assert (reason.row, reason.confirmed, reason.reason) == (5, False, True)
    assert dataclasses.replace(other, row=24, reason=False) == halve
    assert other.row == NO_ROW and other.reason
    assert found.table.head[0] == "point" and [row[0] for row in found.table.rows] == ["gqa", "mqa"]
    # A point that a short form leaves out is no row.
    for run in results.read(folder).point("mqa").runs:
        folder.result(run.name).unlink()
        shutil.rmtree(folder.run(run.name).path, ignore_errors=True)
    found = StudyEvidence("tiny", ("--only=gqa",), 1.0).read(folder.path)
    assert [row[0] for row in found.table.rows] == ["gqa"]
    assert [finding.row for finding in found.findings] == [24, 25, 5]


def test_a_training_run_has_to_reach_its_bounds(tmp_path):
    folder = RunFolder(tmp_path)
    for step, accuracy in ((5, 0.99), (10, 0.625)):
        folder.append_metrics({"step": step, "copy/accuracy": accuracy, "copy/chance": 0.25})
    folder.append_metrics({"step": 12, "loss": 1.0})
    bounds = (AtLeast("copy/accuracy", 0.625, "low"), AtLeast("copy/accuracy", 0.7, "high"))
    low, high = Training("t", "configs/full.py", (), bounds, 1.0).read(tmp_path).findings
    assert low.measured == (
        "copy/accuracy 0.625 after 10 steps (chance 0.250; wanted: at least 0.625)"
    )
    assert (low.confirmed, high.confirmed) == (True, False)


def text_folder(path: Path, sink: float, alone: float, newline: float, learned: float) -> Path:
    seen = {
        "step": 9, "kept": 64, "spans": [[0, 128], [128, 256], [256, 1024]],
        "perplexity": {"dense": [8.0, 16.0, 80.0], "window 64": [8.0, 8.0, alone],
                       "window 60 + 4 first": [8.0, 8.0, 9.0]},
        "first_token": [[0.0, sink], [0.25, 0.125]], "no_token": [[learned, 0.0], [0.0, 0.0]],
    }  # fmt: skip
    write_json(path / "streaming.json", seen)
    names = ("step", "delimiter_chance", "delimiter/layer0/head0", "delimiter/layer0/head1")
    lines = (names, (0, 0.0625, 0.5, 0.5), (9, 0.0625, 0.03125, newline))
    text = "".join(",".join(map(str, line)) + "\n" for line in lines)
    (path / "emergence.csv").write_text(text)
    return path


@pytest.mark.parametrize("shown", [True, False])
def test_a_text_model_shows_rows_15_18_and_19(tmp_path, shown):
    path = text_folder(tmp_path, *((0.75, 20.0, 0.25, 0.5) if shown else (0.25, 10.0, 0.1, 0.25)))
    found = TextModel("text", (), 1.0).read(path)
    newlines, sink, stable, collapsed = found.findings
    assert [each.row for each in found.findings] == [15, 18, 19, 19]
    assert [newlines.confirmed, sink.confirmed, collapsed.confirmed] == [shown] * 3
    assert stable.confirmed and stable.measured.startswith("8.00 to 9.00 (1.12 times); dense 8.00")
    assert newlines.measured.endswith("4.0 times" if shown else "1.6 times")
    assert "0.250 0.125" in sink.measured
    assert collapsed.measured.endswith("(2.22 times)" if shown else "(1.11 times)")
    assert found.table.rows[1][1:] == ("8.00", "8.00", "20.00" if shown else "10.00")
    first, second = WithLearnedSinks("sinks", (), 1.0).read(path).findings
    assert (first.row, second.row) == (18, 19) and first.reason and second.reason
    # Heads that use the place that they are offered were idle: the reason falls.
    assert first.confirmed is not shown and first.measured.startswith(
        "0.125 on" if shown else "0.06"
    )


# --- The page that ships -------------------------------------------------------------------------


def test_the_page_has_every_row_and_evidence_that_exists():
    module = runpy.run_path(str(ROOT / "configs" / "sweeps" / "claims.py"))
    assert "python sweep.py --config=configs/sweeps/claims.py" in module["__doc__"]
    page = study.described(ROOT / "configs" / "sweeps" / "claims.py", Claims)
    assert [row.number for row in page.rows] == list(range(1, 31))
    assert drive.minutes(page.evidence) < 45
    for evidence in page.evidence:
        for need in evidence.needs:
            assert (ROOT / need).exists(), need
        for node in getattr(evidence, "nodes", ()):
            file, _, name = node.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text(), node


def test_the_studies_that_it_cites_have_verdicts_on_their_rows():
    page = shipped.get_sweep()
    for evidence in page.evidence:
        if not isinstance(evidence, StudyEvidence):
            continue
        claims = [getattr(each, "claim", "") for each in study.load(ROOT / evidence.path).verdicts]
        for row in page.rows:
            if evidence in row.evidence:
                assert any(re.match(rf"([0-9, ]*, )?{row.number}[:,]", c) for c in claims), row
