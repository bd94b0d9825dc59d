"""HATLoss: Bernoulli blank and label softmax on any lattice of unit steps."""

from typing import Literal

from jax_rnnt import _checks
from jax_rnnt._pytree import static
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._composition import Composition, DecodingRules
from jax_rnnt.losses._constrained import ConstrainedRNNTLoss
from jax_rnnt.losses._monotonic import MonotonicRNNTLoss
from jax_rnnt.losses._rnnt import RNNTLoss

UNIT_STEP_LOSSES: dict[str, type[TransducerLoss]] = {
    "standard": RNNTLoss,
    "monotonic": MonotonicRNNTLoss,
    "constrained": ConstrainedRNNTLoss,
}


class HATLoss(TransducerLoss):
    """Hybrid autoregressive transducer loss (Variani et al. 2020): first blank or not, then which label.

    T frames, U labels, V classes (blank included). In the recursion of the loss that `variant` names, these
    log-probabilities of logits x replace those of the softmax::

        l[blank] = log sigmoid(x[blank])
        l[k]     = log(1 - sigmoid(x[blank])) + x[k] - log sum over classes j other than blank of exp(x[j])

    The logit of the blank decides between blank and label; the others form the softmax over labels. A label that is the
    blank class scores as the blank.

    Parameters
    ----------
    variant : {"standard", "monotonic", "constrained"}
        The recursion: that of `RNNTLoss`, `MonotonicRNNTLoss` or `ConstrainedRNNTLoss`.
    **options
        Those of `TransducerLoss`; fused_log_softmax=False: `logits` already are these log-probabilities.

    References
    ----------
    Variani, Rybach, Allauzen and Riley, "Hybrid Autoregressive Transducer (HAT)", 2020, arXiv:2003.07705.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import HATLoss
    >>> loss = HATLoss()(jnp.zeros((4, 3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)  # 6 log 2 + 2 log 4 - log 10
    4.629
    """

    variant: Literal["standard", "monotonic", "constrained"] = static("standard")

    def _check(self):
        super()._check()
        _checks.choice("variant", self.variant, tuple(UNIT_STEP_LOSSES))

    def _emission(self):
        return Softmax((self.blank,), self.fused_log_softmax, bernoulli=self.fused_log_softmax)

    def compose(self) -> Composition:
        """Returns a Bernoulli variable for the blank, and a softmax for the labels."""
        same = UNIT_STEP_LOSSES[self.variant]().compose()
        return Composition(self._emission(), same.topology, same.steps, bounded=True, closing=same.closing)

    def decoding(self) -> DecodingRules:
        """Returns the rules of the loss whose lattice it has."""
        same = UNIT_STEP_LOSSES[self.variant]().decoding()
        return DecodingRules(self._emission(), same.topology, same.labels_per_frame)
