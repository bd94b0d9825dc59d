"""A linear joint network and its emission for TPUs, in Pallas: no hidden unit, logit or gradient of a logit is kept.

A block has `FRAMES` x `COLUMNS` nodes, which are its rows. Columns lie in sublanes, so rows [FRAMES, COLUMNS, H] are
[N, H] in the same memory, sums over frames are additions of registers, and the mask of a label serves all frames. The
grid takes the blocks of a list, `Cut.listed`; the weight lies in VMEM all the while.

Classes have an order of their own (`Classes`): those of other heads than the softmax come first, in 128 lanes, then
blanks, then all others. So all that a loss treats in its own way lies in the first chunk, in known lanes. `_planes.py`
writes down the gradient.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt.tiles.joint._classes import LANES

SUBLANES = 8
FRAMES, COLUMNS = 32, SUBLANES
ROWS = FRAMES * COLUMNS


def _lane(shape):
    return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def _by_columns(x):
    """Reshapes [N, lanes] to [FRAMES, COLUMNS, lanes]."""
    return x.reshape(FRAMES, COLUMNS, x.shape[-1])


def _group(x, i):
    """Returns lanes i * 128 ... of [N, lanes]."""
    return x[:, i * LANES : (i + 1) * LANES]


def _finite(peak):
    return jnp.where(peak == -jnp.inf, 0, peak)


def _rows(plan, code, refs):
    """Returns encoder + predictor [FRAMES, COLUMNS, H], 0 for rows outside the lengths."""
    encoder, frame, copy, column = plan.cut.decode(code)
    sequence = encoder * plan.cut.copies + copy
    row = frame * FRAMES + lax.broadcasted_iota(jnp.int32, (FRAMES, plan.units), 0)
    of_encoder = jnp.where(row < refs.num_frames[sequence], refs.encoder[0].astype(jnp.float32), 0)
    row = column * COLUMNS + lax.broadcasted_iota(jnp.int32, (COLUMNS, plan.units), 0)
    of_predictor = jnp.where(row <= refs.num_labels[sequence], refs.predictor[0], 0)
    return of_encoder[:, None] + of_predictor[None]


def _logits(plan, refs, c):
    """Returns the logits of chunk c [N, chunk]."""
    return plan.product(refs.hidden[...], refs.weight[:, plan.chunk(c)]) + refs.bias[:, plan.chunk(c)]


# --------------------------------------------------------------------------------------------------------- forward


# Its memory: scalars, operands as in `Arrays`, the numbers of rows, and scratch. `peak`, `total` and `picked`, which is
# the logit of the label, are [N, 128], and each lane has the classes of all chunks that meet in it.
ForwardRefs = collections.namedtuple(
    "ForwardRefs", "codes num_frames num_labels encoder predictor label weight bias out hidden peak total picked"
)


def forward_kernel(*refs, plan):
    """Takes chunk after chunk of a group's classes, with the largest logit and the sum of exponentials so far."""
    from jax.experimental import pallas as pl

    refs, classes = ForwardRefs(*refs), plan.classes
    code, offset = refs.codes[pl.program_id(1)], pl.program_id(0) * classes.lanes
    refs.hidden[...] = plan.activation(_rows(plan, code, refs)).reshape(ROWS, plan.units).astype(plan.factor)
    label = jnp.broadcast_to(refs.label[0], (COLUMNS, LANES))

    def picked(groups, c, first):
        """Returns the logit of the label, in its lane of those modulo 128, [N, 128]."""
        total = jnp.zeros((FRAMES, COLUMNS, LANES), jnp.float32)
        for i, z in enumerate(groups):
            lane = offset + c * classes.chunk + (first + i) * LANES + _lane((COLUMNS, LANES))
            total = jnp.where((lane == label)[None], _by_columns(z), total)
        return total.reshape(ROWS, LANES)

    skip = classes.start // LANES
    z = _logits(plan, refs, 0)
    first = z[:, : (skip + 1) * LANES]
    groups = [_group(z, i) for i in range(skip, classes.chunk // LANES)]
    if groups:
        peak = functools.reduce(jnp.maximum, groups)
        base = _finite(peak)
        refs.peak[...] = peak
        refs.total[...] = sum(jnp.exp(z - base) for z in groups)
        refs.picked[...] = picked(groups, 0, skip)

    def step(c):
        z = _logits(plan, refs, c)
        groups = [_group(z, i) for i in range(classes.chunk // LANES)]
        old = refs.peak[...]
        peak = functools.reduce(jnp.maximum, groups, old)
        base = _finite(peak)
        refs.peak[...] = peak
        refs.total[...] = refs.total[...] * jnp.exp(old - base) + sum(jnp.exp(z - base) for z in groups)
        refs.picked[...] = refs.picked[...] + picked(groups, c, 0)

    plan.each_other_chunk(step)
    _write_numbers(plan, refs, first)


def _write_numbers(plan, refs, first):
    """Writes the kernel's result: other heads, the kept logits, then the largest, the sum, and that of the label.

    `first` has the lanes of other heads, if there are any, and the first 128 of the softmax.
    """
    from jax.experimental.pallas import tpu as pltpu

    peak = jnp.max(refs.peak[...], 1, keepdims=True)
    base = _finite(peak)
    total = jnp.sum(refs.total[...] * jnp.exp(_finite(refs.peak[...]) - base), 1, keepdims=True)
    of_label = jnp.sum(refs.picked[...], 1, keepdims=True)
    others, kept, skip = len(plan.classes.others), plan.classes.kept, plan.classes.start // LANES
    lane = _lane((ROWS, LANES))
    out = pltpu.roll(_group(first, skip), others, 1) if others else first
    if others:
        out = jnp.where(lane < others, _group(first, 0), out)
    for i, value in enumerate((peak, total, of_label)):
        out = jnp.where(lane == others + kept + i, value, out)
    refs.out[0, 0] = out.T[: refs.out.shape[2]]


# -------------------------------------------------------------------------------------------------------- backward


# Its memory, in four lines: scalars; operands as in `Arrays`, then the `numbers` of rows, and weight and bias of the
# first 128 classes of the softmax; results, of which that of the weight is outside VMEM; and scratch. The scratch has
# hidden units [N, H] and [H, N], their gradient summed over chunks, the last three of the numbers in all lanes, dx
# [FRAMES, COLUMNS, H] summed over the blocks of the same frames, and the gradient of the weight.
BackwardRefs = collections.namedtuple(
    "BackwardRefs",
    "codes num_frames num_labels bound "
    "encoder predictor label weight bias planes anchor anchor_bias "
    "of_encoder of_predictor of_weight of_bias "
    "hidden transposed of_hidden base factor added frames_sum weight_sum semaphore",
)


def backward_kernel(*refs, plan):
    """Computes g = dL/dz of a block, chunk after chunk of a group's classes, and adds it to all sums at once.

    With the sums over chunks of g weight^T in `of_hidden`, the block ends by dx = of_hidden activation'(x).
    """
    from jax.experimental import pallas as pl

    refs, cut = BackwardRefs(*refs), plan.cut
    i, group = pl.program_id(1), pl.program_id(0)
    offset = group * plan.classes.lanes
    code, before, after = refs.codes[i], refs.codes[jnp.maximum(i - 1, 0)], refs.codes[i + 1]
    encoder, _, copy, column = cut.decode(code)
    bound = refs.bound[encoder * cut.copies + copy]
    pl.when(i == 0)(lambda: _clear_sums(plan, refs))

    x = _rows(plan, code, refs)
    hidden = plan.activation(x).reshape(ROWS, plan.units)
    refs.hidden[...] = hidden.astype(plan.factor)
    refs.transposed[...] = hidden.T.astype(plan.factor)
    gradient = _Gradient(plan, refs, offset)
    _add_chunk(plan, refs, 0, gradient.of_first_chunk(_logits(plan, refs, 0), group), bound)
    plan.each_other_chunk(lambda c: _add_chunk(plan, refs, c, gradient.of_chunk(_logits(plan, refs, c), c), bound))

    x = _rows(plan, code, refs)  # computed again, as registers are few
    (dx,) = jax.vjp(plan.activation, x)[1](refs.of_hidden[...].reshape(x.shape))
    _add_rows(cut, refs, dx, i, (before, code, after), (encoder, copy, column))
    pl.when(i == pl.num_programs(1) - 1)(lambda: _write_weight(plan, refs, group))


def _clear_sums(plan, refs):
    """Sets the sums of the parameters to 0; that of the weight a few rows at a time, as one store is too long."""
    from jax.experimental import pallas as pl

    def clear(k, carry):
        refs.weight_sum[pl.ds(pl.multiple_of(k * SUBLANES, SUBLANES), SUBLANES)] = jnp.zeros_like(refs.of_bias)
        return carry

    lax.fori_loop(0, plan.units // SUBLANES, clear, np.int32(0))
    refs.of_bias[...] = jnp.zeros_like(refs.of_bias)


class _Gradient:
    """g = dL/dz of a block, 128 classes at a time, from the numbers of its rows (`_planes.numbers`)."""

    def __init__(self, plan, refs, offset):
        self.classes, self.softmax, self.refs, self.offset = plan.classes, plan.softmax, refs, offset
        self.product = plan.product
        self.planes = refs.planes[0].T
        self.others, self.blanks = len(plan.classes.others), len(plan.classes.blanks)
        refs.added[...] = self.number(self.others + self.blanks)
        refs.factor[...] = self.number(self.others + self.blanks + 1)
        self.label = jnp.broadcast_to(refs.label[0], (COLUMNS, LANES))

    def number(self, k):
        """Returns number k of all rows, in all lanes."""
        return jnp.broadcast_to(self.planes[:, k : k + 1], (ROWS, LANES))

    def of_softmax(self, z, first_lane):
        """Returns exp(z - base) factor, plus the label's part in its lane; the first chunk adds the blanks' part."""
        lane = first_lane + _lane((COLUMNS, LANES))
        less = _by_columns(jnp.exp(z - self.refs.base[...]) * self.refs.factor[...])
        at_label = (lane == self.label)[None]
        return jnp.where(at_label, less + _by_columns(self.refs.added[...]), less).reshape(ROWS, LANES)

    def of_other_heads(self, z):
        """Returns g for HAT's blank, or for the durations: less their softmax times the sum of their cotangents."""
        lane, others = _lane((ROWS, LANES)), self.others
        if self.softmax.bernoulli:
            g = self.number(0) * jax.nn.sigmoid(-z) - self.refs.added[...] * jax.nn.sigmoid(z)
        else:
            g, width = self.planes, self.planes.shape[1]
            g = g if width == LANES else jnp.pad(g, ((0, 0), (0, LANES - width)))
            g = jnp.where(lane < others, g, 0)
            if self.softmax.normalize:
                z = jnp.where(lane < others, z, -jnp.inf)
                peak = jnp.max(z, 1, keepdims=True)
                weights = jnp.exp(z - jnp.where(peak == -jnp.inf, 0, peak))
                total = jnp.sum(weights, 1, keepdims=True)
                g = g - weights / jnp.where(total == 0, 1, total) * jnp.sum(g, 1, keepdims=True)
        return jnp.where(lane < others, g, 0)

    def of_first_chunk(self, z, group):
        """Returns g for the first chunk. Sets `base` where that is the anchor's logit, a class of the first group."""
        refs, classes, skip = self.refs, self.classes, self.classes.start // LANES
        if classes.groups > 1:
            anchor = self.product(refs.hidden[...], refs.anchor[...]) + refs.anchor_bias[...]
        else:
            anchor = _group(z, skip)
        base = self.number(self.others + self.blanks + 2)
        refs.base[...] = jnp.where(base == -jnp.inf, anchor[:, :1], base)
        in_first = group == 0
        groups = [jnp.where(in_first, self.of_other_heads(_group(z, 0)), 0)] if self.others else []
        for k in range(skip, classes.chunk // LANES):
            groups.append(self.of_softmax(_group(z, k), self.offset + k * LANES))
        for k in range(self.blanks):
            here = (_lane((ROWS, LANES)) == k) & in_first
            groups[skip] = jnp.where(here, groups[skip] + self.number(self.others + k), groups[skip])
        return groups

    def of_chunk(self, z, c):
        first = self.offset + c * self.classes.chunk
        return [self.of_softmax(_group(z, k), first + k * LANES) for k in range(self.classes.chunk // LANES)]


def _add_chunk(plan, refs, c, groups, bound):
    """Adds the clipped g of a chunk to d bias, g weight^T and d weight = hidden^T g."""
    g = jnp.clip(groups[0] if len(groups) == 1 else jnp.concatenate(groups, 1), -bound, bound)
    chunk = plan.chunk(c)
    refs.of_bias[:, chunk] += jnp.sum(_by_columns(g), 0)
    g = g.astype(plan.factor)
    of_hidden = plan.product(g, refs.weight[:, chunk], ((1,), (1,)))
    first = isinstance(c, int) and c == 0
    refs.of_hidden[...] = of_hidden if first else refs.of_hidden[...] + of_hidden
    refs.weight_sum[:, chunk] += plan.product(refs.transposed[...], g)


def _add_rows(cut, refs, dx, i, codes, place):
    """Adds dx [FRAMES, COLUMNS, H] to the gradients of its frames and of its columns.

    The list is in the order of encoders and their frames. So the sum of a block of frames is complete where the next
    code has other frames, and only then its columns are summed and it is written. The predictor's block is all columns
    of an encoder's sequences, which stays in VMEM until the next encoder.
    """
    from jax.experimental import pallas as pl

    (before, code, after), (encoder, copy, column) = codes, place
    _, of_copy, of_column = cut.bits
    bits = of_copy + of_column
    new_frames = (i == 0) | (before >> bits != code >> bits)
    new_encoder = (i == 0) | (before >> (bits + cut.bits[0]) != encoder)

    @pl.when(new_frames)
    def start_frames():
        refs.frames_sum[...] = dx

    @pl.when(~new_frames)
    def add_frames():
        refs.frames_sum[...] += dx

    @pl.when(after >> bits != code >> bits)
    def write_frames():
        refs.of_encoder[0, 0] = jnp.sum(refs.frames_sum[...], 1)

    @pl.when(new_encoder)
    def start_predictor():
        refs.of_predictor[...] = jnp.zeros_like(refs.of_predictor)

    rows = pl.ds(pl.multiple_of(column * COLUMNS, COLUMNS), COLUMNS)
    refs.of_predictor[0, copy, rows] += jnp.sum(dx, 0)


def _write_weight(plan, refs, group):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    lanes = plan.classes.lanes
    to = refs.of_weight.at[:, pl.ds(pl.multiple_of(group * lanes, lanes), lanes)]
    copy = pltpu.make_async_copy(refs.weight_sum, to, refs.semaphore)
    copy.start()
    copy.wait()
