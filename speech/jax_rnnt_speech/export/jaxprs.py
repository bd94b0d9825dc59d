"""Writes a function's jaxpr as an ONNX graph, for the primitives of our networks, with symbolic sizes.

Calls are inlined, and values that depend on constants alone are computed. A broadcast keeps sizes of 1 until an
operator needs it as a whole. This is an emitter of our own, since jax2onnx 0.17.1 writes none of our encoders with open
sizes.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from jax_rnnt_speech.model import is_key
from jax_rnnt_speech.system import UserError

CALLS = "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"
SAME = "copy", "copy_p", "optimization_barrier", "sharding_constraint", "stop_gradient"
OPERATORS = {
    "abs": "Abs", "add": "Add", "and": "And", "cos": "Cos", "div": "Div", "eq": "Equal", "erf": "Erf", "exp": "Exp",
    "floor": "Floor", "ge": "GreaterOrEqual", "gt": "Greater", "le": "LessOrEqual", "log": "Log",
    "logistic": "Sigmoid", "lt": "Less", "max": "Max", "min": "Min", "mul": "Mul", "neg": "Neg", "not": "Not",
    "or": "Or", "pow": "Pow", "sign": "Sign", "sin": "Sin", "sqrt": "Sqrt", "sub": "Sub", "tanh": "Tanh",
}  # fmt: skip
LARGEST = 2**22  # size of the largest array that is computed here, and written as a constant


class Tensor(NamedTuple):
    """A tensor of the graph. Sizes of 1 here may be larger in JAX: such a broadcast is still to be done."""

    name: str
    shape: tuple


def elementwise(graph, eqn, names):
    """Returns the name of an elementwise primitive's result, or None for other primitives."""
    primitive, (x, *others) = eqn.primitive.name, names or [None]
    dtype = eqn.invars[0].aval.dtype if eqn.invars else None
    match primitive:
        case "square":
            return graph.node("Mul", x, x)
        case "integer_pow":
            return graph.node("Pow", x, graph.constant(np.asarray(eqn.params["y"], dtype)))
        case "rsqrt":
            return graph.node("Reciprocal", graph.node("Sqrt", x))
        case "erfc":
            return graph.node("Sub", graph.constant(np.asarray(1, dtype)), graph.node("Erf", x))
        case "ne":
            return graph.node("Not", graph.node("Equal", x, *others))
        case "rem":
            return graph.node("Mod", x, *others, fmod=1)
        case "clamp":
            return graph.node("Min", graph.node("Max", others[0], x), others[1])
        case "select_n":
            return graph.node("Where", x, *others[::-1])
        case "shift_right_arithmetic":  # by a constant, which is a division that rounds down
            two = graph.constant(np.asarray(2 ** graph.arrays[others[0]], dtype))
            return graph.node("Div", graph.node("Sub", x, graph.node("Mod", x, two)), two)
        case "convert_element_type":
            return graph.cast(x, eqn.outvars[0].aval.dtype)
    return graph.node(OPERATORS[primitive], *names) if primitive in OPERATORS else None


def require(fine, eqn):
    if not fine:
        raise UserError(f"the network computes {eqn.primitive.name} in a way that ONNX cannot: {eqn}")


# ------------------------------------------------------------------------ primitives that need their tensors as a whole


def iota(graph, eqn):
    """Returns a Tensor of numbers along one axis, which are broadcast to the others."""
    shape, axis = eqn.outvars[0].aval.shape, eqn.params["dimension"]
    numbers, zero, one = graph.reshape(graph.sizes([shape[axis]]), []), *(graph.constant(np.int64(x)) for x in (0, 1))
    numbers = graph.cast(graph.node("Range", zero, numbers, one), eqn.outvars[0].aval.dtype)
    sizes = [size if i == axis else 1 for i, size in enumerate(shape)]
    return Tensor(graph.reshape(numbers, sizes), tuple(sizes))


def broadcast_in_dim(graph, eqn, x):
    """Returns a Tensor with axes of size 1 where it is to be broadcast."""
    sizes = [1] * len(eqn.outvars[0].aval.shape)
    for axis, size in zip(eqn.params["broadcast_dimensions"], x.shape):
        sizes[axis] = size
    return Tensor(x.name if len(sizes) == len(x.shape) else graph.reshape(x.name, sizes), tuple(sizes))


