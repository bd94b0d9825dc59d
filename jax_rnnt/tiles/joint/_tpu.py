"""The kernels for TPUs: how they cut a problem, and their calls.

There are H units.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt._xla import struct_like
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.tiles._tile_blocks import Blocks
from jax_rnnt.tiles.joint import _kernel
from jax_rnnt.tiles.joint._blocks import Cut, cut_of
from jax_rnnt.tiles.joint._classes import LANES, Classes, heads, rounded
from jax_rnnt.tiles.joint._planes import bounds, numbers, planes
from jax_rnnt.tiles.joint._tpu_kernels import COLUMNS, FRAMES, ROWS, SUBLANES, backward_kernel, forward_kernel

BLOCKS = Blocks(FRAMES, COLUMNS, 1)
# Megabytes of VMEM of a core by the kind of a device, and where the kind is unknown.
VMEM = {
    "TPU v4": 16, "TPU v5 lite": 128, "TPU v5e": 128, "TPU v5": 64, "TPU v5p": 64, "TPU v6 lite": 128, "TPU v6e": 128,
    "TPU7x": 64,
}  # fmt: skip
LEAST_VMEM = 16
MOST_BLOCKS = 1 << 17  # most blocks of a list, which take half of the scalar memory
# Values of `jax.default_matmul_precision` that allow products of bfloat16 factors.
_FAST = None, "default", "fastest", "bfloat16", "BF16_BF16_F32"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a call of the kernels."""

    classes: Classes
    cut: Cut
    softmax: Softmax
    activation: Callable[[jax.Array], jax.Array]
    units: int  # H, padded
    exact: bool  # whether products are in float32

    blocks = BLOCKS

    def for_inputs(self, inputs) -> "Plan":
        """Returns the plan for the inputs of one device, which are a part of the batch."""
        return dataclasses.replace(self, cut=cut_of(inputs, BLOCKS))

    @property
    def factor(self):
        """The dtype of factors of products."""
        return np.dtype(jnp.float32 if self.exact else jnp.bfloat16)

    @property
    def vmem(self) -> int:
        """Bytes of VMEM for the backward kernel, which takes more than the other; the rest is XLA's, for planes."""
        width, units, lanes = self.factor.itemsize, self.units, self.classes.lanes
        weights = units * lanes * (width + 4) + 6 * SUBLANES * lanes * 4
        hidden = ROWS * units * (2 * width + 4 * 4) + 4 * FRAMES * units * 4
        chunk = ROWS * (4 * self.classes.chunk + 6 * LANES) * 4
        of_predictor = 2 * self.cut.copies * self.cut.shape[1] * COLUMNS * units * 4
        return (weights + hidden + chunk + of_predictor) * 9 // 8 + (1 << 20)

    def product(self, x, y, axes=((1,), (0,))):
        precision = lax.Precision.HIGHEST if self.exact else None
        return lax.dot_general(x, y, (axes, ((), ())), precision=precision, preferred_element_type=jnp.float32)

    def chunk(self, c):
        """Returns the lanes of chunk c of a group."""
        from jax.experimental import pallas as pl

        size = self.classes.chunk
        return pl.ds(c * size if isinstance(c, int) else pl.multiple_of(c * size, size), size)

    def each_other_chunk(self, step):
        """Runs ``step(c)`` for all chunks of a group but the first."""
        if self.classes.chunks == 2:
            step(1)
        elif self.classes.chunks > 2:
            lax.fori_loop(1, self.classes.chunks, lambda c, _: (step(c), _)[1], np.int32(0))


def plan(tiled, parameters, inputs, device) -> Plan | str:
    """Implements `JointKernel.plan`; `device` is (kind, cores)."""
    if reason := _kernel.refused(tiled, parameters, inputs):
        return reason
    softmax, weight = tiled.inner, parameters[0]
    activation = _kernel.ACTIVATIONS[_kernel.activation_of(tiled.joint.activation) or ""]
    blanks, others = heads(softmax, tiled.classes)
    if len(others) + len(blanks) + 4 > LANES:
        return f"it takes at most {LANES - 4} blanks and durations, got {len(others) + len(blanks)}"
    cut = cut_of(inputs, BLOCKS)
    if cut.size > MOST_BLOCKS:
        return f"it takes at most {MOST_BLOCKS} blocks of {FRAMES} frames and {COLUMNS} columns, got {cut.size}"
    exact = tiled.precision not in _FAST and weight.dtype != jnp.bfloat16
    kind, cores = device
    vmem = VMEM.get(kind, LEAST_VMEM) << 20
    for doublings in range(8):
        classes = Classes(tiled.classes, blanks, others, cores << doublings)
        found = Plan(classes, cut, softmax, activation, rounded(weight.shape[0], LANES), exact)
        if found.vmem <= 0.95 * vmem:
            return found
    return f"it needs {found.vmem >> 20} of {vmem >> 20} MB of VMEM"


