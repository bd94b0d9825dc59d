"""A transducer in Flax NNX: Conformer-like encoder, predictor and joint of the library.

B utterances, T input frames of F features, N encoder frames (T / subsampling), E the width of a row, U labels. Frames
after the end of an utterance never change those before. With a chunk, a frame sees those of its chunk and `past` frames
before it, and convolutions see the past alone (Gulati et al. 2020; Chen et al. 2021 for chunks). So audio can arrive in
chunks: `initial` and `step` give the rows of the whole, up to rounding.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jax_rnnt.flax.nnx import Joint, LSTMPredictor, StatelessPredictor


def inside(lengths, size):
    """Which of `size` frames belong to the utterances: bool [B, size]."""
    return jnp.arange(size) < lengths[:, None]


def extended(x, before, kernel):
    """(x with the frames that a convolution over time sees around it, those to keep for the next chunk).

    `before` [B, kernel - 1, ...] are the frames before x; None: x is the whole utterance, with zeros at both ends.
    """
    if before is None:
        around = (kernel - 1) // 2, kernel // 2
        return jnp.pad(x, ((0, 0), around, *((0, 0),) * (x.ndim - 2))), None
    x = jnp.concatenate([before.astype(x.dtype), x], 1)
    return x, x[:, x.shape[1] - (kernel - 1) :]


class Subsampling(nnx.Module):
    """Strided convolutions over time and features: [B, T, F] -> [B, N, E]."""

    def __init__(self, features, width, strides, channels, *, dtype, rngs):
        self.strides, self.features, convs, sizes = strides, features, [], [1] + [channels] * len(strides)
        for i, stride in enumerate(strides):
            padding = ((0, 0), (1, 1))
            convs.append(nnx.Conv(*sizes[i : i + 2], (3, 3), stride, padding=padding, dtype=dtype, rngs=rngs))
        self.convs = nnx.Sequential(*convs)  # as a list of modules
        self.project = nnx.Linear(self.shapes()[-1][0] * channels, width, dtype=dtype, rngs=rngs)

    def shapes(self):
        """Features and channels of the input and of each convolution."""
        shapes = [(self.features, 1)]
        for conv, (_, stride) in zip(self.convs.layers, self.strides):
            shapes.append((-(-shapes[-1][0] // stride), conv.out_features))
        return shapes

    def initial(self, batch):
        return [jnp.zeros((batch, 2, *shape)) for shape in self.shapes()[:-1]]

    def __call__(self, x, lengths, state):
        x, after = x[..., None], []
        for conv, (stride, _), before in zip(self.convs.layers, self.strides, state):
            x, before = extended(x * inside(lengths, x.shape[1])[..., None, None], before, 3)
            x, lengths = nnx.relu(conv(x)), -(-lengths // stride)
            after.append(before)
        return self.project(x.reshape(*x.shape[:2], -1)), after


class FeedForward(nnx.Module):
    def __init__(self, width, expansion, dropout, *, dtype, rngs):
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.rise = nnx.Linear(width, expansion * width, dtype=dtype, rngs=rngs)
        self.fall = nnx.Linear(expansion * width, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.fall(nnx.silu(self.rise(self.norm(x)))))


def rotated(x, first):
    """Rows [B, N, H, D] of frames from `first` on, with their place in pairs of angles (RoPE, Su et al. 2021)."""
    half = x.shape[-1] // 2
    angles = (first + jnp.arange(x.shape[1]))[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nnx.Module):
    def __init__(self, width, heads, chunk, past, dropout, *, dtype, rngs):
        self.heads, self.chunk, self.past = heads, chunk, past
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        self.inputs = nnx.Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.output = nnx.Linear(width, width, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def initial(self, batch):
        """Keys and values of the `past` frames before, and how many of them there are."""
        shape = batch, self.past, self.heads, self.inputs.in_features // self.heads
        return jnp.zeros(shape), jnp.zeros(shape), jnp.zeros((), jnp.int32)

    def __call__(self, x, lengths, state):
        frames = x.shape[1]
        query, key, value = jnp.split(self.inputs(self.norm(x)).reshape(*x.shape[:2], self.heads, -1), 3, -1)
        if state is None:
            place = jnp.arange(frames)
            visible = inside(lengths, frames)[:, None]
            if self.chunk:
                start = (place // self.chunk * self.chunk)[:, None]
                visible &= (place >= start - self.past) & (place < start + self.chunk)
            query, key = rotated(query, 0), rotated(key, 0)
        else:
            *before, seen = state
            key, value = (jnp.concatenate([old.astype(x.dtype), new], 1) for old, new in zip(before, (key, value)))
            place = jnp.arange(-self.past, frames)
            visible = ((place >= -seen) & (place < lengths[:, None]))[:, None]
            state = key[:, frames:], value[:, frames:], jnp.minimum(seen + frames, self.past)
            query, key = rotated(query, self.past), rotated(key, 0)
        visible = jnp.broadcast_to(visible, (len(x), frames, key.shape[1]))
        x = jax.nn.dot_product_attention(query, key, value, mask=visible[:, None])
        return self.dropout(self.output(x.reshape(*x.shape[:2], -1))), state


class Depthwise(nnx.Module):
    """A convolution over time of each feature alone, without padding: [B, N + kernel - 1, E] -> [B, N, E].

    As a sum of shifted rows: XLA's grouped convolution takes 12 times as long on a CPU.
    """

    def __init__(self, width, kernel, *, dtype, rngs):
        self.taps = nnx.Param(jax.random.normal(rngs.params(), (kernel, width)) / kernel**0.5)
        self.bias, self.dtype = nnx.Param(jnp.zeros(width)), dtype

    def __call__(self, x):
        taps, bias, x = (y.astype(self.dtype) for y in (self.taps[...], self.bias[...], x))
        frames = x.shape[1] - len(taps) + 1
        return sum(x[:, i : i + frames] * tap for i, tap in enumerate(taps)) + bias


class Convolution(nnx.Module):
    def __init__(self, width, kernel, dropout, *, dtype, rngs):
        self.kernel, options = kernel, {"dtype": dtype, "rngs": rngs}
        self.norm = nnx.LayerNorm(width, **options)
        self.gate = nnx.Linear(width, 2 * width, **options)
        self.depthwise = Depthwise(width, kernel, **options)
        self.norm2 = nnx.LayerNorm(width, **options)  # of a batch, statistics would see other utterances
        self.output = nnx.Linear(width, width, **options)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def initial(self, batch):
        return jnp.zeros((batch, self.kernel - 1, self.output.in_features))

    def __call__(self, x, lengths, before):
        x = nnx.glu(self.gate(self.norm(x))) * inside(lengths, x.shape[1])[..., None]
        x, before = extended(x, before, self.kernel)
        return self.dropout(self.output(nnx.silu(self.norm2(self.depthwise(x))))), before


class Block(nnx.Module):
    """Half a feed-forward layer, attention, convolution, and another half: [B, N, E] -> [B, N, E]."""

    whole = None, None  # the state of whole utterances, in which every frame sees all others

    def __init__(self, config, *, dtype, rngs):
        more = {"dtype": dtype, "rngs": rngs}
        self.first = FeedForward(config.width, config.expansion, config.dropout, **more)
        self.attention = Attention(config.width, config.heads, config.chunk, config.past, config.dropout, **more)
        self.convolution = Convolution(config.width, config.kernel, config.dropout, **more)
        self.second = FeedForward(config.width, config.expansion, config.dropout, **more)

    def initial(self, batch):
        return self.attention.initial(batch), self.convolution.initial(batch)

    def before_all(self, batch):
        """The state of whole utterances in chunks: attention knows their chunks, convolutions see zeros."""
        return None, self.convolution.initial(batch)

    def __call__(self, x, lengths, state):
        x = x + 0.5 * self.first(x)
        y, attention = self.attention(x, lengths, state[0])
        x = x + y
        y, convolution = self.convolution(x, lengths, state[1])
        x = x + y
        return x + 0.5 * self.second(x), (attention, convolution)


class Residual(nnx.Module):
    """A dilated convolution over time, quick to learn and to run: [B, N, E] -> [B, N, E]."""

    whole = None

    def __init__(self, config, dilation, *, dtype, rngs):
        width, self.reach = config.width, (config.kernel - 1) * dilation + 1
        self.norm = nnx.LayerNorm(width, dtype=dtype, rngs=rngs)
        shape = {"kernel_size": (config.kernel,), "kernel_dilation": dilation, "padding": "VALID"}
        self.conv = nnx.Conv(width, width, **shape, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def initial(self, batch):
        return jnp.zeros((batch, self.reach - 1, self.conv.in_features))

    before_all = initial

    def __call__(self, x, lengths, before):
        y, before = extended(self.norm(x) * inside(lengths, x.shape[1])[..., None], before, self.reach)
        return x + self.dropout(nnx.relu(self.conv(y))), before


def recomputed(block):
    """The block, computed again in the backward pass. Its dropout counts no call, and is drawn once a step."""
    graphdef, state = nnx.split(block)
    run = jax.checkpoint(lambda state, *inputs: nnx.merge(graphdef, state)(*inputs))
    return functools.partial(run, state)


class Transducer(nnx.Module):
    """Encoder, predictor and joint with `outputs` logits; class `blank` is the blank, with the labels before it."""

    def __init__(self, config, features, blank, outputs, *, rngs):
        self.chunk, self.remat = config.chunk, config.remat
        self.strides = tuple(map(tuple, config.strides))
        self.subsampling, dtype = math.prod(time for time, _ in self.strides), jnp.dtype(config.dtype)
        more, width = {"dtype": dtype, "rngs": rngs}, config.width
        self.subsample = Subsampling(features, width, self.strides, config.channels, **more)
        if config.encoder == "conformer":
            blocks = [Block(config, **more) for _ in range(config.blocks)]
        else:
            blocks = [Residual(config, 2**i, **more) for i in range(config.blocks)]
        self.blocks, self.norm = nnx.Sequential(*blocks), nnx.LayerNorm(width, **more)
        if config.predictor == "lstm":
            self.predictor = LSTMPredictor(blank + 1, width, **more)
        else:
            self.predictor = StatelessPredictor(blank + 1, width, history=config.history, **more)
        self.joint = Joint(width, width, width, outputs, dropout=config.dropout, **more)
        if config.loss == "pruned":  # linear scores of all classes, for the simple loss that chooses the band
            self.frame_scores, self.state_scores = (nnx.Linear(width, outputs, **more) for _ in range(2))

    def initial(self, batch):
        """The state of an encoder in chunks, before the first one."""
        return self.subsample.initial(batch), [block.initial(batch) for block in self.blocks.layers]

    def step(self, x, lengths, state):
        """Rows [B, N, E] of features [B, T, F], their lengths [B], and the state after them."""
        x, first = self.subsample(x, lengths, state[0])
        lengths, states = -(-lengths // self.subsampling), []
        for block, before in zip(self.blocks.layers, state[1]):
            x, after = (recomputed(block) if self.remat else block)(x, lengths, before)
            states.append(after)
        return self.norm(x), lengths, (first, states)

    def encode(self, x, lengths):
        """Rows [B, N, E] of whole utterances [B, T, F], and their lengths [B]."""
        if self.chunk:
            state = self.subsample.initial(len(x)), [block.before_all(len(x)) for block in self.blocks.layers]
        else:
            state = [None] * len(self.strides), [block.whole for block in self.blocks.layers]
        return self.step(x, lengths, state)[:2]
