"""Decoding token by token through a cache: tokens a second of every variant, against length.

    python -m benchmarks.decode --torch_python=PATH     also GQA in PyTorch with a static cache
    python -m benchmarks.decode --short                 fewer variants, lengths and repetitions

A decoder of 4 layers, width 256 and 8 query heads, float32, batch 1. The cache is filled to
"length" positions with keys and values of 0, which take as long to read as any other.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from attention.cache import SlotCache
from benchmarks import options, peers, report
from benchmarks.timing import Estimate, exponent, in_turns, ratio, seconds_of
from configs import base
from models import pure
from models.generate import follow
from training.resolve import resolve
from training.settings import Settings, settings
from training.step import graph_of, init_state

VARIANTS = ("mha", "gqa", "mqa", "window", "streaming", "mla", "linear")
SHORT_VARIANTS = ["mha", "gqa", "mqa", "window", "mla", "linear"]
LENGTHS, SHORT_LENGTHS = [256, 1024, 4096, 16_384], [256, 2048, 8192]
NUM_TOKENS = 64
SHAPE = {"model.num_layers": 4, "model.d_model": 256, "model.num_heads": 8, "task.vocab_size": 256}
CHANGES = {
    "window": {"attention.window.window": 256},
    "streaming": {"attention.streaming.window": 256, "attention.streaming.first": 4},
    "mla": {"attention.mla.latent_rank": 64},
}
OURS, EAGER, COMPILED = "ours", "PyTorch eager", "PyTorch compiled"
GOAL = 1.3
# Times that differ by less are the same; a fitted power below is flat.
SAME, FLAT = 1.1, 0.1

Key = tuple[str, str, int]


def settings_of(variant: str) -> Settings:
    """The decoder of a variant."""
    config = base.get_config()
    config.update_from_flattened_dict(SHAPE | CHANGES.get(variant, {}))
    config.model.pattern = (variant,)
    return settings(resolve(config.to_dict(), {}))


def filled(cache, length: int):
    """A cache that has taken ``length`` positions of zeros in; a state without slots stays 0."""
    if not isinstance(cache, SlotCache):
        return cache
    zeros = {
        name: jnp.zeros((array.shape[0], length, *array.shape[2:]), array.dtype)
        for name, array in cache.entries.items()
    }
    positions_1T = jnp.arange(length)[None]
    return cache.append(positions_1T, jnp.ones_like(positions_1T, bool), **zeros)[0]


class Ours:
    """``NUM_TOKENS`` tokens after a cache of ``length`` positions, one compiled program.

    The cache is donated and used again: every call forgets what the last one wrote.

    Attributes:
      cache_bytes: of all layers.
      tokens: the ids that the first call wrote, after id 1.
    """

    def __init__(self, run: Settings, length: int):
        graph = graph_of(run)
        self._params = init_state(run).params
        empty = pure.merge(graph, self._params).init_caches(1, length + NUM_TOKENS)
        self._caches = [filled(cache, length) for cache in empty]
        self.cache_bytes = sum(cache.nbytes for cache in self._caches)

        @functools.partial(jax.jit, donate_argnums=1)
        def program(params, caches):
            return follow(
                pure.merge(graph, params),
                jnp.ones(1, jnp.int32),
                jnp.full(1, length, jnp.int32),
                caches,
                NUM_TOKENS,
                lambda logits_BV, index: logits_BV.argmax(-1).astype(jnp.int32),
            )

        self._program = program
        self.tokens = np.asarray(self._run())[:, 0].tolist()

    def _run(self) -> jax.Array:
        tokens_TB, self._caches = self._program(self._params, self._caches)
        return tokens_TB

    def seconds(self) -> float:
        """Of one token."""
        return seconds_of(self._run) / NUM_TOKENS


def in_torch(
    torch: peers.Torch, length: int, expected: list[int], errors: dict[str, str]
) -> dict[Key, Callable[[], float]]:
    """GQA in PyTorch, eager and compiled; refuses another model by the tokens it writes."""
    run = settings_of("gqa")
    programs = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.npz"
        params = init_state(run).params
        np.savez(file, **{f"params/{name}": np.asarray(x) for name, x in params.items()})
        for name in (EAGER, COMPILED):
            label = f"{name}, {length:,}"
            try:
                said = torch.ask(
                    prepare=label, kind="decode", file=str(file), compile=name == COMPILED,
                    num_layers=run.model.num_layers, rope_base=run.model.rope_base, batch=1,
                    length=length, num_tokens=NUM_TOKENS,
                )  # fmt: skip
            except peers.PeerError as error:
                errors[label] = str(error)
                continue
            if said["tokens"] != expected:
                errors[label] = f"not the same model: it writes {said['tokens'][:8]} …, ours " + (
                    f"{expected[:8]} …"
                )
                continue
            programs["gqa", name, length] = lambda label=label: (
                torch.seconds(label, "tokens") / NUM_TOKENS
            )
    return programs


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of a token, samples by (variant, implementation, length); bytes of our caches."""

    seconds: dict[Key, list[float]]
    cache_bytes: dict[tuple[str, int], int]

    def lengths(self, variant: str, name: str = OURS) -> list[int]:
        """At which it was measured, ascending."""
        return sorted(key[2] for key in self.seconds if key[:2] == (variant, name))

    def median(self, variant: str, length: int, name: str = OURS) -> float:
        """Of the samples."""
        return Estimate.of(self.seconds[variant, name, length]).median

    def exponent(self, variant: str) -> float:
        """Of the time of a token against length."""
        lengths = self.lengths(variant)
        return exponent(lengths, [self.median(variant, length) for length in lengths])


