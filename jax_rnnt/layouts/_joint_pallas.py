"""A linear joint network and its emission for TPUs, in Pallas: no hidden unit, logit or gradient of a logit is kept.

A block has `FRAMES` x `COLUMNS` nodes, its rows. Columns lie in sublanes, so rows [FRAMES, COLUMNS, H] are [N, H]
in the same memory, sums over frames are additions of registers, and the mask of a label serves all frames. The grid
takes the blocks of a list, `Cut.listed`; the weight lies in VMEM all the while.

Classes have an order of their own (`Classes`): those of other heads than the softmax in 128 lanes, then its blanks,
then its other classes. So all that a loss treats in a way of its own lies in the first chunk, in known lanes. The
kernels know no loss: the forward kernel makes numbers of rows, and the backward kernel takes such numbers.

B encoders with N sequences each, T frames, U1 columns, H units, V classes.
"""

import functools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt._xla import struct_like
from jax_rnnt.layouts._joint_plan import BLOCKS, COLUMNS, FRAMES, LANES, ROWS, SUBLANES, Problem, planes, rounded
from jax_rnnt.layouts._joint_plan import numbers as numbers_of


def _lane(shape):
    return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def _by_columns(x):
    """[N, lanes] -> [FRAMES, COLUMNS, lanes]."""
    return x.reshape(FRAMES, COLUMNS, x.shape[-1])


def _inputs(problem, code, frames_ref, labels_ref, encoder_ref, predictor_ref):
    """encoder + predictor [FRAMES, COLUMNS, H], 0 for rows outside the lengths."""
    encoder, frame, copy, column = problem.cut.decode(code)
    sequence = encoder * problem.cut.copies + copy
    width = problem.units
    row = frame * FRAMES + lax.broadcasted_iota(jnp.int32, (FRAMES, width), 0)
    of_encoder = jnp.where(row < frames_ref[sequence], encoder_ref[0].astype(jnp.float32), 0)
    row = column * COLUMNS + lax.broadcasted_iota(jnp.int32, (COLUMNS, width), 0)
    of_predictor = jnp.where(row <= labels_ref[sequence], predictor_ref[0], 0)
    return of_encoder[:, None] + of_predictor[None]


def _group(x, i):
    """Lanes i * 128 ... of [N, lanes]."""
    return x[:, i * LANES : (i + 1) * LANES]


