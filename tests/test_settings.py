"""A mistake is found at the boundary: one line with option, value and what would be right."""

import pytest

from configs import base, gqa, mha, mqa
from tasks import Copy, Induction
from tests import tiny
from training.resolve import resolve
from training.settings import OptionError, settings

# What is changed in a config that is right, and what the message has to say: the option as the
# user writes it, the value, and what would be right, in pieces between bars.
MISTAKES = {
    # Names and types.
    "unknown option": ({"train.stepz": 3}, "train.stepz | steps"),
    "unknown group": ({"trane.steps": 3}, "trane | train"),
    "unknown attention option": ({"attention.gqa.heads": 2}, "attention.gqa.heads | num_kv_heads"),
    "unknown task": ({"task.recite.share": 1.0}, "task.recite | copy | induction"),
    "text for a number": ({"train.steps": "many"}, "train.steps | whole number | 'many'"),
    "fraction for a whole number": ({"train.steps": 2.5}, "train.steps | whole number | 2.5"),
    "truth for a whole number": ({"train.steps": True}, "train.steps | whole number | True"),
    "number for a truth": ({"model.tied_head": 1}, "model.tied_head | True or False | 1"),
    "number for a text": ({"train.loss_on": 1}, "train.loss_on | text | 1"),
    "unset that must be set": ({"train.steps": None}, "train.steps | whole number | None"),
    "not a number": (
        {"optimizer.learning_rate": float("nan")},
        "optimizer.learning_rate | finite | nan",
    ),
    "infinite": ({"optimizer.clip_norm": float("inf")}, "optimizer.clip_norm | finite | inf"),
    # Heads and widths.
    "heads that do not divide": ({"model.num_heads": 3}, "model.num_heads | divide | 3 | 8"),
    "no heads": ({"model.num_heads": 0}, "model.num_heads | at least 1 | 0"),
    "kv heads that do not divide": (
        {"attention.gqa.num_kv_heads": 3},
        "attention.gqa | num_kv_heads | divide | 3 | 2 heads",
    ),
    "no kv heads": ({"attention.gqa.num_kv_heads": 0}, "attention.gqa | num_kv_heads | 0"),
    "odd rotary width": ({"attention.gqa.rope_width": 3}, "attention.gqa | rope_width | even | 3"),
    "rotary width beyond the head": (
        {"attention.gqa.rope_width": 6},
        "attention.gqa | rope_width | at most | 4 | 6",
    ),
    "odd head width with rope": ({"model.head_width": 3}, "model.head_width | even | 3"),
    "rope_width without rope": (
        {"attention.gqa.rope_width": 2, "model.position": "none"},
        "attention.gqa | rope_width | 2 | model.position | unset",
    ),
    "base of the rotation": ({"model.rope_base": 1.0}, "model.rope_base | greater than 1 | 1.0"),
    "layout of the rotation": (
        {"model.rope_layout": "halves"},
        "model.rope_layout | half_split | interleaved | halves",
    ),
    "dropout of all": ({"attention.gqa.dropout": 1.0}, "attention.gqa | dropout | below 1 | 1.0"),
    "negative dropout": ({"attention.gqa.dropout": -0.5}, "attention.gqa | dropout | 0 | -0.5"),
    "unknown variant": (
        {"attention.gqa.variant": "casual"},
        "attention.gqa.variant | causal | casual",
    ),
    "unknown layer": ({"model.pattern": ("gqa", "nosuch")}, "model.pattern | gqa | 'nosuch'"),
    "no layer": ({"model.pattern": ()}, "model.pattern | gqa"),
    # The rest of the model.
    "no layers": ({"model.num_layers": 0}, "model.num_layers | at least 1 | 0"),
    "unknown mlp": ({"model.mlp": "relu"}, "model.mlp | gelu | swiglu | none | 'relu'"),
    "d_ff without mlp": ({"model.d_ff": 5}, "model.d_ff | 5 | model.mlp | unset"),
    "unknown position": ({"model.position": "sine"}, "model.position | rope | learned | 'sine'"),
    "max_length without learned positions": (
        {"model.max_length": 5},
        "model.max_length | 5 | model.position | unset",
    ),
    "fewer learned positions than tokens": (
        {"model.max_length": 5, "model.position": "learned"},
        "model.max_length | 5 | 17",
    ),
    "unknown dtype": ({"model.dtype": "float16"}, "model.dtype | float32 | bfloat16 | float16"),
    "unknown implementation": (
        {"model.implementation": "flash"},
        "implementation | auto | reference | 'flash'",
    ),
    # Tasks.
    "vocabulary too small": ({"task.vocab_size": 5}, "task.vocab_size | 5 | at least 6"),
    "length too short for copy": ({"task.length": 2}, "task.length | 2 | at least 3"),
    "string longer than fits": (
        {"task.copy.max_length": 9},
        "task.copy.max_length | 9 | task.length | 17 | at most | 8",
    ),
    "min_length above max_length": (
        {"task.copy.min_length": 3, "task.copy.max_length": 2},
        "task.copy.min_length | 3 | 2",
    ),
    "length too short for the period": (
        {"task.induction.max_period": 17},
        "task.induction.max_period | 17 | at most 16",
    ),
    "min_period above max_period": (
        {"task.induction.min_period": 9},
        "task.induction.min_period | 9 | max_period | 8",
    ),
    "negative share": ({"task.copy.share": -1.0}, "task.copy.share | negative | -1.0"),
    "no share": (
        {"task.copy.share": 0.0, "task.induction.share": 0.0},
        "task.copy.share | positive | 0.0",
    ),
    "text as a share": ({"task.copy.share": "half"}, "task.copy.share | number | 'half'"),
    # Training.
    "negative steps": ({"train.steps": -5}, "train.steps | at least 1 | -5"),
    "no steps": ({"train.steps": 0}, "train.steps | at least 1 | 0"),
    "more steps than int32 counts": ({"train.steps": 2**31}, f"train.steps | at most | {2**31}"),
    "no batch": ({"train.batch_size": 0}, "train.batch_size | at least 1 | 0"),
    "no logs": ({"train.log_every": 0}, "train.log_every | at least 1 | 0"),
    "no evaluation": ({"train.eval_every": 0}, "train.eval_every | at least 1 | 0"),
    "loss on what": ({"train.loss_on": "some"}, "train.loss_on | answers | all | 'some'"),
    "negative rate": (
        {"optimizer.learning_rate": -1.0},
        "optimizer.learning_rate | above 0 | -1.0",
    ),
    "no clipping norm": ({"optimizer.clip_norm": 0.0}, "optimizer.clip_norm | above 0 | 0.0"),
    "negative warm-up": ({"optimizer.warmup_steps": -1}, "optimizer.warmup_steps | negative | -1"),
    "negative decay": (
        {"optimizer.weight_decay": -0.1},
        "optimizer.weight_decay | negative | -0.1",
    ),
    "beta of 1": ({"optimizer.beta2": 1.0}, "optimizer.beta2 | below 1 | 1.0"),
    "unknown schedule": (
        {"optimizer.schedule": "linear"},
        "optimizer.schedule | cosine | 'linear'",
    ),
    "nothing evaluated": ({"eval.batches": 0}, "eval.batches | at least 1 | 0"),
    "no checkpoints": ({"checkpoint.every": 0}, "checkpoint.every | at least 1 | 0"),
    "none kept": ({"checkpoint.keep": 0}, "checkpoint.keep | at least 1 | 0"),
    # Seeds.
    "negative seed": ({"seed": -1}, f"seed | -1 | {2**32 - 1}"),
    "seed too large": ({"seed": 2**32}, f"seed | {2**32} | {2**32 - 1}"),
    "negative init_seed": ({"model.init_seed": -1}, f"model.init_seed | -1 | {2**32 - 1}"),
    "negative data_seed": ({"train.data_seed": -1}, f"train.data_seed | -1 | {2**32 - 1}"),
    "negative evaluation seed": ({"eval.seed": -1}, f"eval.seed | -1 | {2**32 - 1}"),
    # Objectives.
    "unknown objective": ({"train.objective": "next"}, "train.objective | next_token | 'next'"),
    "mask_rate of another objective": (
        {"train.mask_rate": 0.3},
        "train.mask_rate | 0.3 | train.objective | unset",
    ),
    "no mask_rate": ({"train.objective": "masked_token"}, "train.mask_rate | number | None"),
    "nothing masked": (
        {"train.objective": "masked_token", "train.mask_rate": 0.0},
        "train.mask_rate | above 0 | 0.0",
    ),
    # Next-token training under a mask that shows the next token.
    "a full mask comes before the rate that it leaves": (
        {"attention.gqa.variant": "full", "train.mask_rate": 0.15},
        "layer 0 | Full() | next_token | causal | train.objective=masked_token",
    ),
    "cross-attention in a decoder": (
        {"model.pattern": ("cross",), "train.objective": "masked_token", "train.mask_rate": 0.15},
        "model.pattern | 'cross' | sequence_to_sequence",
    ),
    "an implementation that nothing reads": (
        {"model.pattern": ("linear",), "model.implementation": "tiled"},
        "model.implementation | 'tiled' | linear | softmax | 'auto'",
    ),
    "a mask that sees the answer": (
        {"attention.gqa.variant": "full"},
        "layer 0 | Full() | next_token | causal",
    ),
}


