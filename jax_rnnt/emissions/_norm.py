"""The plane `norm`, one number for each row, from which the backward pass computes the softmax again.

A float32 lse near 1e4 is rounded by 5e-4, and exp(x - lse) is off by as much. So the code of a row is one of two:

    anchored    sum over v of exp(x[v] - x[anchor]), scaled: an offset that all logits share drops out
    lse         where the anchor is less than exp(-45) of the largest logit

The range of a number tells the code: scaled sums lie between 0 and any positive lse, an lse closer to 0 counts as the
largest negative one, and 0 is a row of -inf alone. The anchor is the first blank; for HAT, whose blank is not in the
softmax, class 0, or 1 if 0 is the blank.
"""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np


class RowSum(typing.NamedTuple):
    """The sum over v of exp(x[v]) as exp(peak) total, with peak the largest logit, or 0 where there is none."""

    peak: jax.Array
    total: jax.Array
    log_total: jax.Array  # 0 where all logits are -inf
    dead: jax.Array  # where all logits are -inf
    bad: jax.Array  # where a logit is NaN or +inf

    def log_probability(self, x):
        """Returns the log-probability of a class with logit x, or of all on the last axis of x; -inf in a dead row."""
        more = (...,) + (None,) * (x.ndim - self.peak.ndim)
        return jnp.where(self.dead[more], -jnp.inf, x - self.peak[more] - self.log_total[more])


def row_sum(x, axis=-1) -> RowSum:
    """Sums over one axis of x."""
    peak = jax.lax.stop_gradient(jnp.max(x, axis, initial=-jnp.inf))
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    return _row_sum(peak, jnp.sum(jnp.exp(x - jnp.expand_dims(peak, axis)), axis))


def row_sum_of_total(peak, total) -> RowSum:
    """Makes a sum from the largest logit and the sum over v of exp(x[v] - peak)."""
    return _row_sum(jnp.where(jnp.isneginf(peak), 0, peak), total)


def _row_sum(peak, total) -> RowSum:
    dead = total == 0
    bad = jnp.isnan(total) | jnp.isposinf(peak)
    return RowSum(peak, total, jnp.log(jnp.where(dead, 1, total)), dead, bad)


def row_sum_of(parts) -> RowSum:
    """Computes `row_sum` for a few logits [...] each: on a GPU a reduction would be a kernel of its own."""
    peak = jax.lax.stop_gradient(functools.reduce(jnp.maximum, parts))
    peak = jnp.where(jnp.isneginf(peak), 0, peak)
    return _row_sum(peak, sum(jnp.exp(x - peak) for x in parts))


def row_sum_at_once(x) -> RowSum:
    """Computes `row_sum` over the last axis, in one pass on a GPU."""

    def add(left, right):
        peak = jnp.maximum(left[0], right[0])
        base = jnp.where(jnp.isneginf(peak), 0, peak)
        return peak, left[1] * jnp.exp(left[0] - base) + right[1] * jnp.exp(right[0] - base)

    def one_pass(x):
        start = jnp.asarray(-jnp.inf, x.dtype), jnp.asarray(0, x.dtype)
        peak, total = jax.lax.reduce((x, jnp.ones_like(x)), start, add, (x.ndim - 1,))
        dead = jnp.isneginf(peak)  # for one logit XLA returns (x, 1), without `start`
        return _row_sum(jnp.where(dead, 0, peak), jnp.where(dead, 0, total))

    return jax.lax.platform_dependent(x, cuda=one_pass, rocm=one_pass, default=row_sum)


_REACH = 45  # nats from the largest logit down to the anchor


def _scale(dtype):
    """Returns (scale of the sums, threshold between sums and lse)."""
    return (
        (np.asarray(2.0**-124, dtype), 2.0**-32) if dtype == np.float32 else (np.asarray(2.0**-400, dtype), 2.0**-200)
    )


def encoded_norm(row: RowSum, anchor):
    """Returns the code of a row of logits; `softmax_of_norm` reads it."""
    scale, tiny = _scale(row.total.dtype)
    reach = jnp.where(jnp.isneginf(anchor), jnp.inf, row.peak - anchor)
    anchored = (reach <= _REACH) & ~row.dead
    lse = row.peak + row.log_total
    lse = jnp.where(row.dead, 0, jnp.where(jnp.abs(lse) < tiny, -tiny, lse))
    norm = jnp.where(anchored, row.total * jnp.exp(jnp.where(anchored, reach, 0)) * scale, lse)
    return jnp.where(row.bad, jnp.nan, norm)


def is_anchored(norm):
    """Returns True where a code is a scaled sum."""
    return (norm > 0) & (norm < _scale(norm.dtype)[1])


def denominator(norm):
    """Returns (whether a code is a scaled sum, the divisor of exp(x - base)); base is the anchor or the code itself."""
    anchored = is_anchored(norm)
    return anchored, jnp.where(anchored, norm / _scale(norm.dtype)[0], 1)


def softmax_of_norm(x, anchor, norm):
    """Returns exp(x - lse) from the code. It has no useful derivative: the code has none."""
    anchored, total = denominator(norm)
    return jnp.exp(x - jnp.where(anchored, anchor, norm)[..., None]) / total[..., None]
