"""FastConformer encoders in Flax NNX: that of Parakeet, and the causal one of Nemotron, which streams too.

B utterances, S feature frames, M mel bins, T encoder frames (S / 8), E width, H heads, D = E / H; C channels of the
subsampling, K its remaining bins. Modules and parameters have the names of `transformers` where they can.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ACTIVATIONS = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": lambda x: jax.nn.gelu(x, approximate=False)}
EPSILON = 1e-5  # PyTorch's, in all norms


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Fields have the names and defaults of `encoder_config` in config.json."""

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
        """Zeros before and after what a strided convolution reads: past frames alone in a causal one."""
        kernel, stride = self.subsampling_conv_kernel_size, self.subsampling_conv_stride
        return (kernel - 1, stride - 1) if self.causal else ((kernel - 1) // 2,) * 2

    def strided(self, length):
        """Frames, or bins, after one strided convolution; of none, none."""
        more = length + sum(self.margins) - self.subsampling_conv_kernel_size
        return (more // self.subsampling_conv_stride + 1) * (length > 0)

    def length(self, frames):
        """Encoder frames of so many feature frames."""
        for _ in range(self.strides):
            frames = self.strided(frames)
        return frames

    @property
    def strides(self):
        """How many convolutions are strided."""
        return round(math.log2(self.subsampling_factor))


def cut(x, lengths):
    """Zeros from `lengths` on in x [B, S, ...]; None: as it is."""
    if lengths is None:
        return x
    inside = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), x, 0)


def make_dropout(rate, rngs):
    """A layer; without dropout no random state."""
    return nnx.Dropout(rate, rngs=rngs) if rate else lambda x: x


