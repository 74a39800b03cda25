"""A checkpoint is the state of its step, bit for bit, or an error that says so (P1-P3, J2, O4)."""

import functools
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training import manifest
from training.checkpoint import CheckpointError, Checkpoints
from training.state import TrainState

ROOT = Path(__file__).resolve().parent.parent


def make_state(step, *, seed=0, width=3, layers=2, dtype=np.float32):
    """NumPy leaves, so that the expected bits never pass through JAX."""
    rng = np.random.default_rng(1000 * seed + step)
    params = {
        "layers": [{"w": rng.normal(size=(width, 5)).astype(dtype)} for _ in range(layers)],
        "scale": rng.normal(size=7).astype(jnp.bfloat16),
        "table": rng.normal(size=(50, 7)).astype(np.float32),  # too large for the index file
    }
    moments = (rng.normal(size=(width, 5)).astype(np.float32), np.int32(step))
    key = rng.integers(0, 2**32, size=2, dtype=np.uint32)
    return TrainState(step=np.int32(step), params=params, opt_state=moments, key=key)


def on_device(state, sharding=None):
    state = jax.tree.map(lambda x: jax.device_put(x, sharding).copy(), state)
    key = jax.random.wrap_key_data(state.key)
    return TrainState(step=state.step, params=state.params, opt_state=state.opt_state, key=key)


def leaves_of(state):
    return state.step, state.params, state.opt_state


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def assert_same_bits(restored, expected):
    """``expected`` as of make_state."""
    found = jax.tree.leaves((*leaves_of(restored), jax.random.key_data(restored.key)))
    wanted = jax.tree.leaves((*leaves_of(expected), expected.key))
    assert len(found) == len(wanted)
    for array, numpy_array in zip(found, wanted, strict=True):
        assert array.dtype == numpy_array.dtype
        assert array.shape == numpy_array.shape
        assert np.asarray(array).tobytes() == numpy_array.tobytes()


def save_all(folder, steps, *, keep=10):
    with Checkpoints(folder, keep=keep, best_metric=None) as checkpoints:
        for step in steps:
            checkpoints.save(step, on_device(make_state(step)), {})


TEMPLATE = on_device(make_state(0))


def reopen(folder, *, keep=10, best_metric=None):
    return Checkpoints(folder, keep=keep, best_metric=best_metric)


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    """Checkpoints 5 and 9, with a metric; copy it before you break it."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with reopen(folder, best_metric="accuracy") as checkpoints:
        for step in (5, 9):
            checkpoints.save(step, on_device(make_state(step)), {"accuracy": step / 10})
    return folder


@pytest.fixture
def folder(two_saved, tmp_path):
    return shutil.copytree(two_saved, tmp_path / "checkpoints")


@pytest.fixture
def file_limit():
    """No file may grow beyond 64 KiB: what a full disk does to a write, but in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    lift = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    yield lift
    lift()
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("committed", [False, True])
def test_the_saved_state_is_that_of_its_step_and_restores_without_a_new_trace(tmp_path, committed):
    @functools.partial(jax.jit, donate_argnums=0)
    def step_fn(state):
        params = jax.tree.map(lambda x: x * 3, state.params)
        return TrainState(state.step + 1, params, state.opt_state, state.key)

    state = on_device(make_state(1), jax.devices()[0] if committed else None)
    expected = {}
    with reopen(tmp_path / "checkpoints", keep=9) as checkpoints:
        for step in range(2, 6):
            state = step_fn(state)
            bits = TrainState(*leaves_of(state), key=jax.random.key_data(state.key))
            expected[step] = jax.tree.map(np.array, bits)
            checkpoints.save(step, state, {})
        assert checkpoints.steps() == [2, 3, 4, 5]
        for step in (2, 3, 4):
            assert_same_bits(checkpoints.restore(state, step), expected[step])
        restored = checkpoints.restore_latest(state)
    assert_same_bits(restored, expected[5])
    assert jax.tree.map(jax.typeof, restored) == jax.tree.map(jax.typeof, state)

    leaf = restored.params["layers"][0]["w"]
    pointer = leaf.unsafe_buffer_pointer()
    after = step_fn(restored)
    assert step_fn._cache_size() == 1
    assert leaf.is_deleted() and restored.key.is_deleted()
    assert after.params["layers"][0]["w"].unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize("sharding", [None, jax.devices()[0]])
