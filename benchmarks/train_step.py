"""Training steps of configs/gqa.py beside the same model in PyTorch, in turns.

    python -m benchmarks.train_step --torch_python=PATH   ours and PyTorch, eager and compiled
    python -m benchmarks.train_step --short               fewer turns, PyTorch in float32 only

Ours is the compiled interval of the training loop: batches are drawn and the optimizer updates
inside it. PyTorch gets the first 20 of the same batches ready made, and repeats them. Both start
from the same parameters, and their losses of the first 5 steps must agree. Peak bytes are beside
parameters and batches: ours as the compiler has laid them out, PyTorch's as its process grows in a
step. What the loop does beside stepping, and how long a start takes, are measured on train.py's
own loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from tensorboardX import SummaryWriter

from benchmarks import options, peers, report
from benchmarks.timing import Estimate, calls_for, in_turns, peak_bytes, ratio, seconds_of
from configs import gqa
from tasks import train_key
from training import loop, optimizer
from training.checkpoint import Checkpoints
from training.progress import Reporter
from training.resolve import resolve
from training.run_folder import RunFolder
from training.settings import Settings, settings
from training.step import init_state, make_interval

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "bfloat16")
OURS, EAGER, COMPILED = "ours", "PyTorch eager", "PyTorch compiled"
CHECKED_STEPS, BATCHES = 5, 20
# What the loop takes between two lines of its log, about; a slower peer takes fewer steps a turn.
TURN_SECONDS = 2.0
# What of the user's own would keep programs elsewhere, or others of them.
CACHE_SETTINGS = "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
GOALS = {COMPILED: 1.1, EAGER: 1.3}
BESIDE, COLD_START = 0.03, 12.0

Key = tuple[str, str]


def options_of(**changes) -> dict:
    """configs/gqa.py with changes, ``__`` for a dot."""
    config = gqa.get_config()
    config.update_from_flattened_dict({n.replace("__", "."): v for n, v in changes.items()})
    return resolve(config.to_dict(), {})


class Ours:
    """The training loop's own program, which goes on from wherever it is.

    Attributes:
      peak: bytes.
      losses: of the first steps.
    """

    def __init__(self, run: Settings):
        interval, self._state = make_interval(run), init_state(run)
        compiled = interval.func.lower(self._state, 0, **interval.keywords).compile()
        self._interval = functools.partial(compiled, **interval.keywords)
        self.peak = peak_bytes(compiled)
        self.losses = np.asarray(self._advance(CHECKED_STEPS)["loss"])[:CHECKED_STEPS]
        wanted = calls_for(self._step_seconds(CHECKED_STEPS), TURN_SECONDS)
        self._steps = min(wanted, run.train.log_every)

    def _advance(self, steps: int) -> dict:
        self._state, history = self._interval(self._state, int(self._state.step) + steps)
        return history

    def _step_seconds(self, steps: int) -> float:
        return seconds_of(self._advance, steps) / steps

    def seconds(self) -> float:
        """Of one step, in a turn."""
        return self._step_seconds(self._steps)


@dataclasses.dataclass(frozen=True)
class Measured:
    """By (implementation, dtype).

    Attributes:
      seconds: of a step, a turn each.
      peaks: bytes.
      errors: why there are no seconds.
    """

    seconds: dict[Key, list[float]]
    peaks: dict[Key, int]
    errors: dict[Key, str]


def for_torch(run: Settings, file: Path, batches: int) -> dict:
    """Writes parameters and batches to a file; the request that all PyTorch variants share."""
    params = init_state(run).params
    drawn = jax.jit(
        jax.vmap(lambda i: run.task.sample(train_key(run.train_seed, i), run.train.batch_size))
    )(jnp.arange(batches))
    arrays = {f"params/{name}": np.asarray(value) for name, value in params.items()}
    np.savez(
        file, tokens=drawn.tokens_BT, targets=drawn.targets_BT, weights=drawn.weights_BT, **arrays
    )
    rate = optimizer.learning_rate(run.optimizer, run.train.steps)
    return {
        "kind": "train_step",
        "file": str(file),
        "num_layers": run.model.num_layers,
        "rope_base": run.model.rope_base,
        "check": CHECKED_STEPS,
        "learning_rates": [float(rate(step)) for step in range(run.train.steps)],
        "betas": [run.optimizer.beta1, run.optimizer.beta2],
        "weight_decay": run.optimizer.weight_decay,
        "clip_norm": run.optimizer.clip_norm,
    }


def steps_beside_torch(
    torch: peers.Torch | None, repeats: int, left_out: dict[Key, str]
) -> Measured:
    """Everything but what is left out of PyTorch, for the reasons given."""
    runs = {dtype: settings(options_of(model__dtype=dtype)) for dtype in DTYPES}
    ours = {dtype: Ours(run) for dtype, run in runs.items()}
    programs: dict[Key, Callable[[], float]] = {
        (OURS, dtype): mine.seconds for dtype, mine in ours.items()
    }
    peaks = {(OURS, dtype): mine.peak for dtype, mine in ours.items()}
    asked = [(name, dtype) for name in (EAGER, COMPILED) for dtype in DTYPES]
    errors = dict.fromkeys(asked, peers.WITHOUT) if torch is None else dict(left_out)
    with tempfile.TemporaryDirectory() as folder:
        request = for_torch(runs["float32"], Path(folder) / "model.npz", BATCHES)
        for key in [key for key in asked if key not in errors]:
            (name, dtype), label = key, " ".join(key)
            rtol = 1e-4 if dtype == "float32" else 1e-2
            try:
                said = torch.ask(prepare=label, compile=name == COMPILED, dtype=dtype, **request)
                check_losses(label, ours[dtype].losses, said["losses"], rtol)
                grown = torch.ask(peak=label, what="step")["bytes"]
                steps = calls_for(torch.seconds(label, "step"), TURN_SECONDS)
            except peers.PeerError as error:
                errors[key] = str(error)
                continue
            if grown is not None:
                peaks[key] = grown
            programs[key] = functools.partial(torch.seconds, label, "step", steps)
        return Measured(in_turns(programs, repeats, errors), peaks, errors)


def check_losses(name: str, ours, theirs, rtol: float) -> None:
    """Raises PeerError where a peer that should be the same model is another."""
    if not np.allclose(ours, theirs, rtol=rtol):
        raise peers.PeerError(
            f"{name} is not the same model: its first losses are {list(theirs)}, ours {list(ours)}"
        )


@dataclasses.dataclass(frozen=True)
class Beside:
    """Seconds that a run of the loop spent beside its steps.

    Attributes:
      steps: of the run.
      data, lines, checkpoints: on drawing batches, writing lines, saving checkpoints.
    """

    steps: int
    data: float
    lines: float
    checkpoints: float

    def share(self, step_seconds: float) -> float:
        """Of the time that the steps take, which includes drawing the batches."""
        return (self.data + self.lines + self.checkpoints) / (self.steps * step_seconds)


def beside_steps(steps: int) -> Beside:
    """Runs the training loop in a folder of its own, and times the calls of it that are beside."""
    config = options_of(train__steps=steps)
    run = settings(config)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        _timed((RunFolder, "append_metrics"), (SummaryWriter, "add_scalar"),
               (SummaryWriter, "flush"), (Reporter, "update")) as lines,
        _timed((Checkpoints, "save"), (Checkpoints, "wait")) as checkpoints,
    ):  # fmt: skip
        loop.train(config, run, RunFolder(folder))
    sample = jax.jit(lambda i: run.task.sample(train_key(run.train_seed, i), run.train.batch_size))
    sample(0)
    return Beside(
        steps=steps,
        data=steps * seconds_of(sample, 1, calls=20),
        lines=sum(lines),
        checkpoints=sum(checkpoints),
    )


@contextlib.contextmanager
def _timed(*methods: tuple[type, str]):
    """The seconds of each call of these methods within; one inside another is part of that one.

    A profiler would count other threads.
    """
    seconds, inside = [], False

    def timed(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            nonlocal inside
            if inside:
                return method(*args, **kwargs)
            begun, inside = time.perf_counter(), True
            try:
                return method(*args, **kwargs)
            finally:
                inside = False
                seconds.append(time.perf_counter() - begun)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in methods:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield seconds


class NoFirstStep(RuntimeError):
    """train.py ended before its first step; says why in one line."""


def start_seconds() -> tuple[float, float]:
    """From the start of train.py to the first step, without and with a compilation cache.

    Raises:
      NoFirstStep: it did not get there.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
        for setting in CACHE_SETTINGS:
            environment.pop(setting, None)
        return tuple(_first_step(environment, f"{folder}/{name}") for name in ("cold", "warm"))