def _forward_kernel(
    list_ref, frames_ref, labels_ref, encoder_ref, predictor_ref, label_ref, weight_ref, bias_ref, out_ref,
    hidden_ref, peak_ref, total_ref, picked_ref, *, problem,
):  # fmt: skip
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    classes = problem.classes
    code, offset = list_ref[pl.program_id(1)], pl.program_id(0) * classes.lanes
    x = _inputs(problem, code, frames_ref, labels_ref, encoder_ref, predictor_ref)
    hidden_ref[...] = problem.activation(x).reshape(ROWS, problem.units).astype(problem.factor)
    label = jnp.broadcast_to(label_ref[0], (COLUMNS, LANES))

    def logits(c):
        return problem.product(hidden_ref[...], weight_ref[:, problem.chunk(c)]) + bias_ref[:, problem.chunk(c)]

    def picked(groups, c, first):
        """[N, 128]: the logit of the label, in its lane of those modulo 128."""
        total = jnp.zeros((FRAMES, COLUMNS, LANES), jnp.float32)
        for i, z in enumerate(groups):
            lane = offset + c * classes.chunk + (first + i) * LANES + _lane((COLUMNS, LANES))
            total = jnp.where((lane == label)[None], _by_columns(z), total)
        return total.reshape(ROWS, LANES)

    def finite(peak):
        return jnp.where(peak == -jnp.inf, 0, peak)

    skip = classes.start // LANES
    z = logits(0)
    first = z[:, : (skip + 1) * LANES]
    groups = [_group(z, i) for i in range(skip, classes.chunk // LANES)]
    if groups:
        peak = functools.reduce(jnp.maximum, groups)
        base = finite(peak)
        peak_ref[...] = peak
        total_ref[...] = sum(jnp.exp(z - base) for z in groups)
        picked_ref[...] = picked(groups, 0, skip)

    def step(c):
        z = logits(c)
        groups = [_group(z, i) for i in range(classes.chunk // LANES)]
        old = peak_ref[...]
        peak = functools.reduce(jnp.maximum, groups, old)
        base = finite(peak)
        peak_ref[...] = peak
        total_ref[...] = total_ref[...] * jnp.exp(old - base) + sum(jnp.exp(z - base) for z in groups)
        picked_ref[...] = picked_ref[...] + picked(groups, c, 0)

    problem.each_other_chunk(step)

    peak = jnp.max(peak_ref[...], 1, keepdims=True)
    base = finite(peak)
    total = jnp.sum(total_ref[...] * jnp.exp(finite(peak_ref[...]) - base), 1, keepdims=True)
    of_label = jnp.sum(picked_ref[...], 1, keepdims=True)
    # In lanes: other heads, what is kept, then these three.
    others, kept = len(classes.others), classes.kept
    lane = _lane((ROWS, LANES))
    out = pltpu.roll(_group(first, skip), others, 1) if others else first
    if others:
        out = jnp.where(lane < others, _group(first, 0), out)
    for i, value in enumerate((peak, total, of_label)):
        out = jnp.where(lane == others + kept + i, value, out)
    out_ref[0, 0] = out.T[: out_ref.shape[2]]


class Arrays(typing.NamedTuple):
    """Operands of both kernels."""

    encoder: jax.Array  # [B, T', H']
    predictor: jax.Array  # float32 [B N, U', H']
    label: jax.Array  # int32 [B N, U', 1]
    weight: jax.Array  # [H', groups * lanes]
    bias: jax.Array  # float32 [1, groups * lanes]


def _padded(x, *sizes):
    """Zeros behind the last dimensions, up to these sizes."""
    edges = [(0, 0)] * (x.ndim - len(sizes)) + [(0, size - n) for n, size in zip(x.shape[x.ndim - len(sizes) :], sizes)]
    return jnp.pad(x, edges) if any(after for _, after in edges) else x


def _arrays(problem, parameters, inputs) -> Arrays:
    weight, *bias = parameters
    classes, units = problem.classes, problem.units
    frames, columns = (n * size for n, size in zip(problem.cut.shape, (FRAMES, COLUMNS)))
    encoder = inputs.encoder if inputs.encoder.dtype == jnp.bfloat16 else inputs.encoder.astype(jnp.float32)
    added = bias[0].astype(jnp.float32) if bias else jnp.zeros(classes.count, jnp.float32)
    return Arrays(
        _padded(encoder, frames, units),
        _padded(inputs.predictor.astype(jnp.float32), columns, units),
        _padded(classes.lane(inputs.label[:, 0]), columns)[..., None],
        _padded(classes.arrange(weight.astype(problem.factor), 0), units, classes.groups * classes.lanes),
        classes.arrange(added, -jnp.inf)[None],
    )


def _specs(problem):
    """Of the operands in `Arrays`, and of one row a block."""
    from jax.experimental import pallas as pl

    cut, units, lanes = problem.cut, problem.units, problem.classes.lanes

    def of_encoder(g, i, codes, *_):
        encoder, frame, _, _ = cut.decode(codes[i])
        return encoder, frame, 0

    def of_columns(g, i, codes, *_):
        encoder, _, copy, column = cut.decode(codes[i])
        return encoder * cut.copies + copy, column, 0

    def of_block(g, i, codes, *_):
        encoder, frame, copy, column = cut.decode(codes[i])
        return ((encoder * cut.copies + copy) * cut.shape[0] + frame) * cut.shape[1] + column, 0, 0

    def of_group(g, i, *_):
        return 0, g

    once = pl.Buffered(1)
    operands = [
        pl.BlockSpec((1, FRAMES, units), of_encoder),
        pl.BlockSpec((1, COLUMNS, units), of_columns),
        pl.BlockSpec((1, COLUMNS, 1), of_columns),
        pl.BlockSpec((units, lanes), of_group, pipeline_mode=once),
        pl.BlockSpec((1, lanes), of_group, pipeline_mode=once),
    ]
    return operands, of_block, of_encoder


def _call(kernel, problem: Problem, name, count, products, interpret, scalars, operands, specs, results, scratch):
    """The results of a kernel, over `count` blocks of each group; `products`: how many it takes of all nodes.

    `specs`: those of the operands, and those of the results.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    cut, classes = problem.cut, problem.classes
    elements = cut.size * ROWS * classes.groups * classes.lanes
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(classes.groups, jnp.maximum(count, 1)),
        in_specs=specs[0],
        out_specs=specs[1],
        scratch_shapes=scratch,
    )
    return pl.pallas_call(
        functools.partial(kernel, problem=problem),
        grid_spec=grid,
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=problem.vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * elements * problem.units,
            transcendentals=elements,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results)),
        ),
        interpret=interpret,
        name=f"jax_rnnt_joint_{name}",
    )(*scalars, *operands)


def forward(problem, parameters, inputs, interpret=False):
    """(planes by slot, norm) [B N, T, U1]"""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    problem = problem.of(inputs)
    arrays, classes = _arrays(problem, parameters, inputs), problem.classes
    codes, count = problem.cut.listed(BLOCKS.within(inputs.shape, inputs.num_frames, inputs.num_labels))
    used = len(classes.others) + classes.kept + 3
    specs, of_block, _ = _specs(problem)
    shape = classes.groups, codes.size - 1, rounded(used, SUBLANES), ROWS
    result = struct_like(arrays.encoder, shape, jnp.float32)
    by_lane = pltpu.VMEM((ROWS, LANES), jnp.float32)
    scalars = codes, inputs.num_frames, inputs.num_labels
    of_result = pl.BlockSpec((1, 1, *shape[2:]), lambda g, *rest: (g, *of_block(g, *rest)))
    scratch = [pltpu.VMEM((ROWS, problem.units), problem.factor), by_lane, by_lane, by_lane]
    of_call = scalars, arrays, (specs, [of_result]), [result], scratch
    (out,) = _call(_forward_kernel, problem, "forward", count, 1, interpret, *of_call)
    rows = [BLOCKS.join(x, inputs.shape) for x in _joined(out, used)]
    return planes(problem.softmax, classes, inputs, rows)


def _joined(out, used):
    """Numbers of rows from those of the groups [groups, blocks, planes, rows]."""
    parts = [[x[:, i] for i in range(used)] for x in out]
    *others, peak, total, of_label = parts[0]
    for *_, next_peak, next_total, next_label in parts[1:]:
        either = jnp.maximum(peak, next_peak)
        base = jnp.where(jnp.isneginf(either), 0, either)
        total = total * jnp.exp(peak - base) + next_total * jnp.exp(next_peak - base)
        peak, of_label = either, of_label + next_label
    return [*others, peak, total, of_label]


# -------------------------------------------------------------------------------------------------------- backward


def _backward_kernel(
    list_ref, frames_ref, labels_ref, bound_ref, encoder_ref, predictor_ref, label_ref, weight_ref, bias_ref,
    planes_ref, anchor_ref, anchor_bias_ref, of_encoder_ref, of_predictor_ref, of_weight_ref, of_bias_ref,
    hidden_ref, transposed_ref, of_hidden_ref, base_ref, factor_ref, added_ref, frames_sum_ref, weight_sum_ref,
    semaphore, *, problem,
):  # fmt: skip
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    classes, softmax, cut = problem.classes, problem.softmax, problem.cut
    i, group = pl.program_id(1), pl.program_id(0)
    offset = group * problem.classes.lanes
    code, before, after = list_ref[i], list_ref[jnp.maximum(i - 1, 0)], list_ref[i + 1]
    encoder, _, copy, column = cut.decode(code)
    bound = bound_ref[encoder * cut.copies + copy]

    @pl.when(i == 0)
    def clear_sums():
        def clear(k, carry):
            weight_sum_ref[pl.ds(pl.multiple_of(k * SUBLANES, SUBLANES), SUBLANES)] = jnp.zeros_like(of_bias_ref)
            return carry

        lax.fori_loop(0, problem.units // SUBLANES, clear, np.int32(0))
        of_bias_ref[...] = jnp.zeros_like(of_bias_ref)

    x = _inputs(problem, code, frames_ref, labels_ref, encoder_ref, predictor_ref)
    hidden = problem.activation(x).reshape(ROWS, problem.units)
    hidden_ref[...] = hidden.astype(problem.factor)
    transposed_ref[...] = hidden.T.astype(problem.factor)
    planes = planes_ref[0].T
    others, blanks, skip = len(classes.others), len(classes.blanks), classes.start // LANES

    def plane(k):
        return jnp.broadcast_to(planes[:, k : k + 1], (ROWS, LANES))

    added_ref[...] = plane(others + blanks)
    factor_ref[...] = plane(others + blanks + 1)
    label = jnp.broadcast_to(label_ref[0], (COLUMNS, LANES))

    def of_softmax(z, first_lane):
        """Of 128 lanes."""
        lane = first_lane + _lane((COLUMNS, LANES))
        less = _by_columns(jnp.exp(z - base_ref[...]) * factor_ref[...])
        return jnp.where((lane == label)[None], less + _by_columns(added_ref[...]), less).reshape(ROWS, LANES)

    def of_other_heads(z):
        lane = _lane((ROWS, LANES))
        if softmax.bernoulli:
            g = plane(0) * jax.nn.sigmoid(-z) - added_ref[...] * jax.nn.sigmoid(z)
        else:
            g = planes if planes.shape[1] == LANES else jnp.pad(planes, ((0, 0), (0, LANES - planes.shape[1])))
            g = jnp.where(lane < others, g, 0)
            if softmax.normalize:
                z = jnp.where(lane < others, z, -jnp.inf)
                peak = jnp.max(z, 1, keepdims=True)
                weights = jnp.exp(z - jnp.where(peak == -jnp.inf, 0, peak))
                total = jnp.sum(weights, 1, keepdims=True)
                g = g - weights / jnp.where(total == 0, 1, total) * jnp.sum(g, 1, keepdims=True)
        return jnp.where(lane < others, g, 0)

    def add(c, groups, first):
        g = jnp.clip(groups[0] if len(groups) == 1 else jnp.concatenate(groups, 1), -bound, bound)
        chunk = problem.chunk(c)
        of_bias_ref[:, chunk] += jnp.sum(_by_columns(g), 0)
        g = g.astype(problem.factor)
        of_hidden = problem.product(g, weight_ref[:, chunk], ((1,), (1,)))
        of_hidden_ref[...] = of_hidden if first else of_hidden_ref[...] + of_hidden
        weight_sum_ref[:, chunk] += problem.product(transposed_ref[...], g)

    def logits(c):
        return problem.product(hidden_ref[...], weight_ref[:, problem.chunk(c)]) + bias_ref[:, problem.chunk(c)]

    z = logits(0)
    if classes.groups > 1:  # the anchor is a class of the first
        anchor = problem.product(hidden_ref[...], anchor_ref[...]) + anchor_bias_ref[...]
    else:
        anchor = _group(z, skip)
    base = plane(others + blanks + 2)
    base_ref[...] = jnp.where(base == -jnp.inf, anchor[:, :1], base)
    in_first = group == 0
    groups = [jnp.where(in_first, of_other_heads(_group(z, 0)), 0)] if others else []
    for k in range(skip, classes.chunk // LANES):
        groups.append(of_softmax(_group(z, k), offset + k * LANES))
    for k in range(blanks):
        here = (_lane((ROWS, LANES)) == k) & in_first
        groups[skip] = jnp.where(here, groups[skip] + plane(others + k), groups[skip])
    add(0, groups, True)

    def step(c):
        z, first = logits(c), offset + c * classes.chunk
        add(c, [of_softmax(_group(z, k), first + k * LANES) for k in range(classes.chunk // LANES)], False)

    problem.each_other_chunk(step)

    x = _inputs(problem, code, frames_ref, labels_ref, encoder_ref, predictor_ref)
    (g,) = jax.vjp(problem.activation, x)[1](of_hidden_ref[...].reshape(x.shape))
    of_copy, of_column = cut.bits[1:]
    bits = of_copy + of_column
    new_frames = (i == 0) | (before >> bits != code >> bits)
    new_encoder = (i == 0) | (before >> (bits + cut.bits[0]) != encoder)

    @pl.when(new_frames)
    def start_frames():
        frames_sum_ref[...] = g

    @pl.when(~new_frames)
    def add_frames():
        frames_sum_ref[...] += g

    @pl.when(after >> bits != code >> bits)
    def write_frames():
        of_encoder_ref[0, 0] = jnp.sum(frames_sum_ref[...], 1)

    @pl.when(new_encoder)
    def start_predictor():
        of_predictor_ref[...] = jnp.zeros_like(of_predictor_ref)

    rows = pl.ds(pl.multiple_of(column * COLUMNS, COLUMNS), COLUMNS)
    of_predictor_ref[0, copy, rows] += jnp.sum(g, 0)

    @pl.when(i == pl.num_programs(1) - 1)
    def write_weight():
        lanes = pl.ds(pl.multiple_of(group * classes.lanes, classes.lanes), classes.lanes)
        copy_out = pltpu.make_async_copy(weight_sum_ref, of_weight_ref.at[:, lanes], semaphore)
        copy_out.start()
        copy_out.wait()


def backward(problem, parameters, inputs, cotangents, norm, scale, clamp, flags, interpret=False):
    """(gradient of the encoder [B, T, H], of the predictor [B N, U1, H], those of the parameters), in float32.

    `flags`: bool [B N, blocks of frames, blocks of columns], the blocks that count, of `BLOCKS`.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    problem = problem.of(inputs)
    arrays, classes, cut = _arrays(problem, parameters, inputs), problem.classes, problem.cut
    codes, count = cut.listed(flags)
    numbers = [BLOCKS.cut(x) for x in numbers_of(problem.softmax, inputs, cotangents, norm, scale)]
    numbers += [jnp.zeros_like(numbers[0])] * (rounded(len(numbers), SUBLANES) - len(numbers))
    planes = jnp.stack(numbers, 1)
    bound = jnp.where(clamp > 0, clamp * jnp.abs(scale), jnp.inf).astype(jnp.float32)
    specs, of_block, of_encoder = _specs(problem)
    width = arrays.predictor.shape[1]

    def of_sequences(g, i, codes, *_):
        return g, cut.decode(codes[i])[0], 0, 0

    anchor = slice(classes.start, classes.start + LANES)
    anchors = arrays.weight[:, anchor], arrays.bias[:, anchor]

    results = [
        struct_like(arrays.encoder, shape, jnp.float32)
        for shape in (
            (classes.groups, *arrays.encoder.shape), (classes.groups, *arrays.predictor.shape), arrays.weight.shape,
            (SUBLANES, arrays.bias.shape[1]),
        )
    ]  # fmt: skip
    of_planes = pl.BlockSpec((1, *planes.shape[1:]), of_block)
    of_anchors = [pl.BlockSpec(x.shape, lambda *_: (0, 0), pipeline_mode=pl.Buffered(1)) for x in anchors]
    out_specs = [
        pl.BlockSpec((1, 1, FRAMES, problem.units), lambda g, *rest: (g, *of_encoder(g, *rest))),
        pl.BlockSpec((1, cut.copies, width, problem.units), of_sequences),
        pl.BlockSpec(memory_space=pl.ANY),
        pl.BlockSpec((SUBLANES, classes.lanes), lambda g, i, *_: (0, g)),
    ]
    by_lane = pltpu.VMEM((ROWS, LANES), jnp.float32)
    scratch = [
        pltpu.VMEM((ROWS, problem.units), problem.factor),
        pltpu.VMEM((problem.units, ROWS), problem.factor),
        pltpu.VMEM((ROWS, problem.units), jnp.float32),
        by_lane,
        by_lane,
        by_lane,
        pltpu.VMEM((FRAMES, COLUMNS, problem.units), jnp.float32),
        pltpu.VMEM((problem.units, classes.lanes), jnp.float32),
        pltpu.SemaphoreType.DMA,
    ]
    scalars, in_specs = (codes, inputs.num_frames, inputs.num_labels, bound), [*specs, of_planes, *of_anchors]
    of_call = scalars, (*arrays, planes, *anchors), (in_specs, out_specs), results, scratch
    of_encoder_rows, of_predictor, of_weight, of_bias = _call(
        _backward_kernel, problem, "backward", count, 3, interpret, *of_call
    )
    some = flags.reshape(cut.encoders, cut.copies, *cut.shape)
    of_frames = jnp.repeat(jnp.any(some, (1, 3)), FRAMES, 1)
    (frames, columns), units = inputs.shape, parameters[0].shape[0]
    of_encoder_rows = jnp.where(of_frames[..., None], jnp.sum(of_encoder_rows, 0), 0)[:, :frames, :units]
    of_sequence = jnp.repeat(jnp.any(some, (1, 2, 3)), cut.copies)
    of_predictor = jnp.where(of_sequence[:, None, None], jnp.sum(of_predictor, 0), 0)[:, :columns, :units]
    of_weight = classes.restore(jnp.where(count > 0, of_weight, 0)[:units])
    of_bias = classes.restore(jnp.sum(jnp.where(count > 0, of_bias, 0), 0))
    return of_encoder_rows, of_predictor, [of_weight, of_bias][: len(parameters)]