def test_a_restored_array_never_shares_the_memory_it_was_read_into(sharding):
    """Shared, it could not be donated; JAX shares only where the address is a multiple of 64."""
    buffer = np.zeros(64 + 4 * 32, np.uint8)
    start = -buffer.ctypes.data % 64
    aligned = buffer[start : start + 4 * 32].view(np.float32)
    placed = manifest.place(aligned, jax.device_put(jnp.ones(32), sharding))
    assert placed.unsafe_buffer_pointer() != aligned.ctypes.data
    assert placed.committed == (sharding is not None)


def test_a_template_of_shapes_is_enough(folder):
    shapes = jax.eval_shape(lambda: on_device(make_state(0)))
    assert_same_bits(reopen(folder).restore_latest(shapes), make_state(9))


def test_keeps_the_last_and_the_best_also_after_reopening(tmp_path):
    accuracies = {1: 0.2, 2: 0.9, 3: 0.9, 4: 0.1, 5: None}
    with reopen(tmp_path, keep=2, best_metric="accuracy") as checkpoints:
        for step, accuracy in accuracies.items():
            metrics = {} if accuracy is None else {"accuracy": accuracy, "loss": 1.5}
            checkpoints.save(step, on_device(make_state(step)), metrics)
        assert checkpoints.steps() == [3, 4, 5]
        assert checkpoints.best_step() == 3
    with reopen(tmp_path, keep=2, best_metric="accuracy") as checkpoints:
        checkpoints.save(6, on_device(make_state(6)), {"accuracy": 0.5})
        assert checkpoints.steps() == [3, 5, 6]
        checkpoints.save(7, on_device(make_state(7)), {"accuracy": 0.95})
        checkpoints.save(8, on_device(make_state(8)), {})
        checkpoints.save(9, on_device(make_state(9)), {})
        assert checkpoints.steps() == [7, 8, 9]
        assert checkpoints.best_step() == 7
        assert_same_bits(checkpoints.restore(TEMPLATE, 7), make_state(7))


def test_without_a_metric_only_the_last_are_kept(tmp_path):
    save_all(tmp_path, range(4), keep=1)
    assert reopen(tmp_path).steps() == [3]
    assert reopen(tmp_path).best_step() is None


def test_wrong_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"checkpoint\.keep=0"):
        Checkpoints(tmp_path, keep=0, best_metric=None)
    checkpoints = reopen(tmp_path / "checkpoints", best_metric="accuracy")
    with pytest.raises(ValueError, match=r"step=3.* at step 2"):
        checkpoints.save(3, on_device(make_state(2)), {})
    with pytest.raises(ValueError, match=r"'accuracy'.*\['acuracy'\]"):
        checkpoints.save(2, on_device(make_state(2)), {"acuracy": 1.0})
    weak = TrainState(TEMPLATE.step, TEMPLATE.params, jnp.asarray(1.0), TEMPLATE.key)
    with pytest.raises(CheckpointError, match=r"opt_state is weakly typed \(~float32\[\]\)"):
        checkpoints.save(0, weak, {})
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("step", [4, 5])
def test_a_step_that_is_saved_already_or_older_is_refused(tmp_path, step):
    save_all(tmp_path, [5])
    with (
        reopen(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=f"step {step} is not saved: .* step 5"),
    ):
        checkpoints.save(step, on_device(make_state(step, seed=1)), {})
    assert_same_bits(reopen(tmp_path).restore_latest(TEMPLATE), make_state(5))


@pytest.mark.parametrize(
    ("name", "break_it"),
    [
        ("params/layers/1/w", lambda s: s.params["layers"][1]["w"].__setitem__((2, 4), -np.inf)),
        ("params/scale", lambda s: s.params["scale"].__setitem__(6, np.nan)),
        ("opt_state/0", lambda s: s.opt_state[0].__setitem__((0, 0), np.nan)),
    ],
)
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, name, break_it):
    save_all(tmp_path, [5])
    broken = make_state(6)
    break_it(broken)
    with (
        reopen(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=f"step 6 .*not finite: {name};"),
    ):
        checkpoints.save(6, on_device(broken), {})
    assert_same_bits(reopen(tmp_path).restore_latest(TEMPLATE), make_state(5))


