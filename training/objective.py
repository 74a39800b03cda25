"""What training minimises and evaluation counts: sums and counts, divided once at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention.probe import Probe
from models.decoder import DecoderOptions
from models.encoder_decoder import EncoderDecoderOptions
from tasks import Batch
from tasks.vocabulary import MASK, PAD


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Every counted position predicts the token that follows (GPT)."""

    name: ClassVar[str] = "next_token"
    generates: ClassVar[bool] = True
    reads_source: ClassVar[bool] = False
    model_options: ClassVar[type] = DecoderOptions

    def check(self, layers: Sequence, first_position: int) -> None:
        """Refuses a model in which a counted position could see its own target.

        Args:
          layers: attention options of the layers.
          first_position: the first position whose prediction counts.

        Raises:
          ValueError: names the layer and the mask.
        """
        for i, layer in enumerate(layers):
            causal_from = layer.mask().causal_from()
            if causal_from is None or causal_from > first_position:
                instead = "" if self.reads_source else ", or train.objective=masked_token"
                raise ValueError(
                    f"train.objective {self.name!r} cannot train layer {i}: its mask "
                    f"{layer.mask()} lets position {first_position}, which counts, see the token "
                    f"it is to predict; use a causal mask{instead}"
                )

    def tokens_read(self, length: int) -> int:
        """Tokens in a sequence that the model reads, of a task of ``length``."""
        return length

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """The batch as the model reads it."""
        del key
        return batch

    def logits(
        self, model, batch: Batch, dropout_key: jax.Array | None, probe: Probe | None = None
    ) -> jax.Array:
        """Logits (B, T, V) of a prepared batch."""
        return model(batch.tokens_BT, dropout_key=dropout_key, probe=probe)[0]


@dataclasses.dataclass(frozen=True)
class MaskedToken:
    """A share of the counted tokens is replaced by MASK, and each is predicted in place (BERT).

    The model reads the whole sequence, T + 1 tokens. Devlin et al. 2018 (arXiv 1810.04805).

    Attributes:
      mask_rate: probability that a counted token is masked, above 0 and at most 1.
    """

    name: ClassVar[str] = "masked_token"
    generates: ClassVar[bool] = False
    reads_source: ClassVar[bool] = False
    model_options: ClassVar[type] = DecoderOptions

    mask_rate: float

    def __post_init__(self):
        if not 0 < self.mask_rate <= 1:
            raise ValueError(f"train.mask_rate must be above 0 and at most 1, got {self.mask_rate}")

    def check(self, layers: Sequence, first_position: int) -> None:
        """Any mask will do: what is to be predicted is not there to be seen."""

    def tokens_read(self, length: int) -> int:
        """Tokens in a sequence that the model reads, of a task of ``length``."""
        return length + 1

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """The sequences with tokens masked; the weights count these and no others."""
        tokens_BU = jnp.concatenate([batch.tokens_BT[:, :1], batch.targets_BT], axis=1)
        counted_BU = jnp.pad(batch.weights_BT, ((0, 0), (1, 0))) > 0
        masked_BU = counted_BU & jax.random.bernoulli(key, self.mask_rate, tokens_BU.shape)
        return Batch(
            jnp.where(masked_BU, MASK, tokens_BU), tokens_BU, masked_BU.astype(jnp.float32)
        )

    def logits(
        self, model, batch: Batch, dropout_key: jax.Array | None, probe: Probe | None = None
    ) -> jax.Array:
        """Logits (B, T + 1, V) of a prepared batch."""
        return model(batch.tokens_BT, dropout_key=dropout_key, probe=probe)[0]


@dataclasses.dataclass(frozen=True)
class SequenceToSequence(NextToken):
    """Next-token prediction by a decoder that reads an encoded source sequence."""

    name: ClassVar[str] = "sequence_to_sequence"
    reads_source: ClassVar[bool] = True
    model_options: ClassVar[type] = EncoderDecoderOptions

    def logits(
        self, model, batch: Batch, dropout_key: jax.Array | None, probe: Probe | None = None
    ) -> jax.Array:
        """Logits (B, T, V) of the decoder."""
        memory = model.encode(
            batch.source_BS, batch.source_segments_BS, probe=probe, dropout_key=dropout_key
        )
        return model(batch.tokens_BT, memory=memory, dropout_key=dropout_key, probe=probe)[0]


OBJECTIVES = {
    objective.name: objective for objective in (NextToken, MaskedToken, SequenceToSequence)
}


def _answers(batch: Batch) -> jax.Array:
    return batch.weights_BT


def _all_but_padding(batch: Batch) -> jax.Array:
    return (batch.targets_BT != PAD).astype(jnp.float32)


# Weights of the positions in the loss.
LOSS_ON = {"answers": _answers, "all": _all_but_padding}


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


def mean_loss(
    objective, model, batch: Batch, loss_on: str, mask_key: jax.Array, dropout_key: jax.Array | None
) -> jax.Array:
    """Mean cross-entropy in nats over the positions that count; 0 where none does."""
    batch = dataclasses.replace(batch, weights_BT=LOSS_ON[loss_on](batch))
    batch = objective.prepare(batch, mask_key)
    logits_BTV = objective.logits(model, batch, dropout_key)
    total, count = cross_entropy(logits_BTV, batch.targets_BT, batch.weights_BT)
    return total / jnp.maximum(count, 1)
