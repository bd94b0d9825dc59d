"""The base of all encoders.

There are B utterances, T feature frames of F features and N encoder frames; E is the width of a row. Frames after the
end of an utterance never change those before.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}
ACTIVATIONS["gelu"] = functools.partial(jax.nn.gelu, approximate=False)
EPSILON = 1e-5  # as in PyTorch, for all norms


def inside(lengths, size):
    """Returns which of `size` frames belong to the utterances, bool [B, size]."""
    return jnp.arange(size) < lengths[:, None]


def cut(x, lengths):
    """Puts zeros from `lengths` on in x [B, T, ...], whatever is there."""
    here = inside(lengths, x.shape[1])
    return jnp.where(here.reshape(*here.shape, *[1] * (x.ndim - 2)), x, 0)


def extended(x, before, kernel, causal=False):
    """Returns (x with the frames around it that a convolution over time sees, those to keep for the next chunk).

    `before` [B, kernel - 1, ...] are the frames before x. With None, x is the whole utterance, with zeros at both ends,
    or before it alone if `causal`.
    """
    if before is None:
        around = (kernel - 1, 0) if causal else ((kernel - 1) // 2, kernel // 2)
        return jnp.pad(x, ((0, 0), around, *((0, 0),) * (x.ndim - 2))), None
    x = jnp.concatenate([before.astype(x.dtype), x], 1)
    return x, x[:, x.shape[1] - (kernel - 1) :]


class Uncounted(nnx.RngStream):
    """Its keys are all the same, for callers that need only shapes, whose time would mostly go into counting."""

    def __call__(self):
        return self.key[...]

    def fork(self, **options):
        return nnx.RngStream(self(), tag=self.tag)


def alike(count, kind, config, *, rngs, **more):
    """Makes blocks of one kind. Where only shapes are needed, one is made and copied, in a tenth of the time."""
    first = kind(config, rngs=rngs, **more)
    copied = isinstance(rngs.params, Uncounted)
    others = (nnx.clone(first) if copied else kind(config, rngs=rngs, **more) for _ in range(count - 1))
    return nnx.Sequential(first, *others)


def layer_norm(width, **more):
    return nnx.LayerNorm(width, epsilon=EPSILON, use_fast_variance=False, **more)


apart = jax.lax.optimization_barrier  # on CPUs, XLA would compute the gradients of later layers again in each layer


def recomputed(block):
    """Returns the block, computed again in the backward pass. Its dropout counts no call, and is drawn once a step."""
    graphdef, state = nnx.split(block)
    run = jax.checkpoint(lambda state, *inputs: nnx.merge(graphdef, state)(*inputs))
    return functools.partial(run, state)


@functools.partial(jax.jit, static_argnums=0)
def applied(graphdef, state, *inputs):
    return nnx.merge(graphdef, state)(*inputs)


def traced_once(block):
    """Returns the block, which JAX traces once for all that are alike, not once for each."""
    return functools.partial(applied, *nnx.split(block))


def scanned(blocks, rows, shared, states, remat):
    """Returns rows after blocks that are alike, and a list of their states, by one program that runs for each of them.

    Blocks round their parameters to the type of the rows, except those of norms: here once, not in each run.
    """
    graphdefs, parameters = zip(*map(nnx.split, blocks))

    def stack(*trees):
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    def rounded(path, x):
        kept = any("norm" in str(name) for name in path) or not jnp.issubdtype(x.dtype, jnp.floating)
        return x if kept else x.astype(rows.dtype)

    def run(rows, x):
        parameters, state = x
        return nnx.merge(graphdefs[0], parameters)(rows, shared, state)

    parameters = jax.tree.map_with_path(rounded, stack(*parameters))
    rows, after = jax.lax.scan(jax.checkpoint(run) if remat else run, rows, (parameters, stack(*states)))
    return rows, [jax.tree.map(lambda x, i=i: x[i], after) for i in range(len(blocks))]


class Depthwise(nnx.Module):
    """A convolution of each channel by itself over one or two dimensions, as a sum of shifted products.

    XLA's own convolution with a group for each channel takes 12 to 60 times as long on two cores of a CPU. Programs
    other than XLA's have a good one: `grouped` asks for it.
    """

    grouped = False

    def __init__(self, kernel, channels, *, stride=1, bias=True, dtype, rngs):
        init = nnx.initializers.normal(math.prod(kernel) ** -0.5)
        self.kernel = nnx.Param(init(rngs.params(), (*kernel, channels), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32)) if bias else None
        self.stride, self.dtype = stride, dtype

    def __call__(self, x, ends=None):
        """Convolves x [B, *sizes, C], with the zeros around it.

        `ends` [T] is where the part of x that each frame sees ends in time; from there on it sees zeros.
        """
        kernel, x = self.kernel[...].astype(self.dtype), x.astype(self.dtype)
        *sizes, channels = kernel.shape
        counts = [(n - k) // self.stride + 1 for n, k in zip(x.shape[1:], sizes)]
        out = 0 if self.bias is None else self.bias[...].astype(self.dtype)
        if self.grouped and ends is None:
            axes = "HW"[: len(sizes)]
            layout = f"N{axes}C", f"{axes}IO", f"N{axes}C"
            more = {"dimension_numbers": layout, "feature_group_count": channels}
            strides = (self.stride,) * len(sizes)
            return out + jax.lax.conv_general_dilated(x, kernel[..., None, :], strides, "VALID", **more)
        parts = self.phases(x)
        for offset in np.ndindex(*sizes):
            steps, phase = zip(*(divmod(o, self.stride) for o in offset))
            window = [slice(step, step + count) for step, count in zip(steps, counts)]
            seen = parts[phase][:, *window]
            if ends is not None and (ahead := offset[0] - (sizes[0] - 1) // 2) > 0:
                seen = jnp.where((jnp.arange(counts[0]) + ahead < ends)[:, None], seen, 0)
            out = out + seen * kernel[offset]
        return out

    def phases(self, x):
        """Returns {start along each axis: every stride-th entry of x from there}.

        It uses splits, whose gradients are joined: those of slices are a sum of arrays as large as x.
        """
        sizes, stride = x.shape[1:-1], self.stride
        counts = [-(-n // stride) for n in sizes]
        x = jnp.pad(x, [(0, 0), *((0, stride * count - n) for count, n in zip(counts, sizes)), (0, 0)])
        ends = x.shape[0], x.shape[-1]
        parts = {(): x.reshape(ends[0], *(n for count in counts for n in (count, stride)), ends[1])}
        for axis in range(2, 2 + 2 * len(counts), 2):
            split = {start: jax.lax.split(part, [1] * stride, axis) for start, part in parts.items()}
            parts = {(*start, i): part for start, some in split.items() for i, part in enumerate(some)}
        return {start: part.reshape(ends[0], *counts, ends[1]) for start, part in parts.items()}


class Encoder(nnx.Module):
    """Turns features [B, T, F] and lengths [B] into rows [B, N, E] and lengths [B]; rows after an end mean nothing.

    A `contexts.Context` limits what rows see; without one, they see everything.

    A subclass sets `width`, `subsampling`, `blocks` (an `nnx.Sequential`) and `norm`, and has `lengths`, `subsample`,
    `shared` and `whole`; one that streams sets `chunk`, and has `initial`.
    """

    chunk = 0  # encoder frames of a step of a stream; 0 if the encoder sees whole utterances alone
    remat = False  # whether blocks are computed again in the backward pass
    scan = False  # whether one program is run for each block, in place of one program of all blocks

    def lengths(self, frames):
        """Returns how many encoder frames `frames` feature frames become; numbers or arrays."""
        return -(-frames // self.subsampling)

    def __call__(self, x, lengths, context=None):
        return self.upper(self.lower(x, lengths, 0, context), self.lengths(lengths), 0, context)

    def lower(self, x, lengths, layers, context=None):
        """Returns rows [B, N, E] after subsampling and `layers` blocks; `self.lengths(lengths)` are their lengths."""
        first, blocks = self.whole(x.shape[0])
        rows, _ = self.subsample(x, lengths, first)
        return self.through(rows, self.lengths(lengths), first, blocks, slice(layers), context)[0]

    def upper(self, rows, lengths, layers, context=None):
        """Applies the blocks after the first `layers` to rows [B, N, E], whose lengths [B] are encoder frames."""
        first, blocks = self.whole(rows.shape[0])
        return self.norm(self.through(rows, lengths, first, blocks, slice(layers, None), context)[0]), lengths

    def step(self, x, lengths, state):
        """Returns rows of the next features of streams, their lengths, and the state after them.

        x is [B, frames_of_step, F]; lengths [B] are fewer at the end of a stream alone.
        """
        first, blocks = state
        rows, after = self.subsample(x, lengths, first)
        lengths = self.lengths_of_step(lengths, first)
        rows, blocks = self.through(rows, lengths, first, blocks, slice(None))
        return self.norm(rows), lengths, (after, blocks)

    def frames_of_step(self, first):
        """Returns the feature frames of a step of a stream, of its `first` one or of a later one."""
        return self.chunk * self.subsampling

    def lengths_of_step(self, lengths, first):
        return self.lengths(lengths)

    def through(self, rows, lengths, first, states, layers, context=None):
        """Returns rows after some of the blocks, and their states. `first` is the state of the subsampling before."""
        shared, after = self.shared(rows, lengths, first, context), []
        if self.scan and len(self.blocks.layers[layers]) > 1:
            return scanned(self.blocks.layers[layers], rows, shared, states[layers], self.remat)
        for block, state in zip(self.blocks.layers[layers], states[layers]):
            rows, state = (recomputed if self.remat else traced_once)(block)(apart(rows), shared, state)
            after.append(state)
        return rows, after

    def shared(self, rows, lengths, first, context=None):
        """Returns the input of all blocks besides their rows."""
        return lengths