def test_a_metric_that_is_not_finite_is_not_saved(tmp_path):
    with (
        reopen(tmp_path, best_metric="accuracy") as checkpoints,
        pytest.raises(CheckpointError, match="not finite: accuracy;"),
    ):
        checkpoints.save(6, on_device(make_state(6)), {"accuracy": np.nan})
    assert reopen(tmp_path).steps() == []


def big_state(step):
    noise = np.random.default_rng(step).normal(size=50_000).astype(np.float32)
    return TrainState(jnp.int32(step), {"w": jnp.asarray(noise)}, (), jax.random.key(step))


@pytest.mark.parametrize("surface", ["wait", "save", "close", "steps", "restore_latest"])
def test_a_save_that_fails_in_the_background_surfaces_once(tmp_path, file_limit, surface, capfd):
    file_limit()  # lifted for the first save
    checkpoints = reopen(tmp_path, keep=1)
    checkpoints.save(1, big_state(1), {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, resource.RLIM_INFINITY))
    checkpoints.save(2, big_state(2), {})
    call = {
        "wait": checkpoints.wait,
        "save": lambda: checkpoints.save(3, big_state(3), {}),
        "close": checkpoints.close,
        "steps": checkpoints.steps,
        "restore_latest": lambda: checkpoints.restore_latest(big_state(0)),
    }[surface]
    with pytest.raises(CheckpointError, match=r"step 2 .* failed: .*rror writing") as caught:
        call()
    assert "\n" not in str(caught.value)
    file_limit()
    assert checkpoints.steps() == [1]  # what it would have replaced
    checkpoints.save(2, big_state(2), {})
    checkpoints.close()
    assert [p.name for p in tmp_path.iterdir()] == ["2"]
    restored = checkpoints.restore_latest(big_state(0))
    assert (restored.params["w"] == big_state(2).params["w"]).all()
    assert capfd.readouterr() == ("", "")


def test_leaving_with_an_exception_keeps_it_and_logs_the_failed_save(tmp_path, file_limit, caplog):
    with pytest.raises(KeyboardInterrupt), reopen(tmp_path) as checkpoints:
        checkpoints.save(2, big_state(2), {})
        raise KeyboardInterrupt
    assert "checkpoint of step 2" in caplog.text and "rror writing" in caplog.text


def test_a_folder_that_is_a_file_is_an_error(tmp_path):
    checkpoints = reopen(tmp_path / "checkpoints")
    checkpoints.save(1, on_device(make_state(1)), {})
    checkpoints.wait()
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"step 2 to .* failed"):
        checkpoints.save(2, on_device(make_state(2)), {})
        checkpoints.wait()
    checkpoints.close()
    # Orbax's writers would wait five minutes for the folder and keep the process from ending.
    names = {thread.name for thread in threading.enumerate()}
    assert not names & {"np_type_handler", "json_ch_save", "write_metadata_after_commits"}


def test_nothing_is_none_and_nothing_is_written(tmp_path):
    with reopen(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.restore_latest(TEMPLATE) is None
        assert checkpoints.steps() == []
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 3; it has \[\]"):
            checkpoints.restore(TEMPLATE, 3)
    assert list(tmp_path.iterdir()) == []


def test_a_first_save_that_was_cut_short_is_nothing(tmp_path, caplog):
    (tmp_path / "1.orbax-checkpoint-tmp").mkdir()
    assert reopen(tmp_path).restore_latest(TEMPLATE) is None
    assert "1.orbax-checkpoint-tmp" in caplog.text


def test_unfinished_folders_are_skipped_and_do_not_stop_later_saves(tmp_path, caplog):
    save_all(tmp_path, [2, 5])
    (tmp_path / "9.orbax-checkpoint-tmp-1").mkdir()
    (tmp_path / "7").mkdir()
    shutil.copytree(tmp_path / "5", tmp_path / "8")
    (tmp_path / "8" / "_CHECKPOINT_METADATA").unlink()
    (tmp_path / "6").write_text("a file")
    with reopen(tmp_path, keep=2) as checkpoints:
        assert checkpoints.steps() == [2, 5]
        assert_same_bits(checkpoints.restore_latest(TEMPLATE), make_state(5))
        for name in ("9.orbax-checkpoint-tmp-1", "7", "8", "6"):
            assert f"{tmp_path / name}" in caplog.text
        for step in (6, 7):
            checkpoints.save(step, on_device(make_state(step)), {})
        assert checkpoints.steps() == [6, 7]
        assert_same_bits(checkpoints.restore_latest(TEMPLATE), make_state(7))
    assert (tmp_path / "broken-6").read_text() == "a file"
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"6", "7", "broken-6", "broken-7", "broken-8"}


