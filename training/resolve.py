"""Which options of a config a run reads; the others are left out of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tasks import TASKS
from training.objective import OBJECTIVES

# Evaluated whatever the mixture: what a variant cannot do is part of the answer.
ALWAYS_EVALUATED = ("copy", "induction")


def resolve(config: Mapping, overridden: Iterable[str] = ()) -> dict:
    """The config with only the attention groups and tasks that the run uses.

    Args:
      config: all options, as plain dicts.
      overridden: dotted names of the options that the user has set.

    Raises:
      ValueError: a pattern names no group, or an overridden option would do nothing.
    """
    used = {"attention": _groups(config), "task": _tasks(config)}
    for option in overridden:
        part, _, rest = option.partition(".")
        group, _, name = rest.partition(".")
        if name and name != "share" and part in used and group not in used[part]:
            reason = (
                f"model.pattern is {pattern_names(config['model']['pattern'])}"
                if part == "attention"
                else f"task.{group}.share is {config['task'][group]['share']}"
            )
            raise ValueError(f"{option} would do nothing: {reason}")
        if part == "analysis" and group != "every" and not config["analysis"]["every"]:
            raise ValueError(f"{option} would do nothing: analysis.every is 0")
    task = {
        name: value
        for name, value in config["task"].items()
        if not isinstance(value, Mapping) or name in used["task"]
    }
    groups = {name: config["attention"][name] for name in used["attention"]}
    return {**config, "attention": groups, "task": task}


def _groups(config: Mapping) -> list[str]:
    model, groups = config["model"], config["attention"]
    names = list(pattern_names(model["pattern"]))
    options = {"model.pattern": names}
    if config["train"]["objective"] == "sequence_to_sequence":
        options["model.encoder_pattern"] = list(
            pattern_names(model["encoder_pattern"] or ("full",))
        )
        options["cross-attention"] = ["cross"]
    for option, wanted in options.items():
        for name in wanted:
            if name not in groups:
                raise ValueError(
                    f"{option} names {name!r}; the attention groups are {', '.join(sorted(groups))}"
                )
    return sorted({name for wanted in options.values() for name in wanted})


def _tasks(config: Mapping) -> list[str]:
    for name, options in config["task"].items():
        if isinstance(options, Mapping) and name not in TASKS:
            raise ValueError(f"task.{name} is not a task; known are {', '.join(TASKS)}")
    objective = OBJECTIVES.get(config["train"]["objective"])
    always = () if objective is None or objective.reads_source else ALWAYS_EVALUATED
    return [
        name
        for name, options in config["task"].items()
        if name in TASKS and (options.get("share", 1) or name in always)
    ]


def pattern_names(pattern: str | Iterable[str]) -> tuple[str, ...]:
    """The names in a pattern: a tuple of them, or a text such as ``linear,linear,causal``."""
    # On the command line a text becomes a tuple that holds the whole text.
    names = pattern if isinstance(pattern, str) else ",".join(map(str, pattern))
    return tuple(name.strip() for name in names.split(","))
