"""A linear joint network and its emission on GPUs: kernels of `xla_kernels/cuda/joint.h`, and matrix products of XLA.

Hidden units and the gradient of logits are in memory for a slab of blocks at a time, logits never. The order of
classes, the list of blocks, and what planes are made of are those of the TPU (`_joint_plan.py`).

B encoders with N sequences each, T frames, U1 columns, H units, V classes.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt import _xla
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.layouts import _joint_plan as plans
from jax_rnnt.layouts._joint_plan import Classes, numbers, planes, rounded
from jax_rnnt.layouts._tile_blocks import Blocks

CLASSES, BYTES = 128, 128  # of a stage of the weight
_COLUMNS, _STAGES, _NUMBERS, _PAD = 8, 3, 12, 16  # as in `joint_product.cuh`
SLAB = 175e6  # bytes of a slab
_LEAST = 132  # blocks of a slab: a block for each multiprocessor of an H100
_MOST_BLOCKS = 1 << 24  # of a list
# `jax.default_matmul_precision` of products of float32 that XLA computes as TF32; others are three of them.
_TF32 = None, "default", "fastest", "high", "bfloat16", "bfloat16_3x", "tensorfloat32", "TF32_TF32_F32", "BF16_BF16_F32"
_ACTIVATIONS = jnp.tanh, jax.nn.relu, jax.nn.silu, jax.nn.gelu, plans._gelu  # as in `joint.h`


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is static of a call of the kernels."""

    classes: Classes
    softmax: Softmax
    activation: int
    units: int  # H
    factor: Any  # dtype of the factors of products
    exact: bool  # products of float32
    rows: int  # of a block

    @property
    def blocks(self) -> Blocks:
        return Blocks(self.rows // _COLUMNS, _COLUMNS, 1)

    @property
    def padded(self) -> int:
        """H in whole stages."""
        return rounded(self.units, BYTES // self.factor.itemsize)

    @property
    def slab(self) -> int:
        """Blocks of a slab of many: it depends on no length, and so neither does the order of sums."""
        block = self.rows * (self.padded + self.classes.lanes) * self.factor.itemsize + 8 * self.classes.lanes
        return max(int(SLAB) // block, _LEAST)

    def shape(self, inputs, cut, slab):
        """The attribute of the custom calls."""
        classes, softmax = self.classes, self.softmax
        bits = cut.bits
        sizes = inputs.encoder.shape[0], inputs.copies, *inputs.shape, self.units, classes.lanes, self.padded
        sizes += len(classes.others), classes.kept, self.rows, *bits, cut.size, slab, self.activation
        sizes += self.exact, softmax.normalize, softmax.bernoulli, len(classes.blanks)
        return np.array(sizes, np.int64)

    def product(self, x, y, axes, dtype):
        precision = lax.Precision.HIGHEST if self.exact else lax.Precision.DEFAULT
        return lax.dot_general(x, y, (axes, ((), ())), precision=precision, preferred_element_type=dtype)


def plan(tiled, parameters, inputs, shared: int | str) -> Problem | str:
    """The problem for avals of the operands, or why there is no kernel for it.

    `shared`: bytes of shared memory of a thread block, or why devices have no such kernel.
    """
    if reason := plans.refused(tiled, parameters, inputs):
        return reason
    if isinstance(shared, str):
        return shared
    softmax, weight = tiled.inner, parameters[0]
    blanks, others = plans.heads(softmax, tiled.classes)
    if max(len(blanks), len(others)) > CLASSES:
        return f"it takes at most {CLASSES} blanks and durations, got {len(blanks) + len(others)}"
    factor = np.dtype(weight.dtype)
    exact = factor == np.float32 and tiled.precision not in _TF32
    activation = _ACTIVATIONS.index(plans.activation_of(tiled.joint.activation))
    classes = Classes(tiled.classes, blanks, others, 1, (CLASSES,))
    problem = Problem(classes, softmax, activation, weight.shape[0], factor, exact, 0)
    row = problem.padded * factor.itemsize + _PAD + 4 * _NUMBERS
    free = shared - _STAGES * CLASSES * (BYTES + _PAD)
    for rows in (128, 64, 32) if factor.itemsize == 2 else (64, 32):
        problem = dataclasses.replace(problem, rows=rows)
        if rows * row > free:
            continue
        if plans.cut_of(inputs, problem.blocks).size > _MOST_BLOCKS:
            return f"it takes at most {_MOST_BLOCKS} blocks of {rows} nodes"
        return problem
    needed = 32 * row + shared - free
    return f"{weight.shape[0]} units take {needed >> 10} KB of shared memory, and a thread block has {shared >> 10}"


def _table(problem, inputs, listed):
    """The first operands of all calls."""
    encoder, predictor = inputs.encoder, inputs.predictor
    if encoder.dtype != predictor.dtype:
        encoder, predictor = (x.astype(jnp.float32) for x in (encoder, predictor))
    codes, count = listed
    label = problem.classes.lane(inputs.label[:, 0])
    return [codes, count, inputs.num_frames, inputs.num_labels, label, encoder, predictor]


def _weights(problem, parameters):
    """(weight [V', H'], bias [V']) in the order of `Classes`."""
    weight, *bias = parameters
    classes, units = problem.classes, problem.units
    if problem.factor == jnp.float32 and not problem.exact:
        weight = lax.reduce_precision(weight, 8, 10)
    weight = jnp.pad(classes.arrange(weight, 0).T, ((0, 0), (0, problem.padded - units)))
    added = bias[0].astype(jnp.float32) if bias else jnp.zeros(classes.count, jnp.float32)
    return [weight, classes.arrange(added, -jnp.inf)]


def forward(problem, parameters, inputs, interpret=False):
    """(planes by slot, norm) [B N, T, U1]"""
    cut, classes = plans.cut_of(inputs, problem.blocks), problem.classes
    listed = cut.listed(problem.blocks.within(inputs.shape, inputs.num_frames, inputs.num_labels))
    operands = [*_table(problem, inputs, listed), *_weights(problem, parameters)]
    shape = len(classes.others) + classes.kept + 3, inputs.predictor.shape[0], *inputs.shape
    (rows,) = _xla.custom_call(
        "jax_rnnt_joint_fwd", [(shape, jnp.float32)], operands, shape=problem.shape(inputs, cut, 1)
    )
    label = inputs.label == -1  # its plane was not written there
    *rows, of_label = rows
    return planes(problem.softmax, classes, inputs, [*rows, jnp.where(label, 0, of_label)])


def backward(problem, parameters, inputs, cotangents, norm, scale, clamp, flags, interpret=False):
    """(gradient of the encoder [B, T, H], of the predictor [B N, U1, H], those of the parameters).

    They are in float32, but that of the encoder may have its type.

    `flags`: bool [B N, blocks of frames, blocks of columns], the blocks that count.
    """
    cut, classes = plans.cut_of(inputs, problem.blocks), problem.classes
    listed = cut.listed(flags)
    table, (weight, bias) = _table(problem, inputs, listed), _weights(problem, parameters)
    rows = jnp.stack(numbers(problem.softmax, inputs, cotangents, norm, scale))
    bound = jnp.where(clamp > 0, clamp * jnp.abs(scale), jnp.inf).astype(jnp.float32)
    slab = min(problem.slab, cut.size)
    call = functools.partial(_xla.custom_call, shape=problem.shape(inputs, cut, slab))
    nodes, lanes, units = slab * problem.rows, classes.lanes, problem.padded
    factors = [((nodes, width), problem.factor) for width in (units, lanes)]
    of_slab = [*factors, ((slab, 2, lanes), jnp.float32), ((), jnp.int32)]

    def turn(state):
        i, _, of_weight, *sums = state
        hidden, gradient, of_bias, here = call("jax_rnnt_joint_bwd", of_slab, [*table, weight, bias, rows, bound, i])
        of_weight = of_weight + problem.product(gradient, hidden, ((0,), (0,)), jnp.float32)
        # After it, so that the memory of the hidden units is free for their gradient.
        gradient, of_weight = lax.optimization_barrier((gradient, of_weight))
        of_hidden = problem.product(gradient, weight, ((1,), (0,)), problem.factor)
        carried = [*sums, i]  # in place: no launch copies it
        results = [*((x.shape, x.dtype) for x in carried), ((), jnp.bool_)]
        operands = [*table, here, of_hidden, of_bias, *carried]
        aliases = {len(operands) - len(carried) + k: k for k in range(len(carried))}
        *sums, i, more = call("jax_rnnt_joint_sums", results, operands, aliases=aliases)
        return i, more, of_weight, *sums

    carry = 2, problem.blocks.frames, problem.units  # of rows of the encoder whose blocks are in two slabs
    shapes = (lanes, units), inputs.encoder.shape, inputs.predictor.shape, (lanes,), carry
    dtypes = jnp.float32, table[5].dtype, jnp.float32, jnp.float32, jnp.float32
    zeros = [jnp.zeros(*of_array) for of_array in zip(shapes, dtypes)]
    state = lax.while_loop(lambda state: state[1], turn, (jnp.int32(0), listed[1] > 0, *zeros))
    of_weight, of_encoder, of_predictor, of_bias, _ = state[2:]
    of_parameters = [classes.restore(of_weight.T[: problem.units]), classes.restore(of_bias)]
    return of_encoder, of_predictor, of_parameters[: len(parameters)]
