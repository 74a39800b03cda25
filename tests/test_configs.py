"""Every config builds, trains and evaluates, and says what it costs; every option can be set."""

import importlib
import json
import re
import sys
import unittest.mock
import warnings
from pathlib import Path

import pytest
from absl import flags
from ml_collections import config_flags

from configs import base
from tests import tiny
from training import loop
from training.resolve import resolve
from training.run_folder import RunFolder, flatten
from training.settings import settings

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted({path.stem for path in (ROOT / "configs").glob("*.py")} - {"__init__", "base"})
# With an encoder; test_commands.py trains a decoder, and test_layers.py has the variants.
ALWAYS = ("cross",)

# As small as any config can be, whatever its variants and tasks.
SMALL = {
    "model.d_model": 16,
    "model.num_heads": 4,
    "train.steps": 2,
    "train.batch_size": 4,
    "train.log_every": 1,
    "train.eval_every": 1,
    "eval.batches": 1,
    "eval.batch_size": 2,
    "checkpoint.every": 2,
}


def module(name):
    return importlib.import_module(f"configs.{name}")


def parse(*argv, config="configs/base.py"):
    """The options after flags, as train.py would have them."""
    values = flags.FlagValues()
    line = ["train.py", f"--config={ROOT / config}", *argv]
    # ml_collections learns from sys.argv which options are overridden.
    with unittest.mock.patch.object(sys, "argv", line):
        config_flags.DEFINE_config_file("config", flag_values=values)
        values(line)
        return values.config


@pytest.fixture(autouse=True)
def as_ml_collections_loads_a_config():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"the load_module\(\) method")
        yield


@pytest.mark.parametrize("name", NAMES)
def test_a_config_as_it_is_fits_together(name):
    found = settings(resolve(module(name).get_config().to_dict()))
    assert found.train.steps >= 100


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.broad) for n in NAMES]
)
def test_a_config_trains_two_steps_and_evaluates(name, tmp_path):
    config = module(name).get_config()
    config.update_from_flattened_dict(SMALL)
    config.model.num_layers = len(config.model.pattern)
    plain = resolve(config.to_dict())
    chosen = settings(plain)
    lines = loop.train(plain, chosen, RunFolder(tmp_path / "run"))
    assert [line["step"] for line in lines] == [0, 1, 2]
    for task in chosen.evaluated:
        assert 0 <= lines[-1][f"{task.name}/accuracy"] <= 1
        assert lines[-1][f"{task.name}/chance"] == task.chance
    assert lines[1]["loss"] > 0 and lines[2]["gradient_norm"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_config_says_its_command_its_time_and_its_numbers(name):
    text = module(name).__doc__ or ""
    assert f"python train.py --config=configs/{name}.py" in text
    assert re.search(r"\d+(\.\d+)? (s|seconds|min|minutes)\b", text), "how long does it take?"
    assert re.search(r"(accuracy|copy|induction)[^\n]*\b(0?\.\d{2,}|1\.0+|\d+(\.\d+)? ?%)", text)
    assert "cores" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_a_difference_from_base(name):
    """No new options, so that what is said of an option in base.py holds for all.

    But a variant of its own may have a group of its own.
    """
    config = module(name).get_config()
    ours = dict(flatten(config.to_dict()))
    theirs = dict(flatten(base.get_config().to_dict()))
    own = {group for group in config.model.pattern if group not in base.get_config().attention}
    new = {option for option in ours if option.split(".")[1:2] and option.split(".")[1] in own}
    assert ours.keys() - new == theirs.keys()
    assert ours != theirs or name == "mha"


OPTIONS = base.get_config()


def another(name):
    """A value that the option does not have, as text and as the option's type."""
    kind, value = kind_and_value(name)
    if kind is bool:
        return str(not value).lower(), not value
    if kind is int:
        return str((value or 0) + 7), (value or 0) + 7
    if kind is float:
        return "1e-3", 1e-3
    if kind is tuple:
        return "gqa,mqa", ("gqa,mqa",)
    return "something", "something"


def kind_and_value(name):
    group, _, last = name.rpartition(".")
    holder = OPTIONS
    for part in group.split(".") if group else []:
        holder = holder[part]
    return holder.get_type(last), holder[last]


@pytest.mark.parametrize("group", ["seed", *sorted(set(OPTIONS) - {"seed"})])
def test_every_option_can_be_set_from_the_command_line(group):
    names = [name for name, _ in flatten(OPTIONS.to_dict()) if name.partition(".")[0] == group]
    wanted = {name: another(name) for name in names}
    found = parse(*(f"--config.{name}={text}" for name, (text, _) in wanted.items()))
    flat = dict(flatten(found.to_dict()))
    for name, (_, value) in wanted.items():
        assert flat[name] == value, name
        assert type(flat[name]) is type(value), name


@pytest.mark.parametrize(
    "text", ["mqa,mha", "('mqa', 'mha')", "mqa, mha"], ids=["bare", "tuple", "spaced"]
)
def test_a_pattern_can_be_set_from_the_command_line(text):
    found = settings(resolve(parse(f"--config.model.pattern={text}").to_dict()))
    assert found.model.pattern == ("mqa", "mha")


@pytest.mark.parametrize(
    "flag",
    ["model.d_ff=12", "train.data_seed=3", "task.copy.max_length=5", "optimizer.weight_decay=1"],
)
def test_what_is_set_is_what_a_run_is_made_of(flag):
    """An unset option, and a whole number where a real one stands."""
    name, _, text = flag.partition("=")
    resolved = resolve(parse(f"--config.{flag}", config="configs/gqa.py").to_dict(), [name])
    assert dict(flatten(resolved))[name] == json.loads(text)
    assert settings(resolved) != settings(resolve(module("gqa").get_config().to_dict()))


def test_unknown_options_and_wrong_types_are_refused():
    """Case Q1."""
    for bad in ("train.stepz=3", "steps=3", "model.num_head=3"):
        with pytest.raises(AttributeError):
            parse(f"--config.{bad}")
    for bad in ("train.steps=abc", "train.steps=5.5", "train.steps=1e3", "model.tied_head=no"):
        with pytest.raises(flags.IllegalFlagValueError, match=bad.partition("=")[0]):
            parse(f"--config.{bad}")


def test_the_small_run_of_the_tests_is_a_config_too():
    assert settings(tiny.config()).train.steps == 10
