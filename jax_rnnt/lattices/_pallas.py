"""The lattice for TPUs, in Pallas: loss and its gradient, minus the arc posteriors. Any topology.

Columns lie in lanes, sequences in sublanes, and one step takes the nodes of an anti-diagonal n = t + u of a group of
sequences. An arc (dt, du) leads from diagonal n to n + dt + du. VMEM holds what enters the next diagonals: sums of
blank arcs, and sums of label arcs before their shift by one lane. These are shifted when their diagonal comes, so a
step rotates one number, however many arcs there are. XLA masks the planes and skews them into diagonals; the grid
streams chunks of diagonals through VMEM, and runs group after group. More columns than four registers hold are taken
block by block. The first kernel makes alpha, the second beta and the posteriors; its recursion starts from 1 / Z.

Weights are numbers m * 2^e (`_extended.py`), so the accuracy is that of the other kernels. A group with a finite arc
above 2^11 in size takes a second loop, with the second exponent h of the reference; its flag is a scalar of the group.
Large h are rounded sums. So beta has h relative to that of alpha at its node: an arc adds h of alpha times its weight,
less h of alpha at its end. On the way that gave alpha its h this is 0 exactly, as both come from the same sum.

The figures of a step are those of the compiler's schedule; lab/tpu.md has them. On v5e a rotation takes 114 cycles
until its result is there, and no step can start before. Tried and left out: the second exponent in the only loop. It
added 20 cycles to that chain, and three times the operations: 32 sequences, which cost as many cycles as 8, took more,
and their programs minutes to compile. Columns are padded to whole registers, as a rotation within a part of one takes
three, one after the other.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt._xla import struct_like
from jax_rnnt.lattices import _extended as extended
from jax_rnnt.lattices import _reference as reference
from jax_rnnt.lattices._extended import Number
from jax_rnnt.lattices._topology import Topology, bounded, slots

LANES, SUBLANES = 128, 8
MOST = 4  # registers of a number that a step takes at once, and steps that are unrolled
VMEM = 8 << 20  # bytes for chunks of the planes, and half of that for what enters the next diagonals: of 16 MiB or more
SMALL = 2.0**11  # arcs up to this size need no second exponent
# The largest sizes that the kernels take: there are no float64 vectors, path weights have 28 bits, and VMEM is small.
LIMITS = {
    "bytes": 4,
    "diagonals": 1 << 15,
    "arc_labels": 1,
    "arcs": 64,
    "columns_by_planes": 1 << 15,
    "columns_by_diagonals": 1 << 14,
}


class Plan:
    """The sizes of the blocks."""

    def __init__(self, topology: Topology, batch: int, frames: int, columns: int, unroll: int):
        self.batch = batch if batch <= SUBLANES else -(-batch // SUBLANES) * SUBLANES
        registers = -(-columns // LANES)
        self.blocks = -(-registers // MOST)
        self.width = -(-registers // self.blocks) * LANES
        # A group fills whole registers, or is the whole batch.
        groups = [g for g in (32, 16, 8) if self.batch % g == 0 and registers * g <= MOST * SUBLANES]
        self.group = max(groups, default=min(self.batch, SUBLANES))
        held = self.blocks * self.width * max(self.group, SUBLANES)
        self.unroll = min(unroll, max(MOST * SUBLANES * LANES // held, 1))
        diagonals = frames + columns  # including the diagonal of the last terminal node
        most = min(max(VMEM // (8 * held * (2 * len(slots(topology)) + 3)), self.unroll), 64)
        chunks = -(-diagonals // most)
        self.steps = -(-diagonals // (chunks * self.unroll)) * self.unroll
        self.chunks = -(-diagonals // self.steps)
        self.diagonals = self.chunks * self.steps
        # The number of diagonals over which blanks lead, and labels.
        self.depths = [max((a.dt + a.du for a in topology if a.du == du), default=1) for du in (0, 1)]


def where_number(where, a, b):
    return Number(*(None if x is None else jnp.where(where, x, y) for x, y in zip(a, b)))  # type: ignore[arg-type]


def load(refs, *at):
    return Number(*(None if ref is None else ref[at] for ref in refs))  # type: ignore[arg-type]


def store(refs, number, *at):
    for ref, x in zip(refs, number):
        if ref is not None:
            ref[at] = x


def shift(number, by, beside):
    """Returns a number moved by 1 or -1 lanes, and moved within its block; `beside`: the next block, so moved, or None.

    The number that comes in at the end of all blocks meets, or has met, an arc of weight 0.
    """
    from jax.experimental.pallas import tpu as pltpu

    width = number[0].shape[1]
    within = [None if x is None else pltpu.roll(x, by % width, 1) for x in number]
    if beside is None:
        return within, within
    inner = lax.broadcasted_iota(jnp.int32, number[0].shape, 1) != (0 if by == 1 else width - 1)
    return [None if x is None else jnp.where(inner, x, y) for x, y in zip(within, beside)], within


class Sweep:
    """A recursion over the diagonals of a chunk, with or without the second exponent.

    `carried` holds a number for each of the next diagonals, in two rings: of blanks and of labels.
    """

    def __init__(self, topology, plan, wide, chunk, last_ref, num_labels_ref, planes, carried):
        self.topology, self.plan, self.wide, self.chunk, self.planes = topology, plan, wide, chunk, planes
        self.last, self.num_labels = last_ref[...], num_labels_ref[...]
        self.carried = [self.by_slot(carried[:3]), self.by_slot(carried[3:])]
        m = jnp.zeros(carried[0].shape[-2:], carried[0].dtype)
        self.zero = extended.zero(m, wide)
        self.one = Number(jnp.ones_like(m), jnp.zeros_like(m, jnp.int32), jnp.zeros_like(m) if wide else None)

    def by_slot(self, refs):
        return refs if self.wide else (*refs[:2], None)

    def at(self, du, n, c):
        """Returns the place of the number of diagonal n, block c."""
        depth = self.plan.depths[du]
        return (lax.rem(n, np.int32(depth)) if depth > 1 else 0), c

    def clear(self):
        for refs, depth in zip(self.carried, self.plan.depths):
            for k in range(depth):
                for c in range(self.plan.blocks):
                    store(refs, self.zero, k, c)

    def column(self, c):
        return lax.broadcasted_iota(jnp.int32, self.zero.m.shape, 1) + c * self.plan.width

    def weighted(self, i, c):
        """Returns a function that multiplies a number of the chunk's diagonal i by the weight of an arc leaving it."""
        to_number = extended.from_log if self.wide else extended.from_small_log
        weights = {slot: to_number(ref[i, c]) for slot, ref in zip(slots(self.topology), self.planes)}
        n, column, products = self.chunk * self.plan.steps + i, self.column(c), {}

        def times(number, key, arc):
            """Returns the product; `key` names the number, so that a product is computed once."""
            if (key, arc.slot) not in products:
                products[key, arc.slot] = extended.multiply(number, weights[arc.slot])
            product = products[key, arc.slot]
            if arc.other is not None:
                product = extended.multiply(product, weights[arc.other])
            if arc.may_end:
                return product
            into_end = (n + (arc.dt + arc.du) == self.last) & (column == self.num_labels - arc.du)
            return where_number(into_end, self.zero, product)

        return times

    def run(self, step, reverse=False):
        """Runs ``step(i, block, its neighbour, whether to normalize) -> what its other neighbour needs``."""
        blocks, unroll = self.plan.blocks, 1 if self.wide else self.plan.unroll

        def diagonal(i, normalize):
            if blocks == 1:
                step(i, 0, None, normalize)
                return
            place = (lambda c: blocks - 1 - c) if reverse else (lambda c: c)
            edge = [*self.zero, self.zero.m] if reverse and self.wide else [*self.zero]
            lax.fori_loop(0, blocks, lambda c, beside: step(i, place(c), beside, normalize), edge)

        def several(k, _):
            for j in range(unroll):  # each adds a factor of at most twice the number of arcs
                i = k * unroll + j
                diagonal(self.plan.steps - 1 - i if reverse else i, j == 0)
            return _

        lax.fori_loop(np.int32(0), np.int32(self.plan.steps // unroll), several, np.int32(0))


def alpha_kernel(wide_ref, last_ref, num_labels_ref, *refs, topology, plan, keep):
    from jax.experimental import pallas as pl

    count = len(slots(topology))
    planes, alphas, total_refs, carried = refs[:count], refs[count:-9], refs[-9:-6], refs[-6:]
    chunk = pl.program_id(1)

    def run(wide):
        sweep = Sweep(topology, plan, wide, chunk, last_ref, num_labels_ref, planes, carried)
        totals = sweep.by_slot(total_refs)

        @pl.when(chunk == 0)
        def _():
            sweep.clear()
            for c in range(plan.blocks):
                total_refs[2][c] = jnp.zeros_like(sweep.zero.m)
                store(totals, sweep.zero, c)
            start = where_number(sweep.column(0) == 0, sweep.one, sweep.zero)
            store(sweep.carried[0], start, 0, 0)

        def step(i, c, beside, normalize):
            n = chunk * plan.steps + i
            labels, within = shift(load(sweep.carried[1], *sweep.at(1, n, c)), 1, beside)
            alpha = extended.add(load(sweep.carried[0], *sweep.at(0, n, c)), Number(*labels))
            alpha = extended.normalize(alpha) if normalize else alpha
            ends = (n == sweep.last) & (sweep.column(c) == sweep.num_labels)
            store(totals, where_number(ends, alpha, load(totals, c)), c)
            if keep:
                store(sweep.by_slot(alphas), alpha, i, c)
            times, leaving = sweep.weighted(i, c), dict[tuple[int, int], list[Number]]()
            for arc in topology:
                leaving.setdefault((arc.du, arc.dt + arc.du), []).append(times(alpha, "alpha", arc))
            for (du, k), numbers in leaving.items():
                at = sweep.at(du, n + k, c)
                if k < plan.depths[du]:  # this diagonal takes the place of the farthest
                    numbers.append(load(sweep.carried[du], *at))
                store(sweep.carried[du], functools.reduce(extended.add, numbers), *at)
            if all(arc.du for arc in topology):  # no blank takes the place of the start
                store(sweep.carried[0], sweep.zero, *sweep.at(0, n, c))
            return within

        sweep.run(step)

    is_wide = wide_ref[pl.program_id(0)] != 0
    pl.when(is_wide)(functools.partial(run, True))
    pl.when(~is_wide)(functools.partial(run, False))


def beta_kernel(wide_ref, last_ref, num_labels_ref, *refs, topology, plan):
    from jax.experimental import pallas as pl

    count = len(slots(topology))
    planes, alphas, total_refs = refs[:count], refs[count : count + 3], refs[count + 3 : count + 6]
    gradients, carried, at_ends = refs[count + 6 : -8], refs[-8:-2], refs[-2:]
    chunk = plan.chunks - 1 - pl.program_id(1)

    def clear(sweep):
        sweep.clear()
        for ref in at_ends:
            ref[...] = jnp.zeros_like(ref)

    def run(wide):
        sweep = Sweep(topology, plan, wide, chunk, last_ref, num_labels_ref, planes, carried)
        pl.when(chunk == plan.chunks - 1)(functools.partial(clear, sweep))

        def start(c):
            """Returns 1 / Z at the terminal node, so that products with alpha are posteriors; 0 if there is no path."""
            total = load(sweep.by_slot(total_refs), c)
            reached = total.m != 0
            inverse = Number(1 / jnp.where(reached, total.m, 1), -total.e, sweep.one.h)
            return where_number(reached, inverse, sweep.zero)

        def step(i, c, beside, normalize):
            n = chunk * plan.steps + i
            alpha = load(sweep.by_slot(alphas), i, c)
            times, through = sweep.weighted(i, c), []
            for arc in topology:
                k = arc.dt + arc.du
                at = sweep.at(arc.du, n + k, c)
                beta = load(sweep.carried[arc.du], *at)
                path = times(beta, (arc.du, k), arc)
                if wide:
                    h = (times(alpha, "alpha", arc).h - at_ends[arc.du][at]) + beta.h
                    lowest = sweep.zero.h
                    path = path._replace(h=jnp.where(path.m == 0, lowest, jnp.maximum(h, lowest)))
                through.append(path)
            factor = alpha._replace(h=sweep.one.h)
            for slot, ref in zip(slots(topology), gradients):
                paths = (extended.multiply(factor, x) for a, x in zip(topology, through) if slot in (a.slot, a.other))
                posteriors = [x.m * extended.pow2(extended.gap(x, sweep.one), x.m.dtype) for x in paths]
                ref[i, c] = 0 - functools.reduce(jnp.add, posteriors)
            ends = (n == sweep.last) & (sweep.column(c) == sweep.num_labels)
            beta = where_number(ends, start(c), functools.reduce(extended.add, through, sweep.zero))
            beta = extended.normalize(beta) if normalize else beta
            moved, within = shift([*beta, alpha.h] if wide else beta, -1, beside)
            blanks, labels = sweep.at(0, n, c), sweep.at(1, n, c)
            store(sweep.carried[0], beta, *blanks)
            store(sweep.carried[1], moved[:3], *labels)
            if wide:
                at_ends[0][blanks], at_ends[1][labels] = alpha.h, moved[3]
            return within

        sweep.run(step, reverse=True)

    is_wide = wide_ref[pl.program_id(0)] != 0
    pl.when(is_wide)(functools.partial(run, True))
    pl.when(~is_wide)(functools.partial(run, False))


def call(kernel, name, plan, operands, results, reverse, interpret):
    """Calls a kernel on flags, lengths [B, 1], diagonals [D, blocks, B, width] and rows [blocks, B, width].

    `results` are the same by rank and dtype.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    zero, group, tile = np.int32(0), plan.group, (plan.blocks, plan.group, plan.width)
    last = plan.chunks - 1
    specs = {
        1: pl.BlockSpec(memory_space=pltpu.SMEM),
        2: pl.BlockSpec((group, 1), lambda g, c: (g, zero)),
        3: pl.BlockSpec(tile, lambda g, c: (zero, g, zero)),
        4: pl.BlockSpec((plan.steps, *tile), lambda g, c: (last - c if reverse else c, zero, g, zero)),
    }
    shape = plan.diagonals, plan.blocks, plan.batch, plan.width
    shapes = [struct_like(operands[3], shape[4 - rank :], dtype) for rank, dtype in results]
    nodes, dtype = math.prod(shape), operands[3].dtype
    rings = [(depth, *tile) for depth in plan.depths]
    return pl.pallas_call(
        kernel,
        grid=(plan.batch // group, plan.chunks),
        in_specs=[specs[x.ndim] for x in operands],
        out_specs=[specs[len(x.shape)] for x in shapes],
        out_shape=shapes,
        scratch_shapes=[pltpu.VMEM(ring, kind) for ring in rings for kind in (dtype, jnp.int32, dtype)]
        + [pltpu.VMEM(ring, dtype) for ring in rings if reverse],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=50 * len(operands) * nodes,
            transcendentals=len(operands) * nodes,
            bytes_accessed=sum(math.prod(x.shape) * x.dtype.itemsize for x in (*operands, *shapes)),
        ),
        interpret=interpret,
        name=f"jax_rnnt_lattice_{name}",
    )(*operands)


def diagonals(x, used, plan):
    """Converts [B, T, U1] to [D, blocks, B, width], with -inf outside."""
    columns = x.shape[2]
    more = plan.batch - x.shape[0], plan.diagonals + 1 - x.shape[1], 0
    x = jnp.pad(jnp.where(used, x, -jnp.inf), [(0, n) for n in more], constant_values=-jnp.inf)
    x = jnp.swapaxes(x, 1, 2).reshape(plan.batch, -1)[:, : columns * plan.diagonals]
    x = x.reshape(plan.batch, columns, plan.diagonals)
    x = jnp.pad(x, [(0, 0), (0, plan.blocks * plan.width - columns), (0, 0)], constant_values=-jnp.inf)
    return jnp.transpose(x.reshape(plan.batch, plan.blocks, plan.width, -1), (3, 1, 0, 2))


def nodes(x, batch, frames, columns):
    """Converts [D, blocks, B, width] to [B, T, U1]."""
    diagonals = len(x)
    x = jnp.transpose(x, (2, 1, 3, 0)).reshape(x.shape[2], -1, diagonals)[:batch, :columns]
    x = jnp.pad(x.reshape(batch, -1), [(0, 0), (0, columns)]).reshape(batch, columns, diagonals + 1)
    return jnp.swapaxes(x[..., :frames], 1, 2)


def prepare(topology, arcs, num_frames, num_labels, unroll):
    """Returns (topology, plan, operands of the kernels, sequences with a NaN or +inf)."""
    batch, frames, columns = arcs[slots(topology)[0]].shape
    topology = bounded(topology, frames)
    plan = Plan(topology, batch, frames, columns, unroll)
    bad = wide = jnp.zeros(batch, bool)
    planes = []
    for slot in slots(topology):
        x, least = arcs[slot], min(a.du for a in topology if slot in (a.slot, a.other))
        used = reference.inside(num_frames, num_labels - least, frames, columns)
        bad |= jnp.any(used & (jnp.isnan(x) | (x == jnp.inf)), (1, 2))
        wide |= jnp.any(used & (jnp.abs(x) > SMALL) & (x > -jnp.inf), (1, 2))
        planes.append(diagonals(x, used, plan))
    padded = (
        jnp.pad(x.astype(jnp.int32), (0, plan.batch - batch)) for x in (wide, num_frames + num_labels, num_labels)
    )
    wide, *lengths = padded
    return topology, plan, (jnp.max(wide.reshape(-1, plan.group), 1), *(x[:, None] for x in lengths), *planes), bad


def alphas(topology, plan, operands, keep, interpret):
    """Returns the numbers of all diagonals, if they are kept, and then those of the terminal nodes, in one list."""
    number = operands[3].dtype, jnp.int32, operands[3].dtype
    results = [(rank, kind) for rank in ((4, 3) if keep else (3,)) for kind in number]
    kernel = functools.partial(alpha_kernel, topology=topology, plan=plan, keep=keep)
    return call(kernel, "alpha", plan, operands, results, False, interpret)


def loss_of(total, bad):
    total = (jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1)[: len(bad)] for x in total)
    return jnp.where(bad, jnp.nan, 0 - extended.log_of_sum(Number(*total)))


def value(topology: Topology, arcs, num_frames, num_labels, *, interpret=False, unroll=MOST):
    """Returns -log likelihood [B], for planes [B, T, U1] by slot with B, T, U1 >= 1."""
    topology, plan, operands, bad = prepare(topology, arcs, num_frames, num_labels, unroll)
    return loss_of(alphas(topology, plan, operands, False, interpret), bad)


def value_and_grad(topology: Topology, arcs, num_frames, num_labels, *, interpret=False, unroll=MOST):
    """Returns (`value`, {slot: its gradient [B, T, U1]})."""
    shape = arcs[slots(topology)[0]].shape
    topology, plan, operands, bad = prepare(topology, arcs, num_frames, num_labels, unroll)
    numbers = alphas(topology, plan, operands, True, interpret)
    kernel = functools.partial(beta_kernel, topology=topology, plan=plan)
    results = [(4, operands[3].dtype)] * len(slots(topology))
    gradients = call(kernel, "beta", plan, (*operands, *numbers), results, True, interpret)
    used = reference.inside(num_frames, num_labels, *shape[1:])
    nan = jnp.where(bad, jnp.nan, 0).astype(gradients[0].dtype)[:, None, None]
    gradients = (jnp.where(used, nodes(x, *shape) + nan, 0) for x in gradients)
    return loss_of(numbers[3:], bad), dict(zip(slots(topology), gradients))
