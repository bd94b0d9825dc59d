"""MonotonicRNNTLoss: every frame emits one symbol."""

from jax_rnnt import _checks
from jax_rnnt._pytree import static
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.lattices._topology import MONOTONIC, MONOTONIC_FINAL_BLANK
from jax_rnnt.losses._adjustments import forbid_final_label
from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._composition import Composition, DecodingRules


class MonotonicRNNTLoss(TransducerLoss):
    """Monotonic RNN-T loss (Tripathi et al. 2019): every frame emits one symbol, a label or a blank.

    T frames, U labels, V classes (blank included). Node (t, u): t frames read, u labels written. With log-probabilities
    l of the softmax over V::

        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) exp l[t - 1, u, blank] + alpha(t - 1, u - 1) exp l[t - 1, u - 1, targets[u - 1]]
        loss        = -log alpha(T_b, U_b)

    A path exists if U_b <= T_b (with `final_blank`, U_b < T_b); the loss of other sequences is +inf with a zero
    gradient. This is k2's rnnt_type="modified".

    Parameters
    ----------
    final_blank : bool, default False
        True: the last frame emits a blank, as in optimized_transducer's one_sym_per_frame and TDT with durations [1].
    **options
        Those of `TransducerLoss`.

    References
    ----------
    Tripathi, Lu, Sak and Soltau, "Monotonic Recurrent Neural Network Transducer and Decoding Strategies", 2019.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import MonotonicRNNTLoss
    >>> loss = MonotonicRNNTLoss(blank=0)(jnp.zeros((4, 3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)  # 4 log 5 - log 6: six ways to put two labels into four frames
    4.646
    """

    final_blank: bool = static(False)

    def _check(self):
        super()._check()
        self._set("final_blank", _checks.boolean("final_blank", self.final_blank))

    def compose(self) -> Composition:
        """Returns the softmax, with labels that read a frame."""
        steps = (forbid_final_label,) if self.final_blank else ()
        return Composition(Softmax((self.blank,), self.fused_log_softmax), MONOTONIC, steps, bounded=True)

    def decoding(self) -> DecodingRules:
        """Returns rules by which labels read a frame; with `final_blank` no label ends the path."""
        arcs = MONOTONIC_FINAL_BLANK if self.final_blank else MONOTONIC
        return DecodingRules(Softmax((self.blank,), self.fused_log_softmax), arcs)