class Arrays(typing.NamedTuple):
    """The operands of both kernels."""

    encoder: jax.Array  # [B, T', H']
    predictor: jax.Array  # float32 [B N, U', H']
    label: jax.Array  # int32 [B N, U', 1]
    weight: jax.Array  # [H', groups * lanes]
    bias: jax.Array  # float32 [1, groups * lanes]


def _padded(x, *sizes):
    """Adds zeros behind the last dimensions, up to these sizes."""
    edges = [(0, 0)] * (x.ndim - len(sizes)) + [(0, size - n) for n, size in zip(x.shape[x.ndim - len(sizes) :], sizes)]
    return jnp.pad(x, edges) if any(after for _, after in edges) else x


def _arrays(plan, parameters, inputs) -> Arrays:
    weight, *bias = parameters
    classes, units = plan.classes, plan.units
    frames, columns = (n * size for n, size in zip(plan.cut.shape, (FRAMES, COLUMNS)))
    encoder = inputs.encoder if inputs.encoder.dtype == jnp.bfloat16 else inputs.encoder.astype(jnp.float32)
    added = bias[0].astype(jnp.float32) if bias else jnp.zeros(classes.count, jnp.float32)
    return Arrays(
        _padded(encoder, frames, units),
        _padded(inputs.predictor.astype(jnp.float32), columns, units),
        _padded(classes.lane(inputs.label[:, 0]), columns)[..., None],
        _padded(classes.arrange(weight.astype(plan.factor), 0), units, classes.groups * classes.lanes),
        classes.arrange(added, -jnp.inf)[None],
    )


def _specs(plan):
    """(specs of the operands in `Arrays`, index of one row a block, index of the encoder's block of frames)."""
    from jax.experimental import pallas as pl

    cut, units, lanes = plan.cut, plan.units, plan.classes.lanes

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


def _call(kernel, plan: Plan, name, count, products, interpret, scalars, operands, specs, results, scratch):
    """Returns the results of a kernel, over `count` blocks of each group.

    It takes `products` products of all nodes. `specs` are those of the operands, and those of the results.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    cut, classes = plan.cut, plan.classes
    elements = cut.size * ROWS * classes.groups * classes.lanes
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=(classes.groups, jnp.maximum(count, 1)),
        in_specs=specs[0],
        out_specs=specs[1],
        scratch_shapes=scratch,
    )
    return pl.pallas_call(
        functools.partial(kernel, plan=plan),
        grid_spec=grid,
        out_shape=results,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=plan.vmem),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * elements * plan.units,
            transcendentals=elements,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *results)),
        ),
        interpret=interpret,
        name=f"jax_rnnt_joint_{name}",
    )(*scalars, *operands)


def forward(plan, parameters, inputs, interpret=False):
    """Implements `JointKernel.forward`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    plan = plan.for_inputs(inputs)
    arrays, classes = _arrays(plan, parameters, inputs), plan.classes
    codes, count = plan.cut.listed(BLOCKS.within(inputs.shape, inputs.num_frames, inputs.num_labels))
    used = len(classes.others) + classes.kept + 3
    specs, of_block, _ = _specs(plan)
    shape = classes.groups, codes.size - 1, rounded(used, SUBLANES), ROWS
    result = struct_like(arrays.encoder, shape, jnp.float32)
    by_lane = pltpu.VMEM((ROWS, LANES), jnp.float32)
    scalars = codes, inputs.num_frames, inputs.num_labels
    of_result = pl.BlockSpec((1, 1, *shape[2:]), lambda g, *rest: (g, *of_block(g, *rest)))
    scratch = [pltpu.VMEM((ROWS, plan.units), plan.factor), by_lane, by_lane, by_lane]
    of_call = scalars, arrays, (specs, [of_result]), [result], scratch
    (out,) = _call(forward_kernel, plan, "forward", count, 1, interpret, *of_call)
    rows = [BLOCKS.join(x, inputs.shape) for x in _joined(out, used)]
    return planes(plan.softmax, classes, inputs, rows)


