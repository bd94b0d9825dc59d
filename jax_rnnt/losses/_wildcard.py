"""WildcardRNNTLoss: a transcript may lack labels at its beginning and at its end (W-Transducer)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_rnnt import _checks
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.lattices import _order as order
from jax_rnnt.losses._adjustments import frame
from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._composition import Composition, DecodingRules


def _then(first, second):
    """Returns the map a -> a exp(x) + exp(y) for (x, y) = `second`, applied after that of `first`."""
    return first[0] + second[0], order.logaddexp(first[1] + second[0], second[1])


def _ratio(blank, skip, none, some, none_before, some_before, inside):
    """Returns the blank of a frame, from the maps of all frames up to it, and up to the one before."""
    after, before = order.logaddexp(none, skip + some), order.logaddexp(none_before, skip + some_before)
    blocked = jnp.isneginf(after)  # only if the skip is: it has a part in every a(t) but a(0)
    after, before = jnp.where(blocked, 0, after), jnp.where(blocked, 0, before)
    # The value is not computed as a difference of logs, whose sizes would cost digits. The derivative is: of the other
    # form it is a sum of differences of numbers near 1, with an error of 1e-4 at T = 1000 in float32.
    difference, value = after - before, jnp.logaddexp(blank, skip - before)
    return jnp.where(inside & ~blocked, difference + lax.stop_gradient(value - difference), blank)


def _with_skips(blank, skip, inside, reverse):
    """Makes a column's blanks [..., T] ratios a(t + 1) / a(t), with a(t + 1) = a(t) exp(blank) + exp(skip), a(0) = 1.

    So a product of blanks from the first frame on is the sum over all ways to pass these frames; with `reverse`, from
    the last frame back. Only blanks `inside` change.
    """
    skip = jnp.broadcast_to(jnp.asarray(skip, blank.dtype), blank.shape)
    # This leaves out the skip's weight, whose size would cost digits: after = log(exp(none) + exp(some)).
    neutral = 0, -jnp.inf
    steps = jnp.where(inside, blank, 0), jnp.where(inside, jnp.zeros_like(blank), -jnp.inf)
    frames = blank.shape[-1]
    end = order.BLOCK - frames % order.BLOCK if isinstance(frames, int) else 0  # as in `order.elementwise`
    more = [(0, 0)] * (blank.ndim - 1) + [(0, end)]
    whole = [jnp.pad(x, more, constant_values=fill) for x, fill in zip(steps, neutral)]
    maps = [x[..., :frames] for x in order.cumulative(_then, whole, neutral, reverse)]

    def before(x, fill):
        first = jnp.full_like(x[..., :1], fill)
        return jnp.concatenate([x[..., 1:], first] if reverse else [first, x[..., :-1]], -1)

    arrays = blank, skip, *maps, *map(before, maps, neutral), inside
    return order.elementwise(_ratio, *arrays, batch_dims=blank.ndim - 1)


@dataclasses.dataclass(frozen=True)
class _Wildcards:
    """Adds the skips to the blanks of the first and the last column. If both are one, order does not matter."""

    start: Any
    end: Any

    def __call__(self, planes, num_frames, num_labels):
        blank = planes["blank"]
        column = lax.broadcasted_iota(jnp.int32, (1,) * (blank.ndim - 1) + blank.shape[-1:], blank.ndim - 1)
        before_last = (frame(blank) < num_frames[..., None, None] - 1)[..., 0]
        for skip, where, reverse in ((self.end, num_labels[..., None, None], True), (self.start, 0, False)):
            if skip is not None:
                here = column == where
                passed = _with_skips(jnp.sum(jnp.where(here, blank, 0), -1), skip, before_last, reverse)
                blank = jnp.where(here, passed[..., None], blank)
        return planes | {"blank": blank}


class WildcardRNNTLoss(TransducerLoss):
    """W-Transducer loss (Laptev et al. 2023): a path may skip frames at both ends, for transcripts cut at their ends.

    T frames, U labels, V classes (blank included). Node (t, u): t frames read, u labels written. With log-probabilities
    l of the softmax over V::

        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) exp l[t - 1, u, blank] + alpha(t, u - 1) exp l[t, u - 1, targets[u - 1]]
                      + exp(skip_start)                             u = 0, 0 < t < T_b
                      + sum_(s < t) alpha(s, u) exp(skip_end)       u = U_b, t = T_b - 1
        loss        = -log(alpha(T_b - 1, U_b) exp l[T_b - 1, U_b, blank])

    For every t, one arc leads from the first node to (t, 0), and one from (t, U_b) to (T_b - 1, U_b): a skip has one
    weight, however many frames it skips. The blanks of these frames stay. The last frame ends with a blank. With both
    None this is `RNNTLoss`. The loss may be below 0.

    A blank of the first or the last column also counts the skips over its frame. So in `posteriors`, a blank of column
    0 has the probability that the first label comes later, one of column U_b that the last label has come. A path of
    `align` fixes the frames of its labels alone: its score sums over all ways to pass the frames before the first label
    and after the last.

    Parameters
    ----------
    skip_start, skip_end : float, scalar Array or None, default 0.0
        Log-weight of a skip at the beginning and at the end, in nats; None: no frame may be skipped there. Both have a
        gradient.
    **options
        Those of `TransducerLoss`.

    References
    ----------
    Laptev, Bataev, Gitman and Ginsburg, "Powerful and Extensible WFST Framework for RNN-Transducer Losses", 2023,
    arXiv:2303.10384. NeMo's GraphWTransducerLoss, with eps_weight for both skips and last_blank_mode="force_last".

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import WildcardRNNTLoss
    >>> batch = jnp.zeros((4, 3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2)
    >>> [round(float(WildcardRNNTLoss(skip_start=x, skip_end=x)(*batch)), 3) for x in (None, -2.0, 0.0)]
    [7.354, 5.297, 2.978]
    """

    skip_start: float | jax.Array | None = 0.0
    skip_end: float | jax.Array | None = 0.0

    def _check(self):
        super()._check()
        for name in ("skip_start", "skip_end"):
            if (value := getattr(self, name)) is not None:
                self._set(name, _checks.number(name, value))

    def compose(self) -> Composition:
        """Returns the softmax, with the weights of skips added to the blanks of the first and last column."""
        no_skips = self.skip_start is None and self.skip_end is None
        steps = () if no_skips else (_Wildcards(self.skip_start, self.skip_end),)
        return Composition(Softmax((self.blank,), self.fused_log_softmax), steps=steps, bounded=no_skips)

    def decoding(self) -> DecodingRules:
        """Returns the rules of `RNNTLoss`, as skips act on known targets alone."""
        return DecodingRules(Softmax((self.blank,), self.fused_log_softmax))
