"""The command line that the benchmarks share."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from benchmarks import peers
from training.command import enable_compilation_cache


def parser(description: str) -> argparse.ArgumentParser:
    """With --torch_python, --out and --short."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--torch_python",
        metavar="PATH",
        help="an interpreter that has PyTorch, to be measured beside ours; none: not measured",
    )
    result.add_argument(
        "--out",
        metavar="FOLDER",
        default="runs/bench",
        type=Path,
        help="where the report goes, default %(default)s",
    )
    result.add_argument("--short", action="store_true", help="the short form of make bench")
    return result


def parse_lengths(
    description: str,
    names: Mapping[str, Collection[str]],
    short: dict,
    full: dict,
    argv: list[str] | None,
) -> argparse.Namespace:
    """The command line of a benchmark of variants at several lengths.

    Args:
      description: of the benchmark.
      names: option, such as ``variants`` → what it may name.
      short, full: what these options, ``lengths`` and ``repeats`` are where they are not given,
        with --short and without.
      argv: the arguments; None: those of the process.
    """
    result = parser(description)
    for option, known in names.items():
        kind = several(known, option.removesuffix("s"))
        help = f"of {', '.join(known)}; a comma between two"
        result.add_argument(f"--{option}", type=kind, metavar="NAMES", help=help)
    result.add_argument("--lengths", type=whole_numbers(1), metavar="TOKENS",
                        help="a comma between two")  # fmt: skip
    result.add_argument("--repeats", type=whole_number(1), help="rounds")
    arguments = result.parse_args(argv)
    for name, value in (short if arguments.short else full).items():
        setattr(arguments, name, getattr(arguments, name) or value)
    return arguments


def several(known, what: str) -> Callable[[str], list[str]]:
    """The type of an option that takes names, a comma between two of them."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"unknown {what} {name!r}; known are {', '.join(known)}"
                )
        return names

    return parse


def whole_numbers(least: int) -> Callable[[str], list[int]]:
    """The type of an option that takes whole numbers, a comma between two of them."""

    def parse(text: str) -> list[int]:
        try:
            numbers = [int(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"must be whole numbers such as 1024,2048, got {text!r}"
            ) from None
        if min(numbers) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {min(numbers)}")
        return sorted(set(numbers))

    return parse


def whole_number(least: int) -> Callable[[str], int]:
    """The type of an option that takes one whole number."""

    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least}, got {text!r}")
        return int(text)

    return parse


def run(main: Callable[[argparse.Namespace, peers.Torch | None], None], arguments) -> int:
    """Runs a benchmark beside PyTorch where it was asked for; the exit code."""
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
        # The report is written after minutes of measuring: that it can be is to be known now.
        tempfile.TemporaryFile(dir=arguments.out).close()
    except OSError as error:
        print(
            f"error: --out={arguments.out}: no report can be written there ({error.strerror}); "
            "name a folder of yours",
            file=sys.stderr,
        )
        return 2
    enable_compilation_cache()
    try:
        with peers.torch_peer(arguments.torch_python) as torch:
            main(arguments, torch)
    except peers.PeerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
