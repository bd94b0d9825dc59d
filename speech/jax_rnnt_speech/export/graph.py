"""An ONNX graph that grows node by node, with sizes that are known only at run time."""

import hashlib
import math

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET, IR = 17, 8  # of 2022, which every current runtime reads
LIMIT = 2**31 - 2**24  # bytes of a file: protobuf ends at 2 GiB, and nodes and names need some of them


def kind(dtype):
    """Returns ONNX's number for a type."""
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


class Size:
    """A size as an int64 scalar of the graph, with the arithmetic of JAX's symbolic sizes."""

    def __init__(self, graph, name):
        self.graph, self.name = graph, name

    def by(self, operator, other, swapped=False):
        """Returns `self operator other`, or the reverse."""
        other = other.name if isinstance(other, Size) else self.graph.constant(np.int64(other))
        names = (other, self.name) if swapped else (self.name, other)
        return Size(self.graph, self.graph.node(operator, *names))

    def __add__(self, other):
        return self.by("Add", other)

    def __sub__(self, other):
        return self.by("Sub", other)

    def __rsub__(self, other):
        return self.by("Sub", other, swapped=True)

    def __mul__(self, other):
        return self.by("Mul", other)

    def __mod__(self, other):
        return self.by("Mod", other)

    def __floordiv__(self, other):
        """Rounds down, where ONNX rounds to zero."""
        return (self - self % other).by("Div", other)

    def __pow__(self, exponent):
        return math.prod([self] * exponent)

    def __neg__(self):
        return self * -1

    __radd__, __rmul__ = __add__, __mul__


# The functions in the text of a symbolic size, whose first argument is never a number.
ARITHMETIC = {
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "max": lambda x, y: x.by("Max", y) if isinstance(x, Size) else y.by("Max", x),
    "min": lambda x, y: x.by("Min", y) if isinstance(x, Size) else y.by("Min", x),
}


class Graph:
    """Nodes and constants, equal ones only once. `symbols` has the Size of each symbol of JAX's shapes."""

    def __init__(self):
        self.nodes, self.arrays, self.names, self.symbols = [], {}, {}, {}

    def fresh(self, key):
        """Returns (a name, whether it is new) for a key."""
        new = key not in self.names
        return self.names.setdefault(key, f"x{len(self.names)}"), new

    def constant(self, x):
        x = np.ascontiguousarray(x) if np.ndim(x) else np.asarray(x)
        name, new = self.fresh((x.dtype.str, x.shape, hashlib.sha256(x.tobytes()).digest()))
        if new:
            self.arrays[name] = x
        return name

    def node(self, operator, *inputs, outputs=1, **attributes):
        """Returns the name of its output, or the list of their names."""
        made = [self.fresh((operator, inputs, repr(attributes), i)) for i in range(outputs)]
        names, new = [name for name, _ in made], made[0][1]
        if new:
            self.nodes.append(helper.make_node(operator, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def size(self, size):
        """Returns an int or a Size for one of JAX's sizes, whose text is a formula of symbols."""
        if isinstance(size, int | np.integer):
            return int(size)
        if isinstance(size, Size):
            return size
        return eval(f"{size}".replace("^", "**"), ARITHMETIC, self.symbols)

    def sizes(self, sizes):
        """Returns the name of an int64 tensor of JAX's sizes."""
        sizes = [self.size(x) for x in sizes]
        if all(isinstance(x, int) for x in sizes):
            return self.constant(np.array(sizes, np.int64))
        one = np.array([1], np.int64)
        parts = [self.constant(one * x) if isinstance(x, int) else self.node("Reshape", x.name, self.constant(one))
                 for x in sizes]  # fmt: skip
        return self.node("Concat", *parts, axis=0)

    def size_of(self, name, axis):
        """Returns the Size of an axis of a tensor."""
        return Size(self, self.node("Gather", self.node("Shape", name), self.constant(np.int64(axis)), axis=0))

    def reshape(self, name, sizes):
        return self.node("Reshape", name, self.sizes(sizes), allowzero=1)

    def cast(self, name, dtype):
        return self.node("Cast", name, to=kind(dtype))

    def transpose(self, name, axes):
        axes = list(axes)
        if axes == sorted(axes):
            return name
        if name in self.arrays:
            return self.constant(self.arrays[name].transpose(axes))
        return self.node("Transpose", name, perm=axes)

    def result(self, x, name, dtype):
        """Names an output of the graph."""
        self.nodes.append(helper.make_node("Cast", [x], [name], to=kind(dtype)))

    def save(self, path, inputs, outputs, metadata):
        """Writes the graph. Inputs and outputs are {name: (type, shape)}, whose shapes have numbers and names.

        Arrays that no file of protobuf can hold go into a second file, which has the name of the first and `.data`.
        """
        described = [[helper.make_tensor_value_info(name, kind(dtype), shape) for name, (dtype, shape) in x.items()]
                     for x in (inputs, outputs)]  # fmt: skip
        used = {name for node in self.nodes for name in node.input}
        arrays = [numpy_helper.from_array(x, name) for name, x in self.arrays.items() if name in used]
        graph = helper.make_graph(self.nodes, path.stem, *described, arrays)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
        helper.set_model_props(model, {name: f"{x}" for name, x in metadata.items()})
        large = sum(len(x.raw_data) for x in arrays) > LIMIT
        onnx.save_model(model, path, save_as_external_data=large, location=f"{path.name}.data", size_threshold=100)
        onnx.checker.check_model(f"{path}", full_check=True)
