"""What the measured attention says about the table of claims, row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from benchmarks.cases import DENSE, FLEX, JAX_NN, OURS, PRODUCTS, PROGRAMS, SDPA, WINDOW
from benchmarks.report import Goal, Verdict
from benchmarks.timing import Estimate, exponent, ratio

# A power of the length fitted to four lengths or fewer is uncertain by about this much: what is
# done once a call or once a token counts for more at the short end, caches at the long one.
SQUARE, LINE = (1.7, 2.3), (0.7, 1.3)
# Four heads of equal total width have the same products, in smaller matrices, and four times the
# exponentials: they took 1.43 to 1.56 times as long in several runs, which is about this bound. A
# run whose quartiles lie on both sides of it decides nothing.
EQUAL = 1.5
SEVERAL = 2.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """Of one benchmark; keys are (variant, implementation, T, program).

    Attributes:
      seconds: samples, a turn each.
      peaks: bytes of temporaries and outputs.
      errors: why there are no seconds.
    """

    seconds: Mapping[tuple, list[float]]
    peaks: Mapping[tuple, int]
    errors: Mapping[tuple, str] = dataclasses.field(default_factory=dict)

    def median(self, *key) -> float:
        return Estimate.of(self.seconds[key]).median

    def lengths(self, variant: str, implementation: str, program: str, of: str = "seconds"):
        """Lengths at which it was measured, ascending."""
        start, end = (variant, implementation), (program,)
        return sorted(k[2] for k in getattr(self, of) if (k[:2], k[3:]) == (start, end))

    def exponent(self, variant: str, implementation: str = OURS, program: str = "both") -> float:
        """Of time against T; ValueError where it was measured at fewer than two lengths."""
        lengths = self.lengths(variant, implementation, program)
        times = [self.median(variant, implementation, T, program) for T in lengths]
        return exponent(lengths, times)

    def final_exponent(self, variant: str, implementation: str = OURS) -> float:
        """Of forward with backward between the two longest lengths, where a law shows best."""
        lengths = self.lengths(variant, implementation, "both")[-2:]
        return exponent(lengths, [self.median(variant, implementation, T, "both") for T in lengths])

    def peak_exponent(self, variant: str, implementation: str, program: str = "both") -> float:
        """Of peak bytes against T."""
        lengths = self.lengths(variant, implementation, program, "peaks")
        return exponent(lengths, [self.peaks[variant, implementation, T, program] for T in lengths])

    def speed_up(self, variant: str, peer: str, T: int, program: str) -> float:
        """How many times as fast ours is; KeyError where one of both was not measured."""
        theirs, ours = (self.seconds[variant, name, T, program] for name in (peer, OURS))
        return ratio(theirs, ours).median


def _within(value: float, bounds: tuple[float, float]) -> bool:
    return bounds[0] <= value <= bounds[1]


def _additive(measured: Measured) -> tuple[bool, str]:
    T = max(measured.lengths("additive", OURS, "both"))
    times, bytes_ = (
        [of("causal", OURS, T, "both"), of("additive", OURS, T, "both")]
        for of in (measured.median, lambda *key: measured.peaks[key])
    )
    slower, larger = times[1] / times[0], bytes_[1] / bytes_[0]
    return slower > 1 and larger > 1, (
        f"T = {T:,}, forward and backward: additive scores take {slower:.1f} times as long as dot "
        f"products, and {larger:.1f} times the memory"
    )


def _heads(measured: Measured) -> tuple[bool | None, str]:
    T = max(measured.lengths("one_head", OURS, "both"))
    many, one = (measured.seconds[name, OURS, T, "both"] for name in ("causal", "one_head"))
    times = ratio(many, one)
    equal = {1 / EQUAL <= quartile <= EQUAL for quartile in (times.low, times.high)}
    return equal.pop() if len(equal) == 1 else None, (
        f"T = {T:,}, forward and backward: 4 heads of 64 take {times.text()} times as long as "
        f"one of 256 (as much: at most {EQUAL:g} ×, by both quartiles); the parameters are 4d² "
        "either way"
    )


def _square(measured: Measured) -> tuple[bool, str]:
    last, said = [], []
    for name, called in ((DENSE, "dense"), (OURS, "tiled")):
        *_, start, end = lengths = measured.lengths("causal", name, "both")
        last.append(measured.final_exponent("causal", name))
        said.append(
            f"{called} T^{last[-1]:.2f} from T = {start:,} to {end:,} (from {lengths[0]:,} on "
            f"T^{measured.exponent('causal', name):.2f})"
        )
    return all(_within(power, SQUARE) for power in last), f"time ~ {', '.join(said)}"


def _stored(measured: Measured) -> tuple[bool, str]:
    power = measured.peak_exponent("causal", DENSE, "forward")
    T = max(measured.lengths("causal", DENSE, "forward", "peaks"))
    scores = 4 * 4 * T**2
    peak = measured.peaks["causal", DENSE, T, "forward"]
    return _within(power, SQUARE) and peak >= scores, (
        f"the dense program takes {peak / 2**20:,.0f} MiB at T = {T:,}, of which one array of "
        f"4 × T × T scores is {scores / 2**20:,.0f}; bytes ~ T^{power:.2f}; at 32,768 that is "
        f"{32_768**2 / 1e9:.2f}·10⁹ scores a head"
    )


def _flash(measured: Measured) -> tuple[bool, str]:
    power, time = measured.peak_exponent("causal", OURS), measured.final_exponent("causal")
    T = max(measured.lengths("causal", DENSE, "both"))
    *_, start, end = measured.lengths("causal", OURS, "both")
    faster = measured.speed_up("causal", DENSE, T, "both")
    right = _within(power, LINE) and _within(time, SQUARE) and faster >= SEVERAL
    return right, (
        f"tiles take {measured.peaks['causal', OURS, T, 'both'] / 2**20:,.0f} MiB at T = {T:,} "
        f"against {measured.peaks['causal', DENSE, T, 'both'] / 2**20:,.0f} dense; bytes ~ "
        f"T^{power:.2f}, time ~ T^{time:.2f} from T = {start:,} to {end:,}, at T = {T:,} "
        f"{faster:.1f} times as fast as dense"
    )


def _window(measured: Measured) -> tuple[bool, str]:
    powers = {name: measured.exponent(name) for name in ("window", "longformer")}
    return all(_within(power, LINE) for power in powers.values()), (
        f"window of {WINDOW} " + ", ".join(f"{n}: time ~ T^{p:.2f}" for n, p in powers.items())
    )


def _linear(measured: Measured) -> tuple[bool, str]:
    power, peak = measured.exponent("linear"), measured.peak_exponent("linear", OURS)
    return _within(power, LINE) and _within(peak, LINE), (
        f"time ~ T^{power:.2f}, bytes ~ T^{peak:.2f}; token by token: benchmarks.decode"
    )


ROWS: dict[str, tuple[str, Callable[[Measured], tuple[bool, str]]]] = {
    "6": ("dot-product attention beats additive attention in speed and memory", _additive),
    "13": ("h heads of width d/h cost as much as one head of width d", _heads),
    "21": ("attention's time grows with T²", _square),
    "22": ("a plain implementation stores T × T scores", _stored),
    "26": ("tiles: memory linear in T, several times faster, T² arithmetic", _flash),
    "27": ("a window costs T · w, and a few global tokens little more", _window),
    "28": ("linear attention costs T", _linear),
}


def verdicts(measured: Measured) -> list[Verdict]:
    """Of every row that attention alone can decide."""
    return [_verdict(row, claim, decide, measured) for row, (claim, decide) in ROWS.items()]


def _verdict(row: str, claim: str, decide: Callable, measured: Measured) -> Verdict:
    try:
        return Verdict(row, claim, *decide(measured))
    except (KeyError, ValueError):
        why = "its variants were not measured, or at fewer than two lengths"
        return Verdict(row, claim, None, why)


# (variant, peer) → how many times as fast ours is to be, forward and with the gradients.
GOALS = {
    ("causal", SDPA): (1.2, 1.2),
    ("window", SDPA): (8.0, 7.0),
    ("causal", JAX_NN): (6.0, 7.0),
    ("window", JAX_NN): (30.0, 30.0),
}
GOAL_LENGTH = 8192


def goals(measured: Measured) -> list[Goal]:
    """The speed-ups that are wanted at 8,192 tokens."""
    result = []
    for (variant, peer), wanted in GOALS.items():
        for program, least in zip(("forward", "both"), wanted, strict=True):
            try:
                reached = measured.speed_up(variant, peer, GOAL_LENGTH, program)
            except KeyError:
                reached = None
            name = f"{variant} {GOAL_LENGTH:,}, {program}, beside {peer}"
            result.append(Goal(name, least, reached))
    return result


def bounds(measured: Measured) -> list[str]:
    """How much faster than each peer no softmax made of XLA's products of these tiles can be."""
    result = []
    for variant, peer in GOALS:
        for program in PROGRAMS:
            keys = ((variant, name, GOAL_LENGTH, program) for name in (peer, PRODUCTS))
            try:
                theirs, least = (measured.seconds[key] for key in keys)
            except KeyError:
                continue
            result.append(
                f"bound {variant} {GOAL_LENGTH:,}, {program}, beside {peer}: the products of the "
                f"tiles alone are {ratio(theirs, least).median:.2f} × as fast"
            )
    return result


NAMES = OURS, DENSE, JAX_NN, SDPA, FLEX
