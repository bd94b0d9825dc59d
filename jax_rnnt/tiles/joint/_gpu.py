"""The kernels for GPUs: those of `xla_kernels/cuda/joint.h` and matrix products of XLA.

Hidden units and the gradient of logits are in memory for a slab of blocks at a time, logits never. The module of the
kernels says which problems it takes.

There are B encoders with N sequences each, T frames, U1 columns and H units.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt import _xla
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.tiles._tile_blocks import Blocks
from jax_rnnt.tiles.joint import _kernel
from jax_rnnt.tiles.joint._blocks import cut_of
from jax_rnnt.tiles.joint._classes import Classes, heads, rounded
from jax_rnnt.tiles.joint._planes import bounds, numbers, planes

SLAB = 175e6  # bytes of a slab
_LEAST = 132  # least blocks of a slab: one for each multiprocessor of an H100
# Values of `jax.default_matmul_precision` with which XLA computes float32 products as TF32; others take three of them.
_TF32 = None, "default", "fastest", "high", "bfloat16", "bfloat16_3x", "tensorfloat32", "TF32_TF32_F32", "BF16_BF16_F32"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a call of the kernels."""

    classes: Classes
    softmax: Softmax
    activation: int  # its place in `joint["activations"]` of the module
    units: int  # H
    padded: int  # H in whole stages
    factor: Any  # dtype of the factors of products
    exact: bool  # products of float32
    rows: int  # rows of a block
    blocks: Blocks

    @property
    def slab(self) -> int:
        """The number of blocks of a slab of many: it depends on no length, and so neither does the order of sums."""
        block = self.rows * (self.padded + self.classes.lanes) * self.factor.itemsize + 8 * self.classes.lanes
        return max(int(SLAB) // block, _LEAST)

    def shape(self, inputs, cut, slab):
        """Returns the attribute of the custom calls."""
        classes, softmax = self.classes, self.softmax
        bits = cut.bits
        sizes = inputs.encoder.shape[0], inputs.copies, *inputs.shape, self.units, classes.lanes, self.padded
        sizes += len(classes.others), classes.kept, self.rows, *bits, cut.size, slab, self.activation
        sizes += self.exact, softmax.normalize, softmax.bernoulli, len(classes.blanks)
        return np.array(sizes, np.int64)

    def product(self, x, y, axes, dtype):
        precision = lax.Precision.HIGHEST if self.exact else lax.Precision.DEFAULT
        return lax.dot_general(x, y, (axes, ((), ())), precision=precision, preferred_element_type=dtype)


def plan(tiled, parameters, inputs, device) -> Plan | str:
    """Implements `JointKernel.plan`.

    `device` is (bytes of shared memory of a thread block, or why devices have no such kernel; the extension module,
    whose `joint` and `joint_shared_bytes` are the limits of the kernels).
    """
    if reason := _kernel.refused(tiled, parameters, inputs):
        return reason
    shared, module = device
    if isinstance(shared, str):
        return shared
    softmax, weight, joint = tiled.inner, parameters[0], module.joint
    blanks, others = heads(softmax, tiled.classes)
    if max(len(blanks), len(others)) > joint["classes"]:
        return f"it takes at most {joint['classes']} blanks and durations, got {len(blanks) + len(others)}"
    factor = np.dtype(weight.dtype)
    exact = factor == np.float32 and tiled.precision not in _TF32
    activation = joint["activations"].index(_kernel.activation_of(tiled.joint.activation))
    classes = Classes(tiled.classes, blanks, others, 1, (joint["classes"],))
    units = weight.shape[0]
    padded = rounded(units, joint["unit_bytes"] // factor.itemsize)
    for rows in joint["rows"][factor.itemsize]:  # the most first
        needed = module.joint_shared_bytes(rows, padded * factor.itemsize)
        if needed > shared:
            continue
        blocks = Blocks(rows // joint["columns"], joint["columns"], 1)
        if cut_of(inputs, blocks).size > joint["blocks"]:
            return f"it takes at most {joint['blocks']} blocks of {rows} nodes"
        return Plan(classes, softmax, activation, units, padded, factor, exact, rows, blocks)
    return f"{units} units take {needed >> 10} KB of shared memory, and a thread block has {shared >> 10}"


def _table(plan, inputs, listed):
    """Returns the first operands of all calls."""
    encoder, predictor = inputs.encoder, inputs.predictor
    if encoder.dtype != predictor.dtype:
        encoder, predictor = (x.astype(jnp.float32) for x in (encoder, predictor))
    codes, count = listed
    label = plan.classes.lane(inputs.label[:, 0])
    return [codes, count, inputs.num_frames, inputs.num_labels, label, encoder, predictor]


def _weights(plan, parameters):
    """Returns (weight [V', H'], bias [V']) in the order of `Classes`."""
    weight, *bias = parameters
    classes, units = plan.classes, plan.units
    if plan.factor == jnp.float32 and not plan.exact:
        weight = lax.reduce_precision(weight, 8, 10)
    weight = jnp.pad(classes.arrange(weight, 0).T, ((0, 0), (0, plan.padded - units)))
    added = bias[0].astype(jnp.float32) if bias else jnp.zeros(classes.count, jnp.float32)
    return [weight, classes.arrange(added, -jnp.inf)]


def forward(plan, parameters, inputs, interpret=False):
    """Implements `JointKernel.forward`."""
    cut, classes = cut_of(inputs, plan.blocks), plan.classes
    listed = cut.listed(plan.blocks.within(inputs.shape, inputs.num_frames, inputs.num_labels))
    operands = [*_table(plan, inputs, listed), *_weights(plan, parameters)]
    shape = len(classes.others) + classes.kept + 3, inputs.predictor.shape[0], *inputs.shape
    (rows,) = _xla.custom_call("jax_rnnt_joint_fwd", [(shape, jnp.float32)], operands, shape=plan.shape(inputs, cut, 1))
    label = inputs.label == -1  # there, its plane was not written
    *rows, of_label = rows
    return planes(plan.softmax, classes, inputs, [*rows, jnp.where(label, 0, of_label)])


def backward(plan, parameters, inputs, cotangents, norm, scale, clamp, flags, interpret=False):
    """Implements `JointKernel.backward`.

    The kernels compute g and the hidden units of a slab, and later the sums of dx. XLA computes their products with
    each other and with the weight. `_planes.py` writes down the gradient.
    """
    cut, classes = cut_of(inputs, plan.blocks), plan.classes
    listed = cut.listed(flags)
    table, (weight, bias) = _table(plan, inputs, listed), _weights(plan, parameters)
    rows = jnp.stack(numbers(plan.softmax, inputs, cotangents, norm, scale))
    bound = bounds(clamp, scale)
    slab = min(plan.slab, cut.size)
    call = functools.partial(_xla.custom_call, shape=plan.shape(inputs, cut, slab))
    nodes, lanes, units = slab * plan.rows, classes.lanes, plan.padded
    factors = [((nodes, width), plan.factor) for width in (units, lanes)]
    of_slab = [*factors, ((slab, 2, lanes), jnp.float32), ((), jnp.int32)]

    def turn(state):
        i, _, of_weight, *sums = state
        hidden, gradient, of_bias, here = call("jax_rnnt_joint_bwd", of_slab, [*table, weight, bias, rows, bound, i])
        of_weight = of_weight + plan.product(gradient, hidden, ((0,), (0,)), jnp.float32)
        # The barrier orders this after it, so that the memory of the hidden units is free for their gradient.
        gradient, of_weight = lax.optimization_barrier((gradient, of_weight))
        of_hidden = plan.product(gradient, weight, ((1,), (0,)), plan.factor)
        carried = [*sums, i]  # in place: no launch copies it
        results = [*((x.shape, x.dtype) for x in carried), ((), jnp.bool_)]
        operands = [*table, here, of_hidden, of_bias, *carried]
        aliases = {len(operands) - len(carried) + k: k for k in range(len(carried))}
        *sums, i, more = call("jax_rnnt_joint_sums", results, operands, aliases=aliases)
        return i, more, of_weight, *sums

    carry = 2, plan.blocks.frames, plan.units  # for rows of the encoder whose blocks are in two slabs
    shapes = (lanes, units), inputs.encoder.shape, inputs.predictor.shape, (lanes,), carry
    dtypes = jnp.float32, table[5].dtype, jnp.float32, jnp.float32, jnp.float32
    zeros = [jnp.zeros(*of_array) for of_array in zip(shapes, dtypes)]
    state = lax.while_loop(lambda state: state[1], turn, (jnp.int32(0), listed[1] > 0, *zeros))
    of_weight, of_encoder, of_predictor, of_bias, _ = state[2:]
    of_parameters = [classes.restore(of_weight.T[: plan.units]), classes.restore(of_bias)]
    return of_encoder, of_predictor, of_parameters[: len(parameters)]