def measure(
    variants: Iterable[str], lengths: Iterable[int], repeats: int, torch: peers.Torch | None
) -> tuple[Measured, dict[str, str]]:
    """Everything, and why what is missing is missing."""
    seconds, cache_bytes, errors = {}, {}, {}
    for length in lengths:
        print(f"a cache of {length:,} positions", file=sys.stderr, flush=True)
        programs = {}
        for variant in variants:
            mine = Ours(settings_of(variant), length)
            cache_bytes[variant, length] = mine.cache_bytes
            programs[variant, OURS, length] = mine.seconds
            if variant == "gqa" and torch is not None:
                programs |= in_torch(torch, length, mine.tokens, errors)
        seconds |= in_turns(programs, repeats)
    return Measured(seconds, cache_bytes), errors


def _shared(measured: Measured) -> tuple[bool, str]:
    longest = max(measured.lengths("mha"))
    bytes_of = {v: measured.cache_bytes[v, longest] for v in ("mha", "gqa", "mqa")}
    times = {v: 1e6 * measured.median(v, longest) for v in bytes_of}
    right = (
        bytes_of["mha"] == 4 * bytes_of["gqa"] == 8 * bytes_of["mqa"]
        and times["mqa"] <= SAME * times["gqa"]
        and times["gqa"] <= SAME * times["mha"]
    )
    figures = ", ".join(
        f"{v} {bytes_of[v] / 2**20:.2f} MiB and {times[v]:,.0f} µs a token" for v in bytes_of
    )
    return right, f"8 query heads with 8 / 2 / 1 key-value heads at {longest:,}: {figures}"


def _latent(measured: Measured) -> tuple[bool, str]:
    longest = max(measured.lengths("mla"))
    mla, mha = (measured.cache_bytes[variant, longest] for variant in ("mla", "mha"))
    layers = pure.merge(graph_of(run := settings_of("mla")), init_state(run).params)
    per_token = sum(layer.cache_bytes_per_token() for layer in layers.caching_layers())
    return mla == per_token * (longest + NUM_TOKENS) and mla < mha, (
        f"{per_token:,} bytes a token over all layers, {mha / mla:.1f} times less than multi-head"
    )


