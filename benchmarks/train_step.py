"""Training steps of configs/gqa.py beside the same model in PyTorch, in turns.

    python -m benchmarks.train_step --torch_python=PATH   ours and PyTorch, eager and compiled
    python -m benchmarks.train_step --short               fewer repetitions

Ours is the compiled interval of the training loop: batches are drawn and the optimizer updates
inside it. PyTorch gets its batches ready made. Both start from the same parameters and see the
same batches, and their first losses must agree. What the loop does beside stepping, and how long
a start takes, are measured on train.py's own loop.
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
from benchmarks.timing import Estimate, in_turns, ratio, seconds_of
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
CHECKED_STEPS = 5
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
      losses: of the first steps.
    """

    def __init__(self, run: Settings, steps: int):
        self._interval, self._steps = make_interval(run), steps
        self._state = init_state(run)
        self.losses = np.asarray(self._advance(CHECKED_STEPS)["loss"])[:CHECKED_STEPS]

    def _advance(self, steps: int) -> dict:
        self._state, history = self._interval(self._state, int(self._state.step) + steps)
        return history

    def seconds(self) -> float:
        """Of one step, over as many as the loop takes between two lines of its log."""
        return seconds_of(self._advance, self._steps) / self._steps


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


def steps_beside_torch(torch: peers.Torch | None, repeats: int, batches: int):
    """Samples of seconds a step by (name, dtype), and errors of those that have none."""
    runs = {dtype: settings(options_of(model__dtype=dtype)) for dtype in DTYPES}
    steps = runs["float32"].train.log_every
    ours = {dtype: Ours(run, steps) for dtype, run in runs.items()}
    programs: dict[Key, Callable[[], float]] = {
        (OURS, dtype): mine.seconds for dtype, mine in ours.items()
    }
    errors: dict[Key, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        request = for_torch(runs["float32"], Path(folder) / "model.npz", batches)
        for name in (EAGER, COMPILED) if torch else ():
            for dtype in DTYPES:
                key = f"{name} {dtype}"
                try:
                    losses = torch.ask(
                        prepare=key, compile=name == COMPILED, dtype=dtype, **request
                    )["losses"]
                except peers.PeerError as error:
                    errors[name, dtype] = str(error)
                    continue
                check_losses(
                    key, ours[dtype].losses, losses, rtol=1e-4 if dtype == "float32" else 1e-2
                )
                programs[name, dtype] = lambda key=key: torch.seconds(key, "step", steps)
        return in_turns(programs, repeats), errors


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
    """The seconds of each call of these methods within. A profiler would count other threads."""
    seconds = []

    def timed(method):
        @functools.wraps(method)
        def call(*args, **kwargs):
            begun = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begun)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in methods:
            stack.enter_context(mock.patch.object(owner, name, timed(getattr(owner, name))))
        yield seconds


def start_seconds() -> tuple[float, float]:
    """From the start of train.py to the first step, without and with a compilation cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        return tuple(_first_step(environment, f"{folder}/{name}") for name in ("cold", "warm"))


def _first_step(environment: dict[str, str], workdir: str) -> float:
    command = [sys.executable, "train.py", "--config=configs/gqa.py", f"--workdir={workdir}"]
    command += ["--config.train.steps=1", "--config.train.log_every=1"]
    begun = time.perf_counter()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("step 1/1"):
                seconds = time.perf_counter() - begun
                process.communicate()
                return seconds
    raise RuntimeError(f"{' '.join(command)} ended without a first step")


def step_table(samples: dict[Key, list[float]], errors: dict[Key, str], tokens: int) -> str:
    """A row for each implementation: milliseconds, tokens per second, ours over it."""
    rows = []
    for name in (OURS, EAGER, COMPILED):
        for dtype in DTYPES:
            if (name, dtype) not in samples:
                rows.append((f"{name}, {dtype}", errors.get((name, dtype), "not measured"), "", ""))
                continue
            mine, theirs = samples[OURS, dtype], samples[name, dtype]
            step = Estimate.of([1e3 * seconds for seconds in theirs])
            speed = f"{tokens / step.median * 1e3:,.0f}"
            faster = "" if name == OURS else ratio(theirs, mine).text()
            rows.append((f"{name}, {dtype}", step.text("{:.1f}".format), speed, faster))
    header = ("step", "ms (quartiles)", "tokens/s", "ours is faster by")
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
    samples, errors = steps_beside_torch(torch, arguments.repeats, batches=20)
    bfloat16 = ratio(samples[OURS, "float32"], samples[OURS, "bfloat16"])
    step_seconds = Estimate.of(samples[OURS, "float32"]).median
    lines = [str(goal) for goal in goals(samples)]
    lines.append(f"bfloat16 activations make our step {bfloat16.text()} times as fast")
    lines.append(beside_text(beside_steps(250 if arguments.short else 500), step_seconds))
    lines.append(start_text(*start_seconds()))
    sections = [
        "# Training step of configs/gqa.py",
        report.machine(str(torch or peers.WITHOUT)),
        step_table(samples, errors, tokens),
        report.items(lines),
    ]
    rows = [
        {"implementation": name, "dtype": dtype, "turn": turn, "seconds": seconds}
        for (name, dtype), taken in samples.items()
        for turn, seconds in enumerate(taken)
    ]
    report.write(arguments.out, "train_step", sections, rows)


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