def put(config: dict, name: str, value) -> None:
    """Sets a dotted option in a nest of dicts, whether it is there or not."""
    *groups, last = name.split(".")
    for group in groups:
        config = config.setdefault(group, {})
    config[last] = value


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_option_value_and_what_is_right(mistake):
    changes, pieces = MISTAKES[mistake]
    config = tiny.options()
    for name, value in changes.items():
        put(config, name, value)
    with pytest.raises(ValueError) as caught:
        settings(resolve(config))
    message = str(caught.value)
    assert "\n" not in message
    missing = [piece for piece in pieces.split(" | ") if piece not in message]
    assert not missing, f"{message!r} does not say {missing}"


@pytest.mark.parametrize(
    "name", ["seed", "task.copy", "train.steps", "attention.gqa.dropout", "task.copy.share"]
)
def test_a_missing_option_is_named(name):
    """As in the config.json of another version."""
    config = tiny.config()
    *groups, last = name.split(".")
    group = config
    for part in groups:
        group = group[part]
    del group[last]
    if name in ("task.copy", "attention.gqa.dropout"):
        settings(config)  # a task that is left out, an option with a default
        return
    with pytest.raises(OptionError) as caught:
        settings(config)
    assert last in str(caught.value)


def test_a_whole_number_does_for_a_real_one():
    assert settings(tiny.config(optimizer__learning_rate=1)).optimizer.learning_rate == 1


