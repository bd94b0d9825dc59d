"""TargetRobustRNNTLoss: frames and labels may be skipped, for transcripts with errors."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.lattices import _order as order
from jax_rnnt.losses._adjustments import frame
from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._composition import Composition, DecodingRules


def _log_complement(x):
    """Returns log(1 - exp(x)); -inf for x >= 0."""
    inside = x < 0
    x = jnp.where(inside, x, -1)
    near = x > -0.5
    value = jnp.where(near, jnp.log(-jnp.expm1(jnp.where(near, x, -1))), jnp.log1p(-jnp.exp(jnp.where(near, -1, x))))
    return jnp.where(inside, value, -jnp.inf)


def _mixed(label, others, skip):
    """Returns log((1 - c) exp(label) + c exp(rest)) with c = exp(skip) in [0, 1], for label <= rest.

    Where c is near 1, its logarithm would give no derivative with respect to `skip`; where c is small, it underflows.
    """
    none = jnp.isneginf(others)
    others = jnp.where(none, 0, others)
    ratio, large = jnp.where(none, 0, label) - others, skip > -0.5
    c = jnp.exp(jnp.where(large, skip, 0))
    by_c = jnp.log(c + (1 - c) * jnp.exp(ratio))
    small = jnp.where(large, -1, skip)
    mixed = others + jnp.where(large, by_c, order.logaddexp(small, ratio + _log_complement(small)))
    return jnp.where(none, -jnp.inf, mixed)


def _with_other_labels(label, blank, skip):
    others = _log_complement(blank)  # log-probability of all labels together
    others = jnp.where(others < label, label, others)  # rounding may make it smaller
    return jnp.where(skip > 0, jnp.nan, _mixed(label, others, jnp.where(skip > 0, 0, skip)))


def _everywhere(number, like):
    return jnp.full_like(like, jnp.asarray(number, like.dtype))  # split over devices as `like` is


@dataclasses.dataclass(frozen=True)
class _Skips:
    """Adds the weight of a skipped frame to blanks, and of a skipped label to labels."""

    frame: Any
    label: Any

    def __call__(self, planes, num_frames, num_labels):
        blank, label = planes["blank"], planes["label"]
        each = functools.partial(order.elementwise, batch_dims=num_frames.ndim)
        if self.label is not None:
            label = each(_with_other_labels, label, blank, _everywhere(self.label, label))
        if self.frame is not None:
            before_last = frame(blank) < num_frames[..., None, None] - 1
            blank = jnp.where(before_last, each(order.logaddexp, blank, _everywhere(self.frame, blank)), blank)
        # A node without arcs lies outside a band, where nothing skips.
        there = ~jnp.isneginf(functools.reduce(jnp.maximum, planes.values()))
        return planes | {slot: jnp.where(there, x, -jnp.inf) for slot, x in (("blank", blank), ("label", label))}


class TargetRobustRNNTLoss(TransducerLoss):
    """Target-robust transducer loss (Bataev 2025): paths may skip frames and labels of a transcript with errors.

    T frames, U labels, V classes (blank included). Node (t, u): t frames read, u labels written. With probabilities p
    of the softmax over V and y = targets::

        blank(t, u) = p[t, u, blank] + exp(skip_frame)                          t < T_b - 1
        label(t, u) = p[t, u, y[u]] + exp(skip_label) (1 - p[t, u, blank] - p[t, u, y[u]])
        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) blank(t - 1, u) + alpha(t, u - 1) label(t, u - 1)
        loss        = -log alpha(T_b, U_b)

    A skipped frame stands for speech that the transcript lacks (deletions): the star transducer has `skip_frame` alone.
    A skipped label stands for a label that was not spoken (insertions): the bypass transducer has `skip_label` alone;
    its weight is the probability of all other labels. Both together allow for wrong labels (substitutions). The last
    frame ends with a blank. With both None this is `RNNTLoss`. Options, posteriors and alignments take an arc and its
    skip as one. With `skip_frame` the loss may be below 0. Where blank and label both have probability 0, nothing
    skips.

    Parameters
    ----------
    skip_frame : float, scalar Array or None, default 0.0
        Log-weight of a skipped frame, in nats; None: no frame may be skipped. It has a gradient.
    skip_label : float, scalar Array or None, default 0.0
        Added to the log-weight of a skipped label, in nats, at most 0 (a larger traced value makes the loss NaN); None:
        no label may be skipped. It has a gradient.
    **options
        Those of `TransducerLoss`.

    References
    ----------
    Bataev, "RNN-Transducer-based Losses for Speech Recognition on Noisy Targets", 2025, arXiv:2504.06963.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import TargetRobustRNNTLoss
    >>> batch = jnp.zeros((4, 3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2)
    >>> [round(float(TargetRobustRNNTLoss(skip_frame=None, skip_label=x)(*batch)), 3) for x in (None, -2.0, 0.0)]
    [7.354, 6.673, 4.581]
    """

    skip_frame: float | jax.Array | None = 0.0
    skip_label: float | jax.Array | None = 0.0

    def _check(self):
        super()._check()
        for name in ("skip_frame", "skip_label"):
            if (value := getattr(self, name)) is not None:
                self._set(name, _checks.number(name, value))
        if self.skip_label is not None and (x := _checks.known(self.skip_label)) is not None and not x <= 0:
            raise _checks.bad_value(f"skip_label must be 0 or less, got {self.skip_label!r}.")

    def compose(self) -> Composition:
        """Returns the softmax, with the weights of skips added to blanks and labels."""
        steps = (
            () if self.skip_frame is None and self.skip_label is None else (_Skips(self.skip_frame, self.skip_label),)
        )
        return Composition(Softmax((self.blank,), self.fused_log_softmax), steps=steps, bounded=self.skip_frame is None)

    def decoding(self) -> DecodingRules:
        """Returns the rules of `RNNTLoss`, as skips act on known targets alone."""
        return DecodingRules(Softmax((self.blank,), self.fused_log_softmax))
