"""The encoder of Whisper (Radford et al. 2022): two convolutions, positions, and transformer blocks.

The original sees 30 seconds, with silence after the recording. This one sees the recording alone; its positions end at
30 s.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_rnnt_speech.model.encoders.base import ACTIVATIONS, Encoder, alike, cut, layer_norm
from jax_rnnt_speech.model.encoders.conformer import Attention, FeedForward

GELU = ACTIVATIONS["gelu"]


@dataclasses.dataclass(frozen=True)
class WhisperConfig:
    """The encoder's sizes. Fields have the names of config.json; defaults are those of Whisper tiny."""

    d_model: int = 384
    encoder_layers: int = 4
    encoder_attention_heads: int = 6
    encoder_ffn_dim: int = 1536
    num_mel_bins: int = 80
    max_source_positions: int = 1500
    dropout: float = 0.0


def positions(count, width):
    """Returns sines, then cosines, of `count` places: [count, width], in the float16 of the released weights."""
    frequencies = 10000.0 ** (-np.arange(width // 2) / (width // 2 - 1))
    angles = np.arange(count)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], 1).astype(np.float16)


class Subsampling(nnx.Module):
    """[B, T, F] -> [B, T / 2, E]: two convolutions, each of three frames side by side and a matrix."""

    def __init__(self, features, width, **more):
        self.conv1, self.conv2 = nnx.Linear(3 * features, width, **more), nnx.Linear(3 * width, width, **more)

    def __call__(self, x, lengths, _):
        for conv, stride in ((self.conv1, 1), (self.conv2, 2)):
            x = jnp.pad(cut(x, lengths), ((0, 0), (1, 1), (0, 0)))
            x = GELU(conv(jnp.concatenate([x[:, i:][:, : x.shape[1] - 2 : stride] for i in range(3)], -1)))
        return x + positions(*x.shape[1:]).astype(x.dtype), None


class Block(nnx.Module):
    def __init__(self, config, *, dtype, rngs):
        more = {"dtype": dtype, "rngs": rngs}
        self.attention = Attention(config.d_model, config.encoder_attention_heads, 0, 0, config.dropout, False, **more)
        self.feed_forward = FeedForward(config.d_model, config.encoder_ffn_dim, config.dropout, GELU, **more)

    def __call__(self, x, lengths, state):
        x = x + self.attention(x, lengths, None)[0]
        return x + self.feed_forward(x), state


class Whisper(Encoder):
    subsampling = 2

    def __init__(self, config: WhisperConfig, *, dtype, rngs):
        more = {"dtype": dtype, "rngs": rngs}
        self.width = config.d_model
        self.subsample = Subsampling(config.num_mel_bins, config.d_model, **more)
        self.blocks = alike(config.encoder_layers, Block, config, **more)
        self.norm = layer_norm(config.d_model, **more)

    def whole(self, batch):
        return None, [None] * len(self.blocks.layers)
