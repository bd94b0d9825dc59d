"""What kernels of a joint network leave to XLA, on TPUs and GPUs: planes of numbers of rows, numbers of cotangents.

B encoders with N sequences each, T frames, U1 columns.
"""

import functools

import jax.numpy as jnp

from jax_rnnt.emissions import _norm
from jax_rnnt.emissions._emission import Nodes, inside_rows, scale_cotangent
from jax_rnnt.emissions._softmax import Heads, planes_of


def inside(inputs):
    return inside_rows(Nodes(inputs.label, inputs.num_frames), inputs.shape[-2])


def planes(softmax, classes, inputs, rows):
    """(planes by slot, norm) from numbers [B N, T, U1], of any value outside the lengths.

    Logits of other heads, then those that `classes` keeps; the largest logit, the sum of exponentials relative to it,
    the logit of the label.
    """
    within = inside(inputs)
    rows = [jnp.where(within, x, 0) for x in rows]
    others = len(classes.others)
    of_others, kept, (peak, total, of_label) = rows[:others], rows[others:-3], rows[-3:]
    row = _norm.row_sum_of_total(peak, total) if softmax.normalize else None
    blank, durations = (of_others[0], []) if softmax.bernoulli else (None, of_others)
    heads = Heads(within, row, of_label, kept[: len(classes.blanks)], durations, blank, kept[0])
    *made, norm = planes_of(heads, inputs.label, softmax.blanks)
    return dict(zip(softmax._names(), made)), norm


def numbers(softmax, inputs, cotangents, norm, scale):
    """Numbers of rows [B N, T, U1] for the backward kernel.

    What other heads get; what is added at each blank, and at the label; the factor of exp(logit - base), and base: -inf
    for the logit of the anchor, +inf where the softmax adds nothing.
    """
    cotangents = [cotangents[name] for name in softmax._names()]
    used = inside(inputs) & functools.reduce(jnp.logical_or, (x != 0 for x in cotangents))
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
