"""Evidence from a model of real text: its heads, and how it goes on past its training length."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from analysis import emergence_table
from sweeps.claims.rows import Finding, Found, Table
from training.run_folder import RunFolder

_HEADS, _STREAMING = "analysis/head_scores.py", "analysis/streaming.py"
# A delimiter head gives delimiters so many times the weight that uniform attention gives them.
DELIMITERS = 2.0
# An attention sink takes the larger part of a head's weight.
SINK = 0.5
# Perplexity that grows by less is stable; a window that has lost its sinks is so much worse.
STABLE, COLLAPSED = 1.25, 2.0
FIRST = 4


@dataclasses.dataclass(frozen=True)
class TextModel:
    """A text model trained by train.py, and ``analysis.streaming`` on it.

    Rows 15, 18 and 19; of a model with learned sinks the reason why it has no others.

    Attributes:
      name: see ``rows.Evidence``.
      options: of train.py.
      minutes: see ``rows.Evidence``.
      multiple: training lengths that it reads.
    """

    name: str
    options: tuple[str, ...]
    minutes: float
    multiple: int = 8
    whole = False
    config = "configs/text_induction.py"
    links = (config, _HEADS, _STREAMING)
    needs = (config, _STREAMING)

    def commands(self, folder: Path) -> tuple[tuple[str, ...], ...]:
        train = ("train.py", f"--config={self.config}", *self.options, f"--workdir={folder}")
        multiple = f"--multiple={self.multiple}"
        return train, ("-m", "analysis.streaming", f"--workdir={folder}", multiple)

    def read(self, folder: Path) -> Found:
        seen = json.loads((folder / "streaming.json").read_text())
        table = emergence_table.read(RunFolder(folder).emergence)
        findings = (_delimiters(table), _sink(seen), *_streaming(seen))
        return Found(findings, _perplexity(seen))


@dataclasses.dataclass(frozen=True)
class WithLearnedSinks(TextModel):
    """The same with a logit per head that takes weight and gives nothing: who needs one uses it."""

    def read(self, folder: Path) -> Found:
        seen = json.loads((folder / "streaming.json").read_text())
        each = [mass for layer in seen["no_token"] for mass in layer]
        mean = sum(each) / len(each)
        measured = f"{mean:.3f} on average, {max(each):.3f} at most, over {len(each)} heads"
        what = f"offered a place for idle weight, heads put less than {SINK:g} of it there"
        idle = max(each) < SINK
        reasons = [Finding(row, what, measured, idle, reason=True) for row in (18, 19)]
        return Found(tuple(reasons), _perplexity(seen))


def _delimiters(table) -> Finding:
    best = float(table.heads("delimiter")[-1].max())
    uniform = float(table["delimiter_chance"][-1])
    what = f"a head gives newlines at least {DELIMITERS:g} times the weight of uniform attention"
    measured = f"{best:.3f}, uniform {uniform:.3f}: {best / uniform:.1f} times"
    return Finding(15, what, measured, best >= DELIMITERS * uniform)


def _sink(seen: dict) -> Finding:
    each = [mass for layer in seen["first_token"] for mass in layer]
    layers = "; ".join(
        f"layer {i} " + " ".join(f"{mass:.3f}" for mass in layer)
        for i, layer in enumerate(seen["first_token"])
    )
    what = f"a head puts at least {SINK:g} of its weight on the first token"
    return Finding(18, what, layers, max(each) >= SINK)


def _streaming(seen: dict) -> tuple[Finding, ...]:
    kept = seen["kept"]
    dense, alone, pinned = (
        seen["perplexity"][name]
        for name in ("dense", f"window {kept}", f"window {kept - FIRST} + {FIRST} first")
    )
    length = seen["spans"][-1][1] // seen["spans"][0][1]
    grown, dense_grown = pinned[-1] / pinned[0], dense[-1] / dense[0]
    stable = (
        f"with {FIRST} first tokens perplexity grows by less than {STABLE:g} times up to {length} "
        "training lengths, where dense attention's does not",
        f"{pinned[0]:.2f} to {pinned[-1]:.2f} ({grown:.2f} times); dense {dense[0]:.2f} to "
        f"{dense[-1]:.2f} ({dense_grown:.1f} times)",
        grown < STABLE <= dense_grown,
    )
    worse = alone[-1] / pinned[-1]
    collapsed = (
        f"a window alone collapses: perplexity at least {COLLAPSED:g} times as high (StreamingLLM: "
        "5158 against 5.40)",
        f"{alone[-1]:.2f} against {pinned[-1]:.2f} ({worse:.2f} times)",
        worse >= COLLAPSED,
    )
    return tuple(Finding(19, *each) for each in (stable, collapsed))


def _perplexity(seen: dict) -> Table:
    head = ("perplexity at positions", *(f"{low:,} to {high:,}" for low, high in seen["spans"]))
    rows = (
        (name, *(f"{number:.2f}" for number in numbers))
        for name, numbers in seen["perplexity"].items()
    )
    return Table(head, tuple(rows))
