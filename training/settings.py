"""From a config to checked, typed values: the boundary where a user's mistake is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from attention import VARIANTS
from models.decoder import DecoderOptions, reads_memory
from tasks import TASKS, Mixture, Task
from training.objective import LOSS_ON, OBJECTIVES
from training.optimizer import OptimizerOptions
from training.resolve import ALWAYS_EVALUATED, pattern_names
from training.typed import at_least, exactly, known, take, whole_number

# Steps are counted in 32 bits.
_MOST_STEPS = 2**31 - 1


class OptionError(ValueError):
    """A mistake in the options: one line with the option, its value and what would be right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """See ``configs/base.py``."""

    steps: int
    batch_size: int
    loss_on: str
    log_every: int
    eval_every: int

    def __post_init__(self):
        at_least("train", self, 1, "steps", "batch_size", "log_every", "eval_every")
        for name in ("steps", "log_every", "eval_every"):
            value = getattr(self, name)
            if value > _MOST_STEPS:
                raise ValueError(f"train.{name} must be at most {_MOST_STEPS}, got {value}")
        if self.loss_on not in LOSS_ON:
            raise ValueError(f"train.loss_on must be one of {list(LOSS_ON)}, got {self.loss_on!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """See ``configs/base.py``."""

    batches: int
    batch_size: int
    seed: int

    def __post_init__(self):
        at_least("eval", self, 1, "batches", "batch_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """See ``configs/base.py``."""

    every: int
    keep: int

    def __post_init__(self):
        at_least("checkpoint", self, 1, "every", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnalysisOptions:
    """See ``configs/base.py``."""

    every: int
    sequences: int
    around: int
    bos: bool

    def __post_init__(self):
        at_least("analysis", self, 0, "every", "around")
        at_least("analysis", self, 1, "sequences")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """All that a run is: what ``settings`` makes of a config.

    Attributes:
      init_seed, train_seed: of the parameters; of batches and dropout.
      model: shape of the decoder.
      task: what is trained on.
      held_out: the same mixture on data that training does not draw.
      evaluated: its tasks that are evaluated, whatever the mixture.
      objective: one of ``training.objective.OBJECTIVES``.
    """

    init_seed: int
    train_seed: int
    objective: object
    model: DecoderOptions
    task: Mixture
    held_out: Mixture
    evaluated: tuple[Task, ...]
    train: TrainOptions
    optimizer: OptimizerOptions
    eval: EvalOptions
    checkpoint: CheckpointOptions
    analysis: AnalysisOptions


def settings(config: Mapping) -> Settings:
    """Checks a resolved config, a nest of plain dicts, and gives every part its type.

    Raises:
      OptionError: an unknown option, a wrong type, a value out of bounds, or options that do not
        go together.
    """
    try:
        return _settings(config)
    except ValueError as error:
        raise OptionError(str(error)) from None


def _settings(config: Mapping) -> Settings:
    exactly("", config, "seed", "model", "attention", "task", "train", "optimizer", "eval",
            "checkpoint", "analysis")  # fmt: skip
    seed = _seed("seed", config["seed"])
    train, model = dict(config["train"]), dict(config["model"])
    data_seed, init_seed = train.pop("data_seed"), model.pop("init_seed")
    mask_rate = train.pop("mask_rate")
    objective = _objective(train.pop("objective"), mask_rate)
    task, evaluated = _tasks(config["task"], objective)
    result = Settings(
        init_seed=seed if init_seed is None else _seed("model.init_seed", init_seed),
        train_seed=seed if data_seed is None else _seed("train.data_seed", data_seed),
        objective=objective,
        model=_model(model, config["attention"], task, objective),
        task=task,
        held_out=task.held_out(),
        evaluated=evaluated,
        train=take(TrainOptions, "train", train),
        optimizer=take(OptimizerOptions, "optimizer", config["optimizer"]),
        eval=take(EvalOptions, "eval", config["eval"]),
        checkpoint=take(CheckpointOptions, "checkpoint", config["checkpoint"]),
        analysis=take(AnalysisOptions, "analysis", config["analysis"]),
    )
    _seed("eval.seed", result.eval.seed)
    first_counted = task.first_answer if result.train.loss_on == "answers" else 0
    objective.check(result.model.all_layers(), first_counted)
    # Last: where a full mask is the mistake, that is the reason to give.
    if mask_rate is not None and not _masks(objective):
        raise ValueError(
            f"train.mask_rate is set to {mask_rate}, but train.objective is {objective.name!r}; "
            "leave it unset"
        )
    return result


def _objective(name: str, mask_rate: float | None):
    if name not in OBJECTIVES:
        raise ValueError(f"train.objective must be one of {', '.join(OBJECTIVES)}, got {name!r}")
    objective = OBJECTIVES[name]
    if _masks(objective):
        return take(objective, "train", {"mask_rate": mask_rate})
    return objective()


def _masks(objective) -> bool:
    return any(field.name == "mask_rate" for field in dataclasses.fields(objective))


def _seed(name: str, value) -> int:
    if not 0 <= whole_number(name, value) < 2**32:
        raise ValueError(f"{name} must be from 0 to {2**32 - 1}, got {value}")
    return value


def _tasks(group: Mapping, objective) -> tuple[Mixture, tuple[Task, ...]]:
    group = dict(group)
    common = {name: group.pop(name) for name in ("vocab_size", "length")}
    known("task", group, *TASKS)
    tasks, shares = [], []
    for name, options in group.items():
        options = dict(options)
        shares.append(_share(f"task.{name}.share", options.pop("share", None)))
        tasks.append(take(TASKS[name], f"task.{name}", {**common, **options}))
        if tasks[-1].has_source != objective.reads_source:
            has, reads = (
                ("has a source", "reads none")
                if tasks[-1].has_source
                else ("has no source", "reads one")
            )
            raise ValueError(
                f"task.{name} {has}, but train.objective={objective.name} {reads}; set "
                f"task.{name}.share=0 or choose another objective"
            )
    if not any(shares):
        names = ", ".join(f"task.{name}.share" for name in group)
        raise ValueError(f"at least one of {names} must be positive, got {shares}")
    mixture = Mixture(tuple(tasks), tuple(shares))
    evaluated = [
        task
        for task, share in zip(mixture.held_out().tasks, shares, strict=True)
        if share > 0 or task.name in ALWAYS_EVALUATED
    ]
    return mixture, tuple(evaluated)


def _share(name: str, value) -> float:
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number that is finite and not negative, got {value!r}")
    return float(value)


def _model(group: dict, attention_groups: Mapping, task: Mixture, objective) -> DecoderOptions:
    width = 4 * whole_number("model.d_model", group["d_model"])
    _derive(group, "d_ff", width, None if group["mlp"] != "none" else "model.mlp is 'none'")
    learned = group["position"] == "learned"
    length = objective.tokens_read(task.length)
    _derive(group, "max_length", length, None if learned else "model.position is not 'learned'")
    if learned and whole_number("model.max_length", group["max_length"]) < length:
        raise ValueError(
            f"model.max_length must be at least {length} for task.length={task.length}, "
            f"got {group['max_length']}"
        )
    group |= {"vocab_size": task.vocab_size, "layers": _layers(group, "pattern", attention_groups)}
    encoder = None if objective.reads_source else f"train.objective is {objective.name!r}"
    _derive(group, "encoder_num_layers", group["num_layers"], encoder)
    _derive(group, "encoder_pattern", ("full",), encoder)
    if objective.reads_source:
        group["encoder_layers"] = _layers(group, "encoder_pattern", attention_groups)
        group["cross"] = _layer("cross", attention_groups["cross"])
    else:
        del group["encoder_num_layers"], group["encoder_pattern"]
        for name, layer in zip(group["pattern"], group["layers"], strict=True):
            if reads_memory(layer):
                raise ValueError(
                    f"model.pattern names {name!r}, which is cross-attention, and a decoder alone "
                    "has no memory to read; use train.objective=sequence_to_sequence, which adds "
                    "it to every block (see configs/cross.py)"
                )
    return take(objective.model_options, "model", group)


def _layers(group: dict, option: str, attention_groups: Mapping) -> tuple:
    """Options of the attention groups that a pattern names; the pattern becomes a tuple."""
    group[option] = pattern_names(group[option])
    return tuple(_layer(name, attention_groups[name]) for name in group[option])


def _derive(group: dict, name: str, default: int, unused: str | None) -> None:
    """Fills in an option that is unset; refuses one that is set and would not be read."""
    if unused is None:
        group[name] = default if group[name] is None else group[name]
    elif group[name] is None:
        group[name] = 0
    else:
        raise ValueError(f"model.{name} is set to {group[name]}, but {unused}; leave it unset")


def _layer(name: str, group: Mapping):
    group = dict(group)
    variant = group.pop("variant", None)
    if variant not in VARIANTS:
        raise ValueError(
            f"attention.{name}.variant must be one of {', '.join(VARIANTS)}, got {variant!r}"
        )
    return take(VARIANTS[variant], f"attention.{name}", group)
