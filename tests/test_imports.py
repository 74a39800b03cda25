"""Imports run one way; the sources are parsed, so that imports inside functions count too."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("attention", "models", "tasks", "training", "configs", "analysis", "sweeps")

# Each may import what stands before it, and what stands beside it.
ORDER = (
    ("attention.masks", "attention.rope", "attention.cache"),
    ("attention.reference", "attention.tiled", "attention.pallas", "attention.linear_ops"),
    ("attention.ops",),
    ("attention.multi_head", "attention.latent", "attention.linear", "attention.additive"),
    ("models",),
    ("training",),
    ("sweeps",),
    ("train", "eval", "sweep"),
)
# What may not be imported by what, whatever the order says.
CLOSED = {
    "attention": ("models", "tasks", "training", "configs", "analysis"),
    "models": ("tasks", "training", "configs", "analysis"),
    "tasks": ("attention", "models", "training", "configs", "analysis"),
    "configs": ("attention", "models", "tasks", "training", "analysis"),
    "training": ("configs", "analysis", "sweeps"),
    "analysis": ("sweeps", "train", "eval", "sweep"),
    "sweeps": ("configs", "train", "eval", "sweep"),
}
# The only packages from outside, beside the standard library. Text is cut into tokens by a library,
# once and outside of what is traced.
ONLY = {"tasks": {"jax", "numpy", "tokenizers"}, "configs": {"ml_collections"}}
# Studies are made of the values that the room of sweeps has for them.
STUDIES = "configs.sweeps"


def files():
    folders = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [*folders, *sorted(ROOT.glob("*.py"))]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in files()}


@functools.cache
def imported(module, types=True):
    """Names that a module imports: modules of the project as such, others as they are written."""
    path = MODULES[module]
    tree = ast.parse(path.read_text(), str(path))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only and not types:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                found.append(inner if inner in MODULES else base)
    return found


@functools.cache
def reaches(module):
    """All modules of the project that are loaded when this one is, except by its packages."""
    found, todo = set(), [module]
    while todo:
        for name in imported(todo.pop(), False):
            if name in MODULES and name not in found:
                found.add(name)
                todo.append(name)
    return found


def is_in(module, room):
    return module == room or module.startswith(room + ".")


def test_every_room_is_found():
    for room in ("attention", "models", "tasks", "training", "configs", "analysis"):
        assert any(is_in(name, room) for name in MODULES)
    assert {"train", "eval"} <= MODULES.keys()
    assert "attention.masks.values" in set(imported("attention.cache")) | reaches("attention.cache")
    assert "models.decoder" in reaches("train")


@pytest.mark.parametrize("level", range(len(ORDER)), ids=lambda level: " ".join(ORDER[level]))
def test_nothing_imports_what_stands_above_it(level):
    """Through helpers that stand nowhere in the order neither."""
    above = [room for rooms in ORDER[level + 1 :] for room in rooms]
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if any(is_in(module, room) for room in ORDER[level])
        for other in sorted(reaches(module))
        if any(is_in(other, room) for room in above)
    ]
    assert not wrong


@pytest.mark.parametrize("room", CLOSED)
def test_a_room_knows_nothing_of_those_above_and_beside_it(room):
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if is_in(module, room)
        for other in imported(module)
        if any(is_in(other, closed) for closed in CLOSED[room])
    ]
    assert not wrong


@pytest.mark.parametrize("room", ONLY)
def test_tasks_and_configs_need_little(room):
    allowed = {room, "__future__"} | ONLY[room] | sys.stdlib_module_names
    wrong = [
        f"{module} imports {other}"
        for module in MODULES
        if is_in(module, room)
        for other in imported(module)
        if other.partition(".")[0] not in allowed
        and not (is_in(module, STUDIES) and is_in(other, "sweeps"))
    ]
    assert not wrong


def test_commands_are_not_imported():
    """Two files that both define --config cannot be imported in one process."""
    for module in MODULES:
        assert not {"train", "eval", "sweep"} & set(imported(module))


def test_no_command_loads_what_draws_before_it_draws():
    """Half a second and more, which every start would wait for."""
    code = (
        "import sys, train, sweeps.command, sweeps.worker; "
        "print([name for name in ('matplotlib', 'scipy.stats') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
