"""Shapes of published models, for their cost; norms and biases are those of this laboratory."""

from __future__ import annotations

import dataclasses

from attention.latent import Latent
from attention.multi_head import MultiHead, MultiHeadWindow
from models.decoder import DecoderOptions


@dataclasses.dataclass(frozen=True)
class Preset:
    """A published shape, the longest sequence that it was trained on, and where it is from."""

    options: DecoderOptions
    length: int
    source: str


def _decoder(layer, **sizes) -> DecoderOptions:
    return DecoderOptions(
        pattern=(type(layer).__name__,),
        layers=(layer,),
        **{"mlp": "swiglu", "dtype": "bfloat16", **sizes},
    )


PRESETS = {
    "gpt2": Preset(
        _decoder(
            MultiHead(bias=True), vocab_size=50_257, num_layers=12, d_model=768, num_heads=12,
            d_ff=3072, mlp="gelu", tied_head=True, position="learned", max_length=1024,
        ),
        1024, "Radford et al. 2019, 124M",
    ),
    "llama2-7b": Preset(
        _decoder(
            MultiHead(), vocab_size=32_000, num_layers=32, d_model=4096, num_heads=32, d_ff=11_008
        ),
        4096, "arXiv 2307.09288",
    ),
    "llama3-8b": Preset(
        _decoder(
            MultiHead(num_kv_heads=8), vocab_size=128_256, num_layers=32, d_model=4096,
            num_heads=32, d_ff=14_336, rope_base=500_000.0,
        ),
        8192, "arXiv 2407.21783",
    ),
    "llama3-70b": Preset(
        _decoder(
            MultiHead(num_kv_heads=8), vocab_size=128_256, num_layers=80, d_model=8192,
            num_heads=64, d_ff=28_672, rope_base=500_000.0,
        ),
        8192, "arXiv 2407.21783",
    ),
    "mistral-7b": Preset(
        _decoder(
            MultiHeadWindow(num_kv_heads=8, window=4096), vocab_size=32_000, num_layers=32,
            d_model=4096, num_heads=32, d_ff=14_336,
        ),
        8192, "arXiv 2310.06825",
    ),
    # The feed-forward width is that of a token's experts: 2 shared and 6 of 160, 1536 wide each.
    # So parameters are those that a token activates, 21 of 236 billion.
    "deepseek-v2": Preset(
        _decoder(
            Latent(latent_rank=512, rope_width=64, query_rank=1536), vocab_size=102_400,
            num_layers=60, d_model=5120, num_heads=128, head_width=128, d_ff=12_288,
        ),
        4096, "arXiv 2405.04434; experts: those that a token activates",
    ),
}  # fmt: skip
