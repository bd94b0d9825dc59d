"""XLA's part of the kernels' work: planes from the numbers that they compute for rows, and numbers from cotangents.

The forward kernel knows no loss. It makes numbers of each row of logits z: those of other heads than the softmax, those
of blanks, the largest logit, the sum of exponentials relative to it, and the logit of the label.

The backward kernel makes the gradient of the loss L with respect to z from numbers of the same kind. A plane of the
softmax is z[k] - lse(z), for a blank k or the label. With c[k] the cotangent of that plane,

    dL/dz[v] = sum_k c[k] [v = k]  -  exp(z[v] - lse(z)) sum_k c[k].

The planes of durations are a softmax of their own, with the same gradient over its classes. HAT's blank is a Bernoulli
variable: its plane is log sigmoid(z), and log sigmoid(-z) is added to all others, so

    dL/dz = c[blank] sigmoid(-z)  -  c[label] sigmoid(z).

With g = dL/dz [N, V] of the rows h = activation(x) [N, H], x = encoder + predictor, the kernels sum

    d weight = h^T g      d bias = sum of g over rows      dx = (g weight^T) activation'(x)
    d encoder[t] = sum of dx over the columns of frame t      d predictor[u] = sum of dx over the frames of column u.

There are B encoders with N sequences each, T frames and U1 columns.
"""

import functools

import jax.numpy as jnp

from jax_rnnt.emissions import _norm
from jax_rnnt.emissions._emission import Nodes, inside_rows, scale_cotangent
from jax_rnnt.emissions._softmax import Heads, planes_of


def _inside(inputs):
    return inside_rows(Nodes(inputs.label, inputs.num_frames), inputs.shape[-2])


def planes(softmax, classes, inputs, rows):
    """Returns (planes by slot, norm) from numbers [B N, T, U1], which may have any value outside the lengths.

    They are the logits of other heads, then those that `classes` keeps, the largest logit, the sum of exponentials
    relative to it, and the logit of the label.
    """
    within = _inside(inputs)
    rows = [jnp.where(within, x, 0) for x in rows]
    others = len(classes.others)
    of_others, kept, (peak, total, of_label) = rows[:others], rows[others:-3], rows[-3:]
    row = _norm.row_sum_of_total(peak, total) if softmax.normalize else None
    blank, durations = (of_others[0], []) if softmax.bernoulli else (None, of_others)
    heads = Heads(within, row, of_label, kept[: len(classes.blanks)], durations, blank, kept[0])
    *made, norm = planes_of(heads, inputs.label, softmax.blanks)
    return dict(zip(softmax._names(), made)), norm


def numbers(softmax, inputs, cotangents, norm, scale):
    """Returns the numbers of rows [B N, T, U1] for the backward kernel.

    They are what other heads get, what is added at each blank, what is added at the label, the factor of
    exp(logit - base), and base. A base of -inf stands for the logit of the anchor, and +inf says that the softmax adds
    nothing.
    """
    cotangents = [cotangents[name] for name in softmax._names()]
    used = _inside(inputs) & functools.reduce(jnp.logical_or, (x != 0 for x in cotangents))
    cotangents = [jnp.where(used, scale_cotangent(x, scale), 0) for x in cotangents]
    count = len(softmax.blanks)
    of_blanks, of_label, of_others = cotangents[:count], cotangents[count], cotangents[count + 1 :]
    if softmax.bernoulli:  # a label that is the blank counts as one
        same = inputs.label == softmax.blanks[0]
        of_others, of_blanks = [of_blanks[0] + jnp.where(same, of_label, 0)], []
        of_label = jnp.where(same, 0, of_label)
    factor, base = jnp.zeros_like(of_label), jnp.full_like(of_label, jnp.inf)
    if softmax.normalize:
        anchored, total = _norm.denominator(norm)
        factor = -sum(of_blanks, of_label) / jnp.where(used, total, 1)
        base = jnp.where(used, jnp.where(anchored, -jnp.inf, norm), base)
    return [*of_others, *of_blanks, of_label, factor, base]


def bounds(clamp, scale):
    """Returns the bound of a logit's gradient, for each sequence [B N]."""
    return jnp.where(clamp > 0, clamp * jnp.abs(scale), jnp.inf).astype(jnp.float32)
