"""A transducer in Flax NNX: encoder, blocks of our own on a pretrained one, predictor and joint of the library.

B utterances, T feature frames of F features, N rows (T / subsampling), E the width of a row, U labels.
"""

import jax.numpy as jnp
from flax import nnx

from jax_rnnt.flax.nnx import Joint, LSTMPredictor, StatelessPredictor
from jax_rnnt_speech.model import encoders
from jax_rnnt_speech.model.encoders import contexts
from jax_rnnt_speech.model.encoders.base import ACTIVATIONS, alike, apart, cut, layer_norm
from jax_rnnt_speech.model.encoders.conformer import Block


class Head(nnx.Module):
    """Conformer blocks on rows [B, N, E] of an encoder, `stack` of them joined: -> [B, N / stack, width]."""

    def __init__(self, config, width, *, dtype, rngs):
        config = config.replace(chunk=0)  # they see whole utterances
        self.stack, more = config.head.stack, {"dtype": dtype, "rngs": rngs}
        self.dropout = nnx.Dropout(config.network.row_dropout, rngs=rngs)
        self.project = nnx.Linear(config.head.stack * width, config.blocks.width, **more)
        self.blocks = alike(config.blocks.count, Block, config, **more)
        self.norm = layer_norm(config.blocks.width, **more)

    def __call__(self, rows, lengths):
        rows = jnp.pad(cut(rows, lengths), ((0, 0), (0, -rows.shape[1] % self.stack), (0, 0)))
        rows, lengths = rows.reshape(rows.shape[0], -1, self.stack * rows.shape[-1]), -(-lengths // self.stack)
        rows = self.project(self.dropout(rows))
        for block in self.blocks.layers:
            rows, _ = block(apart(rows), (lengths, None), block.whole)
        return self.norm(rows), lengths


class Prompt(nnx.Module):
    """Turns rows [B, N, E] of recordings into those of a language, which is one of `count` prompts."""

    def __init__(self, count, hidden, width, **more):
        self.width, self.linear_1 = width, nnx.Linear(width + count, hidden, **more)
        self.linear_2 = nnx.Linear(hidden, width, **more)

    def __call__(self, rows, language):
        kernel, bias = (x[...].astype(rows.dtype) for x in (self.linear_1.kernel, self.linear_1.bias))
        return self.linear_2(nnx.relu(rows @ kernel[: self.width] + (kernel[self.width + language] + bias)))


class Transducer(nnx.Module):
    """Encoder, predictor and joint with `outputs` logits; class `blank` is the blank, with the labels before it.

    A model of CTC alone has a head for it in place of predictor and joint; other models may have one as well.

    `source` are the JSON files of a pretrained model.
    """

    def __init__(self, config, features, blank, outputs, source=None, *, rngs):
        more, width = {"dtype": jnp.dtype(config.compute.dtype), "rngs": rngs}, config.blocks.width
        self.encoder = encoders.make(config, features, encoders.fields_of(source), **more)
        self.usual = contexts.usual(config.encoder)
        self.head = Head(config, self.encoder.width, **more) if config.head.stack else None
        fields = {} if self.head else (source or {}).get("config.json", {})
        sizes = [fields.get(x) for x in ("num_prompts", "prompt_intermediate_size")]
        self.prompt = Prompt(*sizes, self.encoder.width, **more) if all(sizes) else None
        rows, activation = width if self.head else self.encoder.width, ACTIVATIONS[config.head.activation]
        if config.objective.ctc or config.head.loss == "ctc":
            self.ctc = nnx.Linear(rows, blank + 1, **more)
        if config.head.loss == "ctc":
            return
        if config.head.predictor == "lstm":
            self.predictor = LSTMPredictor(blank + 1, width, layers=config.head.predictor_layers, **more)
        else:
            self.predictor = StatelessPredictor(blank + 1, width, history=config.head.history, **more)
        self.joint = Joint(rows, width, width, outputs, activation=activation, dropout=config.network.dropout, **more)
        if config.head.loss == "pruned":  # linear scores of all classes, for the simple loss that chooses the band
            self.frame_scores = nnx.Linear(rows, outputs, **more)
            self.state_scores = nnx.Linear(width, outputs, **more)

    def encode(self, x, lengths, context=None):
        """Returns rows [B, N, E] of utterances [B, T, F], and their lengths [B]; by default, in their usual context."""
        return self.on_rows(*self.encoder(x, lengths, self.usual if context is None else context))

    def on_rows(self, rows, lengths):
        """Returns the input of predictor and joint, from the encoder's rows [B, N, E] and their lengths [B]."""
        return self.head(rows, lengths) if self.head else (rows, lengths)
