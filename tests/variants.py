"""Every variant under the contract, a line each; ``tests/test_layers.py`` runs it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from attention import VARIANTS as REGISTERED
from attention.additive import Additive
from attention.latent import Latent
from attention.linear import Linear
from attention.memory import Memory
from attention.multi_head import (
    MultiHead,
    MultiHeadCross,
    MultiHeadFull,
    MultiHeadLongformer,
    MultiHeadLongformerEncoder,
    MultiHeadMasked,
    MultiHeadPrefix,
    MultiHeadStreaming,
    MultiHeadWindow,
)
from tests.subject import D, T, Variant, padded, positions_of

LOOKS_AHEAD = "tokens see later ones"
NO_CACHE = "a mask that looks ahead cannot be decoded token by token, and its cache is refused"
FULL = dict.fromkeys(
    ("causality_by_gradient", "causality_by_perturbation", "causality_in_a_decoder"), LOOKS_AHEAD
) | dict.fromkeys(
    (
        "causality_through_the_cache", "token_by_token", "prefill_in_any_chunks",
        "decoder_in_any_chunks", "cache_bytes", "cache_keeps_its_types", "bfloat16",
        "second_prompt_in_a_used_cache", "past_the_end_of_the_cache",
        "ragged_batch_padded_on_the_left", "ragged_batch_padded_on_the_right",
    ),
    NO_CACHE,
)  # fmt: skip
IN_PARTS = "the prefix must be prefilled at once: its first tokens see its last"
PREFIX = dict.fromkeys(
    (
        "token_by_token", "bfloat16", "decoder_in_any_chunks", "ragged_batch_padded_on_the_left",
        "ragged_batch_padded_on_the_right",
    ),
    IN_PARTS,
)  # fmt: skip
SINK = {"pattern_rows_sum_to_one": "the sink takes its share of the weight"}
TWO_PATTERNS = {"replacing": "the rows of global tokens have a pattern of their own"}
NO_MEMORY = "a decoder alone has no memory; test_encoder_decoder.py has one"
CROSS = dict.fromkeys(
    ("causality_in_a_decoder", "packed_documents_in_a_decoder", "decoder_in_any_chunks"), NO_MEMORY
) | {
    "past_the_end_of_the_cache": "its length is that of the memory; the sequence has no end",
    "padding_has_no_weight": "the memory has other padding than the queries",
}


def memory(batch: int) -> dict[str, Memory]:
    """As long as the sequence, so that one length suits both; the second row is shorter."""
    segments = padded((T, 6, 9)[:batch], T, "right")
    x = np.random.default_rng(0).standard_normal((batch, T, D)).astype("f")
    return {"memory": Memory(jnp.asarray(x), positions_of(segments), segments)}


VARIANTS = [
    Variant("mha", MultiHead()),
    Variant("gqa", MultiHead(
        num_kv_heads=2, qk_norm=True, bias=True, rope_width=4, scale=0.7, learned_sink=True,
    ), model={"rope_layout": "interleaved"}, exempt=SINK),
    Variant("mqa", MultiHead(num_kv_heads=1), model={"position": "none"}),
    Variant("smeared", MultiHead(num_kv_heads=2, smeared_keys=True), constant_bytes=2 * 6 * 4),
    Variant("window", MultiHeadWindow(num_kv_heads=2, window=2), slots=lambda n: min(n, 2)),
    Variant("streaming", MultiHeadStreaming(
        num_kv_heads=2, window=4, first=2, smeared_keys=True,
    ), window=4, slots=lambda n: min(n, 6), constant_bytes=2 * 6 * 4),
    Variant("longformer", MultiHeadLongformer(num_kv_heads=2, window=2, num_global=2),
            slots=lambda n: min(n, 4)),
    Variant("masked", MultiHeadMasked(
        num_kv_heads=2, mask_expression="Causal() & (Window(2) | First(1)) & Window(5)",
    ), slots=lambda n: min(n, 3)),
    Variant("full", MultiHeadFull(num_kv_heads=2), exempt=FULL),
    Variant("longformer global", MultiHeadLongformer(
        num_kv_heads=2, window=2, num_global=2, global_projections=True,
    ), slots=lambda n: 2 * min(n, 4), exempt=TWO_PATTERNS),
    Variant("longformer encoder", MultiHeadLongformerEncoder(
        num_kv_heads=2, window=2, num_global=1, smeared_keys=True,
    ), exempt=FULL),
    Variant("longformer encoder global", MultiHeadLongformerEncoder(
        num_kv_heads=2, window=2, num_global=1, global_projections=True,
    ), exempt=FULL | TWO_PATTERNS),
    Variant("prefix", MultiHeadPrefix(num_kv_heads=2, prefix=3, smeared_keys=True), exempt=PREFIX,
            constant_bytes=2 * 6 * 4),
    Variant("cross", MultiHeadCross(num_kv_heads=2, smeared_keys=True), arguments=memory,
            exempt=CROSS),
    Variant("linear", Linear(num_kv_heads=2), slots=lambda n: 0, wide_bytes=2 * 6 * 7 * 4),
    Variant("linear smeared", Linear(num_kv_heads=2, feature_map="taylor", smeared_keys=True),
            slots=lambda n: 0, wide_bytes=2 * 28 * 7 * 4, constant_bytes=2 * 6 * 4),
    Variant("mla", Latent(latent_rank=5)),
    Variant("mla query latent", Latent(latent_rank=7, query_rank=8, rope_width=4, scale=0.7)),
    Variant("mla smeared", Latent(latent_rank=5, smeared_keys=True), constant_bytes=2 * 4),
    Variant("additive", Additive(num_kv_heads=2), model={"position": "none"}),
    Variant("additive window", Additive(
        num_kv_heads=2, mask_expression="Causal() & (Window(4) | First(1))", smeared_keys=True,
    ), model={"position": "learned", "max_length": 129}, slots=lambda n: min(n, 5),
            constant_bytes=2 * 6 * 4),
]  # fmt: skip


def options_of(name: str):
    """Options of the first line of a registered variant."""
    kind = REGISTERED[name]
    return next(variant.options for variant in VARIANTS if type(variant.options) is kind)
