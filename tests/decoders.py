"""Small decoders of every variant that reads its own sequence causally."""

from __future__ import annotations

from flax import nnx

from configs import base
from models.decoder import Decoder
from training.resolve import resolve
from training.settings import settings

# Groups of configs/base.py, with what of them has to change for a sequence of about 50 tokens.
GROUPS = {
    "mha": {},
    "gqa": {},
    "window": {"window": 7},
    "longformer": {"window": 7},
    "smeared": {},
    "mla": {"latent_rank": 6},
    "linear": {},
    "additive": {},
}
NAMES = list(GROUPS)


def decoder(
    name: str, *, vocab_size: int, d_model=16, num_heads=4, num_layers=1, head_width=None, **options
) -> Decoder:
    """An attention-only decoder of one variant, made as a run would make it."""
    config = base.get_config()
    config.attention[name].update(GROUPS[name] | options)
    if name == "mla" and head_width is not None:
        config.attention.mla.latent_rank = head_width
    config.task.vocab_size = vocab_size
    config.model.update(
        mlp="none", pattern=(name,), d_model=d_model, num_heads=num_heads, num_layers=num_layers,
        head_width=head_width,
    )  # fmt: skip
    if name == "additive":
        config.model.update(position="learned", max_length=128)
    return settings(resolve(config.to_dict())).model.build(nnx.Rngs(0))