def test_a_folder_of_unreadable_steps_is_never_a_fresh_start(tmp_path):
    (tmp_path / "7").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint .* \(7: an empty folder\)"):
        reopen(tmp_path).restore_latest(TEMPLATE)


DAMAGE = {
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "deleted": Path.unlink,
    "noise": lambda file: file.write_bytes(
        np.random.default_rng(0).integers(0, 256, file.stat().st_size, np.uint8).tobytes()
    ),
    "one bit": lambda file: file.write_bytes(
        (lambda data, at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])(
            file.read_bytes(), file.stat().st_size // 2
        )
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_whichever_file_is_damaged_no_wrong_value_is_restored(folder, tmp_path, caplog, damage):
    intact = tmp_path / "intact"
    shutil.copytree(folder / "9", intact)
    files = [p.relative_to(intact) for p in intact.rglob("*") if p.is_file()]
    assert len(files) > 8
    detected = []
    for file in files:
        shutil.rmtree(folder / "9")
        shutil.copytree(intact, folder / "9")
        DAMAGE[damage](folder / "9" / file)
        caplog.clear()
        restored = reopen(folder).restore_latest(TEMPLATE)
        if int(restored.step) == 9:
            assert_same_bits(restored, make_state(9))
            assert caplog.text == ""
        else:
            assert_same_bits(restored, make_state(5))
            assert f"skipping checkpoint {folder / '9'}: " in caplog.text
            detected.append(file)
    assert Path("manifest/metadata") in detected
    assert Path("metrics/metrics") in detected
    assert largest_file(intact).relative_to(intact) in detected
    assert Path("state/manifest.ocdbt") in detected
    assert any(f.match("state/ocdbt.process_0/d/*") for f in detected)
    if damage != "one bit":
        assert Path("_CHECKPOINT_METADATA") in detected


def test_arrays_that_changed_on_disk_are_detected_even_if_orbax_reads_them(folder):
    """Step 9's arrays replaced by the valid ones of step 5: only the checksums can tell."""
    shutil.rmtree(folder / "9" / "state")
    shutil.copytree(folder / "5" / "state", folder / "9" / "state")
    checkpoints = reopen(folder)
    with pytest.raises(CheckpointError, match=r"9 cannot be read: step is not what was saved"):
        checkpoints.restore(TEMPLATE, 9)
    assert_same_bits(checkpoints.restore_latest(TEMPLATE), make_state(5))


def test_after_falling_back_training_saves_the_damaged_step_again(folder):
    data = largest_file(folder / "9")
    DAMAGE["half"](data)
    with reopen(folder, keep=1, best_metric="accuracy") as checkpoints:
        assert_same_bits(checkpoints.restore_latest(TEMPLATE), make_state(5))
        assert checkpoints.steps() == [5]
        assert checkpoints.best_step() == 5
        assert data.exists()
        for step in (7, 9):
            checkpoints.save(step, on_device(make_state(step, seed=2)), {"accuracy": 0.1})
        assert checkpoints.steps() == [5, 9]
        assert_same_bits(checkpoints.restore_latest(TEMPLATE), make_state(9, seed=2))
    assert (folder / "broken-9" / data.relative_to(folder / "9")).exists()


def test_a_run_that_finds_its_own_checkpoint_damaged_can_go_on_from_an_older_one(tmp_path):
    with reopen(tmp_path) as checkpoints:
        for attempt in range(2):
            checkpoints.save(5 + attempt, on_device(make_state(5 + attempt)), {})
            checkpoints.save(9, on_device(make_state(9)), {})
            checkpoints.wait()
            DAMAGE["deleted"](tmp_path / "9" / "state" / "manifest.ocdbt")
            restored = checkpoints.restore_latest(TEMPLATE)
            assert_same_bits(restored, make_state(5 + attempt))
        checkpoints.save(8, on_device(make_state(8)), {})
        assert checkpoints.steps() == [5, 6, 8]
    assert (tmp_path / "broken-9").is_dir() and (tmp_path / "broken-9-2").is_dir()


def test_if_every_checkpoint_is_damaged_it_says_so(folder):
    for step in ("5", "9"):
        DAMAGE["half"](largest_file(folder / step))
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read \(9: .*; 5: "):
        reopen(folder).restore_latest(TEMPLATE)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"layers": 3}, r"params/layers/2/w saved not at all, expected float32\[3,5\]$"),
        ({"layers": 1}, r"params/layers/1/w saved float32\[3,5\], expected not at all$"),
        ({"width": 4}, r"layers/0/w saved float32\[3,5\], expected float32\[4,5\]; params/"),
        ({"dtype": jnp.bfloat16}, r"layers/0/w saved float32\[3,5\], expected bfloat16\[3,5\]"),
        ({"layers": 20}, r"params/layers/15/w saved [^;]*; and 12 more$"),
    ],
)
def test_another_model_is_refused_with_the_leaves_named(folder, template, message):
    with pytest.raises(CheckpointError, match="does not fit this model: .*" + message):
        reopen(folder).restore_latest(on_device(make_state(0, **template)))


