"""The reference lattice: one dynamic program over any topology, in plain JAX.

The scan runs over anti-diagonals n = t + u, so one step is element-wise over u for every topology, also with arcs
inside a frame. A scan over frames needs an associative scan over u for those; it took 9.9 s to compile, this takes less
than 1 s.

Path weights are extended numbers (`extended.py`), so plain automatic differentiation is exact, any number of times and
in both modes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt._xla import vary_together
from jax_rnnt.lattices import extended
from jax_rnnt.lattices.topology import Topology, bounded


def skew(x):
    """[..., T, U1] -> [T + U1 - 1, ..., U1]: anti-diagonals first; -inf where a diagonal leaves the lattice."""
    frames, columns = x.shape[-2:]
    x = jnp.swapaxes(x, -1, -2)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns)], constant_values=-jnp.inf)
    x = x.reshape(*x.shape[:-2], columns * (frames + columns))[..., : columns * (frames + columns - 1)]
    return jnp.moveaxis(x.reshape(*x.shape[:-1], columns, frames + columns - 1), -1, 0)


def inside(num_frames: jax.Array, num_labels: jax.Array, frames: int, columns: int) -> jax.Array:
    """bool [..., frames, columns]: which nodes lie inside the lengths."""
    shape = (1,) * num_frames.ndim + (frames, columns)
    t, u = (lax.broadcasted_iota(jnp.int32, shape, num_frames.ndim + axis) for axis in (0, 1))
    return (t < num_frames[..., None, None]) & (u <= num_labels[..., None, None])


def prepared(topology: Topology, arcs, num_frames, num_labels):
    """(topology, num_frames, num_labels, planes, bad [...]) of a dynamic program over anti-diagonals.

    There is a plane for each arc, with one frame at least, and -inf where an arc leaves a node outside the lengths. A
    sequence with NaN or +inf inside is bad.
    """
    num_frames, num_labels, *planes = vary_together(num_frames, num_labels, *(a.of(arcs) for a in topology))
    frames, columns = planes[0].shape[-2:]
    topology = bounded(topology, frames)
    if frames == 0:
        planes = [jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]) for x in planes]
        frames = 1
    used = [inside(num_frames, num_labels - a.du, frames, columns) for a in topology]
    bad = (jnp.any(i & (jnp.isnan(x) | (x == jnp.inf)), axis=(-1, -2)) for i, x in zip(used, planes))
    planes = [jnp.where(i, x, -jnp.inf) for i, x in zip(used, planes)]
    return topology, num_frames, num_labels, planes, functools.reduce(jnp.logical_or, bad)


def log_likelihood(topology: Topology, arcs: dict[str, jax.Array], num_frames: jax.Array, num_labels: jax.Array):
    """Log of the summed weight of all paths, [...]: `lattices.log_likelihood` has the recursion.

    Differentiable any number of times, in both modes. `num_frames` and `num_labels` lie in their ranges.
    """
    topology, num_frames, num_labels, planes, bad = prepared(topology, arcs, num_frames, num_labels)
    poison = jnp.where(bad, jnp.nan, 0).astype(planes[0].dtype)
    frames, columns = planes[0].shape[-2:]
    diagonals = [extended.from_log(skew(x + poison[..., None, None])) for x in planes]

    depth = max(a.dt + a.du for a in topology)
    column = lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + (columns,), num_frames.ndim)
    last = num_frames + num_labels  # the diagonal of the terminal node
    zero = extended.zero(diagonals[0].m[0])

    def one(where):
        return extended.Number(jnp.where(where, 1, zero.m), zero.e, jnp.where(where, 0, zero.h))

    def shift(a, du):
        def along(x, fill):
            return lax.pad(x, np.asarray(fill, x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(du, -du, 0)])

        return extended.Number(along(a.m, 0), along(a.e, 0), along(a.h, extended.lowest(a.h.dtype))) if du else a

    def step(carry, xs):
        (alpha, *coming), ends = carry  # coming[k]: what already entered diagonal n + 1 + k
        n, weights = xs
        alpha = extended.normalize(alpha)  # once a step: a sum of products stays far inside the range of floats
        coming, ends = [*coming, None], list(ends)
        for j, (arc, weight) in enumerate(zip(topology, weights)):
            leaves = extended.multiply(alpha, weight)
            k = arc.dt + arc.du
            entered = shift(leaves, arc.du)
            coming[k - 1] = entered if coming[k - 1] is None else extended.add(coming[k - 1], entered)
            if arc.may_end:  # kept by column: a sum over columns in every step is half of its time on a TPU
                here = (n + k == last)[..., None] & (column == num_labels[..., None] - arc.du)
                ends[j] = extended.Number(*(extended.where(here, x, y) for x, y in zip(leaves, ends[j])))
        coming = [zero if x is None else x for x in coming]
        return (tuple(coming), tuple(ends)), None

    steps = jnp.arange(frames + columns - 1, dtype=jnp.int32)
    start, at_once = one(column == 0), one((last == 0)[..., None] & (column == 0))
    initial, structure = jax.tree.flatten(
        ((start, *[zero] * (depth - 1)), tuple(zero if a.may_end else None for a in topology))
    )
    _, *initial = vary_together(num_frames, *initial)  # a carry keeps its varying axes
    (_, ends), _ = lax.scan(step, jax.tree.unflatten(structure, initial), (steps, diagonals))
    ends = [at_once, *(x for x in ends if x is not None)]
    return extended.log_of_sum(extended.Number(*(jnp.concatenate(x, -1) for x in zip(*ends)))) + poison
