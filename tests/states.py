"""States of training, compared bit for bit."""

import jax
import numpy as np


def bits(state):
    """Everything a state holds, as bytes by name."""
    leaves = jax.tree_util.tree_leaves_with_path(
        (state.step, state.params, state.opt_state, jax.random.key_data(state.key))
    )
    return {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in leaves}