def _first_step(environment: dict[str, str], workdir: str) -> float:
    command = [sys.executable, "train.py", "--config=configs/gqa.py", f"--workdir={workdir}"]
    command += ["--config.train.steps=1", "--config.train.log_every=1"]
    begun = time.perf_counter()
    said = "nothing"
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as process:  # fmt: skip
        for line in process.stdout:
            said = line.strip() or said
            if line.startswith("step 1/1"):
                seconds = time.perf_counter() - begun
                process.communicate()
                return seconds
    raise NoFirstStep(
        f"{' '.join(command[1:3])} ended with exit code {process.returncode} before its first "
        f"step, last saying {said!r}"
    )


def step_table(measured: Measured, tokens: int) -> str:
    """A row for each implementation: milliseconds, tokens per second, ours over it, bytes."""
    rows = []
    for name in (OURS, EAGER, COMPILED):
        for dtype in DTYPES:
            key, label = (name, dtype), f"{name}, {dtype}"
            if key not in measured.seconds:
                rows.append((label, "not measured", "", "", ""))
                continue
            mine, theirs = measured.seconds[OURS, dtype], measured.seconds[key]
            step = Estimate.of([1e3 * seconds for seconds in theirs])
            speed = f"{tokens / step.median * 1e3:,.0f}"
            faster = "" if name == OURS else ratio(theirs, mine).text()
            peak = f"{measured.peaks[key] / 2**20:,.1f}" if key in measured.peaks else ""
            rows.append((label, step.text("{:.1f}".format), speed, faster, peak))
    header = ("step", "ms (quartiles)", "tokens/s", "ours is faster by", "peak MiB")
    return report.markdown(header, rows)


