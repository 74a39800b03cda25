"""The table of benchmarks/gpu.sh: each time is printed and saved as soon as it is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.gpu_cases import CASES, CUDNN, FLEX, OURS, SDPA, Case

NOT_MEASURED = "not yet measured on a card"


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one call, or why there are none."""

    forward: float | None = None
    both: float | None = None
    error: str = ""


def row(case: Case, times: dict[str, Times]) -> str:
    """A line of the table: milliseconds forward / with backward, ours also in TFLOP/s; targets."""

    def cell(name: str) -> str:
        taken = times.get(name, Times())
        if taken.forward is None:
            return "—" if taken.error else NOT_MEASURED
        return f"{taken.forward * 1e3:.2f} / {taken.both * 1e3:.2f}"

    mine, peer = times.get(OURS, Times()), times.get(case.target.peer, Times())
    rate, verdict = NOT_MEASURED, NOT_MEASURED
    if mine.forward is not None:
        rate = f"{case.teraflops(mine.forward, 2):.0f} / {case.teraflops(mine.both, 7):.0f}"
    if mine.forward is not None and peer.forward is not None:
        ratios = peer.forward / mine.forward, peer.both / mine.both
        wanted = case.target.forward, case.target.both
        met = all(r >= w for r, w in zip(ratios, wanted, strict=True))
        verdict = f"{ratios[0]:.2f} / {ratios[1]:.2f} {'✓' if met else '✗'}"
    target = f"≥ {case.target.forward} / {case.target.both} × {case.target.peer}"
    cells = case.name, *map(cell, (OURS, CUDNN, SDPA, FLEX)), rate, target, verdict
    return "| " + " | ".join(cells) + " |"


def table(results: dict[str, dict[str, Times]]) -> str:
    heads = (
        "mask, bfloat16, forward / forward + backward",
        *(f"{name}, ms" for name in (OURS, CUDNN, SDPA, FLEX)),
        "ours, TFLOP/s",
        "target",
        "speed-up over the target's peer",
    )
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + [row(case, results.get(case.name, {})) for case in CASES])


class Report:
    """The times that are known, in a file that is written anew with each.

    Attributes:
      times: by name of the case, then by peer.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, path: Path, device: str):
        self._path, self._device = path, device
        self.times: dict[str, dict[str, Times]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()  # an earlier table stays until there is a new time

    def add(self, case: Case, times: dict[str, Times]) -> None:
        """Times of one case by peer, or why there are none."""
        self.times.setdefault(case.name, {}).update(times)
        for peer, taken in times.items():
            if taken.error:
                print(f"{case.name}, {peer}: {taken.error}")
        print(row(case, self.times[case.name]), flush=True)
        try:
            self._path.write_text(f"{self._device}\n\n{table(self.times)}\n")
        except OSError as error:  # the other times are still worth knowing
            print(f"{self._path} is not saved: {error.strerror}")