def dim_as_value(graph, eqn):
    return graph.cast(graph.size(eqn.params["dim"]).name, eqn.outvars[0].aval.dtype)


def reshape(graph, eqn, x):
    return graph.reshape(x, eqn.outvars[0].aval.shape)


def transpose(graph, eqn, x):
    return graph.transpose(x, eqn.params["permutation"])


def concatenate(graph, eqn, *parts):
    return graph.node("Concat", *parts, axis=eqn.params["dimension"])


def stack(graph, eqn, *parts):
    axis = eqn.params["axis"]
    return graph.node("Concat", *(graph.node("Unsqueeze", x, graph.sizes([axis])) for x in parts), axis=axis)


def split(graph, eqn, x):
    sizes = graph.sizes(eqn.params["sizes"])
    names = graph.node("Split", x, sizes, outputs=len(eqn.outvars), axis=eqn.params["axis"])
    return [names] if len(eqn.outvars) == 1 else names


def slice_(graph, eqn, x):
    params, rank = eqn.params, len(eqn.outvars[0].aval.shape)
    ends = graph.sizes(params["start_indices"]), graph.sizes(params["limit_indices"])
    return graph.node("Slice", x, *ends, graph.sizes(range(rank)), graph.sizes(params["strides"] or [1] * rank))


def pad(graph, eqn, x, value):
    before, after, between = zip(*eqn.params["padding_config"])
    require(not any(between), eqn)
    return graph.node("Pad", x, graph.sizes([*before, *after]), value)  # negative ones cut, here and there


def reduce_sum(graph, eqn, x):
    return graph.node("ReduceSum", x, graph.sizes(eqn.params["axes"]), keepdims=0)


def reduce_max(graph, eqn, x):
    return graph.node("ReduceMax", x, axes=list(eqn.params["axes"]), keepdims=0)


def gather(graph, eqn, x, index):
    """Takes the values at places [..., 1] of an axis, as in an embedding; or a slice, whose sizes may be symbols."""
    numbers, out = eqn.params["dimension_numbers"], eqn.outvars[0].aval.shape
    (shape, (*places, _)), sizes = (v.aval.shape for v in eqn.invars), eqn.params["slice_sizes"]
    axes, index = list(numbers.start_index_map), graph.cast(index, "int64")
    require(not numbers.operand_batching_dims, eqn)
    if not places:
        ends = graph.node("Add", index, graph.sizes([sizes[axis] for axis in axes]))
        return graph.reshape(graph.node("Slice", x, index, ends, graph.sizes(axes)), out)
    axis, whole = axes[0], [*map(str, shape)] == [*map(str, (*sizes[: axes[0]], shape[axes[0]], *sizes[axes[0] + 1 :]))]
    kept = *range(axis), *range(axis + len(places), len(out))
    require(whole and axes == [*numbers.collapsed_slice_dims] == [axis] and numbers.offset_dims == kept, eqn)
    return graph.node("Gather", x, graph.reshape(index, places), axis=axis)


def dot_general(graph, eqn, x, y):
    """Multiplies matrices, one pair for each place of the batch axes. Other axes become two for the product."""
    (sums_x, sums_y), (batch_x, batch_y) = eqn.params["dimension_numbers"]
    shape_x, shape_y = (v.aval.shape for v in eqn.invars)
    free_x = [i for i in range(len(shape_x)) if i not in (*batch_x, *sums_x)]
    free_y = [i for i in range(len(shape_y)) if i not in (*batch_y, *sums_y)]
    x, y = graph.transpose(x, (*batch_x, *free_x, *sums_x)), graph.transpose(y, (*batch_y, *sums_y, *free_y))
    if len(sums_x) == len(free_y) == 1 and (len(free_x) == 1 or not batch_x):
        return graph.node("MatMul", x, y)
    batch, joint = [shape_x[i] for i in batch_x], math.prod(shape_x[i] for i in sums_x)
    x = graph.reshape(x, [*batch, math.prod(shape_x[i] for i in free_x), joint])
    y = graph.reshape(y, [*batch, joint, math.prod(shape_y[i] for i in free_y)])
    return graph.reshape(graph.node("MatMul", x, y), eqn.outvars[0].aval.shape)


