"""Attention, ours and every available peer in turns: time, memory, and how both grow with T.

    python -m benchmarks.attention --torch_python=PATH     all variants at 1,024 … 8,192 tokens
    python -m benchmarks.attention --variants=causal,window --lengths=8192
    python -m benchmarks.attention --short                 a few variants at up to 4,096
    python -m benchmarks.attention --peers=dense           without jax.nn

Batch 1, 4 heads of 64 (or as the variant says), float32. "both" is forward with all gradients.
Peers: the dense reference, jax.nn.dot_product_attention, PyTorch's SDPA and FlexAttention. SDPA
has no other mask than causal but a T × T array; FlexAttention is measured at the longest length.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import jax

from benchmarks import options, peers, report
from benchmarks.attention_rows import Measured, goals, verdicts
from benchmarks.cases import DENSE, FLEX, JAX_NN, OURS, PROGRAMS, SDPA, VARIANTS, program
from benchmarks.timing import Estimate, calls_for, in_turns, peak_bytes, ratio, seconds_of

LENGTHS, REPEATS = [1024, 2048, 4096, 8192], 5
SHORT_VARIANTS, SHORT_LENGTHS, SHORT_REPEATS = (
    ["causal", "window", "longformer", "one_head", "linear", "additive"], [1024, 2048, 4096], 3
)  # fmt: skip
# Dense scores of 4 heads are 1 GiB at 8,192 tokens, and its gradients hold several of them.
LONGEST_DENSE = 4096
# Short calls are repeated until a turn takes so many seconds.
TURN_SECONDS = 0.05

Key = tuple[str, str, int, str]


def ours_and_jax(
    variant: str, T: int, beside: Sequence[str], peaks: dict[Key, int]
) -> dict[Key, Callable[[], float]]:
    """Timed programs in this process; fills in their peak bytes."""
    case, programs = VARIANTS[variant], {}
    shapes = case.shapes(T)
    arrays = [
        jax.random.normal(key, shape.shape, shape.dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    ]
    for name, attention in case.implementations().items():
        for what in PROGRAMS:
            if name not in (OURS, *beside) or (name == DENSE and T > LONGEST_DENSE):
                continue
            compiled = program(attention, what).lower(*shapes).compile()
            peaks[variant, name, T, what] = peak_bytes(compiled)
            calls = calls_for(_warm_seconds(compiled, arrays), TURN_SECONDS)
            programs[variant, name, T, what] = lambda f=compiled, n=calls: seconds_of(
                f, *arrays, calls=n
            )
    return programs


def _warm_seconds(compiled, arrays) -> float:
    first = seconds_of(compiled, *arrays)
    return first if first > TURN_SECONDS else seconds_of(compiled, *arrays)


def in_torch(
    torch: peers.Torch,
    names: Iterable[str],
    variant: str,
    T: int,
    peaks: dict[Key, int],
    errors: dict[str, str],
) -> dict[Key, Callable[[], float]]:
    """Timed programs in PyTorch; fills in their peak bytes, and why there are none."""
    if VARIANTS[variant].torch_mask is None:
        return {}
    programs = {}
    for name in names:
        for what in PROGRAMS:
            label = f"{variant}, {name}, {T:,}, {what}"
            try:
                torch.ask(
                    prepare=label, peer=name, programs=[what], **VARIANTS[variant].for_torch(T)
                )
                grown = torch.ask(peak=label, what=what)["bytes"]
                seconds = torch.seconds(label, what)
            except peers.PeerError as error:
                errors[f"{variant}, {name}, {what}"] = str(error)
                continue
            if grown is not None:
                peaks[variant, name, T, what] = grown
            calls = calls_for(seconds, TURN_SECONDS)
            programs[variant, name, T, what] = lambda label=label, what=what, n=calls: (
                torch.seconds(label, what, n)
            )
    return programs


def measure(
    variants: Iterable[str],
    lengths: Sequence[int],
    beside: Sequence[str],
    repeats: int,
    torch: peers.Torch | None,
) -> tuple[Measured, dict[str, str]]:
    """Everything, and why what is missing is missing."""
    seconds, peaks, errors = {}, {}, {}
    for T in lengths:
        for variant in variants:
            if (VARIANTS[variant].longest or T) < T:
                continue
            print(f"{variant}, T = {T:,}", file=sys.stderr, flush=True)
            programs = ours_and_jax(variant, T, beside, peaks)
            if torch is not None:
                # FlexAttention compiles for a good part of a minute, at every length anew.
                names = (SDPA, FLEX) if max(lengths) == T else (SDPA,)
                programs |= in_torch(torch, names, variant, T, peaks, errors)
            seconds |= in_turns(programs, repeats)
            for _, name, _, what in programs:
                if name in (SDPA, FLEX):
                    torch.ask(drop=f"{variant}, {name}, {T:,}, {what}")
    return Measured(seconds, peaks), errors


def table(measured: Measured) -> str:
    """A row for each variant, implementation and length."""
    rows = []
    for variant, name, T in dict.fromkeys(key[:3] for key in measured.seconds):
        cells = [f"{variant}, {name}", f"{T:,}"]
        for what in PROGRAMS:
            key = variant, name, T, what
            if key not in measured.seconds:
                cells += ["", "", ""]
                continue
            theirs, mine = measured.seconds[key], measured.seconds[variant, OURS, T, what]
            times = Estimate.of([1e3 * x for x in theirs])
            peak = measured.peaks.get(key)
            cells += [
                times.text(_milliseconds),
                "" if name == OURS else ratio(theirs, mine).text(),
                "" if peak is None else f"{peak / 2**20:,.1f}",
            ]
        rows.append(cells)
    header = ["variant, implementation", "T"]
    for what in PROGRAMS:
        header += [f"{what}, ms (quartiles)", "ours is faster by", "peak MiB"]
    return report.markdown(header, rows)


def exponents(measured: Measured) -> str:
    """p of time = c · T^p, for what was measured at two lengths or more."""
    rows = []
    for variant, name in dict.fromkeys(key[:2] for key in measured.seconds):
        cells = [f"{variant}, {name}"]
        for what in PROGRAMS:
            lengths = measured.lengths(variant, name, what)
            fits = len(lengths) > 1
            cells.append(f"{measured.exponent(variant, name, what):.2f}" if fits else "")
        rows.append(cells)
    return report.markdown(["time ~ T^p", *(f"p, {what}" for what in PROGRAMS)], rows)


def panels(measured: Measured) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Milliseconds against T, a panel for each program."""
    return {
        what: {
            f"{variant}, {name}": [
                (T, 1e3 * measured.median(variant, name, T, what))
                for T in measured.lengths(variant, name, what)
            ]
            for variant, name in dict.fromkeys(k[:2] for k in measured.seconds if k[3] == what)
        }
        for what in PROGRAMS
    }