def goals(samples: dict[Key, list[float]]) -> list[report.Goal]:
    """In float32, ours beside each form of PyTorch."""
    mine = samples[OURS, "float32"]
    return [
        report.Goal(
            f"a training step beside {name}",
            wanted,
            ratio(samples[name, "float32"], mine).median if (name, "float32") in samples else None,
        )
        for name, wanted in GOALS.items()
    ]


def beside_text(beside: Beside, step_seconds: float) -> str:
    """What the loop spends beside its steps, part by part, and whether it is little enough."""
    total, share = beside.steps * step_seconds, beside.share(step_seconds)
    parts = ", ".join(
        f"{name} {100 * seconds / total:.2f} %"
        for name, seconds in (
            ("drawing batches", beside.data),
            ("lines of the log", beside.lines),
            ("checkpoints", beside.checkpoints),
        )
    )
    word = "reached" if share < BESIDE else "NOT reached"
    return (
        f"beside the steps, of {beside.steps} steps: {parts}; together {100 * share:.2f} % "
        f"(goal: under {100 * BESIDE:.0f} %, {word})"
    )


def start_text(cold: float, warm: float) -> str:
    """How long a start takes, and whether that is short enough."""
    word = "reached" if cold < COLD_START else "NOT reached"
    return (
        f"start to first step: {cold:.1f} s with an empty compilation cache (goal: under "
        f"{COLD_START:.0f} s, {word}), {warm:.1f} s with a warm one"
    )


def main(arguments, torch: peers.Torch | None) -> None:
    """Measures, prints and writes the report."""
    run = settings(options_of())
    tokens = run.train.batch_size * run.task.length
    # A step of PyTorch in bfloat16 takes many times as long as any other on some CPUs.
    left_out = {(name, "bfloat16"): "not measured in the short form" for name in (EAGER, COMPILED)}
    measured = steps_beside_torch(torch, arguments.repeats, left_out if arguments.short else {})
    samples, errors = measured.seconds, {", ".join(k): why for k, why in measured.errors.items()}
    bfloat16 = ratio(samples[OURS, "float32"], samples[OURS, "bfloat16"])
    step_seconds = Estimate.of(samples[OURS, "float32"]).median
    wanted = goals(samples)
    lines = [*wanted, f"bfloat16 activations make our step {bfloat16.text()} times as fast"]
    lines.append(beside_text(beside_steps(250 if arguments.short else 500), step_seconds))
    try:
        lines.append(start_text(*start_seconds()))
    except NoFirstStep as error:
        errors["start to first step"] = str(error)
    sections = [
        "# Training step of configs/gqa.py",
        report.machine(str(torch or peers.WITHOUT)),
        step_table(measured, tokens),
        report.items(lines),
        *report.missing(errors),
    ]
    rows = [
        {"implementation": name, "dtype": dtype, "turn": turn, "seconds": seconds}
        for (name, dtype), taken in samples.items()
        for turn, seconds in enumerate(taken)
    ]
    report.write(arguments.out, "train_step", sections, rows, wanted)
    milliseconds = {
        ", ".join(key): Estimate.of([1e3 * seconds for seconds in taken])
        for key, taken in samples.items()
    }
    report.bars(milliseconds, arguments.out / "train_step.png", "milliseconds a step")


def parse(argv: list[str] | None = None):
    """The command line."""
    parser = options.parser(__doc__)
    parser.add_argument(
        "--repeats", type=options.whole_number(1), help="rounds; default 9, short 3"
    )
    arguments = parser.parse_args(argv)
    arguments.repeats = arguments.repeats or (3 if arguments.short else 9)
    return arguments


if __name__ == "__main__":
    sys.exit(options.run(main, parse()))
