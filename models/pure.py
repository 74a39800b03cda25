"""Between a module and a plain dict of its parameters, so that training is a pure function."""

from __future__ import annotations

from flax import nnx
from flax.nnx import GraphDef


def split(model: nnx.Module) -> tuple[GraphDef, dict]:
    """The structure, hashable, and the parameters by path, such as ``blocks/0/mlp/w_in_DF``."""
    graph, state = nnx.split(model)
    return graph, {
        "/".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)
    }


def graph_of(options) -> GraphDef:
    """The structure of what ``options.build(rngs)`` makes, without allocating its parameters."""
    return nnx.split(nnx.eval_shape(lambda: options.build(nnx.Rngs(0))))[0]


def merge(graph: GraphDef, params: dict) -> nnx.Module:
    """The module again; inside a traced function this costs nothing at run time."""
    flat = [
        (tuple(int(part) if part.isdigit() else part for part in path.split("/")), nnx.Param(value))
        for path, value in params.items()
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def is_matrix(path: str) -> bool:
    """Whether a parameter is a matrix by the naming rule: gains, biases and logits are not."""
    return path.rsplit("/", 1)[-1].startswith("w_")