def _joined(out, used):
    """Returns the numbers of rows from those of the groups [groups, blocks, planes, rows]."""
    parts = [[x[:, i] for i in range(used)] for x in out]
    *others, peak, total, of_label = parts[0]
    for *_, next_peak, next_total, next_label in parts[1:]:
        either = jnp.maximum(peak, next_peak)
        base = jnp.where(jnp.isneginf(either), 0, either)
        total = total * jnp.exp(peak - base) + next_total * jnp.exp(next_peak - base)
        peak, of_label = either, of_label + next_label
    return [*others, peak, total, of_label]


def backward(plan, parameters, inputs, cotangents, norm, scale, clamp, flags, interpret=False):
    """Implements `JointKernel.backward`."""
    plan = plan.for_inputs(inputs)
    arrays, classes = _arrays(plan, parameters, inputs), plan.classes
    codes, count = plan.cut.listed(flags)
    rows = [BLOCKS.cut(x) for x in numbers(plan.softmax, inputs, cotangents, norm, scale)]
    rows += [jnp.zeros_like(rows[0])] * (rounded(len(rows), SUBLANES) - len(rows))
    stacked = jnp.stack(rows, 1)
    scalars = codes, inputs.num_frames, inputs.num_labels, bounds(clamp, scale)
    anchor = slice(classes.start, classes.start + LANES)
    operands = *arrays, stacked, arrays.weight[:, anchor], arrays.bias[:, anchor]
    of_call = scalars, operands, *_memory_of_backward(plan, operands)
    results = _call(backward_kernel, plan, "backward", count, 3, interpret, *of_call)
    return _gradients(plan, parameters, inputs, flags, count, results)


def _memory_of_backward(plan, operands):
    """((specs of the operands, specs of the results), types of the results, scratch) of the backward kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    encoder, predictor, _, weight, bias, planes, *anchors = operands
    classes, cut, units = plan.classes, plan.cut, plan.units
    specs, of_block, of_encoder = _specs(plan)
    of_planes = pl.BlockSpec((1, *planes.shape[1:]), of_block)
    of_anchors = [pl.BlockSpec(x.shape, lambda *_: (0, 0), pipeline_mode=pl.Buffered(1)) for x in anchors]
    out_specs = [
        pl.BlockSpec((1, 1, FRAMES, units), lambda g, *rest: (g, *of_encoder(g, *rest))),
        pl.BlockSpec(
            (1, cut.copies, predictor.shape[1], units), lambda g, i, codes, *_: (g, cut.decode(codes[i])[0], 0, 0)
        ),
        pl.BlockSpec(memory_space=pl.ANY),
        pl.BlockSpec((SUBLANES, classes.lanes), lambda g, i, *_: (0, g)),
    ]
    by_group = [(classes.groups, *x.shape) for x in (encoder, predictor)]
    shapes = *by_group, weight.shape, (SUBLANES, bias.shape[1])
    results = [struct_like(encoder, shape, jnp.float32) for shape in shapes]
    by_lane = pltpu.VMEM((ROWS, LANES), jnp.float32)
    scratch = [
        pltpu.VMEM((ROWS, units), plan.factor),
        pltpu.VMEM((units, ROWS), plan.factor),
        pltpu.VMEM((ROWS, units), jnp.float32),
        *[by_lane] * 3,
        pltpu.VMEM((FRAMES, COLUMNS, units), jnp.float32),
        pltpu.VMEM((units, classes.lanes), jnp.float32),
        pltpu.SemaphoreType.DMA,
    ]
    return ([*specs, of_planes, *of_anchors], out_specs), results, scratch


def _gradients(plan, parameters, inputs, flags, count, results):
    """Returns the gradients from the kernel's results, whose memory is not written where no block was visited."""
    of_encoder, of_predictor, of_weight, of_bias = results
    classes, cut = plan.classes, plan.cut
    (frames, columns), units = inputs.shape, parameters[0].shape[0]
    some = flags.reshape(cut.encoders, cut.copies, *cut.shape)
    of_frames = jnp.repeat(jnp.any(some, (1, 3)), FRAMES, 1)
    of_encoder = jnp.where(of_frames[..., None], jnp.sum(of_encoder, 0), 0)[:, :frames, :units]
    of_sequence = jnp.repeat(jnp.any(some, (1, 2, 3)), cut.copies)
    of_predictor = jnp.where(of_sequence[:, None, None], jnp.sum(of_predictor, 0), 0)[:, :columns, :units]
    of_weight = classes.restore(jnp.where(count > 0, of_weight, 0)[:units])
    of_bias = classes.restore(jnp.sum(jnp.where(count > 0, of_bias, 0), 0))
    return of_encoder, of_predictor, [of_weight, of_bias][: len(parameters)]
