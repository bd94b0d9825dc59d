"""A small transducer in Flax NNX: convolutional encoder, stateless predictor, additive joint, greedy decoding.

B utterances, T input frames, N encoder frames (T / reduction), U labels, U1 = U + 1, V outputs: labels, blank and
further ones that the loss needs (variants.py).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jax_rnnt import LinearJoint


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


class Predictor(nnx.Module):
    """Stateless predictor (Ghodsi et al. 2020): a function of the last `history` labels, [..., history] -> [..., P]."""

    def __init__(self, symbols, width, history, *, rngs):
        self.offsets = tuple(symbols * i for i in range(history))  # a label has one embedding for each distance
        self.embed = nnx.Embed(symbols * history, width, rngs=rngs)

    def __call__(self, labels):
        return nnx.relu(self.embed(labels + jnp.array(self.offsets)).sum(-2))


class Joint(nnx.Module):
    """Additive joint of frames and states, paired by broadcasting: [..., E], [..., P] -> [..., V]."""

    def __init__(self, encoder_width, predictor_width, width, outputs, *, rngs):
        self.frame = nnx.Linear(encoder_width, width, rngs=rngs)
        self.state = nnx.Linear(predictor_width, width, use_bias=False, rngs=rngs)
        self.output = nnx.Linear(width, outputs, rngs=rngs)

    def project(self, frames, states):
        """Encoder and predictor rows for `linear`."""
        return self.frame(frames), self.state(states)

    @property
    def linear(self):
        """The rest of the joint, from projected rows to logits, for `joint_rnnt_loss`."""
        return LinearJoint(self.output.kernel[...], self.output.bias[...])

    def __call__(self, frames, states):
        frames, states = self.project(frames, states)
        hidden = jnp.tanh(frames + states)
        # A two-dimensional matmul: with four, XLA's CPU backend transposes its gradient into a second buffer.
        logits = self.output(hidden.reshape(-1, hidden.shape[-1]))
        return logits.reshape(*hidden.shape[:-1], -1)


class Transducer(nnx.Module):
    """Encoder, predictor and joint with `outputs` logits; class `blank` is the blank, with the labels before it."""

    history = 4  # labels that the predictor sees; it must count the repeats of a digit

    def __init__(self, features, outputs, blank, width, strides, channels, *, rngs):
        self.blank = blank
        self.reduction = math.prod(time for time, _ in strides)
        self.encoder = Encoder(features, width, strides, channels, rngs=rngs)
        self.predictor = Predictor(blank + 1, width, self.history, rngs=rngs)
        self.joint = Joint(width, width, width, outputs, rngs=rngs)

    def lengths(self, feature_lengths):
        """Encoder frames for inputs of `feature_lengths` frames."""
        return -(-feature_lengths // self.reduction)

    def states(self, targets):
        """Predictor states [B, U1, P]; the state in column u follows the first u targets."""
        columns = targets.shape[1] + 1
        past = jnp.pad(targets, ((0, 0), (self.history, 0)), constant_values=self.blank)
        return self.predictor(jnp.stack([past[:, i : i + columns] for i in range(self.history)], -1))

    def __call__(self, features, targets):
        """Logits [B, N, U1, V] of all lattice nodes."""
        return self.joint(self.encoder(features)[:, :, None], self.states(targets)[:, None])


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
        logits = model.joint(here, model.predictor(past))
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