def test_unset_options_take_what_the_docs_say():
    found = settings(resolve(base.get_config().to_dict()))
    assert (found.init_seed, found.train_seed, found.eval.seed) == (0, 0, 1000)
    assert found.model.d_ff == 4 * 64
    assert found.model.context().head_width == 64 // 4
    assert found.task.tasks == (Copy(64, 64), Induction(64, 64))
    assert [(task.name, task.longest) for task in found.task.tasks] == [
        ("copy", 31), ("induction", 32)
    ]  # fmt: skip
    assert found.task.shares == (0.5, 0.5)


def test_seeds_are_separate():
    config = tiny.config(seed=5, train__data_seed=6, model__init_seed=7, eval__seed=8)
    found = settings(config)
    assert (found.train_seed, found.init_seed, found.eval.seed) == (6, 7, 8)
    found = settings(tiny.config(seed=5))
    assert (found.train_seed, found.init_seed) == (5, 5)


def test_both_tasks_are_evaluated_whatever_the_mixture():
    found = settings(tiny.config(task__copy__share=0.0))
    assert [task.name for task in found.evaluated] == ["copy", "induction"]
    assert found.task.shares[0] == 0


def test_a_task_without_a_share_sets_no_bounds():
    """It is neither trained on nor evaluated."""
    config = tiny.config(task__length=7, task__vocab_size=8)
    assert [task.name for task in settings(config).evaluated] == ["copy", "induction"]


def test_key_value_heads_are_a_number():
    for config, heads in ((mha, 4), (gqa, 2), (mqa, 1)):
        model = settings(resolve(config.get_config().to_dict())).model
        assert model.layer(1).kv_heads(model.context()) == heads


def test_a_pattern_is_cycled_over_the_depth():
    config = base.get_config()
    config.model.num_layers, config.model.pattern = 5, ("mqa", "mha")
    found = settings(resolve(config.to_dict())).model
    assert [found.layer(i).num_kv_heads for i in range(5)] == [1, None, 1, None, 1]
