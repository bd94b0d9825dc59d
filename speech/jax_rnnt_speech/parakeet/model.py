"""Parakeet and Nemotron transducers in Flax NNX: encoder, and predictor and joint of the library.

B utterances, S feature frames, T encoder frames, U labels, V classes with the blank, E and P widths of rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jax_rnnt import RNNTLoss, TDTLoss
from jax_rnnt.flax.nnx import Joint, LSTMPredictor

from .encoder import ACTIVATIONS, Encoder, EncoderConfig


@dataclasses.dataclass(frozen=True)
class Config:
    """Fields have the names and defaults of config.json. Without durations it is an RNN-T."""

    encoder_config: EncoderConfig
    vocab_size: int = 8193
    blank_token_id: int = 8192
    decoder_hidden_size: int = 640
    num_decoder_layers: int = 2
    hidden_act: str = "relu"
    max_symbols_per_step: int = 10
    durations: tuple[int, ...] = ()


class Transducer(nnx.Module):
    def __init__(self, config: Config, *, rngs):
        width, outputs = config.decoder_hidden_size, config.vocab_size + len(config.durations)
        self.config = config
        self.encoder = Encoder(config.encoder_config, rngs=rngs)
        options = dict(layers=config.num_decoder_layers, start=config.blank_token_id, rngs=rngs)
        self.predictor = LSTMPredictor(config.vocab_size, width, **options)
        # The projections of encoder and predictor have a bias each in the checkpoint; only their sum matters.
        activation = ACTIVATIONS[config.hidden_act]
        self.joint = Joint(config.encoder_config.hidden_size, width, width, outputs, activation=activation, rngs=rngs)

    def logits(self, features, feature_lengths, targets, *, tiles=True, chunk=None):
        """(logits of all nodes, encoder lengths [B]) of features [B, S, M] and targets [B, U].

        In tiles they are `JointLogits`, of `chunk` nodes each, else an array [B, T, U + 1, V + D].
        """
        rows, lengths = self.encoder(features, feature_lengths)
        columns = self.predictor(targets)
        if tiles:
            return self.joint.logits(rows, columns, chunk), lengths
        return self.joint(rows[:, :, None], columns[:, None]), lengths

    def decoder_inputs(self, rows, lengths):
        """What follows the loss among the arguments of a decoder, from what the encoder returns."""
        return *self.joint.decoder_inputs(self.predictor, rows), lengths

    def criterion(self, **options):
        """The loss of the checkpoint: a `TDTLoss` or an `RNNTLoss`."""
        options |= {"blank": self.config.blank_token_id}
        return TDTLoss(self.config.durations, **options) if self.config.durations else RNNTLoss(**options)


def reduced(losses: jax.Array, target_lengths: jax.Array, reduction: str) -> jax.Array:
    """A reduction of `transformers` for losses [B]: its names, some of which mean something else in this library."""
    if reduction == "mean_volume":
        return losses.sum() / target_lengths.sum()
    if reduction == "mean":
        return (losses / target_lengths).mean()
    return {"none": lambda x: x, "sum": jnp.sum, "mean_batch": jnp.mean}[reduction](losses)