def _state(measured: Measured) -> tuple[bool, str]:
    lengths = measured.lengths("linear")
    sizes = {measured.cache_bytes["linear", length] for length in lengths}
    power = measured.exponent("linear")
    return len(sizes) == 1 and abs(power) < FLAT, (
        f"{max(sizes):,} bytes at every length, time of a token ~ length^{power:.2f}"
    )


def _window(measured: Measured) -> tuple[bool, str]:
    power = measured.exponent("window")
    return abs(power) < FLAT, f"time of a token ~ length^{power:.2f}"


ROWS = {
    "24": ("MQA and GQA divide the cache and its reading", _shared),
    "25": ("MLA caches a small latent", _latent),
    "27": ("a window's token costs the same at any length", _window),
    "28": ("linear attention's token costs the same bytes and time at any length", _state),
}


def verdicts(measured: Measured) -> list[report.Verdict]:
    """Of every row that decoding can decide."""
    result = []
    for row, (claim, decide) in ROWS.items():
        try:
            result.append(report.Verdict(row, claim, *decide(measured)))
        except (KeyError, ValueError):
            why = "its variants were not measured, or at fewer than two lengths"
            result.append(report.Verdict(row, claim, None, why))
    return result


def goals(measured: Measured) -> list[report.Goal]:
    """GQA beside PyTorch's, at every length."""
    result = []
    for length in measured.lengths("gqa"):
        for name in (EAGER, COMPILED):
            theirs, ours = (measured.seconds.get(("gqa", n, length)) for n in (name, OURS))
            reached = None if theirs is None else ratio(theirs, ours).median
            result.append(report.Goal(f"decoding beside {name} at {length:,}", GOAL, reached))
    return result


def table(measured: Measured) -> str:
    """A row for each variant, implementation and length."""
    rows = []
    for (variant, name, length), taken in measured.seconds.items():
        times, mine = Estimate.of([1e6 * x for x in taken]), measured.seconds[variant, OURS, length]
        rows.append(
            (
                f"{variant}, {name}",
                f"{length:,}",
                times.text("{:,.0f}".format),
                f"{1e6 / times.median:,.0f}",
                "" if name == OURS else ratio(taken, mine).text(),
                f"{measured.cache_bytes[variant, length]:,}" if name == OURS else "",
            )
        )
    header = ("decoding", "length", "µs a token (quartiles)", "tokens/s", "ours is faster by",
              "cache bytes")  # fmt: skip
    return report.markdown(header, sorted(rows, key=lambda row: row[0]))


def main(arguments, torch: peers.Torch | None) -> None:
    """Measures, prints and writes the report."""
    measured, errors = measure(arguments.variants, arguments.lengths, arguments.repeats, torch)
    decided = verdicts(measured)
    sections = [
        "# Decoding",
        report.machine(str(torch or peers.WITHOUT)),
        table(measured),
        report.items([*decided, *goals(measured)]),
        *report.missing(errors),
    ]
    rows = [
        dict(zip(("variant", "implementation", "length"), key, strict=True))
        | {"turn": turn, "seconds_per_token": seconds}
        for key, taken in measured.seconds.items()
        for turn, seconds in enumerate(taken)
    ]
    report.write(arguments.out, "decode", sections, rows, decided)
    lines = {
        f"{variant}, {name}": [
            (n, 1 / measured.median(variant, n, name)) for n in measured.lengths(variant, name)
        ]
        for variant, name in dict.fromkeys(key[:2] for key in measured.seconds)
    }
    picture = arguments.out / "decode.png"
    report.draw({"decoding": lines}, picture, "positions in the cache", "tokens per second")


def parse(argv: list[str] | None = None):
    """The command line."""
    short = {"variants": SHORT_VARIANTS, "lengths": SHORT_LENGTHS, "repeats": 3}
    full = {"variants": list(VARIANTS), "lengths": LENGTHS, "repeats": 7}
    return options.parse_lengths(__doc__, {"variants": VARIANTS}, short, full, argv)


if __name__ == "__main__":
    sys.exit(options.run(main, parse()))
