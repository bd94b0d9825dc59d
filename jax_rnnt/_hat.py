"""HATLoss and hat_loss: Bernoulli blank and label softmax on any unit-step lattice."""

from __future__ import annotations

import jax

from jax_rnnt import _checks
from jax_rnnt._loss import Composition, DecodingRules, TransducerLoss, build
from jax_rnnt._pytree import static
from jax_rnnt._topologies import TOPOLOGIES
from jax_rnnt.emissions.softmax import Softmax


class HATLoss(TransducerLoss):
    """Hybrid autoregressive transducer loss (Variani et al. 2020): blank or not, then which label; see `hat_loss`.

    Parameters
    ----------
    topology : {"standard", "monotonic", "constrained"}
        The lattice: that of `RNNTLoss`, `MonotonicRNNTLoss` or `ConstrainedRNNTLoss`.
    blank, clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, implementation, inplace
        As for `TransducerLoss`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import HATLoss
    >>> loss = HATLoss()(jnp.zeros((4, 3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    4.629
    """

    topology: str = static("standard")

    def _check(self, function):
        super()._check(function)
        _checks.choice(function, "topology", self.topology, tuple(TOPOLOGIES))

    def compose(self) -> Composition:
        """Bernoulli blank, label softmax."""
        arcs, steps = TOPOLOGIES[self.topology]
        emission = Softmax((self.blank,), self.fused_log_softmax, bernoulli=self.fused_log_softmax)
        return Composition(emission, arcs, steps, bounded=True)

    def decoding(self) -> DecodingRules:
        """As the loss whose lattice it has: constrained labels are followed by a blank in their frame."""
        made = self.compose()
        if self.topology == "constrained":
            return DecodingRules(made.emission, labels_per_frame=1)
        return DecodingRules(made.emission, made.topology)


def hat_loss(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    clamp: float | jax.Array = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    topology: str = "standard",
    fastemit_lambda: float | jax.Array = 0.0,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
    inplace: bool = True,
) -> jax.Array:
    """Hybrid autoregressive transducer loss (Variani et al. 2020): first blank or not, then which label.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions. With logits x, these
    log-probabilities replace the softmax in the recursion of `rnnt_loss`::

        l[blank] = log sigmoid(x[blank])
        l[k]     = log(1 - sigmoid(x[blank])) + x[k] - log sum over classes j other than blank of exp(x[j])

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network: the blank class is the Bernoulli logit, the others are the label softmax.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank : int, default -1
        The blank class; a negative one counts from the end.
    topology : {"standard", "monotonic", "constrained"}
        The lattice: that of `rnnt_loss`, `monotonic_rnnt_loss` or `constrained_rnnt_loss`.
    fused_log_softmax : bool, default True
        False: `logits` already are these log-probabilities and are used as they are.
    clamp, reduction, fastemit_lambda, delay_penalty, label_windows, implementation, inplace
        As for `rnnt_loss`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In nats; as for `rnnt_loss`. A label that is the blank class scores as the blank.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    See Also
    --------
    rnnt_loss : Meaning of the common options, and the rules for odd sequences.

    References
    ----------
    Variani, Rybach, Allauzen and Riley, "Hybrid Autoregressive Transducer (HAT)", 2020, arXiv:2003.07705.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import hat_loss
    >>> logits, targets = jnp.zeros((4, 3, 5)), jnp.array([1, 2])
    >>> loss = hat_loss(logits, targets, jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)  # 6 log 2 + 2 log 4 - log 10
    4.629
    """
    loss = build(
        "hat_loss", HATLoss, topology=topology,
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, implementation=implementation, inplace=inplace,
    )  # fmt: skip
    return loss._value("hat_loss", logits, targets, logit_lengths, target_lengths, label_windows)
