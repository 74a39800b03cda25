"""Decoding token by token through a cache: tokens a second of every variant, against length.

    python -m benchmarks.decode --torch_python=PATH     also GQA in PyTorch with a static cache
    python -m benchmarks.decode --short                 fewer variants, lengths and repetitions

A decoder of 4 layers, width 256 and 8 query heads, float32, batch 1. The cache is filled to
"length" positions with keys and values of 0, which take as long to read as any other. Peak bytes
are beside parameters and cache: ours as the compiler has laid them out, PyTorch's as its process
grows in a call.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks import options, peers, report
from benchmarks.decode_model import NUM_TOKENS, TURN_SECONDS, Ours, settings_of
from benchmarks.decode_rows import COMPILED, EAGER, OURS, Key, Measured, goals, growth, verdicts
from benchmarks.timing import Estimate, calls_for, in_turns, ratio
from training.step import init_state

VARIANTS = ("mha", "gqa", "mqa", "window", "streaming", "mla", "linear")
SHORT_VARIANTS = ["mha", "gqa", "mqa", "window", "mla", "linear"]
LENGTHS, SHORT_LENGTHS = [256, 1024, 4096, 16_384], [256, 2048, 8192]


def in_torch(
    torch: peers.Torch,
    length: int,
    expected: list[int],
    peaks: dict[Key, int],
    errors: dict[Key, str],
) -> dict[Key, Callable[[], float]]:
    """GQA in PyTorch, eager and compiled; refuses another model by the tokens it writes.

    Fills in peak bytes, and why there are no programs.
    """
    run = settings_of("gqa")
    programs = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.npz"
        params = init_state(run).params
        np.savez(file, **{f"params/{name}": np.asarray(x) for name, x in params.items()})
        for name in (EAGER, COMPILED):
            key, label = ("gqa", name, length), f"{name}, {length:,}"
            try:
                said = torch.ask(
                    prepare=label, kind="decode", file=str(file), compile=name == COMPILED,
                    num_layers=run.model.num_layers, rope_base=run.model.rope_base, batch=1,
                    length=length, num_tokens=NUM_TOKENS,
                )  # fmt: skip
                if said["tokens"] != expected:
                    raise peers.PeerError(
                        f"not the same model: it writes {said['tokens'][:8]} …, ours "
                        f"{expected[:8]} …"
                    )
                grown = torch.ask(peak=label, what="tokens")["bytes"]
                calls = calls_for(torch.seconds(label, "tokens"), TURN_SECONDS)
            except peers.PeerError as error:
                errors[key] = str(error)
                continue
            if grown is not None:
                peaks[key] = grown
            programs[key] = lambda label=label, calls=calls: (
                torch.seconds(label, "tokens", calls) / NUM_TOKENS
            )
    return programs


def measure(
    variants: Iterable[str], lengths: Iterable[int], repeats: int, torch: peers.Torch | None
) -> Measured:
    """Everything, and why what is missing is missing."""
    programs, cache_bytes, peaks, errors = {}, {}, {}, {}
    for length in lengths:
        print(f"a cache of {length:,} positions", file=sys.stderr, flush=True)
        for variant in variants:
            mine = Ours(settings_of(variant), length)
            cache_bytes[variant, length] = mine.cache_bytes
            peaks[variant, OURS, length] = mine.peak
            programs[variant, OURS, length] = mine.seconds
            if variant != "gqa":
                continue
            if torch is None:
                errors |= {("gqa", name, length): peers.WITHOUT for name in (EAGER, COMPILED)}
            else:
                programs |= in_torch(torch, length, mine.tokens, peaks, errors)
    # All lengths take turns: an exponent compares them.
    return Measured(in_turns(programs, repeats, errors), cache_bytes, peaks, errors)


def table(measured: Measured) -> str:
    """A row for each variant, implementation and length."""
    rows = []
    for key in sorted({**measured.seconds, **measured.errors}):
        variant, name, length = key
        cells = [f"{variant}, {name}", f"{length:,}"]
        if key not in measured.seconds:
            rows.append([*cells, "not measured", "", "", "", ""])
            continue
        taken, mine = measured.seconds[key], measured.seconds[variant, OURS, length]
        times = Estimate.of([1e6 * x for x in taken])
        rows.append(
            [
                *cells,
                times.text("{:,.0f}".format),
                f"{1e6 / times.median:,.0f}",
                "" if name == OURS else ratio(taken, mine).text(),
                f"{measured.cache_bytes[variant, length]:,}" if name == OURS else "",
                f"{measured.peaks[key] / 2**20:,.2f}" if key in measured.peaks else "",
            ]
        )
    header = ("decoding", "length", "µs a token (quartiles)", "tokens/s", "ours is faster by",
              "cache bytes", "peak MiB")  # fmt: skip
    return report.markdown(header, rows)


def exponents(measured: Measured) -> str:
    """p of time = c · length^p, for what was measured at two lengths or more."""
    rows = [
        (f"{variant}, {name}", f"{measured.exponent(variant, name):.2f}")
        for variant, name in sorted({key[:2] for key in measured.seconds})
        if len(measured.lengths(variant, name)) > 1
    ]
    return report.markdown(["time of a token ~ length^p", "p"], rows)


def main(arguments, torch: peers.Torch | None) -> None:
    """Measures, prints and writes the report."""
    measured = measure(arguments.variants, arguments.lengths, arguments.repeats, torch)
    decided = verdicts(measured)
    errors = {
        f"{variant}, {name}, {length:,}": why
        for (variant, name, length), why in measured.errors.items()
    }
    sections = [
        "# Decoding",
        report.machine(str(torch or peers.WITHOUT)),
        table(measured),
        exponents(measured),
        report.items([*decided, growth(measured), *goals(measured)]),
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
