"""Axes, and the plan: what a sweep file expands to, and what is refused before any run."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from analysis.cost import cost
from configs import base
from configs.sweeps import copying, heads, variants
from sweeps import axes
from sweeps.axes import AxisError, axis, case, chain, product, zipped
from sweeps.command import read_seeds
from sweeps.description import train_command
from sweeps.fairness import QUANTITIES, Equal, bill
from sweeps.plan import make_plan
from sweeps.study import Study, load
from tests import tiny_sweep
from tests.test_configs import parse
from training.resolve import resolve
from training.run_folder import jsonable
from training.settings import OptionError, settings


def study(axes=None, **changes):
    axes = case("base") if axes is None else axes
    return Study(**{"question": "?", "axes": axes, "metrics": ("copy/accuracy",)} | changes)


def plan(axes=None, overrides=None, base_changes=None, arguments=None, **changes):
    config = base.get_config()
    config.update_from_flattened_dict({**(base_changes or {}), **(overrides or {})})
    return make_plan(
        study(axes, **changes), config.to_dict(), list(overrides or ()), **(arguments or {})
    )


def names(axes):
    return [choice.name for choice in axes.choices]


WIDTHS = axis("model.d_model", 32, 64)
RATES = axis("optimizer.learning_rate", 1e-3, 3e-3, label="lr")


def test_a_product_has_every_pair_and_the_last_axis_varies_fastest():
    both = product(WIDTHS, RATES)
    assert names(both) == [
        "d_model=32,lr=0.001", "d_model=32,lr=0.003", "d_model=64,lr=0.001", "d_model=64,lr=0.003",
    ]  # fmt: skip
    assert both.choices[2].changes == {"model.d_model": 64, "optimizer.learning_rate": 1e-3}
    assert both.choices[2].labels == ("d_model=64", "lr=0.001")


def test_zipped_axes_go_together():
    both = zipped(WIDTHS, RATES)
    assert axes.zip(WIDTHS, RATES) == both
    assert [dict(choice.changes) for choice in both.choices] == [
        {"model.d_model": 32, "optimizer.learning_rate": 1e-3},
        {"model.d_model": 64, "optimizer.learning_rate": 3e-3},
    ]
    with pytest.raises(AxisError, match=r"same number of values, got \[2, 3\]"):
        zipped(WIDTHS, axis("task.length", 16, 32, 64))


def test_a_chain_lines_points_up_and_nests():
    whole = chain(case("mha"), product(case("wide"), WIDTHS))
    assert names(whole) == ["mha", "wide,d_model=32", "wide,d_model=64"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: axis("model.d_model"), "model.d_model has no values"),
        (lambda: axis("model.d_model", 8, 16, 8), "model.d_model has the value 8 twice"),
        (lambda: product(), r"product\(\) has no axes"),
        (lambda: chain(), r"chain\(\) has no axes"),
        (lambda: product(WIDTHS, WIDTHS), "model.d_model is set by two axes"),
        (lambda: study(seeds=()), "seeds is empty"),
        (lambda: study(seeds=(0, 1, 0)), r"seeds \[0, 1, 0\] has 0 twice"),
        (lambda: study(learning_rates=(1e-3, 1e-3)), r"learning_rates .* has 0.001 twice"),
        (lambda: study(metrics=()), "metrics is empty"),
    ],
)
def test_axes_that_describe_no_sweep_are_refused(make, said):
    with pytest.raises(AxisError, match=said):
        make()


def test_the_runs_of_a_point_differ_in_seed_and_learning_rate():
    found = plan(axis("model.pattern", ("gqa",), ("mqa", "mha")), seeds=(3, 5),
                 learning_rates=(1e-3, 1e-2))  # fmt: skip
    assert [point.name for point in found.points] == ["pattern=gqa", "pattern=mqa+mha"]
    assert [run.name for run in found.points[1].runs] == [
        "pattern=mqa+mha,lr=0.001,seed=3", "pattern=mqa+mha,lr=0.001,seed=5",
        "pattern=mqa+mha,lr=0.01,seed=3", "pattern=mqa+mha,lr=0.01,seed=5",
    ]  # fmt: skip
    run = found.points[1].runs[3]
    assert run.config["seed"] == run.settings.train_seed == run.settings.init_seed == 5
    assert run.settings.optimizer.learning_rate == 0.01
    assert sorted(run.config["attention"]) == ["mha", "mqa"]
    assert found.points[0].bill == bill(found.points[0].runs[0].settings)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (axis("model.num_head", 2), "point num_head=2: model.num_head is not an option"),
        (axis("model.d_model", 64, 66), "point d_model=66.*66"),
        (axis("model.pattern", ("nosuch",)), "point pattern=nosuch: .*nosuch"),
        (axis("model.pattern", "mha"), "point pattern=mha: model.pattern takes a tuple"),
        (axis("model.d_model", 64.0), "point d_model=64.*whole number"),
        (axis("attention.mqa.bias", True), "point bias=True: attention.mqa.bias would do nothing"),
        (chain(case("a"), case("a", {"model.d_model": 32})), "points 0 and 1 are both named a"),
        (chain(case("a"), case("b")), "a,seed=0 and b,seed=0 are the same run"),
        (chain(case("a"), case("b", {"model.num_layers": 2})), "a,seed=0 and b,seed=0 are the"),
        (axis("seed", 1, 2), "seed is no axis"),
        (
            case("a", {"analysis.every": 5, "task.vocab_size": 16}),
            "point a,seed=0: analysis.every=5: .*task.vocab_size must be at least 29",
        ),
        (axis("task.length", 64, label="x" * 200), "at most 200 characters"),
    ],
)
def test_a_point_that_cannot_run_is_named(axes, said):
    with pytest.raises(OptionError, match=said):
        plan(axes)


def test_overrides_hold_for_every_point_that_reads_them():
    axes = chain(case("gqa", {"model.pattern": ("gqa",), "train.steps": 7}), case("mha"))
    found = plan(axes, {"train.steps": 20, "attention.gqa.bias": True})
    assert [run.settings.train.steps for run in found.runs] == [20, 20]
    assert found.points[0].runs[0].config["attention"]["gqa"]["bias"] is True
    assert "attention.gqa.bias" not in found.points[1].runs[0].changes


def test_learning_rates_that_share_a_name_are_refused():
    with pytest.raises(OptionError, match=r"two runs are named base,lr=0\.001,seed=0"):
        plan(learning_rates=(1e-3, 1.0000001e-3))


@pytest.mark.parametrize(
    ("overrides", "changes", "said"),
    [
        ({"model.d_model": 32}, {}, "--config.model.d_model is what this sweep varies"),
        ({"optimizer.learning_rate": 1.0}, {"learning_rates": (1e-3,)}, "is what this sweep"),
        ({"seed": 3}, {}, "set --seeds"),
        ({"attention.mqa.bias": True}, {}, "no point of the sweep reads it"),
    ],
)
def test_an_override_that_would_belie_or_do_nothing_is_refused(overrides, changes, said):
    with pytest.raises(OptionError, match=said):
        plan(WIDTHS, overrides, **changes)


def test_points_are_chosen_by_pattern_and_by_number():
    found = plan(product(axis("model.pattern", ("mha",), ("mqa",), label=""), WIDTHS), seeds=(0, 1))
    some = found.only("mqa*")
    assert [point.name for point in some.points] == ["mqa,d_model=32", "mqa,d_model=64"]
    some = found.only("*,seed=1")
    assert [run.seed for run in some.runs] == [1] * 4
    assert [point.index for point in found.only("mqa*").points] == [2, 3]
    assert found.at(3).points == (found.points[3],)
    some = found.only("mha,d_model=64 mqa*,seed=1")
    assert [len(point.runs) for point in some.points] == [2, 1, 1]
    said = r"--only=mqa\* gqa\*: no point matches 'gqa\*'; there are mha,d_model=32"
    with pytest.raises(OptionError, match=said):
        found.only("mqa* gqa*")
    with pytest.raises(OptionError, match="no point matches ''"):
        found.only("")
    for wrong in (4, -1):
        with pytest.raises(OptionError, match=f"--point must be from 0 to 3, got {wrong}"):
            found.at(wrong)


def test_seeds_are_a_number_or_a_list():
    assert read_seeds("3") == (0, 1, 2) and read_seeds("4,2") == (4, 2)
    for text, said in (("0", "at least 1"), ("1,2,1", "has 1 twice"), ("x", "'x'"), ("-1", "-1")):
        with pytest.raises(OptionError, match=said):
            read_seeds(text)


def test_a_number_that_no_run_has_is_refused_before_any_starts():
    for name, said in (
        ("copy/acuracy", "point mha: the study asks for 'copy/acuracy', .* mean 'copy/accuracy'"),
        ("recall/accuracy", "'recall/accuracy', which a run does not have without a measure"),
        ("parameter", "did you mean 'parameters'"),
    ):
        for asked in ({"metrics": (name,)}, {"columns": (name,)}):
            with pytest.raises(OptionError, match=said):
                plan(case("mha"), **asked)
    # A measure may give anything.
    assert plan(case("mha"), columns=("width",), measures=(lambda *_: {"width": 3.0},))


def test_equal_parameters_solve_for_a_width_and_say_what_was_chosen():
    axes = chain(
        case("mha"),
        case("mqa", {"model.pattern": ("mqa",)}),
        case("shallow", {"model.num_layers": 1}),
    )
    found = plan(axes, equal=Equal("parameters", "mha"))
    wanted = found.points[0].bill.parameters
    assert found.points[0].solved is None and found.points[0].runs[0].settings.model.d_model == 64
    for point in found.points[1:]:
        width = point.runs[0].settings.model.d_ff
        assert point.solved.value == width > 256 and point.runs[0].settings.model.d_model == 64
        assert point.solved.got == point.bill.parameters
        assert abs(point.bill.parameters / wanted - 1) <= 0.01
        # No other width is nearer.
        for other in (width - 1, width + 1):
            config = base.get_config()
            config.update_from_flattened_dict(dict(axes.choices[point.index].changes))
            config.model.d_ff = other
            size = bill(settings(resolve(config.to_dict()))).parameters
            assert abs(size - wanted) >= abs(point.bill.parameters - wanted)
    assert str(found.points[1].solved).startswith("model.d_ff 256 → ")
    assert f"{wanted:,}" in str(found.points[1].solved)


def test_equal_cache_bytes_count_what_a_sequence_keeps():
    axes = chain(case("mha"), case("mqa", {"model.pattern": ("mqa",)}))
    found = plan(axes, equal=Equal("cache_bytes", "mha", within=0.01))
    assert found.points[1].bill.cache_bytes == found.points[0].bill.cache_bytes
    # A quarter of the heads, four times as wide each.
    assert found.points[1].runs[0].settings.model.d_model == 256


def test_the_cache_is_counted_at_the_length_of_the_reference():
    """The same model on longer sequences is as large as before."""
    found = plan(
        chain(case("mha"), case("longer", {"task.length": 129})), equal=Equal("cache_bytes", "mha")
    )
    assert found.points[1].solved.got == found.points[0].bill.cache_bytes
    assert found.points[1].runs[0].settings.model.d_model == 64


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize(
    ("study", "to"),
    [
        (variants, "mha"),
        pytest.param(copying, "rope", marks=pytest.mark.broad),
        pytest.param(heads, "heads=4", marks=pytest.mark.broad),
    ],
)
def test_studies_that_ship_can_be_made_equal(study, to, quantity):
    config, axes = study.get_config().to_dict(), study.get_sweep()
    found = make_plan(axes, config, equal=Equal(quantity, to))
    sizes = {}
    for point in found.points:
        settings = point.runs[0].settings
        size = cost(settings.model, config["task"]["length"], 1)
        sizes[point.name] = {
            "parameters": size.parameters["total"], "cache_bytes": size.cache.sequence_bytes,
        }[quantity]  # fmt: skip
    assert all(abs(size / sizes[to] - 1) <= 0.1 for size in sizes.values()), sizes


def test_sizes_that_cannot_be_made_equal_are_refused():
    axes = chain(case("mha"), case("mqa", {"model.pattern": ("mqa",)}))
    for equal, said in (
        (Equal("cache_bytes", "gqa"), "made equal to the point 'gqa', which it does not have"),
        (
            Equal("parameters", "mha", option="model.d_model", within=0.01),
            "point mqa: no model.d_model gives 106,816 parameters within 1%: 72 gives 118,440; "
            "--equal_within=0.11 would take it",
        ),
    ):
        with pytest.raises(OptionError, match=said):
            plan(axes, equal=equal)
    swept = chain(case("mha"), axis("model.d_ff", 100, 200))
    with pytest.raises(OptionError, match=r"point d_ff=100: .* another model\.d_ff, which is what"):
        plan(swept, equal=Equal("parameters", "mha"))
    with pytest.raises(OptionError, match="parameters or cache_bytes, got 'flops'"):
        Equal("flops", "mha")
    with pytest.raises(OptionError, match=r"--equal_within is a share from 0 to 1, got -0\.1"):
        Equal("parameters", "mha", within=-0.1)


@pytest.mark.filterwarnings("ignore:the load_module")
def test_the_command_of_a_row_trains_the_same_run():
    overrides = {"train.steps": 20, "attention.masked.mask_expression": "Causal() & Window(3)"}
    axes = product(case("two words", {"model.pattern": ("masked", "mha"), "model.tied_head": True}),
                   axis("model.d_model", 32))  # fmt: skip
    found = plan(axes, overrides, learning_rates=(1e-4,), seeds=(7,))
    (run,) = found.runs
    program, script, path, *rest, workdir = shlex.split(train_command("configs/base.py", run))
    assert (program, script, path) == ("python", "train.py", "--config=configs/base.py")
    assert workdir == f"--workdir=runs/{run.name}" == shlex.quote(workdir)
    assert settings(resolve(parse(*rest).to_dict())) == run.settings


def test_a_sweep_file_is_read_and_others_are_refused(tmp_path):
    path = tmp_path / "study.py"
    for text, said in (
        ("def get_config(): pass", "has no get_sweep"),
        ("def get_sweep(): return 3", "must return a Study, got int"),
        ("from sweeps.axes import axis\ndef get_sweep(): return axis('a.b')", "a.b has no values"),
    ):
        path.write_text(text)
        with pytest.raises(OptionError, match=said):
            load(path)
    with pytest.raises(OptionError, match="there is no such file"):
        load(tmp_path / "nosuch.py")
    assert load(tiny_sweep.__file__) == tiny_sweep.get_sweep()


def test_what_is_told_to_a_process_is_json():
    (run,) = plan().runs
    assert run.order()["config"] == jsonable(run.config)
    assert settings(run.order()["config"]) == run.settings
    assert dataclasses.replace(run, seed=3).order()["seed"] == 3
