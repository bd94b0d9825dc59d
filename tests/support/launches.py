"""Counts what a program compiled for a GPU launches, from the text of its HLO.

Every instruction with work of its own is one launch; the library's custom calls launch as many kernels as `KERNELS`
says. A loop counts as often as it runs. Nothing is timed.
"""

import math
import re
from typing import NamedTuple

# Launches of the library's handlers: xla_kernels/cuda.
KERNELS = {
    "jax_rnnt_softmax_emission_fwd": 1,
    "jax_rnnt_softmax_emission_bwd": 1,
    "jax_rnnt_lattice_loss": 3,
    "jax_rnnt_lattice_grad": 4,
}
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier",
}  # fmt: skip


class Instruction(NamedTuple):
    shape: str
    opcode: str
    tail: str  # operands and attributes

    def named(self, attribute):
        """The name that an attribute gives, or None."""
        match = re.search(rf'\b{attribute}="?%?([\w.\-]+)', self.tail)
        return match and match[1]


def arrays(shape):
    """(dtype, dimensions) of every array in the text of a shape."""
    return [(d, [int(n) for n in s.split(",") if n]) for d, s in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)]


def parse(text):
    """({computation: its instructions}, name of the entry computation)"""
    computations, entry = {}, None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif operation := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line):
            current.append(Instruction(*operation.groups()))
    return computations, entry


class Program:
    """A compiled program. `tiles` tells how often a loop with this custom call runs, where that is data."""

    def __init__(self, text, tiles=None):
        self.computations, self.entry = parse(text)
        self.tiles = tiles or {}

    def launches(self, computation=None):
        return sum(map(self._launches_of, self.computations[computation or self.entry]))

    def _launches_of(self, x):
        if x.opcode == "while":
            return (self.launches(x.named("body")) + self.launches(x.named("condition"))) * self._turns(x)
        if x.opcode == "call":
            return self.launches(x.named("to_apply"))
        if x.opcode == "custom-call":
            return KERNELS.get(x.named("custom_call_target"), 1)
        inside = self.computations[x.named("calls")] if x.opcode == "fusion" else [x]
        sorts = sum(_sort_launches(y) for y in inside if y.opcode == "sort")
        return sorts or int(x.opcode not in FREE)

    def _turns(self, x):
        if known := re.search(r"known_trip_count[^\d]*(\d+)", x.tail):
            return int(known[1])
        for inside in self.computations[x.named("body")]:
            if (target := inside.named("custom_call_target")) in self.tiles:
                return self.tiles[target]
        raise ValueError("a loop runs as often as its data says, and no one said how often")


def _sort_launches(x):
    """A bitonic sort: one launch for a tile of 2,048 in shared memory, one for each larger stride of each stage."""
    stages = max(math.ceil(math.log2(max(arrays(x.shape)[0][1]))) - 11, 0)
    return 1 + sum(range(1, stages + 1)) + stages