class Depthwise(nnx.Module):
    """Convolution of each channel by itself over one or two dimensions: a sum of shifted products.

    XLA's own convolution with a group for each channel takes 20 to 60 times as long on two cores of a CPU.
    """

    def __init__(self, kernel, channels, *, stride=1, bias=True, rngs):
        init = nnx.initializers.normal(math.prod(kernel) ** -0.5)
        self.kernel = nnx.Param(init(rngs.params(), (*kernel, channels), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32)) if bias else None
        self.stride = stride

    def __call__(self, x):
        """x [B, *sizes, C], zeros around it included."""
        kernel = jnp.asarray(self.kernel)
        *sizes, _ = kernel.shape
        counts = [(n - k) // self.stride + 1 for n, k in zip(x.shape[1:], sizes)]
        out = 0 if self.bias is None else jnp.asarray(self.bias)
        # Every stride-th entry first, so that few gradients of slices are as large as x.
        phases = np.ndindex(*(min(k, self.stride) for k in sizes))
        parts = {phase: x[:, *(slice(start, None, self.stride) for start in phase)] for phase in phases}
        for offset in np.ndindex(*sizes):
            steps, phase = zip(*(divmod(o, self.stride) for o in offset))
            window = [slice(step, step + count) for step, count in zip(steps, counts)]
            out = out + parts[phase][:, *window] * kernel[offset]
        return out


class SubsamplingLayer(nnx.Module):
    def __init__(self, config, *, rngs):
        channels, kernel = config.subsampling_conv_channels, config.subsampling_conv_kernel_size
        self.depthwise_conv = Depthwise((kernel, kernel), channels, stride=config.subsampling_conv_stride, rngs=rngs)
        self.pointwise_conv = nnx.Linear(channels, channels, rngs=rngs)

    def __call__(self, x):
        return self.pointwise_conv(self.depthwise_conv(x))


class Subsampling(nnx.Module):
    """Strided convolutions over time and bins, then a projection: [B, S, M] -> [B, T, E]."""

    def __init__(self, config, *, rngs):
        channels, kernel = config.subsampling_conv_channels, config.subsampling_conv_kernel_size
        size, stride = (kernel, kernel), config.subsampling_conv_stride
        self.config = config
        self.conv_in = nnx.Conv(1, channels, size, strides=stride, padding="VALID", rngs=rngs)
        bins = config.strided(config.num_mel_bins)
        for i in range(config.strides - 1):
            setattr(self, f"layers{i}", SubsamplingLayer(config, rngs=rngs))
            bins = config.strided(bins)
        self.linear = nnx.Linear(bins * channels, config.hidden_size, rngs=rngs)

    def __call__(self, x, lengths=None, past=None):
        """(rows [B, T, E], lengths [B], what the next part of a stream needs of this one).

        `past` has the frames before x for each convolution; None: x is all there is, and zeros surround it.
        """
        before, after = self.config.margins
        kept = self.config.subsampling_conv_kernel_size - self.config.subsampling_conv_stride
        x, ends = cut(x, lengths)[..., None], []
        for i, layer in enumerate(
            [self.conv_in, *(getattr(self, f"layers{j}") for j in range(self.config.strides - 1))]
        ):
            bins = [(before, after), (0, 0)]
            if past is None:
                x = jnp.pad(x, [(0, 0), (before, after), *bins])
            else:
                x = jnp.pad(jnp.concatenate([past[i], x], 1), [(0, 0), (0, 0), *bins])
                ends.append(x[:, x.shape[1] - kept :, before : x.shape[2] - after])
            lengths = None if lengths is None else self.config.strided(lengths)
            x = jax.nn.relu(cut(layer(x), lengths))
        return self.linear(x.reshape(*x.shape[:2], -1)), lengths, ends

    def start(self, batch):
        """The zeros before a stream."""
        count, bins, channels, caches = self.config.subsampling_conv_kernel_size - 1, self.config.num_mel_bins, 1, []
        for _ in range(self.config.strides):
            caches.append(jnp.zeros((batch, count, bins, channels), jnp.float32))
            bins, channels = self.config.strided(bins), self.config.subsampling_conv_channels
        return caches


class FeedForward(nnx.Module):
    def __init__(self, config, *, rngs):
        options = dict(use_bias=config.attention_bias, rngs=rngs)
        self.linear1 = nnx.Linear(config.hidden_size, config.intermediate_size, **options)
        self.linear2 = nnx.Linear(config.intermediate_size, config.hidden_size, **options)
        self.dropout = make_dropout(config.activation_dropout, rngs)
        self.activation = ACTIVATIONS[config.hidden_act]

    def __call__(self, x):
        return self.linear2(self.dropout(self.activation(self.linear1(x))))


def positions(width, first, last):
    """Sines and cosines [first - last + 1, width] of the distances from `first` down to `last`."""
    frequencies = 10000.0 ** (-jnp.arange(0, width, 2, jnp.float32) / width)
    angles = jnp.arange(first, last - 1, -1, jnp.float32)[:, None] * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], -1).reshape(-1, width)


def by_distance(scores, keys):
    """[..., T, P] -> [..., T, keys]: score j of query i is that of position T - 1 - i + j, which is their distance's.

    Row i begins one position before row i - 1, so all rows are one run through memory with steps of P - 1.
    """
    *batch, queries, count = scores.shape
    flat = scores.reshape(*batch, queries * count)[..., queries - 1 :]
    return flat[..., : queries * (count - 1)].reshape(*batch, queries, count - 1)[..., :keys]


