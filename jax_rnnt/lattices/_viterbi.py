"""The best path of a lattice, over any topology, in plain JAX: the reference program with max in place of sum.

Scores are sums of two floats (hi + lo), so that the choice between two paths is as good as if their sums were exact:
the spacing of float32 at the score of a long utterance is 1e-3. Of equal paths, going back from the end, the one wins
that enters each node by the first arc of the topology, blanks before labels.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_rnnt._xla import vary_together
from jax_rnnt.lattices import _order as order
from jax_rnnt.lattices._reference import prepared, skew
from jax_rnnt.lattices._topology import Topology


def _add(a, w):
    """(hi, lo) + w, hi rounded to nearest (Knuth's exact sum); -inf stays -inf."""
    hi, lo = a
    total = hi + w
    virtual = total - hi
    error = jnp.where(jnp.isfinite(total), (hi - (total - virtual)) + (w - virtual), 0) + lo
    top = total + error
    return top, jnp.where(jnp.isfinite(top), error - (top - total), 0)


def _better(a, b):
    """Element-wise the better of two (hi, lo, rank): the larger score, of equal ones the smaller rank."""
    wins = (b[0] > a[0]) | ((b[0] == a[0]) & ((b[1] > a[1]) | ((b[1] == a[1]) & (b[2] < a[2]))))
    return tuple(jnp.where(wins, y, x) for x, y in zip(a, b))


def best_path(topology: Topology, arcs: dict[str, jax.Array], num_frames: jax.Array, num_labels: jax.Array):
    """The best path from (0, 0) to (T_b, U_b): its score and when each label is emitted.

    T frames, U labels, U1 = U + 1; `...` is any number of batch dimensions. Arguments are those of `log_likelihood`.

    Returns
    -------
    score : Array [...]
        Sum of the log-probabilities of its arcs; -inf where there is no path, NaN where an arc inside the lengths is
        NaN or +inf. Its derivative is 1 for the arcs of the path, 0 for all others.
    frames : Array, int32 [..., U]
        The frame t from which the arc of label u leaves; -1 past U_b and where there is no path.
    """
    ranked = tuple(sorted(topology, key=lambda a: a.du))  # stable: blanks first
    ranked, num_frames, num_labels, planes, bad = prepared(ranked, arcs, num_frames, num_labels)
    masked = jnp.where(bad[None, ..., None, None], -jnp.inf, planes)
    frames, columns = masked.shape[-2:]
    diagonals = lax.stop_gradient(skew(masked))  # [N, A, ..., U1]

    none = len(ranked)  # the rank of no arc
    depth = max(a.dt + a.du for a in ranked)
    column = lax.broadcasted_iota(jnp.int32, (1,) * num_frames.ndim + (columns,), num_frames.ndim)
    last = num_frames + num_labels
    minus = jnp.full_like(diagonals[0, 0], -jnp.inf)
    nothing = minus, jnp.zeros_like(minus), jnp.full_like(minus, none, dtype=jnp.int32)
    start = jnp.where(column == 0, 0, nothing[0]), nothing[1], nothing[2]
    end = jnp.full_like(minus[..., 0], -jnp.inf), jnp.zeros_like(minus[..., 0]), jnp.full_like(last, none)

    def shift(x, du, fill):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(du, 0)], constant_values=fill)[..., :columns]

    def forward(carry, xs):
        (alpha, *coming), end = carry
        n, weights = xs
        coming = [*coming, nothing]
        for rank, (arc, weight) in enumerate(zip(ranked, weights)):
            hi, lo = _add(alpha[:2], weight)
            k = arc.dt + arc.du
            which = jnp.where(hi == -jnp.inf, none, rank).astype(jnp.int32)
            moved = shift(hi, arc.du, -jnp.inf), shift(lo, arc.du, 0), shift(which, arc.du, none)
            coming[k - 1] = _better(coming[k - 1], moved)
            if arc.may_end:
                ends = (n + k == last)[..., None] & (column == num_labels[..., None] - arc.du)
                final = (
                    jnp.max(jnp.where(ends, hi, -jnp.inf), -1),
                    jnp.sum(jnp.where(ends, lo, 0), -1),
                    jnp.min(jnp.where(ends, which, none), -1),
                )
                end = _better(end, final)
        return (tuple(coming), end), alpha[2]

    steps = jnp.arange(frames + columns - 1, dtype=jnp.int32)
    initial, structure = jax.tree.flatten(((start, *[nothing] * (depth - 1)), end))
    _, *initial = vary_together(minus, *initial)  # a carry keeps its varying axes
    (_, end), entered = lax.scan(forward, jax.tree.unflatten(structure, initial), (steps, diagonals))

    def of_arc(values, rank):
        """The value of each rank's arc, 0 for none; no gather, so that it shards."""
        return sum(jnp.where(rank == k, jnp.int32(value), 0) for k, value in enumerate(values))

    def backward(carry, xs):
        n, u, rank = carry  # the node that was reached, and by which arc
        m, came = xs
        here = (rank < none) & (n - of_arc([a.dt + a.du for a in ranked], rank) == m)
        source = u - of_arc([a.du for a in ranked], rank)
        before = jnp.sum(jnp.where(column == source[..., None], came, 0), -1, dtype=jnp.int32)
        taken = jnp.where(here, rank, none), source
        return (jnp.where(here, m, n), jnp.where(here, source, u), jnp.where(here, before, rank)), taken

    carry = tuple(vary_together(*(jnp.asarray(x, jnp.int32) for x in (last, num_labels, end[2]))))
    _, (rank, u) = lax.scan(backward, carry, (steps, entered), reverse=True)  # [N, ...]

    path = jnp.stack([steps.reshape(-1, *[1] * u.ndim)[..., 0] - u, u], -1)  # (t, u) on each diagonal
    of_label = of_arc([a.du for a in ranked], rank) > 0
    label = lax.broadcasted_iota(jnp.int32, (1,) * u.ndim + (columns - 1,), u.ndim)
    emits = of_label[..., None] & (u[..., None] == label)
    at = jnp.sum(jnp.where(emits, path[..., :1], 0), 0, dtype=jnp.int32)
    found = jnp.any(emits, 0)

    # Summed over the planes and not carried along the scan: this is differentiable, and exact enough.
    shape = (1,) * num_frames.ndim + (frames, columns)
    t, v = (lax.broadcasted_iota(jnp.int32, shape, num_frames.ndim + axis) for axis in (0, 1))
    diagonal = (t + v).reshape(frames, columns)
    on = jnp.moveaxis(u, 0, -1)[..., diagonal] == v
    which = jnp.moveaxis(rank, 0, -1)[..., diagonal]
    taken = sum((jnp.where(on & (which == k), x, 0) for k, x in enumerate(masked)), jnp.zeros_like(masked[0]))
    score = order.total(order.total(taken, -2))
    score = jnp.where((end[2] == none) & (last > 0), -jnp.inf, score)
    return jnp.where(bad, jnp.nan, score), jnp.where(found, at, -1)
