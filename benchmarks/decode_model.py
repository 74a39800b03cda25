"""The decoder that is timed, token by token, through a cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention.cache import SlotCache
from benchmarks.timing import calls_for, peak_bytes, seconds_of
from configs import base
from models import pure
from models.generate import follow
from training.resolve import resolve
from training.settings import Settings, settings
from training.step import graph_of, init_state

NUM_TOKENS = 64
# Calls are repeated until a turn takes so long.
TURN_SECONDS = 0.3
SHAPE = {"model.num_layers": 4, "model.d_model": 256, "model.num_heads": 8, "task.vocab_size": 256}
CHANGES = {
    "window": {"attention.window.window": 256},
    "streaming": {"attention.streaming.window": 256, "attention.streaming.first": 4},
    "mla": {"attention.mla.latent_rank": 64},
}


def settings_of(variant: str) -> Settings:
    """The decoder of a variant."""
    config = base.get_config()
    config.update_from_flattened_dict(SHAPE | CHANGES.get(variant, {}))
    config.model.pattern = (variant,)
    return settings(resolve(config.to_dict(), {}))


def filled(cache, length: int):
    """A cache that has taken ``length`` positions of zeros in; a state without slots stays 0."""
    if not isinstance(cache, SlotCache):
        return cache
    zeros = {
        name: jnp.zeros((array.shape[0], length, *array.shape[2:]), array.dtype)
        for name, array in cache.entries.items()
    }
    positions_1T = jnp.arange(length)[None]
    return cache.append(positions_1T, jnp.ones_like(positions_1T, bool), **zeros)[0]


class Ours:
    """``NUM_TOKENS`` tokens after a cache of ``length`` positions, one compiled program.

    The cache is donated and used again: every call forgets what the last one wrote.

    Attributes:
      cache_bytes: of all layers.
      peak: bytes.
      tokens: the ids that the first call wrote, after id 1.
    """

    def __init__(self, run: Settings, length: int):
        graph = graph_of(run)
        self._params = init_state(run).params
        empty = pure.merge(graph, self._params).init_caches(1, length + NUM_TOKENS)
        self._caches = [filled(cache, length) for cache in empty]
        self.cache_bytes = sum(cache.nbytes for cache in self._caches)

        @functools.partial(jax.jit, donate_argnums=1)
        def program(params, caches):
            return follow(
                pure.merge(graph, params),
                jnp.ones(1, jnp.int32),
                jnp.full(1, length, jnp.int32),
                caches,
                NUM_TOKENS,
                lambda logits_BV, index: logits_BV.argmax(-1).astype(jnp.int32),
            )

        self._program = program.lower(self._params, self._caches).compile()
        self.peak = peak_bytes(self._program)
        self.tokens = np.asarray(self._run())[:, 0].tolist()
        self._calls = calls_for(seconds_of(self._run), TURN_SECONDS)

    def _run(self) -> jax.Array:
        tokens_TB, self._caches = self._program(self._params, self._caches)
        return tokens_TB

    def seconds(self) -> float:
        """Of one token, in a turn."""
        return seconds_of(self._run, calls=self._calls) / NUM_TOKENS