class Attention(nnx.Module):
    """Self-attention with relative positions, as in Transformer-XL (Dai et al. 2019)."""

    def __init__(self, config, *, rngs):
        width, self.heads = config.hidden_size, config.num_attention_heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nnx.Linear(width, width, use_bias=config.attention_bias, rngs=rngs))
        self.relative_k_proj = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.bias_u = nnx.Param(jnp.zeros((self.heads, width // self.heads), jnp.float32))
        self.bias_v = nnx.Param(jnp.zeros((self.heads, width // self.heads), jnp.float32))
        self.dropout = make_dropout(config.attention_dropout, rngs)

    def __call__(self, x, distances, mask, past=None):
        """(rows [B, T, E], keys and values of the same shape as `past` for the next part of a stream).

        x [B, T, E]; distances [P, E]; mask [B or 1, T, L + T]: which keys a query sees; past: keys and values
        [B, L, E] of the frames before.
        """

        def split(rows):
            return rows.reshape(*rows.shape[:-1], self.heads, -1)

        query, keys, values = split(self.q_proj(x)), self.k_proj(x), self.v_proj(x)
        if past is not None:
            keys, values = (jnp.concatenate(both, 1) for both in zip(past, (keys, values)))
            past = keys[:, x.shape[1] :], values[:, x.shape[1] :]
        content = jnp.einsum("bqhd,bkhd->bhqk", query + self.bias_u, split(keys))
        position = jnp.einsum("bqhd,phd->bhqp", query + self.bias_v, split(self.relative_k_proj(distances)))
        scores = (content + by_distance(position, keys.shape[1])) * (x.shape[-1] // self.heads) ** -0.5
        scores = jnp.where(mask[:, None], scores, jnp.finfo(scores.dtype).min)  # finite: a row without keys is no NaN
        weights = self.dropout(jax.nn.softmax(scores, -1))
        rows = jnp.einsum("bhqk,bkhd->bqhd", weights, split(values))
        return self.o_proj(rows.reshape(x.shape)), past


class Convolution(nnx.Module):
    """Gated convolution over time; batch norm, or layer norm in a causal encoder."""

    def __init__(self, config, *, rngs):
        width, kernel = config.hidden_size, config.conv_kernel_size
        options = dict(use_bias=config.convolution_bias, rngs=rngs)
        self.pointwise_conv1 = nnx.Linear(width, 2 * width, **options)
        self.depthwise_conv = Depthwise((kernel,), width, bias=config.convolution_bias, rngs=rngs)
        if config.causal:
            self.norm = nnx.LayerNorm(width, epsilon=EPSILON, rngs=rngs)
        else:
            self.norm = nnx.BatchNorm(width, momentum=0.9, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)
        self.pointwise_conv2 = nnx.Linear(width, width, **options)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.margins = (kernel - 1, 0) if config.causal else ((kernel - 1) // 2,) * 2

    def __call__(self, x, lengths, past=None):
        """(rows [B, T, E], frames [B, K - 1, E] before the next part of a stream)."""
        x = cut(jax.nn.glu(self.pointwise_conv1(x)), lengths)
        x = jnp.pad(x, [(0, 0), self.margins, (0, 0)]) if past is None else jnp.concatenate([past, x], 1)
        end = x[:, x.shape[1] - self.margins[0] :]
        return self.pointwise_conv2(self.activation(self.norm(self.depthwise_conv(x)))), end


class Block(nnx.Module):
    def __init__(self, config, *, rngs):
        for name in ("feed_forward1", "feed_forward2"):
            setattr(self, name, FeedForward(config, rngs=rngs))
        self.self_attn = Attention(config, rngs=rngs)
        self.conv = Convolution(config, rngs=rngs)
        for name in ("feed_forward1", "self_att", "conv", "feed_forward2", "out"):
            setattr(self, f"norm_{name}", nnx.LayerNorm(config.hidden_size, epsilon=EPSILON, rngs=rngs))

    def __call__(self, x, lengths, distances, mask, past=(None, None)):
        """(rows [B, T, E], past of the next part)."""
        x = x + 0.5 * self.feed_forward1(self.norm_feed_forward1(x))
        attended, keys = self.self_attn(self.norm_self_att(x), distances, mask, past[0])
        x = x + attended
        convolved, frames = self.conv(self.norm_conv(x), lengths, past[1])
        x = x + convolved
        x = x + 0.5 * self.feed_forward2(self.norm_feed_forward2(x))
        return self.norm_out(x), (keys, frames)


class Encoder(nnx.Module):
    """Features [B, S, M] and lengths [B] -> rows [B, T, E] and lengths [B]; later rows mean nothing."""

    def __init__(self, config: EncoderConfig, *, rngs):
        self.config = config
        self.subsampling = Subsampling(config, rngs=rngs)
        for i in range(config.num_hidden_layers):
            setattr(self, f"layers{i}", Block(config, rngs=rngs))
        self.dropout = make_dropout(config.dropout, rngs)
        self.dropout_positions = make_dropout(config.dropout_positions, rngs)

    @property
    def blocks(self) -> list[Callable]:
        return [getattr(self, f"layers{i}") for i in range(self.config.num_hidden_layers)]

    def __call__(self, features, lengths, lookahead=None):
        x, lengths, _ = self.subsampling(features, lengths)
        inside = jnp.arange(x.shape[1]) < lengths[:, None]
        mask = inside[:, None] & self.chunks(x.shape[1], 0, 0, lookahead)
        x, distances = self._scaled(x, 0)
        for block in self.blocks:
            x, _ = block(x, lengths, distances, mask)
        return x, lengths

    def stream(self, features, state=None, lookahead=None):
        """(rows [B, T, E], state): the next frames of streams, whose rows are those of whole utterances.

        The first part has 1 + 8 lookahead feature frames, later ones have 8 (lookahead + 1); T = lookahead + 1. After
        the end of a recording come zeros.
        """
        if not self.config.causal:
            raise ValueError(f"Encoder.stream: the encoder must be causal, got a {self.config.model_type}.")
        left = self.config.sliding_window - 1
        expected = self.frames_of_part(state is None, lookahead)
        if features.shape[1] != expected:
            raise ValueError(f"Encoder.stream: features must have {expected} frames, got {features.shape[1]}.")
        seen, convs, layers = self._start(len(features)) if state is None else state
        x, _, convs = self.subsampling(features, past=convs)
        x, distances = self._scaled(x, left)
        mask, after = self.chunks(x.shape[1], left, seen, lookahead), []
        for block, past in zip(self.blocks, layers):
            x, past = block(x, None, distances, mask, past)
            after.append(past)
        return x, (seen + x.shape[1], convs, after)

    def frames_of_part(self, first, lookahead=None):
        """Feature frames of the first part of a stream, or of a later one."""
        lookahead = self._lookahead(lookahead)
        return self.config.subsampling_factor * (lookahead + (not first)) + first

    def chunks(self, count, past, seen, lookahead=None):
        """Mask [1, T, L + T] of the keys that a query sees: its chunk and those of the left context.

        `count` T frames after `past` L earlier ones; `seen` frames of the stream came before, some of which may be
        older than L. An encoder that is not causal sees all.
        """
        if not self.config.causal:
            return jnp.ones((1, count, past + count), bool)
        size = self._lookahead(lookahead) + 1
        keys = seen - past + jnp.arange(past + count)
        distance = (keys[past:, None] // size) - keys // size
        return ((keys >= 0) & (distance >= 0) & (distance <= (self.config.sliding_window - 1) // size))[None]

    def _lookahead(self, lookahead):
        return self.config.default_num_lookahead_tokens if lookahead is None else lookahead

    def _scaled(self, x, past):
        """(x, distances) of frames after `past` earlier ones."""
        width, count = x.shape[-1], x.shape[1]
        x = self.dropout(x * math.sqrt(width) if self.config.scale_input else x)
        return x, self.dropout_positions(positions(width, past + count - 1, 1 - count))

    def _start(self, batch):
        width, left = self.config.hidden_size, self.config.sliding_window - 1
        keys = (jnp.zeros((batch, left, width), jnp.float32),) * 2
        layer = keys, jnp.zeros((batch, self.config.conv_kernel_size - 1, width), jnp.float32)
        return jnp.zeros((), jnp.int32), self.subsampling.start(batch), [layer] * self.config.num_hidden_layers
