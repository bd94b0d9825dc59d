"""Where a phrase is in a sequence, and the odds that it was said there at all, in plain JAX.

Weights are divided by the probability that nothing is said, frame by frame, so paths may begin in any frame for free.
With s(t) the probability of saying nothing in the frames before t, and a(t, u) the odds of having said u labels in
these, an arc over d frames has its weight divided by s(t + d) / s(t). Blanks over several frames may pass a frame by;
in it, no path begins: a(t, 0) is the share of s(t) that stops there, which is 1 where blanks read one frame.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jax_rnnt._xla import shard_like, vary_together
from jax_rnnt.lattices._order import logaddexp
from jax_rnnt.lattices._reference import inside, shifted, skew


def silence(blanks, within):
    """(log a(t, 0), log s(t + 1) / s(t), whether a ratio is 0 [...]), each [..., T] where nothing else is said.

    `blanks`: frames that each blank reads, and its log-weights in column 0. `within` [..., T]: frames that count.
    """
    most = max(reads for reads, _ in blanks)

    def step(carry, xs):
        enters, empty = carry  # enters[d]: the share of s that has stopped d frames behind this one
        inside, *weights = xs
        after = [*enters[1:], jnp.full_like(enters[0], -jnp.inf)]
        for (reads, _), weight in zip(blanks, weights):
            after[reads - 1] = logaddexp(after[reads - 1], enters[0] + weight)
        ratio = functools.reduce(logaddexp, after)
        empty |= inside & jnp.isneginf(ratio)
        ratio = jnp.where(inside & ~jnp.isneginf(ratio), ratio, 0)
        return ([x - ratio for x in after], empty), (enters[0], ratio)

    first = [jnp.where(within, x, -jnp.inf) for _, x in blanks]
    start = jnp.zeros_like(first[0][..., 0])
    carry = [start, *[jnp.full_like(start, -jnp.inf)] * (most - 1)], jnp.zeros_like(within[..., 0])
    (_, empty), (enters, ratio) = lax.scan(step, carry, [jnp.moveaxis(x, -1, 0) for x in (within, *first)])
    return jnp.moveaxis(enters, 0, -1), jnp.moveaxis(ratio, 0, -1), empty


def spotted(arcs, planes, last, num_frames, num_labels):
    """(log of the largest odds [...], frame of the last label, that of the first one on the best path, impossible).

    `arcs` are pairs (dt, du) of blanks (d, 0) and labels (d, 1), with log-weights `planes` [..., T, U1] of each.
    `last`: pairs of frames and planes of labels that end the phrase. Impossible [...] is what divides by 0.
    """
    num_frames, num_labels, *planes = vary_together(num_frames, num_labels, *planes, *(x for _, x in last))
    planes, ends = planes[: len(arcs)], planes[len(arcs) :]
    num_frames, num_labels = (shard_like(planes[0], n) for n in (num_frames, num_labels))
    frames, columns = planes[0].shape[-2:]
    within, writes = (inside(num_frames, n, frames, columns) for n in (num_labels, num_labels - 1))
    column_0 = [(dt, x[..., 0]) for (dt, du), x in zip(arcs, planes) if not du]
    enters, ratio, impossible = silence(column_0, within[..., 0])
    behind = jnp.pad(ratio, [(0, 0)] * num_frames.ndim + [(0, max(dt for dt, _ in arcs))])

    def divided(x, reads, counts):
        """By s(t + reads) / s(t)."""
        for i in range(reads):
            x = x - behind[..., i : i + frames, None]
        return skew(jnp.where(counts, x, -jnp.inf))

    # A step of an anti-diagonal has all arcs to later ones.
    weights = [divided(x, dt, writes if du else within) for (dt, du), x in zip(arcs, planes)]
    finals = functools.reduce(logaddexp, (divided(x, dt, writes) for (dt, _), x in zip(last, ends)))
    enters = jnp.pad(jnp.moveaxis(enters, -1, 0), [(0, columns - 1)] + [(0, 0)] * num_frames.ndim)
    column = lax.broadcasted_iota(jnp.int32, (1,) * num_labels.ndim + (columns,), num_labels.ndim)
    final = column == num_labels[..., None] - 1

    def of_last(x):
        return jnp.sum(jnp.where(final, x, 0), -1, dtype=x.dtype)

    def step(carry, xs):
        coming, found = carry  # (odds, those of the best path, where it begins) on this diagonal and later ones
        n, enters, finals, *weights = xs
        (total, path, start), *coming = coming
        total, path = (jnp.where(column == 0, enters[..., None], x) for x in (total, path))
        start = jnp.where(column == 0, n, start)
        score = jnp.where(jnp.any(final, -1), of_last(total + finals), -jnp.inf)
        here = score > found[0]
        found = [jnp.where(here, x, y) for x, y in zip((score, n - (num_labels - 1), of_last(start)), found)]
        coming = [*coming, nothing]
        for (dt, du), weight in zip(arcs, weights):
            sums, best, begins = coming[dt + du - 1]
            comes, begin = shifted(path + weight, du, -jnp.inf), shifted(start, du, -1)
            wins = (comes > best) | ((comes == best) & (begin > begins))
            sums = logaddexp(sums, shifted(total + weight, du, -jnp.inf))
            coming[dt + du - 1] = sums, jnp.maximum(best, comes), jnp.where(wins, begin, begins)
        return (coming, found), None

    none = jnp.full_like(planes[0][..., 0, :], -jnp.inf)
    missing, like = jnp.full_like(num_frames, -1), (planes[0], num_frames)
    nothing = *vary_together(none, none, like=like), vary_together(jnp.full_like(none, -1, jnp.int32), like=like)[0]
    found = vary_together(none[..., 0], missing, missing, like=like)
    steps = jnp.arange(weights[0].shape[0], dtype=jnp.int32)
    carry = [nothing] * max(dt + du for dt, du in arcs), list(found)
    (_, (score, end, start)), _ = lax.scan(step, carry, (steps, enters, finals, *weights))
    score = jnp.where(num_labels == 0, 0, score)
    return score, start, end, impossible
