"""Attention, ours and every available peer in turns: time, memory, and how both grow with T.

    python -m benchmarks.attention --torch_python=PATH     all variants at 1,024 … 8,192 tokens
    python -m benchmarks.attention --variants=causal,window --lengths=8192
    python -m benchmarks.attention --short                 a few variants at up to 4,096, no
                                                           FlexAttention, dense causal alone
    python -m benchmarks.attention --peers=dense           without jax.nn

Batch 1, 4 heads of 64 (or as the variant says), float32. "both" is forward with all gradients.
Peers: the dense reference, jax.nn.dot_product_attention, the products of our tiles without a
softmax ("products", not in the short form), PyTorch's SDPA and FlexAttention, the last one at the
longest length only. Peak bytes are those of temporaries and outputs: as the
compiler has laid them out, and for PyTorch as its process grows in a call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from benchmarks import options, peers, report
from benchmarks.attention_rows import Measured, bounds, goals, verdicts
from benchmarks.cases import (
    DENSE,
    FLEX,
    JAX_NN,
    OURS,
    PRODUCTS,
    PROGRAMS,
    SDPA,
    VARIANTS,
    program,
)  # fmt: skip
from benchmarks.timing import Estimate, calls_for, in_turns, peak_bytes, ratio, seconds_of

LENGTHS, REPEATS = [1024, 2048, 4096, 8192], 5
SHORT_VARIANTS, SHORT_LENGTHS, SHORT_REPEATS = (
    ["causal", "window", "longformer", "one_head", "linear", "additive"], [1024, 2048, 4096], 3
)  # fmt: skip
# The one that claims compare with the dense program.
SHORT_DENSE = "causal"
# Said beside the times.
NOTE = (
    "To SDPA any mask but the causal one is a T × T array, ready before it is timed, and to jax.nn "
    "every mask is, made in every call: for a window both do T² work. “products” are those of our "
    "tiles alone, without a softmax: the least that they cost in XLA."
)
# Dense scores of 4 heads are 1 GiB at 8,192 tokens, and its gradients hold several of them.
LONGEST_DENSE = 4096
# Short calls are repeated until a turn takes so many seconds. Before a turn of a program that takes
# less than a second comes one call that is not timed: after a neighbour of gigabytes, the pages of
# the first call are new to the machine.
TURN_SECONDS, WARMED = 0.1, 1.0
TORCH = SDPA, FLEX

Key = tuple[str, str, int, str]


def ours_and_jax(
    variant: str, T: int, names: Sequence[str], peaks: dict[Key, int]
) -> dict[Key, Callable[[], float]]:
    """Timed programs in this process; fills in their peak bytes."""
    case, programs = VARIANTS[variant], {}
    shapes = case.shapes(T)
    arrays = [
        jax.random.normal(key, shape.shape, shape.dtype)
        for key, shape in zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    ]
    for name in names:
        for what in PROGRAMS:
            attention = case.implementations()[name]
            compiled = program(attention, what).lower(*shapes).compile()
            peaks[variant, name, T, what] = peak_bytes(compiled)
            programs[variant, name, T, what] = _turn(
                lambda calls, f=compiled: seconds_of(f, *arrays, calls=calls),
                _warm_seconds(compiled, arrays),
            )
    return programs


def _turn(seconds_of_calls: Callable[[int], float], seconds: float) -> Callable[[], float]:
    """A turn of a program whose call takes about ``seconds``."""
    calls = calls_for(seconds, TURN_SECONDS)

    def turn() -> float:
        if seconds < WARMED:
            seconds_of_calls(1)
        return seconds_of_calls(calls)

    return turn


def _warm_seconds(compiled, arrays) -> float:
    first = seconds_of(compiled, *arrays)
    return first if first > TURN_SECONDS else seconds_of(compiled, *arrays)


def in_torch(
    torch: peers.Torch,
    variant: str,
    T: int,
    names: Iterable[str],
    peaks: dict[Key, int],
    errors: dict[Key, str],
) -> dict[Key, Callable[[], float]]:
    """Timed programs in PyTorch; fills in their peak bytes, and why there are none."""
    programs = {}
    for name in names:
        for what in PROGRAMS:
            label = _label(variant, name, T, what)
            try:
                torch.ask(
                    prepare=label, peer=name, programs=[what], **VARIANTS[variant].for_torch(T)
                )
                grown = torch.ask(peak=label, what=what)["bytes"]
                seconds = torch.seconds(label, what)
            except peers.PeerError as error:
                errors[variant, name, T, what] = str(error)
                continue
            if grown is not None:
                peaks[variant, name, T, what] = grown
            programs[variant, name, T, what] = _turn(
                functools.partial(torch.seconds, label, what), seconds
            )
    return programs


def _label(*key) -> str:
    variant, name, T, what = key
    return f"{variant}, {name}, T = {T:,}, {what}"


def left_out(variant: str, name: str, T: int, arguments, torch: peers.Torch | None) -> str | None:
    """Why it is not measured; None where it is."""
    longest = VARIANTS[variant].longest
    if longest is not None and longest < T:
        return f"takes seconds a call; measured up to T = {longest:,}"
    if name == DENSE and T > LONGEST_DENSE:
        return f"its scores take gigabytes; measured up to T = {LONGEST_DENSE:,}"
    if name == DENSE and arguments.short and variant != SHORT_DENSE:
        return f"not measured in the short form but for {SHORT_DENSE}"
    if name in TORCH and torch is None:
        return peers.WITHOUT
    if name == FLEX and arguments.short:
        return "not measured in the short form: it compiles for a good part of a minute"
    if name == FLEX and max(arguments.lengths) > T:
        return "compiles for a good part of a minute; measured at the longest length only"
    return None


def measure(arguments, torch: peers.Torch | None) -> Measured:
    """Everything, and why what is missing is missing."""
    seconds, peaks, errors = {}, {}, {}
    for variant in arguments.variants:
        case = VARIANTS[variant]
        known = [n for n in case.implementations() if n in (OURS, *arguments.peers)]
        known += TORCH if case.torch_mask else ()
        # All lengths take turns: an exponent compares them.
        programs, asked = {}, {}
        for T in arguments.lengths:
            reasons = {n: left_out(variant, n, T, arguments, torch) for n in known}
            errors |= {
                (variant, name, T, what): why
                for name, why in reasons.items()
                if why is not None
                for what in PROGRAMS
            }
            names = [name for name in known if reasons[name] is None]
            if not names:
                continue
            print(f"{variant}, T = {T:,}", file=sys.stderr, flush=True)
            programs |= ours_and_jax(variant, T, [n for n in names if n not in TORCH], peaks)
            asked |= in_torch(torch, variant, T, [n for n in names if n in TORCH], peaks, errors)
        seconds |= in_turns(programs | asked, repeats=arguments.repeats, errors=errors)
        # What a peer cannot even drop has ended, and every later request says so.
        with contextlib.suppress(peers.PeerError):
            for key in asked:
                torch.ask(drop=_label(*key))
    return Measured(seconds, peaks, errors)


def lacking(errors: Mapping[Key, str]) -> dict[str, str]:
    """What is not measured → why; a program is named where that is not so of all."""
    result = {}
    for (variant, name, T, what), why in errors.items():
        every = all(errors.get((variant, name, T, other)) == why for other in PROGRAMS)
        result[f"{variant}, {name}, T = {T:,}" if every else _label(variant, name, T, what)] = why
    return result


def table(measured: Measured) -> str:
    """A row for each variant, implementation and length."""
    rows = []
    for variant, name, T in dict.fromkeys(k[:3] for k in [*measured.seconds, *measured.errors]):
        cells = [f"{variant}, {name}", f"{T:,}"]
        for what in PROGRAMS:
            key = variant, name, T, what
            if key not in measured.seconds:
                cells += ["not measured", "", ""]
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
    measured = measure(arguments, torch)
    decided = verdicts(measured)
    sections = [
        "# Attention",
        report.machine(str(torch or peers.WITHOUT)),
        table(measured),
        NOTE,
        exponents(measured),
        report.items([*decided, *goals(measured), *bounds(measured)]),
        *report.missing(lacking(measured.errors)),
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
    short = {
        "variants": SHORT_VARIANTS, "peers": [DENSE, JAX_NN],
        "lengths": SHORT_LENGTHS, "repeats": SHORT_REPEATS,
    }  # fmt: skip
    names = {"variants": list(VARIANTS), "peers": [DENSE, JAX_NN, PRODUCTS]}
    full = names | {"lengths": LENGTHS, "repeats": REPEATS}
    return options.parse_lengths(__doc__, names, short, full, argv)


if __name__ == "__main__":
    sys.exit(options.run(main, parse()))
