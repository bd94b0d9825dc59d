"""The reference lattice: one dynamic program over any topology, in plain JAX.

The scan runs over anti-diagonals n = t + u, so one step is element-wise over u for every topology, also with arcs
inside a frame. A scan over frames would need an associative scan over u for those. That took 9.9 s to compile; this
takes less than 1 s.

Path weights are extended numbers (`_extended.py`), so plain automatic differentiation is exact, any number of times and
in both modes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt._xla import shard_like, vary_together
from jax_rnnt.lattices import _extended as extended
from jax_rnnt.lattices import _order as order
from jax_rnnt.lattices._topology import Topology, bounded


def skew(x):
    """Converts [..., T, U1] to [T + U1 - 1, ..., U1], anti-diagonals first; -inf where they leave the lattice."""
    frames, columns = x.shape[-2:]
    x = jnp.swapaxes(x, -1, -2)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns)], constant_values=-jnp.inf)
    x = x.reshape(*x.shape[:-2], columns * (frames + columns))[..., : columns * (frames + columns - 1)]
    return jnp.moveaxis(x.reshape(*x.shape[:-1], columns, frames + columns - 1), -1, 0)


def inside(num_frames: jax.Array, num_labels: jax.Array, frames: int, columns: int) -> jax.Array:
    """Returns which nodes lie inside the lengths, bool [..., frames, columns]."""
    shape = (1,) * num_frames.ndim + (frames, columns)
    t, u = (lax.broadcasted_iota(jnp.int32, shape, num_frames.ndim + axis) for axis in (0, 1))
    return (t < num_frames[..., None, None]) & (u <= num_labels[..., None, None])


def per_arc(values, like: jax.Array) -> np.ndarray:
    """Returns a number for each arc, int32 [A, 1, ...], to broadcast over the dimensions of `like`."""
    return np.array([*values], np.int32).reshape(-1, *[1] * like.ndim)


def prepared(topology: Topology, arcs, num_frames, num_labels):
    """Returns (topology, num_frames, num_labels, planes [A, ..., T, U1], bad [...]) to recurse over anti-diagonals.

    There is a plane for each of the A arcs, with one frame at least, and -inf where an arc leaves a node outside the
    lengths. A sequence with NaN or +inf inside is bad. One array holds all planes: a topology of eight arcs is traced
    in the time of one with two.
    """
    num_frames, num_labels, *each = vary_together(num_frames, num_labels, *(a.score(arcs) for a in topology))
    planes = jnp.stack(each)
    num_frames, num_labels = (shard_like(planes[0], n) for n in (num_frames, num_labels))
    topology = bounded(topology, planes.shape[-2])
    if planes.shape[-2] == 0:
        planes = jnp.pad(planes, [(0, 0)] * (planes.ndim - 2) + [(0, 1), (0, 0)])
    du = per_arc((a.du for a in topology), num_labels)
    used = inside(num_frames[None], num_labels[None] - du, *planes.shape[-2:])
    bad = jnp.any(used & (jnp.isnan(planes) | (planes == jnp.inf)), axis=(0, -1, -2))
    return topology, num_frames, num_labels, extended.where(used, planes, -jnp.inf), bad


def _sweep(topology: Topology, num_frames, num_labels, diagonals, keep=False):
    """Returns (weights of the arcs into the terminal node, alpha of all diagonals or None) for weights by diagonals.

    The first are [A, ..., U1], by arc and column that it leaves; the second are [N, ..., U1].
    """
    columns = diagonals.m.shape[-1]
    lengths = [a.dt + a.du for a in topology]
    index, k, du, may_end = (
        per_arc(values, diagonals.m[0, 0])
        for values in (range(len(topology)), lengths, (a.du for a in topology), (a.may_end for a in topology))
    )
    column = lax.broadcasted_iota(jnp.int32, (1,) * (num_frames.ndim + 1) + (columns,), num_frames.ndim + 1)
    last = (num_frames + num_labels)[None, ..., None]  # the diagonal of the terminal node
    last_column = num_labels[None, ..., None] - du
    zero = extended.zero(diagonals.m[0])

    def one(where):
        return extended.Number(jnp.where(where, 1, zero.m), zero.e, jnp.where(where, 0, zero.h))

    def of_arc(a, j):
        return extended.Number(*(lax.index_in_dim(x, j, keepdims=False) for x in a))

    def step(carry, xs):
        (alpha, *coming), ends = carry  # coming[k]: what already entered diagonal n + 1 + k
        n, weights = xs
        alpha = extended.normalize(alpha)  # once a step, as a sum of products stays far inside the range of floats
        leaves = extended.multiply(extended.Number(*(x[None] for x in alpha)), weights)
        # Kept by column: a sum over columns in every step takes half of its time on a TPU. On CPUs both take as long.
        here = (n + k == last) & (column == last_column) & (may_end == 1)
        ends = extended.Number(*(extended.where(here, x, y) for x, y in zip(leaves, ends)))
        moved = {a.du: _shift(leaves, a.du) for a in topology}
        coming = [*coming, None]
        for j, (arc, length) in enumerate(zip(topology, lengths)):
            entered = of_arc(moved[arc.du], j)
            before = coming[length - 1]
            coming[length - 1] = entered if before is None else extended.add(before, entered)
        return (tuple(of_arc(zero, 0) if x is None else x for x in coming), ends), alpha if keep else None

    steps = jnp.arange(diagonals.m.shape[0], dtype=jnp.int32)
    start, at_once = one(column == 0), one((last == 0) & (column == 0) & (index == 0))
    carry = (of_arc(start, 0), *[of_arc(zero, 0)] * (max(lengths) - 1)), at_once
    initial, structure = jax.tree.flatten(carry)
    _, *initial = vary_together(num_frames, *initial)  # a carry keeps its varying axes
    (_, ends), alphas = lax.scan(step, jax.tree.unflatten(structure, initial), (steps, diagonals))
    return ends, alphas


def shifted(x, du, fill):
    """Moves x by `du` columns."""
    return lax.pad(x, np.asarray(fill, x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(du, -du, 0)])


def _shift(a, du):
    """Moves numbers by `du` columns, with zeros in the first ones."""
    fills = 0, 0, extended.lowest(a.h.dtype)
    return extended.Number(*(shifted(x, du, fill) for x, fill in zip(a, fills))) if du else a


@functools.partial(jax.jit, static_argnums=0)  # losses that differ in their emission alone share its trace
def log_likelihood(topology: Topology, arcs: dict[str, jax.Array], num_frames: jax.Array, num_labels: jax.Array):
    """Log of the summed weight of all paths, [...]: `lattices.log_likelihood` has the recursion.

    It is differentiable any number of times, in both modes. `num_frames` and `num_labels` must lie in their ranges.
    """
    topology, num_frames, num_labels, planes, bad = prepared(topology, arcs, num_frames, num_labels)
    poison = jnp.where(bad, jnp.nan, 0).astype(planes.dtype)
    diagonals = extended.from_log(skew(planes + poison[None, ..., None, None]))  # [N, A, ..., U1]
    ends, _ = _sweep(topology, num_frames, num_labels, diagonals)
    # At most one column of each arc is not zero, so these sums are exact, whatever the number of columns.
    e = jnp.sum(extended.where(ends.m == 0, 0, ends.e), -1, dtype=ends.e.dtype)
    by_arc = (jnp.moveaxis(x, 0, -1) for x in (jnp.sum(ends.m, -1), e, jnp.max(ends.h, -1)))
    return extended.log_of_sum(extended.Number(*by_arc)) + poison


@functools.partial(jax.jit, static_argnums=0)
def label_log_probs(topology: Topology, arcs: dict, num_frames: jax.Array, num_labels: jax.Array, last=None):
    """Returns log(A_u / A_(u - 1)) of every label, [..., U], where A_u is the summed weight of all paths up to label u.

    Such a path ends with the arc that writes the label. It has its weight in `last`, by default
    that in `arcs`. Arguments and derivatives are those of `log_likelihood`.
    """
    end_planes = None if last is None else prepared(topology, last, num_frames, num_labels)[3]
    topology, num_frames, num_labels, planes, bad = prepared(topology, arcs, num_frames, num_labels)
    frames, columns = planes.shape[-2:]
    # These arcs lead out of the lattice; those of earlier labels may end in T_b as if they were the last.
    dt, may_end = (per_arc(x, num_frames) for x in ((a.dt for a in topology), (a.may_end for a in topology)))
    leads = inside(num_frames[None] - dt + may_end, num_labels[None], frames, columns)
    poison = jnp.where(bad, jnp.nan, 0).astype(planes.dtype)

    def by_diagonals(planes):  # [N, A, ..., U1]
        return extended.from_log(skew(extended.where(leads, planes, -jnp.inf) + poison[None, ..., None, None]))

    diagonals = by_diagonals(planes)
    ends = diagonals if end_planes is None else by_diagonals(end_planes)
    _, alphas = _sweep(topology, num_frames, num_labels, diagonals, keep=True)
    written = extended.zero(alphas.m)  # [N, ..., U1]
    for j, arc in enumerate(topology):
        leaves = extended.multiply(alphas, extended.Number(*(x[:, j] for x in ends)))
        for k in range(arc.du):  # an arc that leaves column c writes the labels c ... c + du - 1
            written = extended.add(written, _shift(leaves, k))
    total = extended.total(extended.Number(*(jnp.moveaxis(x, 0, -1) for x in written)), order.total)
    until, pad = [x[..., :-1] for x in total], [(0, 0)] * num_labels.ndim + [(1, 0)]  # A_1 ... A_U
    before = (jnp.pad(x, pad, constant_values=one)[..., :-1] for x, one in zip(until, (1, 0, 0)))
    ratio = extended.log_of_ratio(extended.Number(*until), extended.Number(*before))
    label = lax.broadcasted_iota(jnp.int32, (1,) * num_labels.ndim + (columns - 1,), num_labels.ndim)
    return jnp.where(label < num_labels[..., None], ratio, 0) + poison[..., None]
