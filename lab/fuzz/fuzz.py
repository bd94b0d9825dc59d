"""Feeds the handlers of the CPU kernels with random calls: shapes, types, lengths, labels, attributes and numbers.

    lab/run.sh fuzz --seconds 60 --seed 1    # under sanitizers of memory, then of 16 threads that call at once

A handler must take a call or refuse it; it must stay inside its buffers and write every element of its results. A call
fits together at first, and then has up to four changes: a dimension, a type, a buffer too many or too few, an
attribute. A call without a change must be taken. Calls go through tests/support/door.py, which guards every buffer. The
exit status is 1 after a failure, whose call is printed; the same seed repeats it, on one thread in the same order.
"""

import argparse
import concurrent.futures
import dataclasses
import math
import pathlib
import random
import sys
import time
import typing

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/support"))

import jax
import numpy as np

import door
from jax_rnnt._xla import loading
from jax_rnnt.emissions import _softmax
from jax_rnnt.lattices import _lattice

FLOATS = "float32", "float64", "float16", "bfloat16"
# A size, length, label or attribute that a caller gets wrong.
ODD = [0, 1, 2, -1, -2, -3, 7, 63, 64, 65, 1 << 20, 1 << 26, (1 << 26) + 1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
ODD += [1 << 32, 1 << 62]
ODD_FLOATS = [-np.inf, np.inf, np.nan, -1e9, -3.4e38, 3.4e38, 1e-40, -0.0, -1e4, 2e6, -2.2e6]
SCALES = 1, 0, 0.01, 10, 100, 1e4, 1e9, 1e30
MOST = 1 << 22  # bytes of a buffer


@dataclasses.dataclass
class Call:
    """Buffers are [shape, dtype]."""

    kernel: typing.Any
    operands: list
    attributes: dict
    results: list
    aliased: bool
    changed: bool = False

    @property
    def lattice(self):
        return "lattice" in self.kernel.target

    def written(self):
        """Results that the handler must write: all but the workspace of a lattice."""
        if not self.lattice:
            return len(self.results)
        return len(self.operands) - 1 if self.kernel.target.endswith("grad") else 1

    def possible(self):
        """Whether XLA could make the buffers."""
        for shape, dtype in self.operands + self.results:
            bound = math.prod(n for n in shape if n) * np.dtype(dtype).itemsize
            if any(not 0 <= n <= 1 << 40 for n in shape) or bound > (MOST if all(shape) else 1 << 60):
                return False
        return True

    def aliases(self):
        """{operand: result} of the same size and type."""
        pairs = self.kernel.aliases(len(self.operands)).items() if self.aliased else ()
        same = lambda i, k: k < len(self.results) and self.operands[i] == self.results[k]
        return {i: k for i, k in pairs if i < len(self.operands) and same(i, k)}


# ---------------------------------------------------------------------------------------------- calls that fit together


def odd(draw):
    return draw.choice([*ODD, draw.randrange(256), draw.randrange(-(2**63), 2**63)])


def sizes(draw, large):
    """(batch, frames, columns). Most calls are of a few nodes: what is refused, and where loops begin and end, shows
    there."""
    tiny = not large and draw.randrange(16) != 0
    batch = tuple(2 + draw.randrange(6) if large else draw.randrange(3) for _ in range(draw.randrange(3)))
    if large:
        return batch, 100 + draw.randrange(300), 20 + draw.randrange(60)
    return batch, draw.randrange(6 if tiny else 20), draw.randrange(6 if tiny else 36)


def emission(draw, kernel, large):
    batch, frames, columns = sizes(draw, large)
    nodes = *batch, frames, columns
    most = min(max((1 << 20 if large else 1 << 11) // (math.prod(nodes) + 1), 1), 300)
    classes = 1 + draw.randrange(min(most, 8) if draw.randrange(8) else most)
    bernoulli = draw.randrange(4) == 0
    blanks = 1 if bernoulli else 1 + draw.choice([0, draw.randrange(5)])
    durations, dtype = draw.choice([0, draw.randrange(5)]), draw.choice(FLOATS)
    plane = "float64" if dtype == "float64" else "float32"
    operands = [[(*nodes, classes + durations), dtype], [(*batch, draw.choice([1, frames]), columns), "int32"]]
    operands += [[batch, "int32"]]
    if kernel is _softmax.backward_kernel:
        planes = blanks + durations + 1 + (0 if bernoulli else draw.randrange(2))  # one more: the total
        operands += [[nodes, plane], [batch, plane], [batch, plane]] + [[nodes, plane]] * planes
    attributes = {"blanks": tuple(draw.randrange(classes) for _ in range(blanks)), "durations": durations}
    attributes |= {"bernoulli": int(bernoulli), "normalize": int(bernoulli or draw.randrange(4) != 0)}
    return operands, attributes


def arcs(draw):
    """Columns dt, du, may_end, plane, other of a table of arcs, and how many planes it has."""
    kind = draw.randrange(4)
    if kind < 2:
        return [(1, 0, 1, 0, -1), (kind, 1, 1, 1, -1)], 2
    planes, table = 1 + draw.randrange(5), []
    for _ in range(1 + draw.randrange(6)):
        du, plane, other = draw.randrange(2), draw.randrange(planes), draw.randrange(planes + 1) - 1
        other = -1 if other == plane else other
        table.append((draw.randrange(8) + (du == 0), du, draw.randrange(2), plane, other))
    return table, planes


def lattice(draw, kernel, large):
    batch, frames, columns = sizes(draw, large)
    table, planes = arcs(draw)
    plane = [(*batch, frames, max(columns, 1)), draw.choice(FLOATS[:2])]  # a lattice of no columns has no first node
    attributes = dict(zip(("dt", "du", "may_end", "plane", "other"), zip(*table)))
    return [plane, [batch, "int32"], [batch, "int32"]] + [plane] * (planes - 1), attributes


MAKERS = {
    _softmax.forward_kernel: emission,
    _softmax.backward_kernel: emission,
    _lattice._loss_kernel: lattice,
    _lattice._grad_kernel: lattice,
}


def make(draw, large):
    kernel, maker = draw.choice(list(MAKERS.items()))
    operands, attributes = maker(draw, kernel, large)
    batch = operands[2][0]
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands]
    results = [[(*batch, *shape), np.dtype(dtype).name] for shape, dtype in kernel.results(*avals, **attributes)]
    if elements := kernel.workspace(loading.WORKSPACES["cpu"], *avals, **attributes):
        results.append([(*batch, elements), operands[0][1]])
    return Call(kernel, [list(x) for x in operands], attributes, results, bool(draw.randrange(2)))


def change(draw, call):
    """Changes one thing, so that the call may no longer fit together."""
    buffers, kind = draw.choice([call.operands, call.results]), draw.randrange(8)
    if kind < 5 and not buffers:
        return
    call.changed = True
    at = draw.randrange(len(buffers)) if buffers else 0
    name = draw.choice(list(call.attributes))
    value = call.attributes[name]
    if kind == 0 and buffers[at][0]:
        dims = list(buffers[at][0])
        i = draw.randrange(len(dims))
        dims[i] = draw.choice([odd(draw), odd(draw), dims[i] // 2, 0 if dims[i] > 50 else dims[i] + 1])
        buffers[at] = [tuple(dims), buffers[at][1]]
    elif kind == 1:
        shape = buffers[at][0]
        buffers[at] = [shape[:-1] if shape and draw.randrange(2) else (*shape, draw.randrange(4)), buffers[at][1]]
    elif kind == 2:
        buffers[at] = [buffers[at][0], draw.choice([*FLOATS, "int32", "int64"])]
    elif kind == 3:
        buffers.pop()
    elif kind == 4:
        buffers.append(buffers[at])
    elif kind == 5:
        several = list(value) if isinstance(value, tuple) else [value]
        if several:
            several[draw.randrange(len(several))] = odd(draw)
            call.attributes[name] = tuple(several) if isinstance(value, tuple) else several[0]
    elif isinstance(value, tuple):
        call.attributes[name] = (*value, odd(draw)) if kind == 6 else value[:-1]


# -------------------------------------------------------------------------------------------------------------- numbers


def floats(draw, numbers, shape, dtype):
    """One in a few numbers is odd. Any bits are a number of 16 bits."""
    x = draw.choice(SCALES) * numbers.uniform(-1, 1, shape)
    rate, one = draw.choice([0, draw.random()]), draw.choice([ODD_FLOATS, [draw.choice(ODD_FLOATS)]])
    x = np.where(numbers.random(shape) < rate, numbers.choice(one, shape), x)
    if dtype == "float64":
        return np.where(np.isfinite(x) & (np.abs(x) > 3e38), np.copysign(1e308, x), x)
    x = x.astype(np.float32)
    return x if dtype == "float32" else (x.view(np.uint32) >> 16).astype(np.uint16).view(np.dtype(dtype))


def integers(draw, numbers, shape, dtype, most):
    x = numbers.integers(0, most, shape, endpoint=True)
    if draw.randrange(4) == 0:
        wrong = np.array([odd(draw) % 2**32 for _ in range(8)], np.uint32).astype(np.int32)
        x = np.where(numbers.random(shape) < 0.25, numbers.choice(wrong, shape), x)
    return x.astype(dtype)


def fill(draw, numbers, call):
    """The operands; lengths and labels are mostly in range."""
    first = call.operands[0][0] if call.operands else ()
    for i, (shape, dtype) in enumerate(call.operands):
        if not dtype.startswith("int"):
            yield floats(draw, numbers, shape, dtype)
            continue
        axis = (2 if i == 1 else 1) if call.lattice else (1 if i == 1 else 3)  # of T, U, classes or T
        most = min(first[-axis], 60_000) if len(first) >= axis else 1
        yield integers(draw, numbers, shape, dtype, max(most - (i == 2 and call.lattice), 0))


# -------------------------------------------------------------------------------------------------------------- running


def run(draw, numbers, call, threads):
    """Whether the handler took the call. Raises AssertionError for what it must not do."""
    aliases = call.aliases()
    try:
        given = list(fill(draw, numbers, call)), call.attributes, call.results
        results = door.call(call.kernel.target, *given, aliases=aliases, threads=threads)
    except RuntimeError as error:
        if not call.changed:
            raise AssertionError(f"refused a call that fits together: {error}") from None
        return False
    for i, x in enumerate(results[: call.written()]):
        if i not in aliases.values():
            fresh = x.reshape(-1).view(np.uint8).reshape(x.size, x.itemsize) == 255  # a NaN that no kernel writes
            assert not fresh.all(1).any(), f"result {i} was not written"
    return True


def work(options, number, end):
    """{whether taken: calls} of one thread, with random numbers of its own."""
    draw, numbers = random.Random(f"{options.seed}, {number}"), np.random.default_rng((options.seed, number))
    module, counts, several = loading.module("cpu"), {True: 0, False: 0}, options.threads > 1
    while time.monotonic() < end:
        if draw.randrange(64) == 0:
            module.use_target(draw.choice(module.targets()))  # while others call
            door._attributes.cache_clear()
        call = make(draw, large=several and draw.randrange(4) == 0)  # for the workers
        for _ in range(draw.choice([0, draw.randrange(5)])):
            change(draw, call)
        for _ in range(8 if call.possible() else 0):  # with other numbers
            try:
                counts[run(draw, numbers, call, 4 * several)] += 1
            except AssertionError as error:
                raise AssertionError(f"{error}\n{call}") from None
    return counts


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="that call at once, with four workers each")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    try:
        with np.errstate(all="ignore"), concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
            counts = list(pool.map(lambda i: work(options, i, end), range(options.threads)))
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    finally:
        loading.module("cpu").use_target(loading.module("cpu").targets()[0])
    taken, refused = (sum(x[key] for x in counts) for key in (True, False))
    print(f"{taken} calls taken, {refused} refused, by {options.threads} threads in {options.seconds:g} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
