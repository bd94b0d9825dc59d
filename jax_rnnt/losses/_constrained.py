"""ConstrainedRNNTLoss: every frame ends with a blank, after at most one label."""

from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.lattices._topology import MONOTONIC
from jax_rnnt.losses._adjustments import pay_next_blank
from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._composition import Composition, DecodingRules


class ConstrainedRNNTLoss(TransducerLoss):
    """Constrained RNN-T loss (k2): every frame ends with a blank, after at most one label.

    T frames, U labels, V classes (blank included). Node (t, u): t frames read, u labels written. With log-probabilities
    l of the softmax over V and y = targets::

        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) exp l[t - 1, u, blank]
                      + alpha(t - 1, u - 1) exp(l[t - 1, u - 1, y[u - 1]] + l[t - 1, u, blank])
        loss        = -log alpha(T_b, U_b)

    These are the RNN-T's paths with at most one label in a frame. A path exists if U_b <= T_b; the loss of other
    sequences is +inf with a zero gradient. FastEmit scales the gradient of the whole label arc, its blank included.

    Parameters
    ----------
    **options
        Those of `TransducerLoss`.

    References
    ----------
    Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022, arXiv:2206.13236, and k2's
    rnnt_type="constrained".

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import ConstrainedRNNTLoss
    >>> loss = ConstrainedRNNTLoss(blank=0)(jnp.zeros((4, 3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)  # 6 log 5 - log 6
    7.865
    """

    def compose(self) -> Composition:
        """Returns the softmax, with labels that read a frame and pay its blank."""
        emission = Softmax((self.blank,), self.fused_log_softmax)
        return Composition(emission, MONOTONIC, bounded=True, closing=(pay_next_blank,))

    def decoding(self) -> DecodingRules:
        """Returns the same paths on standard arcs: after a label, a blank must leave the frame."""
        return DecodingRules(Softmax((self.blank,), self.fused_log_softmax), labels_per_frame=1)
