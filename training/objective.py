"""What training minimises and evaluation counts: sums and counts, divided once at the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.decoder import Decoder
from tasks import Batch
from tasks.vocabulary import PAD

LOSS_ON = ("answers", "all")


def check_causal(model_layers, first_position: int) -> None:
    """Refuses next-token training where a counted position could see its own target.

    Args:
      model_layers: attention options of the layers.
      first_position: the first position whose prediction counts.

    Raises:
      ValueError: names the layer and the mask.
    """
    for i, layer in enumerate(model_layers):
        causal_from = layer.mask().causal_from()
        if causal_from is None or causal_from > first_position:
            raise ValueError(
                f"train.objective 'next_token' cannot train layer {i}: its mask {layer.mask()} "
                f"lets position {first_position}, which counts, see the token it is to predict; "
                "use a causal mask or another objective"
            )


def loss_weights(batch: Batch, loss_on: str) -> jax.Array:
    """Weight of every position in the loss: the answers alone, or all but padding."""
    if loss_on == "answers":
        return batch.weights_BT
    return (batch.targets_BT != PAD).astype(jnp.float32)


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, weights_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Σ weight · (−log softmax(logits)[target]) in nats, and Σ weight.

    A position of weight 0 takes no part, whatever its logits or label; a counted label outside
    the vocabulary gives NaN.
    """
    counted_BT = weights_BT > 0
    # Selecting the logits first keeps the gradient of an ignored NaN from being 0 · NaN.
    logits_BTV = jnp.where(counted_BT[..., None], logits_BTV, 0)
    V = logits_BTV.shape[-1]
    targets_BT = jnp.where(targets_BT < 0, V, targets_BT)
    log_total_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    target_logit_BT = jnp.take_along_axis(
        logits_BTV, targets_BT[..., None], axis=-1, mode="fill", fill_value=jnp.nan
    )[..., 0]
    nll_BT = jnp.where(counted_BT, log_total_BT - target_logit_BT, 0)
    return (nll_BT * weights_BT).sum(), weights_BT.sum()


def next_token_loss(
    model: Decoder, batch: Batch, loss_on: str, dropout_key: jax.Array | None
) -> jax.Array:
    """Mean cross-entropy in nats over the positions that count; 0 where none does."""
    logits_BTV, _ = model(batch.tokens_BT, dropout_key=dropout_key)
    total, count = cross_entropy(logits_BTV, batch.targets_BT, loss_weights(batch, loss_on))
    return total / jnp.maximum(count, 1)
