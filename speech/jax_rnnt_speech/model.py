"""A transducer in Flax NNX: encoder, blocks of our own on a pretrained one, predictor and joint of the library.

B utterances, T feature frames of F features, N rows (T / subsampling), E the width of a row, U labels.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from jax_rnnt.flax.nnx import Joint, LSTMPredictor, StatelessPredictor
from jax_rnnt_speech import encoders
from jax_rnnt_speech.encoders.base import ACTIVATIONS, cut, layer_norm
from jax_rnnt_speech.encoders.conformer import Block


class Head(nnx.Module):
    """Conformer blocks on rows [B, N, E] of an encoder, `stack` of them joined: -> [B, N / stack, width]."""

    def __init__(self, config, width, *, dtype, rngs):
        config = dataclasses.replace(config, chunk=0)  # they see whole utterances
        self.stack, more = config.stack, {"dtype": dtype, "rngs": rngs}
        self.dropout = nnx.Dropout(config.row_dropout, rngs=rngs)
        self.project = nnx.Linear(config.stack * width, config.width, **more)
        self.blocks = nnx.Sequential(*(Block(config, **more) for _ in range(config.blocks)))
        self.norm = layer_norm(config.width, **more)

    def __call__(self, rows, lengths):
        rows = jnp.pad(cut(rows, lengths), ((0, 0), (0, -rows.shape[1] % self.stack), (0, 0)))
        rows, lengths = rows.reshape(rows.shape[0], -1, self.stack * rows.shape[-1]), -(-lengths // self.stack)
        rows = self.project(self.dropout(rows))
        for block in self.blocks.layers:
            rows, _ = block(rows, lengths, block.whole)
        return self.norm(rows), lengths


class Transducer(nnx.Module):
    """Encoder, predictor and joint with `outputs` logits; class `blank` is the blank, with the labels before it.

    `fields` are those of a pretrained encoder's config.json.
    """

    def __init__(self, config, features, blank, outputs, fields=None, *, rngs):
        more, width = {"dtype": jnp.dtype(config.dtype), "rngs": rngs}, config.width
        self.encoder = encoders.make(config, features, fields, **more)
        self.head = Head(config, self.encoder.width, **more) if config.stack else None
        if config.predictor == "lstm":
            self.predictor = LSTMPredictor(blank + 1, width, layers=config.predictor_layers, **more)
        else:
            self.predictor = StatelessPredictor(blank + 1, width, history=config.history, **more)
        rows, activation = width if self.head else self.encoder.width, ACTIVATIONS[config.activation]
        self.joint = Joint(rows, width, width, outputs, activation=activation, dropout=config.dropout, **more)
        if config.ctc:
            self.ctc = nnx.Linear(rows, blank + 1, **more)
        if config.loss == "pruned":  # linear scores of all classes, for the simple loss that chooses the band
            self.frame_scores = nnx.Linear(rows, outputs, **more)
            self.state_scores = nnx.Linear(width, outputs, **more)

    def encode(self, x, lengths):
        """Rows [B, N, E] of whole utterances [B, T, F], and their lengths [B]."""
        return self.on_rows(*self.encoder(x, lengths))

    def on_rows(self, rows, lengths):
        """What predictor and joint take, from the encoder's rows [B, N, E] and their lengths [B]."""
        return self.head(rows, lengths) if self.head else (rows, lengths)
