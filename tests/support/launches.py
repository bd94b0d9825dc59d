"""Counts what a program compiled for a GPU launches, moves and multiplies, from the text of its HLO.

Every instruction with work of its own is one launch; the library's custom calls launch as many kernels as `KERNELS`
says. A loop counts as often as it runs. Bytes are operands and results; where a kernel gathers, slices or updates in
place, they are the elements that it touches. Nothing is timed.
"""

import dataclasses
import math
import re
from typing import NamedTuple

import numpy as np

# Launches of the library's handlers: xla_kernels/cuda.
KERNELS = {
    "jax_rnnt_softmax_emission_fwd": 1,
    "jax_rnnt_softmax_emission_bwd": 1,
    "jax_rnnt_lattice_loss": 3,
    "jax_rnnt_lattice_grad": 4,
}
# Instructions without a kernel; `while` and `call` count what they run.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "while", "call", "opt-barrier",
}  # fmt: skip
LAUNCH, TENSOR_FLOPS, VECTOR_FLOPS, BANDWIDTH = 2.5e-6, 600e12, 50e12, 4.3e12  # seconds, 16-bit and float32 flop/s, B/s
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
WIDTHS |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}
# Instructions that only rename or reinterpret the elements of their operand, one to one.
VIEWS = {"bitcast", "bitcast-convert", "reshape", "convert", "copy"}


@dataclasses.dataclass
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: list[str]
    rest: str  # attributes
    root: bool

    def called(self, attribute):
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found and found[1]


class Cost(NamedTuple):
    launches: float
    tensor: float  # flop of products of 16-bit numbers
    vector: float  # flop of products of wider ones
    bytes: float

    @property
    def seconds(self):
        """A model, not a measurement: launches, products and bytes one after the other, at fixed rates."""
        products = self.tensor / TENSOR_FLOPS + self.vector / VECTOR_FLOPS
        return self.launches * LAUNCH + products + self.bytes / BANDWIDTH


def arrays(shape):
    """(dtype, dimensions) of every array in the text of a shape."""
    return [(d, [int(n) for n in s.split(",") if n]) for d, s in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)]


def size(shape):
    return sum(WIDTHS.get(dtype, 0) * math.prod(dims) for dtype, dims in arrays(shape))


def parse(text):
    """({computation: {name: instruction}}, name of the entry computation)"""
    computations, entry, current = {}, None, None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif made := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line):
            depth = np.cumsum([(c == "(") - (c == ")") for c in made[5]])
            end = int(np.argmax(depth < 0))  # the parenthesis that closes the operands
            operands = [] if made[4] == "parameter" else re.findall(r"%([\w.\-]+)", made[5][:end])
            current[made[2]] = Instruction(made[2], made[3], made[4], operands, made[5][end + 1 :], bool(made[1]))
    return computations, entry


class Program:
    """A compiled program. `tiles` tells how often a loop with this custom call runs, where that is data."""

    def __init__(self, text, tiles=None, valid=1.0):
        self.computations, self.entry = parse(text)
        self.tiles, self.valid = tiles or {}, valid

    @property
    def total(self) -> Cost:
        return Cost(*self.of(self.entry))

    def of(self, computation):
        """The cost of a computation as an array."""
        own = self.computations[computation]
        return sum((self.instruction(x, own) for x in own.values()), np.zeros(4))

    def _turns(self, x):
        if known := re.search(r"known_trip_count[^\d]*(\d+)", x.rest):
            return int(known[1])
        for inside in self.computations[x.called("body")].values():
            if inside.opcode == "custom-call" and (target := _target_of(inside)) in self.tiles:
                return self.tiles[target]
        raise ValueError(f"a loop runs as often as its data says, and no one said how often: {x.name}")

    def instruction(self, x, own):
        if x.opcode == "while":
            return (self.of(x.called("body")) + self.of(x.called("condition"))) * self._turns(x)
        if x.opcode == "call":
            return self.of(x.called("to_apply"))
        if x.opcode in FREE:
            return np.zeros(4)
        shapes = [own[name].shape for name in x.operands if name in own]
        if x.opcode == "custom-call" and (target := _target_of(x)) in KERNELS:
            # The emission reads no logits outside the lengths, which are all of those of a tile.
            share = self.valid if len(arrays(shapes[0])[0][1]) == 4 and arrays(shapes[0])[0][1][1] > 1 else 1
            moved = share * size(shapes[0]) + sum(map(size, shapes[1:])) + size(x.shape)
            return np.array([KERNELS[target], 0, 0, moved])
        if x.opcode == "fusion":
            inner = self.computations[x.called("calls")]
            products = [_flops(y, inner) for y in inner.values() if y.opcode == "dot"]
            sort = sum(_sort_launches(y) for y in inner.values() if y.opcode == "sort")
            moved = _moved(inner)
        else:
            products = [_flops(x, own)] if x.opcode == "dot" or "gemm" in x.rest or "matmul" in x.rest else []
            sort = _sort_launches(x) if x.opcode == "sort" else 0
            moved = sum(map(size, shapes)) + size(x.shape)
        tensor, vector = (sum(n for wide, n in products if wide == kind) for kind in (False, True))
        return np.array([sort or 1, tensor, vector, moved])


def _target_of(x):
    found = re.search(r'custom_call_target="([^"]+)"', x.rest)
    return found and found[1]


def _flops(x, own):
    """(whether an operand has 32 bits or more and is not split into 16-bit parts, flop) of a product."""
    if x.opcode != "dot":
        raise ValueError(f"a product that this program does not count: {x.name} {x.rest[:80]}")
    (dtype, left), (other, _) = (arrays(own[name].shape)[0] for name in x.operands[:2])
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.rest)[1]
    summed = math.prod(left[int(i)] for i in contracted.split(",") if i)
    parts = re.search(r"algorithm=dot_bf16_bf16_f32(?:_x(\d))?", x.rest)
    wide = max(WIDTHS[dtype], WIDTHS[other]) > 2 and not parts
    return wide, 2 * summed * math.prod(arrays(x.shape)[0][1]) * int((parts and parts[1]) or 1)


def _sort_launches(x):
    """A bitonic sort: one launch for a tile of 2,048 in shared memory, one for each larger stride of each stage."""
    stages = max(math.ceil(math.log2(max(arrays(x.shape)[0][1]))) - 11, 0)
    return 1 + sum(range(1, stages + 1)) + stages


def _moved(inner):
    """Bytes that a fusion reads and writes."""
    users = {name: [] for name in inner}
    for x in inner.values():
        for name in x.operands:
            users[name].append(x)

    def written(name):
        x = inner[name]
        while x.opcode in VIEWS:
            x = inner[x.operands[0]]
        if x.opcode in ("dynamic-update-slice", "scatter"):
            update = size(inner[x.operands[1 if x.opcode == "dynamic-update-slice" else 2]].shape)
            return update * (2 if x.opcode == "scatter" else 1)  # a scatter adds
        return size(inner[name].shape)

    def read(x):
        """Bytes read of this parameter or view."""
        total = 0
        for user in users[x.name]:
            if user.opcode in ("gather", "dynamic-slice") and user.operands[0] == x.name:
                total += size(user.shape)
            elif user.opcode in VIEWS:
                total += read(user)
            elif user.opcode not in ("dynamic-update-slice", "scatter") or user.operands[0] != x.name:
                return size(x.shape)
        return min(total, size(x.shape))

    root = next(x for x in inner.values() if x.root)
    results = set(root.operands) if root.opcode == "tuple" else [root.name]
    return sum(map(written, results)) + sum(read(x) for x in inner.values() if x.opcode == "parameter")
