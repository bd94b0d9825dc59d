"""The conformer (Gulati et al. 2020), for whole utterances or in chunks (Chen et al. 2021).

With a chunk, a frame sees those of its chunk and `past` frames before it, and convolutions see only the past. So audio
can arrive in chunks: `initial` and `step` give the rows of the whole, up to rounding.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jax_rnnt_speech.model.encoders.base import Depthwise, Encoder, alike, cut, extended, inside, layer_norm


class Subsampling(nnx.Module):
    """Strided convolutions over time and features: [B, T, F] -> [B, N, E]."""

    def __init__(self, features, width, strides, channels, *, dtype, rngs):
        self.strides, self.features, convs, sizes = strides, features, [], [1] + [channels] * len(strides)
        for i, stride in enumerate(strides):
            padding = ((0, 0), (1, 1))
            convs.append(nnx.Conv(*sizes[i : i + 2], (3, 3), stride, padding=padding, dtype=dtype, rngs=rngs))
        self.convs = nnx.Sequential(*convs)  # in place of a list: `__call__` runs each by itself
        self.project = nnx.Linear(self.shapes()[-1][0] * channels, width, dtype=dtype, rngs=rngs)

    def shapes(self):
        """Returns features and channels of the input and of each convolution."""
        shapes = [(self.features, 1)]
        for conv, (_, stride) in zip(self.convs.layers, self.strides):
            shapes.append((-(-shapes[-1][0] // stride), conv.out_features))
        return shapes

    def initial(self, batch):
        return [jnp.zeros((batch, 2, *shape)) for shape in self.shapes()[:-1]]

    def __call__(self, x, lengths, state):
        x, after = x[..., None], []
        for conv, (stride, _), before in zip(self.convs.layers, self.strides, state):
            x, before = extended(cut(x, lengths), before, 3)
            x, lengths = nnx.relu(conv(x)), -(-lengths // stride)
            after.append(before)
        return self.project(x.reshape(*x.shape[:2], -1)), after


class FeedForward(nnx.Module):
    """Normalisation, a wider layer with an activation, and back to the width: [B, N, E] -> [B, N, E]."""

    def __init__(self, width, hidden, dropout, activation=nnx.silu, *, dtype, rngs):
        self.norm = layer_norm(width, dtype=dtype, rngs=rngs)
        self.rise = nnx.Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.fall = nnx.Linear(hidden, width, dtype=dtype, rngs=rngs)
        self.dropout, self.activation = nnx.Dropout(dropout, rngs=rngs), activation

    def __call__(self, x):
        return self.dropout(self.fall(self.activation(self.rise(self.norm(x)))))


def rotated(x, first):
    """Rotates rows [B, N, H, D] of frames from `first` on by angles of their place (RoPE, Su et al. 2021)."""
    half = x.shape[-1] // 2
    angles = (first + jnp.arange(x.shape[1]))[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nnx.Module):
    """Self-attention. If `rotary`, rows know their place by angles; otherwise they know it already."""

    def __init__(self, width, heads, chunk, past, dropout, rotary=True, *, dtype, rngs):
        self.heads, self.chunk, self.past, self.rotary = heads, chunk, past, rotary
        self.norm = layer_norm(width, dtype=dtype, rngs=rngs)
        self.inputs = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)  # query, key, value of each head
        self.output = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def initial(self, batch):
        """Returns keys and values of the `past` frames before, and how many of them there are."""
        shape = batch, self.past, self.heads, self.inputs.in_features // self.heads
        return jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((), jnp.int32)

    def __call__(self, x, lengths, state, context=None):
        frames = x.shape[1]
        query, key, value = jnp.split(self.inputs(self.norm(x)).reshape(*x.shape[:2], self.heads, -1), 3, -1)
        if state is None:
            place = jnp.arange(frames)
            visible = inside(lengths, frames)[:, None]
            if context is not None:
                visible &= context.visible(frames)
            if self.chunk:
                start = (place // self.chunk * self.chunk)[:, None]
                visible &= (place >= start - self.past) & (place < start + self.chunk)
            first = 0
        else:
            *before, seen = state
            key, value = (jnp.concatenate([old.astype(x.dtype), new], 1) for old, new in zip(before, (key, value)))
            place = jnp.arange(-self.past, frames)
            visible = ((place >= -seen) & (place < lengths[:, None]))[:, None]
            state, first = (key[:, frames:], value[:, frames:], jnp.minimum(seen + frames, self.past)), self.past
        if self.rotary:
            query, key = rotated(query, first), rotated(key, 0)
        visible = jnp.broadcast_to(visible, (x.shape[0], frames, key.shape[1]))
        x = jax.nn.dot_product_attention(query, key, value, mask=visible[:, None])
        return self.dropout(self.output(x.reshape(*x.shape[:2], -1))), state


class Convolution(nnx.Module):
    """A gate, and a convolution over frames of each feature, which begins with the last frames of the state."""

    def __init__(self, width, kernel, dropout, *, dtype, rngs):
        self.kernel, options = kernel, {"dtype": dtype, "rngs": rngs}
        self.norm = layer_norm(width, **options)
        self.gate = nnx.Linear(width, 2 * width, **options)
        self.depthwise = Depthwise((kernel,), width, **options)
        self.norm2 = layer_norm(width, **options)  # statistics of a batch would see other utterances
        self.output = nnx.Linear(width, width, **options)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def initial(self, batch):
        return jnp.zeros((batch, self.kernel - 1, self.output.in_features))

    def __call__(self, x, lengths, before, context=None):
        ends = None if context is None else context.edges(x.shape[1])[1]
        x, before = extended(cut(nnx.glu(self.gate(self.norm(x))), lengths), before, self.kernel)
        return self.dropout(self.output(nnx.silu(self.norm2(self.depthwise(x, ends))))), before


class Block(nnx.Module):
    """Half a feed-forward layer, attention, convolution, and another half: [B, N, E] -> [B, N, E]."""

    whole = None, None  # the state of whole utterances, in which every frame sees all others

    def __init__(self, config, *, dtype, rngs):
        more, sizes, dropout = {"dtype": dtype, "rngs": rngs}, config.blocks, config.network.dropout
        self.first = FeedForward(sizes.width, sizes.expansion * sizes.width, dropout, **more)
        chunks = config.encoder.step, config.encoder.past
        self.attention = Attention(sizes.width, sizes.heads, *chunks, dropout, **more)
        self.convolution = Convolution(sizes.width, sizes.convolution, dropout, **more)
        self.second = FeedForward(sizes.width, sizes.expansion * sizes.width, dropout, **more)

    def initial(self, batch):
        return self.attention.initial(batch), self.convolution.initial(batch)

    def before_all(self, batch):
        """Returns the state of whole utterances in chunks: attention knows their chunks, convolutions see zeros."""
        return None, self.convolution.initial(batch)

    def __call__(self, x, shared, state):
        lengths, context = shared
        x = x + 0.5 * self.first(x)
        y, attention = self.attention(x, lengths, state[0], context)
        x = x + y
        y, convolution = self.convolution(x, lengths, state[1], context)
        x = x + y
        return x + 0.5 * self.second(x), (attention, convolution)


class Conformer(Encoder):
    """Strided convolutions, and blocks of the sizes in the configuration."""

    def __init__(self, config, features, *, dtype, rngs):
        more = {"dtype": dtype, "rngs": rngs}
        self.width, self.chunk, strides = config.blocks.width, config.encoder.step, config.encoder.strides
        self.subsampling = math.prod(time for time, _ in strides)
        self.subsample = Subsampling(features, config.blocks.width, strides, config.encoder.channels, **more)
        self.blocks = self.layers(config, **more)
        self.norm = layer_norm(config.blocks.width, **more)

    @staticmethod
    def layers(config, **more):
        return alike(config.blocks.count, Block, config, **more)

    def shared(self, rows, lengths, first, context=None):
        return lengths, context

    def initial(self, batch):
        """Returns the state of a stream before its first chunk."""
        return self.subsample.initial(batch), [block.initial(batch) for block in self.blocks.layers]

    def whole(self, batch):
        """Returns the state of whole utterances."""
        if self.chunk:
            return self.subsample.initial(batch), [block.before_all(batch) for block in self.blocks.layers]
        return [None] * len(self.subsample.strides), [block.whole for block in self.blocks.layers]