def _milliseconds(value: float) -> str:
    """Three figures, and all of a large number's."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main(arguments, torch: peers.Torch | None) -> None:
    """Measures, prints and writes the report."""
    measured, errors = measure(
        arguments.variants, arguments.lengths, arguments.peers, arguments.repeats, torch
    )
    decided = verdicts(measured)
    sections = [
        "# Attention",
        report.machine(str(torch or peers.WITHOUT)),
        table(measured),
        exponents(measured),
        report.items([*decided, *goals(measured)]),
        *report.missing(errors),
    ]
    rows = [
        dict(zip(("variant", "implementation", "T", "program"), key, strict=True))
        | {"turn": turn, "seconds": seconds, "peak_bytes": measured.peaks.get(key, "")}
        for key, taken in measured.seconds.items()
        for turn, seconds in enumerate(taken)
    ]
    report.write(arguments.out, "attention", sections, rows, decided)
    picture = arguments.out / "attention.png"
    report.draw(panels(measured), picture, "T, tokens", "milliseconds")


def parse(argv: list[str] | None = None):
    """The command line."""
    short = {"variants": SHORT_VARIANTS, "lengths": SHORT_LENGTHS, "repeats": SHORT_REPEATS}
    full = {"variants": list(VARIANTS), "lengths": LENGTHS, "repeats": REPEATS}
    beside = {"peers": [DENSE, JAX_NN]}
    names = {"variants": VARIANTS} | beside
    return options.parse_lengths(__doc__, names, short | beside, full | beside, argv)


if __name__ == "__main__":
    sys.exit(options.run(main, parse()))