def conv_general_dilated(graph, eqn, x, kernel):
    params, layouts = eqn.params, eqn.params["dimension_numbers"]
    require({*params["lhs_dilation"]} <= {1} and params["batch_group_count"] == 1, eqn)
    more = {"strides": list(params["window_strides"]), "dilations": list(params["rhs_dilation"])}
    more |= {"pads": [x for side in zip(*params["padding"]) for x in side], "group": params["feature_group_count"]}
    x = graph.transpose(x, layouts.lhs_spec)
    return graph.transpose(graph.node("Conv", x, graph.transpose(kernel, layouts.rhs_spec), **more),
                           np.argsort(layouts.out_spec).tolist())  # fmt: skip


WHOLE = {
    "concatenate": concatenate, "conv_general_dilated": conv_general_dilated, "dim_as_value": dim_as_value,
    "dot_general": dot_general, "expand_dims": reshape, "gather": gather, "iota": iota, "pad": pad,
    "reduce_max": reduce_max, "reduce_sum": reduce_sum, "reshape": reshape, "slice": slice_, "split": split,
    "squeeze": reshape, "stack": stack, "transpose": transpose,
}  # fmt: skip


def is_static(shape):
    return all(isinstance(size, int | np.integer) for size in shape)


def joined(shape, tensors):
    """Returns the shape of an elementwise result, with sizes of 1 where all its tensors have them."""
    shapes = [(1,) * (len(shape) - len(x.shape)) + x.shape for x in tensors]
    return tuple(1 if all(f"{x[i]}" == "1" for x in shapes) else size for i, size in enumerate(shape))


class Emitter:
    """Writes jaxprs into a graph. Values are Tensors of it, or constants: arrays of NumPy."""

    def __init__(self, graph):
        self.graph = graph

    def tensor(self, x):
        return x if isinstance(x, Tensor) else Tensor(self.graph.constant(x), x.shape)

    def whole(self, x, shape):
        """Returns the name of a value's tensor, with its broadcast done."""
        name, sizes = self.tensor(x)
        if [*map(str, sizes)] == [*map(str, shape)]:
            return name
        return self.graph.node("Expand", name, self.graph.sizes(shape))

    def run(self, jaxpr, constants, values):
        """Returns the values of a jaxpr's results."""
        constants = [x if is_key(x) else np.asarray(x) for x in constants]  # calls take keys of dropout, unused
        known = dict(zip(jaxpr.constvars, constants)) | dict(zip(jaxpr.invars, values))

        def read(x):
            return np.asarray(x.val, x.aval.dtype) if isinstance(x, Literal) else known[x]

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self.results(eqn, [read(x) for x in eqn.invars])))
        return [read(x) for x in jaxpr.outvars]

    def results(self, eqn, values):
        """Returns the values that an equation computes."""
        primitive, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[0].aval.shape
        if primitive in CALLS:
            inner = params.get("jaxpr") or params["call_jaxpr"]
            return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), values)
        if primitive in SAME:
            return values
        constant = not any(isinstance(x, Tensor) for x in values) and primitive != "dim_as_value"
        if constant and is_static(shape) and math.prod(shape) <= LARGEST:
            made = eqn.primitive.bind(*map(jnp.asarray, values), **params)
            return [*map(np.asarray, made if eqn.primitive.multiple_results else [made])]
        if primitive == "broadcast_in_dim":
            return [broadcast_in_dim(self.graph, eqn, self.tensor(values[0]))]
        if primitive in WHOLE:
            made = WHOLE[primitive](self.graph, eqn, *map(self.whole, values, (v.aval.shape for v in eqn.invars)))
            made = made if isinstance(made, list) else [made]
            return [x if isinstance(x, Tensor) else Tensor(x, v.aval.shape) for x, v in zip(made, eqn.outvars)]
        tensors = [self.tensor(x) for x in values]
        name = elementwise(self.graph, eqn, [x.name for x in tensors])
        if name is None:
            raise UserError(f"the network computes {primitive}, which the export to ONNX lacks")
        return [Tensor(name, joined(shape, tensors))]
