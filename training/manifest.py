"""What a checkpoint says about its own leaves, so that reading it back can be checked.

The manifest lists every leaf of the state as ``{name: [kind, checksum]}``. Two checks use it:
the template is compared with the kinds before an array is read (orbax casts a float32 array into
a bfloat16 target without a word), and the arrays that were read are compared with the checksums,
so it does not matter which file was damaged, nor how.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

_MAX_LEAVES_NAMED = 6


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or could not be read back; the message is one line."""


class DamagedError(CheckpointError):
    """This one checkpoint cannot be used, an older one perhaps can; the message is the reason."""


def one_line(error: Exception) -> str:
    """The type and the (possibly very long, many-line) message of an error, for one line."""
    text = " ".join(str(error).split()) or "no reason given"
    return f"{type(error).__name__}: {text[:300]}"


def kind(leaf: Any) -> str:
    """What makes a jitted step compile anew: ``float32[2,3]``, ``~int32[]`` if weakly typed."""
    aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    return f"{'~' * aval.weak_type}{aval.dtype}[{','.join(map(str, aval.shape))}]"


def flatten(state: Any) -> tuple[dict[str, Any], Any]:
    """The leaves by name, such as ``params/layers/0/w``, and the tree definition."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(state)
    leaves: dict[str, Any] = {}
    for path, leaf in pairs:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"two leaves of the state are both called {name}")
        leaves[name] = leaf
    return leaves, treedef


def strong_kinds(leaves: dict[str, Any]) -> dict[str, str]:
    """The kind of every leaf. Raises CheckpointError for a weakly typed one."""
    kinds = {name: kind(leaf) for name, leaf in leaves.items()}
    for name, found in kinds.items():
        if found.startswith("~"):
            raise CheckpointError(
                f"{name} is weakly typed ({found}), so a restored step would compile anew; "
                "give it a dtype"
            )
    return kinds


def host_copies(leaves: dict[str, Any]) -> dict[str, np.ndarray]:
    """The bits of every leaf, in memory that nobody else writes to; typed keys as integers."""
    raw = {name: jax.random.key_data(x) if _is_key(x) else x for name, x in leaves.items()}
    # On the CPU device_get hands out views of the device's memory, which donation reuses.
    return {name: np.array(view, copy=True) for name, view in jax.device_get(raw).items()}


def host_target(leaves: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arrays of the shapes and dtypes in which ``host_copies`` stores these leaves."""
    raw = {
        name: jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
        for name, x in leaves.items()
    }
    return {name: np.empty(x.shape, x.dtype) for name, x in raw.items()}


def place(array: np.ndarray, leaf: Any) -> jax.Array:
    """The array where the template's leaf is, in memory that JAX owns and can donate.

    A committed array and an uncommitted one are different to jit, so this follows the leaf too.
    """
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    # device_put alone may share a NumPy buffer, which donation then cannot reuse; the copy may
    # spell the sharding differently, which jit would take for another one.
    if sharding:
        owned = jax.device_put(jax.device_put(array, sharding).copy(), sharding)
    else:
        owned = jnp.array(array, copy=True)
    if not _is_key(leaf):
        return owned
    return jax.random.wrap_key_data(owned, impl=jax.random.key_impl(jnp.empty_like(leaf)))


def write(
    step: int, metrics: dict[str, float], kinds: dict[str, str], copies: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The manifest as JSON: step, metrics, and every leaf's kind and CRC-32."""
    leaves = {name: [kinds[name], checksum(array)] for name, array in copies.items()}
    body = {"step": step, "metrics": metrics, "leaves": leaves}
    return {"body": body, "checksum": _json_checksum(body)}


def read(path: Path) -> dict[str, Any]:
    """The body of a complete checkpoint's manifest.

    Raises:
      DamagedError: the folder is empty, was never committed, or the manifest or the metrics are
        not what was saved.
    """
    if not path.is_dir():
        raise DamagedError("not a folder")
    if not any(path.iterdir()):
        raise DamagedError("an empty folder")
    try:
        commit = json.loads((path / "_CHECKPOINT_METADATA").read_text())
        committed = commit["commit_timestamp_nsecs"] is not None
    except Exception as error:
        raise DamagedError(f"no commit metadata ({one_line(error)})") from error
    if not committed:
        raise DamagedError("it was never committed")
    try:
        manifest = ocp.JsonCheckpointHandler().restore(path / "manifest")
        body = manifest["body"]
        intact = _json_checksum(body) == manifest["checksum"] and str(body["step"]) == path.name
        if intact and body["metrics"]:
            metrics = ocp.JsonCheckpointHandler(filename="metrics").restore(path / "metrics")
            intact = metrics == body["metrics"]
    except Exception as error:
        raise DamagedError(f"unreadable manifest or metrics ({one_line(error)})") from error
    if not intact:
        raise DamagedError("its manifest or metrics are not what was saved")
    return body


def check_fits(path: Path, saved: dict[str, Any], template: dict[str, Any]) -> None:
    """Raises CheckpointError naming the leaves whose saved and expected kinds differ."""
    found = {name: saved_kind for name, (saved_kind, _) in saved.items()}
    expected = {name: kind(leaf) for name, leaf in template.items()}
    absent = "not at all"
    differences = [
        f"{name} saved {found.get(name, absent)}, expected {expected.get(name, absent)}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]
    if differences:
        more = len(differences) - _MAX_LEAVES_NAMED
        raise CheckpointError(
            f"checkpoint {path} does not fit this model: "
            + "; ".join(differences[:_MAX_LEAVES_NAMED])
            + (f"; and {more} more" if more > 0 else "")
        )


def checksum(array: np.ndarray) -> int:
    """CRC-32 of the array's bytes in row-major order."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _json_checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
