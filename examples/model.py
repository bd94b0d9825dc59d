"""A small transducer in Flax NNX: convolutional encoder, predictor and joint of the library, greedy decoding.

B utterances, T input frames, N encoder frames (T / reduction), U labels, U1 = U + 1, V outputs: labels, blank and
further ones that the loss needs (variants.py).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jax_rnnt.flax.nnx import Joint, StatelessPredictor


class Block(nnx.Module):
    """Residual convolution over time: [B, N, E] -> [B, N, E]."""

    def __init__(self, width, dilation, *, rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.conv = nnx.Conv(width, width, kernel_size=(5,), kernel_dilation=dilation, rngs=rngs)

    def __call__(self, x):
        return x + nnx.relu(self.conv(self.norm(x)))


class Encoder(nnx.Module):
    """Strided convolutions over time and height, then residual convolutions over time: [B, T, F] -> [B, N, E]."""

    def __init__(self, features, width, strides, channels, *, rngs):
        sizes = (1, *channels)
        convs = []
        for i, stride in enumerate(strides):
            convs += [nnx.Conv(sizes[i], sizes[i + 1], kernel_size=(3, 3), strides=stride, rngs=rngs), nnx.relu]
            features = -(-features // stride[1])
        self.subsample = nnx.Sequential(*convs)
        self.project = nnx.Linear(features * sizes[-1], width, rngs=rngs)
        self.blocks = nnx.Sequential(*[Block(width, dilation, rngs=rngs) for dilation in (1, 2, 4)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, x):
        x = self.subsample(x[..., None])
        return self.norm(self.blocks(self.project(x.reshape(*x.shape[:2], -1))))


class Transducer(nnx.Module):
    """Encoder, predictor and joint with `outputs` logits; class `blank` is the blank, with the labels before it."""

    history = 4  # labels that the predictor sees; it must count the repeats of a digit

    def __init__(self, features, outputs, blank, width, strides, channels, *, rngs):
        self.blank = blank
        self.reduction = math.prod(time for time, _ in strides)
        self.encoder = Encoder(features, width, strides, channels, rngs=rngs)
        self.predictor = StatelessPredictor(blank + 1, width, history=self.history, rngs=rngs)
        self.joint = Joint(width, width, width, outputs, rngs=rngs)

    def lengths(self, feature_lengths):
        """Encoder frames for inputs of `feature_lengths` frames."""
        return -(-feature_lengths // self.reduction)

    def __call__(self, features, targets):
        """Logits [B, N, U1, V] of all lattice nodes."""
        return self.joint(self.encoder(features)[:, :, None], self.predictor(targets)[:, None])


class PrunedTransducer(Transducer):
    """Adds linear scores of all classes from encoder and predictor alone, for the simple loss that chooses the band."""

    def __init__(self, features, outputs, blank, width, strides, channels, *, rngs):
        super().__init__(features, outputs, blank, width, strides, channels, rngs=rngs)
        self.frame_scores = nnx.Linear(width, outputs, rngs=rngs)
        self.state_scores = nnx.Linear(width, outputs, rngs=rngs)


def greedy_decode(model, decide, features, feature_lengths, max_labels, max_per_frame=3):
    """Follows the most likely step of each node from (0, 0): labels [B, max_labels] and their number [B].

    `decide(logits [B, V], blank)` returns the symbol to write, or blank for none, and the number of frames to read. All
    utterances advance together, each at its own frame. A frame emits at most `max_per_frame` labels that do not read
    it, so every utterance ends.
    """
    frames, lengths = model.encoder(features), model.lengths(feature_lengths)
    rows = jnp.arange(len(features))

    def running(state):
        return jnp.any(state[0] < lengths)

    def step(state):
        frame, emitted, labels, count, past = state
        here = frames[rows, jnp.minimum(frame, frames.shape[1] - 1)]
        logits = model.joint(here, model.predictor.rows(past))
        symbol, moves = (x.astype(labels.dtype) for x in decide(logits, model.blank))
        emit = (symbol != model.blank) & (emitted < max_per_frame) & (frame < lengths) & (count < max_labels)
        labels = labels.at[rows, jnp.where(emit, count, max_labels)].set(symbol, mode="drop")
        past = jnp.where(emit[:, None], jnp.column_stack([past[:, 1:], symbol]), past)
        moves = jnp.where(emit, moves, jnp.maximum(moves, 1))
        return frame + moves, jnp.where(moves == 0, emitted + 1, 0), labels, count + emit, past

    zeros = jnp.zeros(len(features), jnp.int32)
    labels = jnp.zeros((len(features), max_labels), jnp.int32)
    start = jnp.full((len(features), model.history), model.blank, jnp.int32)
    _, _, labels, count, _ = jax.lax.while_loop(running, step, (zeros, zeros, labels, zeros, start))
    return labels, count
