"""What the measured decoding says about the table of claims, row by row."""

from __future__ import annotations

import dataclasses

from benchmarks import report
from benchmarks.decode_model import NUM_TOKENS, settings_of
from benchmarks.timing import Estimate, exponent, ratio
from models import pure
from training.step import graph_of, init_state

OURS, EAGER, COMPILED = "ours", "PyTorch eager", "PyTorch compiled"
# What these read grows with length; of all others it does not.
READ_ALL = ("mha", "gqa", "mqa", "mla")
GOAL = 1.3
# Times that differ by less are the same; a fitted power below does not grow.
SAME, FLAT = 1.1, 0.1

Key = tuple[str, str, int]


@dataclasses.dataclass(frozen=True)
class Measured:
    """By (variant, implementation, length).

    Attributes:
      seconds: of a token, samples.
      cache_bytes: of our caches, by (variant, length).
      peaks: bytes of temporaries and outputs.
      errors: why there are no seconds.
    """

    seconds: dict[Key, list[float]]
    cache_bytes: dict[tuple[str, int], int]
    peaks: dict[Key, int] = dataclasses.field(default_factory=dict)
    errors: dict[Key, str] = dataclasses.field(default_factory=dict)

    def lengths(self, variant: str, name: str = OURS) -> list[int]:
        """At which it was measured, ascending."""
        return sorted(key[2] for key in self.seconds if key[:2] == (variant, name))

    def median(self, variant: str, length: int, name: str = OURS) -> float:
        """Of the samples."""
        return Estimate.of(self.seconds[variant, name, length]).median

    def exponent(self, variant: str, name: str = OURS) -> float:
        """Of the time of a token against length; ValueError at fewer than two lengths."""
        lengths = self.lengths(variant, name)
        return exponent(lengths, [self.median(variant, length, name) for length in lengths])

    def growth(self, variant: str) -> float:
        """Times as long as at the shortest length that ours takes at the longest.

        Raises:
          ValueError: it was measured at fewer than two lengths.
        """
        lengths = self.lengths(variant)
        if len(lengths) < 2:
            raise ValueError(f"{variant} was measured at {lengths}, and growth needs two lengths")
        return self.median(variant, lengths[-1]) / self.median(variant, lengths[0])


def _shared(measured: Measured) -> tuple[bool, str]:
    longest = max(measured.lengths("mha"))
    bytes_of = {v: measured.cache_bytes[v, longest] for v in ("mha", "gqa", "mqa")}
    times = {v: 1e6 * measured.median(v, longest) for v in bytes_of}
    mha, gqa, mqa = (measured.seconds[v, OURS, longest] for v in bytes_of)
    right = (
        bytes_of["mha"] == 4 * bytes_of["gqa"] == 8 * bytes_of["mqa"]
        # Faster in three turns of four, by more than what counts as the same.
        and min(ratio(mha, gqa).low, ratio(mha, mqa).low) > SAME
        and times["mqa"] <= SAME * times["gqa"]
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
    return len(sizes) == 1 and power < FLAT, (
        f"{max(sizes):,} bytes at every length, time of a token ~ length^{power:.2f}"
    )


def _window(measured: Measured) -> tuple[bool, str]:
    power = measured.exponent("window")
    return power < FLAT, f"time of a token ~ length^{power:.2f}"


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


def growth(measured: Measured) -> str:
    """Whether time grows where more must be read, and only there."""
    claim = "a token costs more where there is more to read, and only there"
    try:
        right, figures = True, []
        for variant in dict.fromkeys(key[0] for key in measured.seconds):
            power, times = measured.exponent(variant), measured.growth(variant)
            right &= times > SAME if variant in READ_ALL else power < FLAT
            reads = "reads all" if variant in READ_ALL else "does not"
            figures.append(f"{variant} ({reads}) × {times:.2f}, length^{power:.2f}")
    except ValueError as error:
        return f"{report.WORDS[None]}: {claim} — {error}"
    return f"{report.WORDS[right]}: {claim} — {'; '.join(figures)}"


def goals(measured: Measured) -> list[report.Goal]:
    """GQA beside PyTorch's, at every length."""
    result = []
    for length in measured.lengths("gqa"):
        for name in (EAGER, COMPILED):
            theirs, ours = (measured.seconds.get(("gqa", n, length)) for n in (name, OURS))
            reached = None if theirs is None else ratio(theirs, ours).median
            result.append(report.Goal(f"decoding beside {name} at {length:,}", GOAL, reached))
    return result
