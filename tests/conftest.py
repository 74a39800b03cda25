"""A strict session: exact float32 products, no silent broadcasting. pyproject.toml adds that
warnings are errors.

No persistent compilation cache: what it stores for the CPU belongs to one kind of CPU, and a
wrong hit would be worse than the seconds it saves.
"""

import gc
import os
from pathlib import Path

# The tests choose shapes for the CPU. JAX_PLATFORMS=cuda python -m pytest runs them elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The GPU interpreter waits for ever for a thread where there are few.
os.environ.setdefault("PJRT_NPROC", "16")

# Most of the time goes into compiling what runs for milliseconds: a fifth less without optimising.
# tests.attending.OPTIMISED is for those who ask about code as users get it.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import hypothesis
import jax
import pytest

# What JAX has traced and compiled stays, and looking through it for garbage takes its time.
gc.set_threshold(100_000, 50, 1000)

# One file of tests adds as many as 31,000.
MAPS = 25_000

# Accelerators multiply float32 in lower precision unless told otherwise; the tests claim float32.
jax.config.update("jax_default_matmul_precision", "highest")
# A missing axis is a mistake here, not a request: arrays of different rank do not meet.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example compiles, so a deadline per example says nothing.
hypothesis.settings.register_profile("attention", deadline=None, print_blob=True)
hypothesis.settings.load_profile("attention")

pytest.register_assert_rewrite("tests.attending", "tests.contract", "tests.oracles")


def pytest_generate_tests(metafunc):
    """``implementation``: the name of each implementation of softmax attention in turn.

    What runs in an interpreter is slow: marked ``interpreted``, unless the test says that it is
    quick or belongs to every run.
    """
    if "implementation" in metafunc.fixturenames:
        from attention.ops import IMPLEMENTATIONS
        from tests.attending import INTERPRETERS

        always = metafunc.definition.get_closest_marker("every_run")
        slow = set() if always else set(INTERPRETERS)
        metafunc.parametrize(
            "implementation",
            [
                pytest.param(name, marks=pytest.mark.interpreted if name in slow else ())
                for name in IMPLEMENTATIONS
            ],
        )


@pytest.fixture(scope="module", autouse=True)
def programs_that_fit():
    """Forgets all programs before the process has the 65,530 memory maps that Linux allows.

    A compiled program has several, and one that gets no more ends in a segmentation fault.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def run(implementation):
    """A ``tests.attending.Runner`` for each implementation in turn."""
    from tests.attending import Runner

    return Runner(implementation)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A refusal that was foreseen, reason included, is what a test asks of the implementation."""
    from tests.attending import Refused

    try:
        return (yield)
    except Refused:
        return True
