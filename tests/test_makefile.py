"""The set-up scripts and the Makefile, run on fake machines: a PATH that holds only what a test
puts there. Nothing is downloaded and nothing is installed.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SH = shutil.which("sh")
MAKE = shutil.which("make")

# Answers `-c` as the real interpreter does, after the line HACK; makes environments whose python
# is a copy of itself, and writes down what pip is asked to do.
FAKE_PYTHON = """#!{sh}
case "$1 $2" in
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") {pip} ;;
"-c "*) exec "{python}" -c 'import sys; {hack}; exec(sys.argv[1])' "$2" ;;
esac
"""
PIP = 'if [ "$3" = install ]; then echo "$0 $*" >>"$LOG"; fi'
OLD = "sys.version_info = (3, 11)"
NO_ENSUREPIP = 'sys.modules["ensurepip"] = None'  # stands in a shell's single quotes
SHIM_THAT_FAILS = f"#!{SH}\necho 'command not found' >&2\nexit 127\n"
FAKE_UV = f"""#!{SH}
[ "$1" = --version ] || echo "uv $*" >>"$LOG"
case "$1" in venv)
    for venv in "$@"; do :; done
    mkdir -p "$venv/bin" && cp "$PYTHON_OF_UV" "$venv/bin/python" ;;
esac
"""


def fake_python(hack: str = "pass", pip: str = PIP) -> str:
    return FAKE_PYTHON.format(sh=SH, python=sys.executable, hack=hack, pip=pip)


class Machine:
    """A copy of the set-up files and a PATH of its own."""

    def __init__(self, folder: Path):
        self.bin, self.root, self.log = folder / "bin", folder / "check out", folder / "log"
        self.bin.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        self.log.touch()
        for tool in ("cat", "cksum", "cp", "dirname", "echo", "mkdir", "rm", "sh", "touch"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        for path in [*ROOT.glob("scripts/*.sh"), *ROOT.glob("*.txt"), ROOT / "Makefile"]:
            shutil.copy(path, self.root / path.relative_to(ROOT))

    def add(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess:
        environment = {"PATH": str(self.bin), "LOG": str(self.log), **variables}
        return subprocess.run(
            command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=60
        )

    def find(self) -> subprocess.CompletedProcess:
        return self.run(SH, "scripts/find_python.sh")

    def setup(self, requirements: str = "requirements.txt", **variables: str) -> list[str]:
        """Sets up and returns what pip and uv were asked to do meanwhile."""
        self.log.write_text("")
        done = self.run(SH, "scripts/setup.sh", requirements, **variables)
        assert done.returncode == 0, done.stderr
        return self.log.read_text().splitlines()

    def make(self, *arguments: str, **variables: str) -> str:
        done = self.run(MAKE, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout


def pip_line(requirements: str, installer: str = ".venv/bin/python -m pip install") -> str:
    return f"{installer} --quiet --requirement {requirements} --constraint constraints.txt"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize("first", range(4))
def test_python_is_searched_newest_first(machine: Machine, first: int):
    names = ["python3.14", "python3.13", "python3.12", "python3"][first:]
    for name in names:
        machine.add(name, fake_python())
    machine.add("uv", FAKE_UV)
    assert machine.find().stdout == f"{names[0]} -m venv\n"


@pytest.mark.parametrize(
    "unusable",
    [SHIM_THAT_FAILS, fake_python(OLD), fake_python(NO_ENSUREPIP)],
    ids=["shim that fails", "too old", "cannot make environments"],
)
def test_python_that_does_not_serve_is_passed_over(machine: Machine, unusable: str):
    machine.add("python3.13", unusable)
    machine.add("python3", fake_python())
    assert machine.find().stdout == "python3 -m venv\n"


def test_uv_is_the_second_choice(machine: Machine):
    machine.add("python3", fake_python(OLD))
    machine.add("uv", FAKE_UV)
    found = machine.find().stdout.split()
    assert found[:2] == ["uv", "venv"]
    assert found[-2:] == ["--python", "3.12"]


@pytest.mark.parametrize("present", [{}, {"python3": fake_python(OLD), "uv": SHIM_THAT_FAILS}])
def test_one_sentence_says_what_to_install(machine: Machine, present: dict[str, str]):
    for name, text in present.items():
        machine.add(name, text)
    done = machine.run(SH, "scripts/setup.sh", "requirements.txt")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "install Python 3.12" in done.stderr
    assert not (machine.root / ".venv").exists()


def test_second_setup_installs_nothing(machine: Machine):
    machine.add("python3", fake_python())
    assert machine.setup() == [pip_line("requirements.txt")]
    for path in machine.root.glob("*.txt"):
        path.touch()
    assert machine.setup() == []
    assert machine.setup("requirements-dev.txt") == [pip_line("requirements-dev.txt")]
    assert machine.setup("requirements-dev.txt") == []
    assert machine.setup() == []


@pytest.mark.parametrize("changed", ["requirements.txt", "constraints.txt"])
def test_changed_requirements_are_installed(machine: Machine, changed: str):
    machine.add("python3", fake_python())
    machine.setup()
    machine.setup("requirements-dev.txt")
    with (machine.root / changed).open("a") as file:
        file.write("# another line\n")
    assert machine.setup() == [pip_line("requirements.txt")]
    assert machine.setup("requirements-dev.txt") == [pip_line("requirements-dev.txt")]


def test_development_requirements_leave_training_alone(machine: Machine):
    machine.add("python3", fake_python())
    machine.setup()
    machine.setup("requirements-dev.txt")
    (machine.root / "requirements-dev.txt").write_text("-r requirements.txt\n")
    assert machine.setup() == []
    assert machine.setup("requirements-dev.txt") == [pip_line("requirements-dev.txt")]


def test_interrupted_installation_is_made_anew(machine: Machine):
    machine.add("python3", fake_python(pip='case "$3" in install) kill -9 $PPID ;; esac'))
    assert machine.run(SH, "scripts/setup.sh", "requirements.txt").returncode != 0
    half_written = machine.root / ".venv" / "lib"
    half_written.touch()
    machine.add("python3", fake_python())
    assert machine.setup() == [pip_line("requirements.txt")]
    assert not half_written.exists()
    assert machine.setup() == []


def test_failed_installation_fails_and_is_tried_again(machine: Machine):
    machine.add("python3", fake_python(pip='case "$3" in install) exit 3 ;; esac'))
    for _ in range(2):
        assert machine.run(SH, "scripts/setup.sh", "requirements.txt").returncode == 3
    machine.add("python3", fake_python())
    assert machine.setup() == [pip_line("requirements.txt")]


def test_environment_without_its_python_is_made_anew(machine: Machine):
    machine.add("python3", fake_python())
    machine.setup()
    (machine.root / ".venv" / "bin" / "python").unlink()
    assert machine.setup() == [pip_line("requirements.txt")]


def test_environment_made_by_hand_is_kept(machine: Machine):
    machine.add("python3", fake_python())
    machine.run(SH, "-c", "python3 -m venv .venv")
    mine = machine.root / ".venv" / "mine"
    mine.touch()
    assert machine.setup() == [pip_line("requirements.txt")]
    assert mine.exists()


def test_uv_makes_and_fills_the_environment(machine: Machine, tmp_path: Path):
    machine.add("uv", FAKE_UV)
    python = tmp_path / "python_of_uv"
    python.write_text(fake_python(pip="exit 1"))
    python.chmod(0o755)
    made, filled = machine.setup(PYTHON_OF_UV=str(python))
    assert made.startswith("uv venv ")
    assert made.endswith(" .venv")
    assert filled == pip_line("requirements.txt", "uv pip install --python .venv/bin/python")
    assert machine.setup() == []


def test_make_alone_prints_help(machine: Machine):
    printed = machine.make()
    targets = (
        "setup",
        "train",
        "eval",
        "bench",
        "test",
        "test-broad",
        "test-slow",
        "test-kernels",
        "test-aot",
        "lint",
    )
    for target in targets:
        assert f"make {target} " in printed


@pytest.mark.parametrize(
    ("arguments", "last_command"),
    [
        (["train"], "train.py --config=configs/gqa.py"),
        (
            ["train", "CONFIG=configs/mqa.py", "ARGS=--config.train.steps=300 --config.seed=1"],
            "train.py --config=configs/mqa.py --config.train.steps=300 --config.seed=1",
        ),
        (["train", "WORKDIR=runs/a"], "train.py --config=configs/gqa.py --workdir=runs/a"),
        (["eval"], "eval.py --workdir=runs/gqa"),
        (["eval", "CONFIG=configs/mqa.py"], "eval.py --workdir=runs/mqa"),
        (["eval", "WORKDIR=runs/a"], "eval.py --workdir=runs/a"),
        (["test", "ARGS=-k masks"], "-m pytest -n 2 --dist loadfile -k masks"),
        (["test-broad"], '-m pytest -n 2 --dist loadfile -m "broad and not interpreted"'),
        (["test-slow"], '-m pytest -n 2 --dist loadfile -m "slow and not interpreted"'),
        (["test-kernels"], "-m pytest -n 2 --dist worksteal -m interpreted"),
        (["lint"], "-m ruff format --check ."),
    ],
)
def test_make_passes_its_variables_on(machine: Machine, arguments: list[str], last_command: str):
    # Variables of the environment are no part of the command.
    printed = machine.make("--dry-run", *arguments, CONFIG="other.py", WORKDIR="w", ARGS="-x")
    last_line = printed.splitlines()[-1]
    assert " ".join(last_line.split()) == f".venv/bin/python {last_command}"


@pytest.mark.parametrize(
    ("arguments", "option"), [([], ""), (["TORCH_PYTHON=/t/python"], "--torch_python=/t/python")]
)
def test_make_bench_runs_the_short_forms(machine: Machine, arguments: list[str], option: str):
    printed = " ".join(machine.make("--dry-run", "bench", *arguments).split())
    assert "for benchmark in train_step attention decode; do" in printed
    assert (
        " ".join(f".venv/bin/python -m benchmarks.$benchmark --short {option}".split()) in printed
    )


@pytest.mark.parametrize("broken", ["", "aot_tpu", "aot_gpu"])
def test_make_test_aot_runs_both_parts_and_fails_at_the_end(machine: Machine, broken: str):
    script = f'#!{SH}\necho "$*" >>"$LOG"\n[ "$2" != benchmarks.{broken} ]\n'
    machine.add("python3", fake_python())
    machine.add("aot_python", script)
    done = machine.run(MAKE, "test-aot", f"AOT_PYTHON={machine.bin / 'aot_python'}")
    ran = machine.log.read_text().splitlines()
    assert ran[-2:] == ["-m benchmarks.aot_tpu", "-m benchmarks.aot_gpu"]
    assert (done.returncode != 0) == bool(broken)
    assert (f"test-aot FAILED: {broken}\n" in done.stderr) == bool(broken)


def test_make_sets_up_first(machine: Machine):
    machine.add("python3", fake_python())
    machine.make("train")
    machine.make("lint")
    installed = [pip_line("requirements.txt"), pip_line("requirements-dev.txt")]
    assert machine.log.read_text().splitlines() == installed


def test_continuous_integration_runs_what_it_should():
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make lint", "make test", "make test-aot"} <= set(commands)
    # A browser and a cluster are there before the tests that skip themselves without.
    (slow,) = (line for line in commands if line.startswith("make test-slow"))
    for name in ("induction_change", "sweep_ray", "sweep_page"):
        assert (ROOT / "tests" / f"test_{name}.py").exists() and f"tests/test_{name}.py" in slow
    for needed in ("scripts/browser.sh", "make setup-cluster"):
        assert commands.index(needed) < commands.index(slow)
    # Tiles of a window, scores of 10,000 and garbage, in the interpreters of both devices.
    (kernels,) = (line for line in commands if line.startswith("make test-kernels"))
    for name in ("window-96x160", "large_logits", "garbage_in_sight", "full_tiles"):
        assert name in kernels


def test_exact_versions_lie_within_the_ranges():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            pinned[canonicalize_name(name)] = version
    for file in ROOT.glob("requirements*.txt"):
        for line in file.read_text().splitlines():
            if not line or line.startswith(("#", "-r ")):
                continue
            wanted = Requirement(line)
            assert "<" in {part.operator for part in wanted.specifier}, f"{file.name}: {line}"
            version = pinned.get(canonicalize_name(wanted.name))
            if version is not None:
                assert wanted.specifier.contains(version), f"{file.name}: {line}, {version} tested"
