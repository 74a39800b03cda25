"""Attention variants: a variant is a value, and all else is derived from it.

Letters, in the names of arrays, in einsums, docstrings and cost formulas alike; the name of an
array ends in its shape, as in ``q_BTNH``:

  B batch · T queries · S keys · D model width · F feed-forward width · N query heads ·
  K key-value heads · G = N/K query heads to a key-value head · H query-key width · E value width ·
  R latent rank · P rotary width · M feature-map width · V vocabulary · L layers

**The layer contract.** Every layer is called as

    y_BTD, cache = layer(x_BTD, positions_BT, segments_BT=None, cache=None, memory=None,
                         probe=None, dropout_key=None)

One call serves training, prefill in any chunking, and decoding token by token:

- ``positions_BT`` are int32 positions, ascending within a row (or a document). Without segments
  and cache they are consecutive, and a mask counts from the first token given.
- ``segments_BT`` number the documents packed in a row, 0 is padding; with a cache there is one
  document a row, and they tell padding (0) from tokens (1).
- ``cache`` is None, or comes from ``layer.init_cache(batch, length, dtype)`` or an earlier call.
- ``memory`` is the other sequence of cross-attention, an ``attention.memory.Memory``; once it has
  been given with a cache, the cache holds its keys and values and it may be left out.
- ``probe`` reads or replaces activations (see ``attention.probe``); asking nothing changes no bit.
- ``dropout_key`` turns dropout on.

``layer.cache_bytes_per_token()`` is what the cache grows by; ``layer.implementation(batch,
length)`` names the implementation that runs.
"""

from __future__ import annotations

import pkgutil

from attention.context import Context

# The options of a layer by the name of its variant, and where they are defined;
# ``options.build(context, rngs)`` makes the layer. A new variant adds its line.
VARIANTS = {
    name: pkgutil.resolve_name(f"attention.{where}")
    for name, where in {
        "causal": "multi_head:MultiHead",
        "full": "multi_head:MultiHeadFull",
        "prefix": "multi_head:MultiHeadPrefix",
        "window": "multi_head:MultiHeadWindow",
        "streaming": "multi_head:MultiHeadStreaming",
        "longformer": "multi_head:MultiHeadLongformer",
        "longformer_encoder": "multi_head:MultiHeadLongformerEncoder",
        "masked": "multi_head:MultiHeadMasked",
        "cross": "multi_head:MultiHeadCross",
        "linear": "linear:Linear",
        "mla": "latent:Latent",
        "additive": "additive:Additive",
    }.items()
}

__all__ = ["VARIANTS", "Context"]
