"""The command lines and the reports that the benchmarks share."""

import csv
import json
from pathlib import Path

import pytest

from benchmarks import attention, decode, report, timing, train_step


def test_a_verdict_names_row_and_word():
    for confirmed, word in ((True, "CONFIRMED"), (False, "NOT CONFIRMED"), (None, "NOT DECIDED")):
        line = str(report.Verdict("21", "time grows", confirmed, "T^2.00"))
        assert line == f"row 21 {word}: time grows — T^2.00"


def test_report_is_written_and_printed(tmp_path: Path, capsys):
    rows = [{"variant": "causal", "seconds": 0.5}, {"variant": "window", "seconds": 0.25}]
    decided = [report.Verdict("22", "it is so", None, "not measured")]
    report.write(tmp_path, "some", ["# Title", report.items(["one", "two"])], rows, decided)
    assert json.loads((tmp_path / "some.json").read_text()) == [
        {"row": "22", "claim": "it is so", "confirmed": None, "figures": "not measured"}
    ]
    assert (tmp_path / "some.md").read_text() == "# Title\n\n- one\n- two\n"
    assert "# Title" in capsys.readouterr().out
    with (tmp_path / "some.csv").open() as file:
        assert [row["seconds"] for row in csv.DictReader(file)] == ["0.5", "0.25"]
    lines = {"ours": [(8, 1.0), (16, 2.0)], "dense": [(8, 3.0)]}
    report.draw({"forward": lines, "both": {}}, tmp_path / "some.png", "T", "ms")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("module", "argument", "said"),
    [
        (attention, "--variants=causal,sliding", "unknown variant 'sliding'; known are causal, "),
        (attention, "--peers=ours", "unknown peer 'ours'; known are dense, jax.nn"),
        (attention, "--lengths=1024,2k", "must be whole numbers such as 1024,2048, got '1024,2k'"),
        (attention, "--lengths=0", "must be at least 1, got 0"),
        (attention, "--repeats=0", "must be a whole number from 1, got '0'"),
        (decode, "--variants=cross", "unknown variant 'cross'; known are mha, "),
        (train_step, "--repeats=two", "must be a whole number from 1, got 'two'"),
    ],
)
def test_wrong_options_are_refused(module, argument: str, said: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        module.parse([argument])
    assert stopped.value.code == 2
    errors = capsys.readouterr().err
    assert argument.partition("=")[0] in errors
    assert said in errors


def test_the_short_form_is_shorter_and_gives_way_to_options():
    for module in (attention, decode, train_step):
        assert module.parse(["--short"]).repeats < module.parse([]).repeats
    arguments = attention.parse(["--short", "--lengths=64,32,64", "--repeats=2"])
    assert (arguments.lengths, arguments.repeats) == ([32, 64], 2)


@pytest.mark.parametrize("module", [attention, decode, train_step])
def test_help_shows_the_commands(module, capsys):
    with pytest.raises(SystemExit):
        module.parse(["--help"])
    assert f"python -m {module.__name__} --short" in capsys.readouterr().out


def test_what_is_missing_is_named_once_for_each_reason():
    assert report.missing({}) == []
    section = report.missing({"a": "too long", "b": "not the same", "c": "too long"})
    assert section == ["Not measured:\n\n- a; c: too long\n- b: not the same"]


def test_bars_are_drawn(tmp_path: Path):
    estimates = {"ours": timing.Estimate(2.0, 1.0, 4.0), "theirs": timing.Estimate(3.0, 3.0, 3.0)}
    report.bars(estimates, tmp_path / "some.png", "milliseconds")
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu avx512f avx2\n\n"
            "processor\t: 1\nmodel name\t: Other\nflags\t\t: fpu\n",
            ["Some CPU @ 2 GHz", "AVX-512", "no AMX bfloat16"],
        ),
        ("model name: B\nflags: amx_bf16\n", ["B", "no AVX-512", "AMX bfloat16"]),
        ("processor: 0\nFeatures: fp asimd\n", []),
    ],
)
def test_a_processor_is_named_with_its_wide_instructions(tmp_path: Path, text, said):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert report.processor(path) == said
    assert report.processor(tmp_path / "none") == []
