"""FastConformer: the encoder of Parakeet, and the causal one of Nemotron, which streams too.

B utterances, S feature frames, M mel bins, T encoder frames (S / 8), E width, H heads, D = E / H; C channels of the
subsampling, K its remaining bins. Modules and parameters have the names of `transformers` where they can.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jax_rnnt_speech.model.encoders.base import (
    ACTIVATIONS,
    EPSILON,
    Depthwise,
    Encoder,
    alike,
    cut,
    extended,
    layer_norm,
)

GROUP = 64  # channels of the largest arrays that are in memory at once
MOMENTUM = 0.1  # share of a batch in the running statistics of batch norm, as PyTorch counts it


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """The encoder's sizes. Fields have the names and defaults of `encoder_config` in config.json."""

    model_type: str = "parakeet_encoder"
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    intermediate_size: int = 4096
    hidden_act: str = "silu"
    attention_bias: bool = True
    convolution_bias: bool = True
    conv_kernel_size: int = 9
    subsampling_factor: int = 8
    subsampling_conv_channels: int = 256
    subsampling_conv_kernel_size: int = 3
    subsampling_conv_stride: int = 2
    num_mel_bins: int = 80
    dropout: float = 0.1
    dropout_positions: float = 0.0
    activation_dropout: float = 0.1
    attention_dropout: float = 0.1
    scale_input: bool = True
    sliding_window: int = 71
    default_num_lookahead_tokens: int = 13

    @property
    def causal(self):
        return self.model_type == "nemotron_asr_streaming_encoder"

    @property
    def margins(self):
        """Zeros before and after the input of a strided convolution: only past frames in a causal one."""
        kernel, stride = self.subsampling_conv_kernel_size, self.subsampling_conv_stride
        return (kernel - 1, stride - 1) if self.causal else ((kernel - 1) // 2,) * 2

    def strided(self, length):
        """Returns frames, or bins, after one strided convolution; 0 for 0."""
        more = length + sum(self.margins) - self.subsampling_conv_kernel_size
        # It divides by 2 in one operation; a division of arrays is twenty, which XLA repeats in the loop of each mask.
        return ((more >> 1) + 1) * (length > 0)

    @property
    def strides(self):
        """The number of convolutions that are strided."""
        return round(math.log2(self.subsampling_factor))


class SubsamplingLayer(nnx.Module):
    def __init__(self, config, **more):
        channels, kernel = config.subsampling_conv_channels, config.subsampling_conv_kernel_size
        self.depthwise_conv = Depthwise((kernel, kernel), channels, stride=config.subsampling_conv_stride, **more)
        self.pointwise_conv = nnx.Linear(channels, channels, **more)

    def __call__(self, x):
        return self.pointwise_conv(self.depthwise_conv(x))


class Subsampling(nnx.Module):
    """Strided convolutions over time and bins, then a projection: [B, S, M] -> [B, T, E]."""

    grouped = False  # as in `Depthwise`: each convolution is a whole one, and not a group of channels after the other

    def __init__(self, config, **more):
        channels, kernel = config.subsampling_conv_channels, config.subsampling_conv_kernel_size
        self.config, stride = config, config.subsampling_conv_stride
        self.conv_in = nnx.Conv(1, channels, (kernel, kernel), strides=stride, padding="VALID", **more)
        bins = config.strided(config.num_mel_bins)
        for i in range(config.strides - 1):
            setattr(self, f"layers{i}", SubsamplingLayer(config, **more))
            bins = config.strided(bins)
        self.linear = nnx.Linear(bins * channels, config.hidden_size, **more)
        self.dropout = nnx.Dropout(config.dropout, rngs=more["rngs"])

    def initial(self, batch):
        """Returns the number of frames so far, and the zeros before a stream."""
        count, bins, channels, caches = self.config.subsampling_conv_kernel_size - 1, self.config.num_mel_bins, 1, []
        for _ in range(self.config.strides):
            caches.append(jnp.zeros((batch, count, bins, channels), jnp.float32))
            bins, channels = self.config.strided(bins), self.config.subsampling_conv_channels
        return jnp.zeros((), jnp.int32), caches

    def lengths(self, lengths, past):
        """Returns lengths after a convolution; `past` are the frames before a part of a stream."""
        config = self.config
        if past is None or past.shape[1] > config.subsampling_conv_kernel_size - config.subsampling_conv_stride:
            return config.strided(lengths)
        return -(-lengths // config.subsampling_conv_stride)

    def first(self, x, lengths):
        """Returns (rows after conv_in and layers0, their lengths) of whole utterances, with zeros behind their ends.

        The result of conv_in has four times the size of any array after it. Both convolutions see a channel by itself:
        a training has a few channels at a time in memory, and computes them again in the backward pass.
        """
        config, channels, dtype = self.config, self.config.subsampling_conv_channels, self.conv_in.dtype
        around = [(0, 0), config.margins, config.margins, (0, 0)]
        x, kernel = jnp.pad(x.astype(dtype), around)[..., 0], config.subsampling_conv_kernel_size
        ends = [n - kernel + 1 for n in x.shape[1:]]
        windows = [x[:, i : ends[0] + i : 2, j : ends[1] + j : 2] for i, j in np.ndindex(kernel, kernel)]
        windows, sizes = jnp.stack([x.reshape(-1) for x in windows]), windows[0].shape
        lengths = self.lengths(lengths, None)
        graphdef, parameters = nnx.split([self.conv_in, self.layers0.depthwise_conv])

        def run(parameters):
            convolution, depthwise = nnx.merge(graphdef, parameters)
            kernel, bias = (x[...].astype(dtype) for x in (convolution.kernel, convolution.bias))
            # On CPUs a convolution of one channel takes longer, and so does a product of windows that are rows.
            y = (windows.T @ kernel.reshape(-1, kernel.shape[-1])).reshape(*sizes, -1) + bias
            return depthwise(jnp.pad(jax.nn.relu(cut(y, lengths)), around))

        groups = channels // GROUP if channels % GROUP == 0 else 1
        parameters = jax.tree.map(lambda x: jnp.stack(jnp.split(x, groups, -1)), parameters)
        parts = jax.lax.map(jax.checkpoint(run, prevent_cse=False), parameters)
        x = jnp.moveaxis(parts, 0, -2).reshape(*parts.shape[1:-1], channels)
        lengths = self.lengths(lengths, None)
        return jax.nn.relu(cut(self.layers0.pointwise_conv(x), lengths)), lengths

    def __call__(self, x, lengths, state):
        """Returns (rows [B, T, E], the state after them).

        The state of a stream has the frames before x for each convolution. With None, x is all there is, and zeros
        surround it.
        """
        seen, past = state or (0, None)
        before, after = self.config.margins
        kept = self.config.subsampling_conv_kernel_size - self.config.subsampling_conv_stride
        x, ends = cut(x, lengths)[..., None], []
        layers = [self.conv_in, *(getattr(self, f"layers{i}") for i in range(self.config.strides - 1))]
        if past is None and len(layers) > 1 and not self.grouped:
            (x, lengths), layers = self.first(x, lengths), layers[2:]
        for i, layer in enumerate(layers):
            bins = [(before, after), (0, 0)]
            lengths = self.lengths(lengths, past and past[i])
            if past is None:
                x = jnp.pad(x, [(0, 0), (before, after), *bins])
            else:
                x = jnp.pad(jnp.concatenate([past[i].astype(x.dtype), x], 1), [(0, 0), (0, 0), *bins])
                ends.append(x[:, x.shape[1] - kept :, before : x.shape[2] - after])
            x = jax.nn.relu(cut(layer(x), lengths))
        rows = self.linear(x.reshape(*x.shape[:2], -1))
        rows = self.dropout(rows * math.sqrt(rows.shape[-1]) if self.config.scale_input else rows)
        return rows, state and (seen + rows.shape[1], ends)


class FeedForward(nnx.Module):
    def __init__(self, config, *, rngs, **more):
        more |= {"use_bias": config.attention_bias, "rngs": rngs}
        self.linear1 = nnx.Linear(config.hidden_size, config.intermediate_size, **more)
        self.linear2 = nnx.Linear(config.intermediate_size, config.hidden_size, **more)
        self.dropout = nnx.Dropout(config.activation_dropout, rngs=rngs)
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x):
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


def positions(width, first, last):
    """Returns sines and cosines [first - last + 1, width] of the distances from `first` down to `last`."""
    frequencies = 10000.0 ** (-jnp.arange(0, width, 2, jnp.float32) / width)
    angles = jnp.arange(first, last - 1, -1, jnp.float32)[:, None] * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(-1, width)


def by_distance(scores, keys):
    """Aligns [..., T, P] to [..., T, keys]: score j of query i is at position T - 1 - i + j, that of their distance.

    Row i begins one position before row i - 1, so all rows are one run through memory with steps of P - 1. A row holds
    no more keys than that. So P must be at least keys + 1, which makes a difference where there is a single query.
    """
    *batch, queries, count = scores.shape
    flat = scores.reshape(*batch, queries * count)[..., queries - 1 :]
    return flat[..., : queries * (count - 1)].reshape(*batch, queries, count - 1)[..., :keys]


class Attention(nnx.Module):
    """Self-attention with relative positions, as in Transformer-XL (Dai et al. 2019)."""

    def __init__(self, config, *, rngs, **more):
        width, self.heads = config.hidden_size, config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nnx.Linear(width, width, use_bias=config.attention_bias, rngs=rngs, **more))
        self.relative_k_proj = nnx.Linear(width, width, use_bias=False, rngs=rngs, **more)
        self.bias_u = nnx.Param(jnp.zeros((self.heads, width // self.heads), jnp.float32))
        self.bias_v = nnx.Param(jnp.zeros((self.heads, width // self.heads), jnp.float32))
        self.dropout = nnx.Dropout(config.attention_dropout, rngs=rngs)

    def __call__(self, x, distances, mask, past):
        """Returns (rows [B, T, E], keys and values of the same shape as `past` for the next part of a stream).

        x is [B, T, E]; distances are [P, E]; mask [B or 1, T, L + T] tells which keys a query sees; past has keys and
        values [B, L, E] of the frames before, or is None.
        """

        def split(rows):
            return rows.reshape(*rows.shape[:-1], self.heads, -1)

        query, keys, values = split(self.q_proj(x)), self.k_proj(x), self.v_proj(x)
        if past is not None:
            keys, values = (jnp.concatenate([old.astype(x.dtype), new], 1) for old, new in zip(past, (keys, values)))
            past = keys[:, x.shape[1] :], values[:, x.shape[1] :]
        bias_u, bias_v = (bias[...].astype(query.dtype) for bias in (self.bias_u, self.bias_v))
        content = jnp.einsum("bqhd,bkhd->bhqk", query + bias_u, split(keys))
        position = jnp.einsum("bqhd,phd->bhqp", query + bias_v, split(self.relative_k_proj(distances)))
        scores = (content + by_distance(position, keys.shape[1])) * (x.shape[-1] // self.heads) ** -0.5
        scores = jnp.where(mask[:, None], scores, jnp.finfo(scores.dtype).min)  # finite: a row without keys is no NaN
        weights = self.dropout(jax.nn.softmax(scores, -1))
        rows = jnp.einsum("bhqk,bkhd->bqhd", weights, split(values))
        return self.o_proj(rows.reshape(x.shape)), past


@jax.custom_vjp
def tracking(x, old, new):
    """Returns x. The gradient of statistics `old` is `new`, their next value, through scan, remat and meshes alike."""
    return x


tracking.defvjp(lambda x, old, new: (x, new), lambda new, gradient: (gradient, new, jax.tree.map(jnp.zeros_like, new)))


class BatchNorm(nnx.Module):
    """Normalises channels by running statistics or, in training, by those of a batch's frames without padding."""

    def __init__(self, width, *, dtype, rngs):
        self.scale, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(width)), nnx.BatchStat(jnp.ones(width))
        self.use_running_average, self.dtype = True, dtype

    def __call__(self, x, lengths):
        mean, var = statistics = self.mean[...], self.var[...]
        if not self.use_running_average:
            exact, count = x.astype(jnp.float32), lengths.sum()
            mean = cut(exact, lengths).sum((0, 1)) / jnp.maximum(count, 1)
            var = cut((exact - mean) ** 2, lengths).sum((0, 1)) / jnp.maximum(count, 1)
            rate = jnp.where(count > 1, MOMENTUM, 0)
            unbiased = mean, var * count / jnp.maximum(count - 1, 1)
            mean, var = tracking(
                (mean, var), statistics, jax.tree.map(lambda x, new: x + rate * (new - x), statistics, unbiased)
            )
        factor = self.scale[...] * jax.lax.rsqrt(var + EPSILON)
        return x * factor.astype(self.dtype) + (self.bias[...] - mean * factor).astype(self.dtype)


class Convolution(nnx.Module):
    """A gated convolution over time with batch norm, or with layer norm in a causal encoder."""

    def __init__(self, config, **more):
        width, kernel, bias = config.hidden_size, config.conv_kernel_size, config.convolution_bias
        self.pointwise_conv1 = nnx.Linear(width, 2 * width, use_bias=bias, **more)
        self.depthwise_conv = Depthwise((kernel,), width, bias=bias, **more)
        self.norm = (layer_norm if config.causal else BatchNorm)(width, **more)
        self.pointwise_conv2 = nnx.Linear(width, width, use_bias=bias, **more)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.kernel, self.causal = kernel, config.causal

    def __call__(self, x, lengths, past, ends=None):
        """(rows [B, T, E], frames [B, K - 1, E] before the next part of a stream); `ends` are those of `Depthwise`."""
        x = cut(jax.nn.glu(self.pointwise_conv1(x)), lengths)
        x, end = extended(x, past, self.kernel, self.causal)
        x = self.depthwise_conv(x, ends)
        x = self.norm(x, lengths) if isinstance(self.norm, BatchNorm) else self.norm(x)
        return self.pointwise_conv2(self.activation(x)), end


class Block(nnx.Module):
    def __init__(self, config, **more):
        for name in ("feed_forward1", "feed_forward2"):
            setattr(self, name, FeedForward(config, **more))
        self.self_attn = Attention(config, **more)
        self.conv = Convolution(config, **more)
        for name in ("feed_forward1", "self_att", "conv", "feed_forward2", "out"):
            setattr(self, f"norm_{name}", layer_norm(config.hidden_size, **more))

    def __call__(self, x, shared, past):
        """Returns (rows [B, T, E], past of the next part)."""
        lengths, distances, mask, ends = shared
        x = x + 0.5 * self.feed_forward1(self.norm_feed_forward1(x))
        attended, keys = self.self_attn(self.norm_self_att(x), distances, mask, past[0])
        x = x + attended
        convolved, frames = self.conv(self.norm_conv(x), lengths, past[1], ends)
        x = x + convolved
        x = x + 0.5 * self.feed_forward2(self.norm_feed_forward2(x))
        return self.norm_out(x), (keys, frames)


class FastConformer(Encoder):
    """The encoder of Parakeet and of Nemotron.

    A frame of Nemotron sees the frames of its chunk, and of as many whole chunks before it as `sliding_window` holds.
    """

    def __init__(self, config: EncoderConfig, *, dtype, rngs):
        more = {"dtype": dtype, "rngs": rngs}
        self.config, self.width, self.subsampling = config, config.hidden_size, config.subsampling_factor
        self.chunk = config.default_num_lookahead_tokens + 1 if config.causal else 0
        self.subsample = Subsampling(config, **more)
        self.blocks = alike(config.num_hidden_layers, Block, config, **more)
        self.dropout_positions = nnx.Dropout(config.dropout_positions, rngs=rngs)

    def norm(self, rows):
        """Returns rows unchanged, as each block ends with its own norm."""
        return rows

    def lengths(self, frames):
        for _ in range(self.config.strides):
            frames = self.config.strided(frames)
        return frames

    def frames_of_step(self, first):
        """Returns a step's feature frames: a stream's first frame sees one, and no frame sees ones after its last."""
        return self.subsampling * (self.chunk - first) + first

    def lengths_of_step(self, lengths, first):
        for past in first[1]:
            lengths = self.subsample.lengths(lengths, past)
        return lengths

    def initial(self, batch):
        width, left = self.config.hidden_size, self.config.sliding_window - 1
        keys = (jnp.zeros((batch, left, width), jnp.float32),) * 2
        layer = keys, jnp.zeros((batch, self.config.conv_kernel_size - 1, width), jnp.float32)
        return self.subsample.initial(batch), [layer] * self.config.num_hidden_layers

    def whole(self, batch):
        return None, [(None, None)] * self.config.num_hidden_layers

    def shared(self, rows, lengths, first, context=None):
        """Returns lengths, distances between frames, which keys a query sees, and where convolutions see zeros."""
        count, window = rows.shape[1], self.config.sliding_window - 1
        left, seen = (window, first[0]) if first else (0, 0)
        # Each key and query have their distance in these, and the last one is there for `by_distance` alone.
        distances = self.dropout_positions(positions(rows.shape[-1], left + count - 1, -count))
        mask = (jnp.arange(-left, count) < lengths[:, None])[:, None]
        if self.config.causal:
            keys = seen - left + jnp.arange(left + count)
            apart = keys[left:, None] // self.chunk - keys // self.chunk
            mask &= (keys >= 0) & (apart >= 0) & (apart <= window // self.chunk)
        ends = None
        if context is not None:
            mask, ends = mask & context.visible(count), context.edges(count)[1]
        return lengths, distances.astype(rows.dtype), mask, ends
