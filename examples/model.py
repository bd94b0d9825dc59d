"""A small transducer in Flax NNX: convolutional encoder, predictor and joint of the library.

B utterances, T input frames, N encoder frames (T / reduction), U labels, U1 = U + 1, V outputs: labels, blank and
further ones that the loss needs (variants.py).
"""

import math

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

    def __init__(self, features, outputs, blank, width, strides, channels, *, masking=0.0, rngs):
        self.blank = blank
        self.reduction = math.prod(time for time, _ in strides)
        self.encoder = Encoder(features, width, strides, channels, rngs=rngs)
        self.predictor = StatelessPredictor(blank + 1, width, history=self.history, rngs=rngs)
        self.joint = Joint(width, width, width, outputs, masking=masking, rngs=rngs)

    def lengths(self, feature_lengths):
        """Encoder frames for inputs of `feature_lengths` frames."""
        return -(-feature_lengths // self.reduction)

    def __call__(self, features, targets):
        """Logits [B, N, U1, V] of all lattice nodes."""
        return self.joint(self.encoder(features)[:, :, None], self.predictor(targets)[:, None])

    def decoder_inputs(self, features, feature_lengths):
        """What follows the loss among the arguments of a decoder: joint, predictor, encoder rows and their lengths."""
        networks = self.joint.decoder_inputs(self.predictor, self.encoder(features))
        return *networks, self.lengths(feature_lengths)


class PrunedTransducer(Transducer):
    """Adds linear scores of all classes from encoder and predictor alone, for the simple loss that chooses the band."""

    def __init__(self, features, outputs, blank, width, strides, channels, *, rngs):
        super().__init__(features, outputs, blank, width, strides, channels, rngs=rngs)
        self.frame_scores = nnx.Linear(width, outputs, rngs=rngs)
        self.state_scores = nnx.Linear(width, outputs, rngs=rngs)
