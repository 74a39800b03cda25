"""Sampling from a model through its caches: the prompt in one call, then token by token."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.decoder import Decoder, check_ids
from models.encoder_decoder import check_memory


def generate(
    model: Decoder,
    prompt_BT: jax.Array,
    num_tokens: int,
    *,
    prompt_segments_BT: jax.Array | None = None,
    source_BS: jax.Array | None = None,
    source_segments_BS: jax.Array | None = None,
    temperature: float = 0.0,
    key: jax.Array | None = None,
    caches: list | None = None,
) -> tuple[jax.Array, list]:
    """Continues each prompt by ``num_tokens`` tokens, the whole loop in one compiled program.

    Args:
      model: a decoder, or an encoder-decoder.
      prompt_BT: token ids; prompts of unequal length are padded on the left or on the right.
      num_tokens: how many tokens to add, at least 1.
      prompt_segments_BT: 1 for tokens, 0 for padding; default all tokens.
      source_BS: what an encoder-decoder reads, encoded once; needed unless ``caches`` hold it.
      source_segments_BS: 1 for tokens, 0 for padding; default all tokens.
      temperature: 0 takes the likeliest token; above 0 samples from softmax(logits / temperature).
      key: of the sampling; needed where temperature > 0.
      caches: to use again, from an earlier call; default new ones of the length needed.

    Returns:
      The new tokens (B, num_tokens), and the caches.

    Raises:
      ValueError: a prompt without a token, ids out of range, positions past the learned ones or
        past the end of the caches, a temperature that does not fit, or a source that is missing,
        that the model does not read, or that has other rows than the prompt.
    """
    prompt_BT = jnp.asarray(prompt_BT, jnp.int32)
    if prompt_segments_BT is None:
        prompt_segments_BT = jnp.ones_like(prompt_BT)
    lengths = np.asarray(prompt_segments_BT != 0).sum(-1)
    _check(model, prompt_BT, prompt_segments_BT, lengths, num_tokens, temperature, key)
    # The last new token is returned but never read.
    needed = int(lengths.max()) + num_tokens - 1
    source_BS, source_segments_BS = _source(
        model, source_BS, source_segments_BS, prompt_BT.shape[0], caches
    )
    if caches is None:
        memory_length = () if source_BS is None else (source_BS.shape[1],)
        caches = model.init_caches(prompt_BT.shape[0], needed, *memory_length)
    _check_room(caches, needed)
    graph, params = nnx.split(model)
    key = jax.random.key(0) if key is None else key
    segments_BT = (prompt_segments_BT != 0).astype(jnp.int32)
    return _generate(
        graph, num_tokens, temperature > 0, params, prompt_BT, segments_BT, source_BS,
        source_segments_BS, caches, key, jnp.float32(temperature),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _generate(
    graph, num_tokens, samples, params, prompt_BT, segments_BT, source_BS, source_segments_BS,
    caches, key, temperature,
):  # fmt: skip
    model = nnx.merge(graph, params)
    read = {} if source_BS is None else {"memory": model.encode(source_BS, source_segments_BS)}
    positions_BT = jnp.maximum(jnp.cumsum(segments_BT, axis=1) - 1, 0)
    logits_BTV, caches = model(
        prompt_BT, positions_BT, segments_BT=segments_BT, caches=caches, **read
    )
    T = prompt_BT.shape[1]
    last_B = jnp.where(segments_BT != 0, jnp.arange(T)[None], -1).max(1)
    logits_BV = jnp.take_along_axis(logits_BTV, last_B[:, None, None], axis=1)[:, 0]

    def choose(logits_BV, index):
        if not samples:
            return logits_BV.argmax(-1).astype(jnp.int32)
        step_key = jax.random.fold_in(key, index)
        return jax.random.categorical(step_key, logits_BV / temperature).astype(jnp.int32)

    first_B = choose(logits_BV, 0)
    tokens_TB, caches = follow(model, first_B, segments_BT.sum(1), caches, num_tokens - 1, choose)
    return jnp.concatenate([first_B[:, None], tokens_TB.T], axis=1), caches


def follow(
    model: Decoder,
    token_B: jax.Array,
    position_B: jax.Array,
    caches: list,
    num_tokens: int,
    choose: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, list]:
    """The tokens that follow ``token_B``, which stands at ``position_B``, one at a time.

    Args:
      choose: (logits (B, V), which token after the first) → the next ids (B,).

    Returns:
      The new tokens (num_tokens, B), and the caches.
    """

    def step(carry, index):
        token_B, position_B, caches = carry
        logits_B1V, caches = model(token_B[:, None], position_B[:, None], caches=caches)
        token_B = choose(logits_B1V[:, 0], index)
        return (token_B, position_B + 1, caches), token_B

    carry = token_B, position_B, caches
    (_, _, caches), tokens_TB = jax.lax.scan(step, carry, jnp.arange(1, num_tokens + 1))
    return tokens_TB, caches


def _check(model, prompt_BT, segments_BT, lengths, num_tokens, temperature, key) -> None:
    if prompt_BT.ndim != 2 or segments_BT.shape != prompt_BT.shape:
        raise ValueError(
            f"prompt_BT and prompt_segments_BT must be (B, T) alike, got {prompt_BT.shape} and "
            f"{segments_BT.shape}"
        )
    if lengths.size == 0 or lengths.min() < 1:
        raise ValueError("every prompt needs at least one token, and one of them is all padding")
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    if not (0 <= temperature < float("inf")):
        raise ValueError(f"temperature must be 0 or a positive number, got {temperature}")
    if temperature > 0 and key is None:
        raise ValueError(f"sampling at temperature {temperature} needs a key")
    check_ids("token id", prompt_BT, model.options.vocab_size)
    _check_learned(model, "position", int(lengths.max()) + num_tokens - 2)
    if num_tokens == 1:
        return
    for i, layer in enumerate(model.caching_layers()):
        together = (layer.mask.causal_from() or 0) + 1
        if lengths.min() < together:
            raise ValueError(
                f"layer{i}: the first {together} positions see each other under {layer.mask}, so "
                f"every prompt needs as many tokens, and one has {lengths.min()}"
            )


def _check_learned(model, name, last) -> None:
    if model.options.position == "learned" and last >= model.options.max_length:
        raise ValueError(
            f"{name} {last} is outside the {model.options.max_length} learned positions "
            "(model.max_length)"
        )


def _source(model, source_BS, segments_BS, batch, caches):
    """The source and its segments, both or neither."""
    if source_BS is None and segments_BS is not None:
        raise ValueError("source_segments_BS is given, but source_BS is not")
    if not model.reads_source:
        if source_BS is not None:
            raise ValueError("a decoder reads no source; only an encoder-decoder does")
        return None, None
    if source_BS is None:
        if caches is None:
            raise ValueError("an encoder-decoder needs source_BS, or caches that hold a memory")
        check_memory(None, caches, batch)
        return None, None
    source_BS = jnp.asarray(source_BS, jnp.int32)
    if segments_BS is None:
        segments_BS = jnp.ones_like(source_BS)
    if source_BS.ndim != 2 or source_BS.shape[0] != batch or segments_BS.shape != source_BS.shape:
        raise ValueError(
            f"source_BS and source_segments_BS must be (B, S) alike for {batch} prompts, got "
            f"{source_BS.shape} and {segments_BS.shape}"
        )
    check_ids("source id", source_BS, model.options.vocab_size)
    last = int(np.asarray(segments_BS != 0).sum(-1).max(initial=0)) - 1
    _check_learned(model, "source position", last)
    return source_BS, jnp.asarray(segments_BS, jnp.int32)


def _check_room(caches: list, needed: int) -> None:
    for i, cache in enumerate(caches):
        limit = cache.limit
        if limit is not None and needed > limit:
            raise ValueError(f"layer{i}: {needed} positions do not fit a cache of length {limit}")
