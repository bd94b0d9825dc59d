"""The best path of a lattice, over any topology, in plain JAX: the reference program with max in place of sum.

Scores are sums of two floats (hi + lo), so that the choice between two paths is as good as if their sums were exact:
the spacing of float32 at the score of a long utterance is 1e-3. Among equal paths, going back from the end, the one
wins that enters each node by the first arc of the topology, blanks before labels.

There are A arcs, N anti-diagonals n = t + u and U1 columns. An arc's rank is its place among the A arcs; no arc has A.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from jax_rnnt._xla import vary_together
from jax_rnnt.lattices import _order as order
from jax_rnnt.lattices._reference import prepared, shifted, skew
from jax_rnnt.lattices._topology import Topology


class Best(typing.NamedTuple):
    """The score hi + lo of the best paths to some nodes, and the rank of their last arcs."""

    hi: jax.Array
    lo: jax.Array
    rank: jax.Array

    def or_better(self, other: "Best") -> "Best":
        """Returns for each element the larger score, or of equal ones that with the smaller rank."""
        a, b = self, other
        wins = (b.hi > a.hi) | ((b.hi == a.hi) & ((b.lo > a.lo) | ((b.lo == a.lo) & (b.rank < a.rank))))
        return Best(*(jnp.where(wins, y, x) for x, y in zip(a, b)))


class Path(typing.NamedTuple):
    """The arc that leaves each anti-diagonal, and the column that it leaves."""

    rank: jax.Array  # [N, ...]; A where the path does not touch the diagonal
    column: jax.Array  # [N, ...]


def _add(hi, lo, w):
    """Returns hi + lo + w, with hi rounded to nearest (Knuth's exact sum); -inf stays -inf."""
    total = hi + w
    virtual = total - hi
    error = jnp.where(jnp.isfinite(total), (hi - (total - virtual)) + (w - virtual), 0) + lo
    top = total + error
    return top, jnp.where(jnp.isfinite(top), error - (top - total), 0)


def _columns(like, count):
    """Returns 0 ... count - 1, with the batch dimensions of `like`."""
    return lax.broadcasted_iota(jnp.int32, (1,) * like.ndim + (count,), like.ndim)


def forward_best(arcs: Topology, diagonals, num_frames, num_labels):
    """Returns (rank of the arc into each node [N, ..., U1], the best entry of the terminal node: `Best` [...])."""
    steps, columns, none = diagonals.shape[0], diagonals.shape[-1], len(arcs)
    column, last = _columns(num_frames, columns), num_frames + num_labels
    minus = jnp.full_like(diagonals[0, 0], -jnp.inf)
    nothing = Best(minus, jnp.zeros_like(minus), jnp.full_like(minus, none, dtype=jnp.int32))
    start = nothing._replace(hi=jnp.where(column == 0, 0, minus))
    end = Best(jnp.full_like(minus[..., 0], -jnp.inf), jnp.zeros_like(minus[..., 0]), jnp.full_like(last, none))

    def step(carry, xs):
        (alpha, *coming), end = carry  # coming[k]: what already entered diagonal n + 1 + k
        n, weights = xs
        coming = [*coming, nothing]
        for rank, (arc, weight) in enumerate(zip(arcs, weights)):
            hi, lo = _add(alpha.hi, alpha.lo, weight)
            k = arc.dt + arc.du
            which = jnp.where(hi == -jnp.inf, none, rank).astype(jnp.int32)
            moved = Best(*(shifted(x, arc.du, fill) for x, fill in zip((hi, lo, which), (-jnp.inf, 0, none))))
            coming[k - 1] = coming[k - 1].or_better(moved)
            if arc.may_end:
                ends = (n + k == last)[..., None] & (column == num_labels[..., None] - arc.du)
                hi = jnp.max(jnp.where(ends, hi, -jnp.inf), -1)
                lo = jnp.sum(jnp.where(ends, lo, 0), -1)
                end = end.or_better(Best(hi, lo, jnp.min(jnp.where(ends, which, none), -1)))
        return (tuple(coming), end), alpha.rank

    depth = max(arc.dt + arc.du for arc in arcs)
    initial, structure = jax.tree.flatten(((start, *[nothing] * (depth - 1)), end))
    _, *initial = vary_together(minus, *initial)  # a carry keeps its varying axes
    xs = jnp.arange(steps, dtype=jnp.int32), diagonals
    (_, end), entered = lax.scan(step, jax.tree.unflatten(structure, initial), xs)
    return entered, end


def _of_arc(values, rank):
    """Returns the value of each rank's arc, 0 for no arc; it uses no gather, so that it shards."""
    return sum(jnp.where(rank == k, jnp.int32(value), 0) for k, value in enumerate(values))


def trace_back(arcs: Topology, entered, end: Best, num_frames, num_labels) -> Path:
    """Returns the path from the terminal node back to the start."""
    none, column = len(arcs), _columns(num_frames, entered.shape[-1])

    def step(carry, xs):
        n, u, rank = carry  # the node that was reached, and the arc into it
        diagonal, ranks = xs
        here = (rank < none) & (n - _of_arc([a.dt + a.du for a in arcs], rank) == diagonal)
        source = u - _of_arc([a.du for a in arcs], rank)
        before = jnp.sum(jnp.where(column == source[..., None], ranks, 0), -1, dtype=jnp.int32)
        reached = jnp.where(here, diagonal, n), jnp.where(here, source, u), jnp.where(here, before, rank)
        return reached, Path(jnp.where(here, rank, none), source)

    carry = vary_together(*(jnp.asarray(x, jnp.int32) for x in (num_frames + num_labels, num_labels, end.rank)))
    return lax.scan(step, tuple(carry), (jnp.arange(entered.shape[0], dtype=jnp.int32), entered), reverse=True)[1]


def frames_of(arcs: Topology, path: Path, labels: int):
    """Returns the frame in which the path writes each label, int32 [..., U], -1 where it does not."""
    n = jnp.arange(path.rank.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (path.rank.ndim - 1))
    writes = (_of_arc([a.du for a in arcs], path.rank) > 0)[..., None]
    writes &= path.column[..., None] == _columns(path.column, labels)
    frames = jnp.sum(jnp.where(writes, (n - path.column)[..., None], 0), 0, dtype=jnp.int32)
    return jnp.where(jnp.any(writes, 0), frames, -1)


def score_of(path: Path, planes):
    """Returns the sum of the path's arcs [...], for planes [A, ..., T, U1].

    It sums over the planes rather than carry a sum along the scan: this is differentiable, and exact enough.
    """
    ndim = planes.ndim - 3
    t, u = (lax.broadcasted_iota(jnp.int32, (1,) * ndim + planes.shape[-2:], ndim + axis) for axis in (0, 1))
    diagonal = (t + u).reshape(planes.shape[-2:])
    column, rank = (jnp.moveaxis(x, 0, -1)[..., diagonal] for x in (path.column, path.rank))
    arcs = (jnp.where((column == u) & (rank == k), x, 0) for k, x in enumerate(planes))
    return order.total(order.total(sum(arcs, jnp.zeros_like(planes[0])), -2))


def best_path(topology: Topology, arcs: dict[str, jax.Array], num_frames: jax.Array, num_labels: jax.Array):
    """Finds the best path from (0, 0) to (T_b, U_b): its score and when each label is emitted.

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
    planes = jnp.where(bad[None, ..., None, None], -jnp.inf, planes)
    diagonals = lax.stop_gradient(skew(planes))  # [N, A, ..., U1]
    entered, end = forward_best(ranked, diagonals, num_frames, num_labels)
    path = trace_back(ranked, entered, end, num_frames, num_labels)
    no_path = (end.rank == len(ranked)) & (num_frames + num_labels > 0)
    score = jnp.where(no_path, -jnp.inf, score_of(path, planes))
    return jnp.where(bad, jnp.nan, score), frames_of(ranked, path, planes.shape[-1] - 1)
