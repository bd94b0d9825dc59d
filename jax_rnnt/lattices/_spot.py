"""Where a phrase is in a sequence, and the odds that it was said there at all, in plain JAX.

Weights are divided by those of the path that says nothing, frame by frame, so paths may begin in any frame for free:
with b the blank and l the label of a node, and 1 for column 0 of every frame,

    a(t, u) = a(t - 1, u) b(t - 1, u) / b(t - 1, 0) + a(t, u - 1) l(t, u - 1)

and e(t) = a(t, U_b - 1) l(t, U_b - 1) for the last label. A label that reads its frame is divided, too.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_rnnt._xla import shard_like, vary_together
from jax_rnnt.lattices._order import logaddexp
from jax_rnnt.lattices._reference import inside, skew


def spotted(reads: bool, blank, label, last, num_frames, num_labels):
    """(log of the largest e [...], its frame, the frame of the first label on the best path there, impossible [...]).

    Log-weights `blank`, `label` and `last`, that of a label as the last one, are [..., T, U1]. `reads`: labels read a
    frame, and `last` pays for it where it is `label` itself. Impossible is what divides by a blank of weight 0.
    """
    last_reads = reads and last is label
    num_frames, num_labels, blank, label, last = vary_together(num_frames, num_labels, blank, label, last)
    num_frames, num_labels = (shard_like(blank, n) for n in (num_frames, num_labels))
    within = inside(num_frames, num_labels, *blank.shape[-2:])
    writes = inside(num_frames, num_labels - 1, *blank.shape[-2:])
    nothing = blank[..., :1]
    impossible = jnp.any(within[..., 0] & jnp.isneginf(nothing[..., 0]), -1)
    nothing = jnp.where(within[..., :1] & ~jnp.isneginf(nothing), nothing, 0)
    blank = jnp.where(within, blank - nothing, -jnp.inf)
    label = jnp.where(writes, label - nothing if reads else label, -jnp.inf)
    last = jnp.where(writes, last - nothing if last_reads else last, -jnp.inf)
    # One step of a frame where labels read it, and else of an anti-diagonal: both have all arcs to the next one.
    weights = [jnp.moveaxis(x, -2, 0) if reads else skew(x) for x in (blank, label, last)]
    column = lax.broadcasted_iota(jnp.int32, (1,) * num_labels.ndim + blank.shape[-1:], num_labels.ndim)
    final = column == num_labels[..., None] - 1

    def shifted(x, fill):
        return lax.pad(x, np.asarray(fill, x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(1, -1, 0)])

    def of_last(x):
        return jnp.sum(jnp.where(final, x, 0), -1, dtype=x.dtype)

    def step(carry, xs):
        total, path, start, *found = carry
        n, blank, label, last = xs
        total, path = (jnp.where(column == 0, 0, x) for x in (total, path))
        start = jnp.where(column == 0, n, start)
        end = n if reads else n - (num_labels - 1)
        score = jnp.where(jnp.any(final, -1), of_last(total + last), -jnp.inf)
        here = score > found[0]
        found = [jnp.where(here, x, y) for x, y in zip((score, end, of_last(start)), found)]
        total = logaddexp(total + blank, shifted(total + label, -jnp.inf))
        waits, comes, from_start = path + blank, shifted(path + label, -jnp.inf), shifted(start, -1)
        start = jnp.where((comes > waits) | ((comes == waits) & (from_start > start)), from_start, start)
        return (total, jnp.maximum(waits, comes), start, *found), None

    none = jnp.full_like(blank[..., 0, :], -jnp.inf)
    empty, missing = jnp.full_like(none, -1, jnp.int32), jnp.full_like(num_frames, -1)
    carry = vary_together(none, none, empty, none[..., 0], missing, missing, like=(blank, num_frames))
    steps = jnp.arange(weights[0].shape[0], dtype=jnp.int32)
    (*_, score, end, start), _ = lax.scan(step, carry, (steps, *weights))
    score = jnp.where(num_labels == 0, 0, score)
    return score, start, end, impossible