def run_python(script, *arguments, devices=1):
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_saved_on_four_devices_restored_on_two_and_on_one(tmp_path):
    script = """
        import sys, jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from training.checkpoint import Checkpoints
        from training.state import TrainState

        def state_on(count):
            mesh = jax.make_mesh((count,), ("x",), devices=jax.devices()[:count])
            whole = NamedSharding(mesh, P())
            w = jax.device_put(np.arange(24, dtype=np.float32).reshape(8, 3),
                               NamedSharding(mesh, P("x")))
            return TrainState(jax.device_put(jnp.int32(1), whole), {"w": w}, (),
                              jax.device_put(jax.random.key(5), whole))

        assert jax.device_count() == 4
        with Checkpoints(sys.argv[1], keep=1, best_metric="accuracy") as checkpoints:
            checkpoints.save(1, state_on(4), {"accuracy": 0.5})
            for count in (4, 2):
                template = state_on(count)
                restored = checkpoints.restore_latest(template)
                for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(template)):
                    assert new.sharding == old.sharding and new.committed
                assert (restored.params["w"] == template.params["w"]).all()
    """
    process = run_python(script, tmp_path, devices=4)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0
    template = TrainState(jnp.int32(0), {"w": jnp.zeros((8, 3))}, (), jax.random.key(0))
    restored = reopen(tmp_path).restore_latest(template)
    assert (np.asarray(restored.params["w"]) == np.arange(24.0).reshape(8, 3)).all()
    assert restored.key == jax.random.key(5)
    assert restored.params["w"].devices() == {jax.devices()[0]}


def noise_state(step):
    noise = np.random.default_rng(step).normal(size=500_000).astype(np.float32)
    return TrainState(jnp.int32(step), {"w": jnp.asarray(noise)}, (), jax.random.key(step))


def test_a_kill_during_a_save_leaves_the_one_before(tmp_path):
    script = """
        import os, pathlib, signal, sys, threading, time
        from tests.test_checkpoint import noise_state
        from training.checkpoint import Checkpoints

        folder, least_bytes = pathlib.Path(sys.argv[1]), int(sys.argv[2])

        def kill_once_a_later_save_has_written_so_much():
            while sum(p.stat().st_size for p in folder.glob("*.orbax*/**/*")) < least_bytes:
                time.sleep(0.0005)
            os.kill(os.getpid(), signal.SIGKILL)

        with Checkpoints(folder, keep=1, best_metric=None) as checkpoints:
            checkpoints.save(1, noise_state(1), {})
            checkpoints.wait()
            thread = threading.Thread(target=kill_once_a_later_save_has_written_so_much)
            thread.daemon = True
            thread.start()
            for step in range(2, 99):
                checkpoints.save(step, noise_state(step), {})
    """
    moments = {1: tmp_path / "at the start", 1_000_000: tmp_path / "while writing"}
    processes = [run_python(script, folder, least) for least, folder in moments.items()]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == 2 * [-signal.SIGKILL], errors
    for folder in moments.values():
        with reopen(folder, keep=1) as checkpoints:
            restored = checkpoints.restore_latest(noise_state(0))
            step = int(restored.step)
            assert (restored.params["w"] == noise_state(step).params["w"]).all()
            checkpoints.save(step + 1, noise_state(step + 1), {})
        assert [p.name for p in folder.iterdir()] == [str(step + 1)]


def test_saving_and_restoring_says_nothing(tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_all(tmp_path, [1, 2])
        reopen(tmp_path).restore_latest(TEMPLATE)
    assert capfd.readouterr() == ("", "")
