"""Losses with at most one label a frame, as values and as functions."""

from __future__ import annotations

import jax

from jax_rnnt import _checks, seam
from jax_rnnt._loss import Composition, DecodingRules, TransducerLoss, build
from jax_rnnt._pytree import static
from jax_rnnt.emissions.softmax import Softmax
from jax_rnnt.lattices.topology import MONOTONIC, MONOTONIC_FINAL_BLANK


class MonotonicRNNTLoss(TransducerLoss):
    """Monotonic RNN-T loss (Tripathi et al. 2019): every frame emits one symbol; see `monotonic_rnnt_loss`.

    Parameters
    ----------
    final_blank : bool, default False
        True: the last frame emits a blank, so that U_b <= T_b - 1.
    blank, clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, implementation, inplace
        As for `TransducerLoss`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import MonotonicRNNTLoss
    >>> loss = MonotonicRNNTLoss(blank=0)(jnp.zeros((4, 3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    4.646
    """

    final_blank: bool = static(False)

    def _check(self, function):
        super()._check(function)
        self._set("final_blank", _checks.boolean(function, "final_blank", self.final_blank))

    def compose(self) -> Composition:
        """Softmax, labels that read a frame."""
        steps = (seam.final_blank,) if self.final_blank else ()
        return Composition(Softmax((self.blank,), self.fused_log_softmax), MONOTONIC, steps, bounded=True)

    def decoding(self) -> DecodingRules:
        """Labels that read a frame; with `final_blank` none ends the path."""
        arcs = MONOTONIC_FINAL_BLANK if self.final_blank else MONOTONIC
        return DecodingRules(Softmax((self.blank,), self.fused_log_softmax), arcs)


class ConstrainedRNNTLoss(TransducerLoss):
    """Constrained RNN-T loss (k2): every frame ends with a blank, after at most one label; see `constrained_rnnt_loss`.

    Parameters
    ----------
    blank, clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, implementation, inplace
        As for `TransducerLoss`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import ConstrainedRNNTLoss
    >>> loss = ConstrainedRNNTLoss(blank=0)(jnp.zeros((4, 3, 5)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    7.865
    """

    def compose(self) -> Composition:
        """Softmax, labels that read a frame and pay its blank."""
        emission = Softmax((self.blank,), self.fused_log_softmax)
        return Composition(emission, MONOTONIC, (seam.pay_next_blank,), bounded=True)

    def decoding(self) -> DecodingRules:
        """The same as standard arcs: after a label its frame must be left by a blank."""
        return DecodingRules(Softmax((self.blank,), self.fused_log_softmax), labels_per_frame=1)


def monotonic_rnnt_loss(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    clamp: float | jax.Array = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    final_blank: bool = False,
    fastemit_lambda: float | jax.Array = 0.0,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
    inplace: bool = True,
) -> jax.Array:
    """Monotonic RNN-T loss (Tripathi et al. 2019): every frame emits one symbol, a label or a blank.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions. Node (t, u): t frames read,
    u labels written. With log-probabilities l of the softmax over V::

        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) exp l[t - 1, u, blank] + alpha(t - 1, u - 1) exp l[t - 1, u - 1, targets[u - 1]]
        loss        = -log alpha(T_b, U_b)

    A path exists if U_b <= T_b. This is k2's rnnt_type="modified".

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network, unnormalised unless `fused_log_softmax` is False.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank : int, default -1
        The blank class; a negative one counts from the end.
    final_blank : bool, default False
        True: the last frame emits a blank, so that U_b <= T_b - 1 (optimized_transducer's one_sym_per_frame; TDT with
        the duration 1 alone).
    clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, label_windows, implementation, inplace
        As for `rnnt_loss`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In nats; +inf with a zero gradient where U_b > T_b, or U_b >= T_b with `final_blank`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    See Also
    --------
    rnnt_loss : Meaning of the common options, and the rules for odd sequences.

    References
    ----------
    Tripathi, Lu, Sak and Soltau, "Monotonic Recurrent Neural Network Transducer and Decoding Strategies", 2019.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import monotonic_rnnt_loss
    >>> logits, targets = jnp.zeros((4, 3, 5)), jnp.array([1, 2])
    >>> loss = monotonic_rnnt_loss(logits, targets, jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)  # 4 log 5 - log 6: six ways to put two labels into four frames
    4.646
    """
    loss = build(
        "monotonic_rnnt_loss", MonotonicRNNTLoss, final_blank=final_blank,
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, implementation=implementation, inplace=inplace,
    )  # fmt: skip
    return loss._value("monotonic_rnnt_loss", logits, targets, logit_lengths, target_lengths, label_windows)


def constrained_rnnt_loss(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    clamp: float | jax.Array = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    fastemit_lambda: float | jax.Array = 0.0,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
    inplace: bool = True,
) -> jax.Array:
    """Constrained RNN-T loss (k2): every frame ends with a blank, after at most one label.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions. Node (t, u): t frames read,
    u labels written. With log-probabilities l of the softmax over V and y = targets::

        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) exp l[t - 1, u, blank]
                      + alpha(t - 1, u - 1) exp(l[t - 1, u - 1, y[u - 1]] + l[t - 1, u, blank])
        loss        = -log alpha(T_b, U_b)

    These are the RNN-T's paths with at most one label a frame. One exists if U_b <= T_b.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network, unnormalised unless `fused_log_softmax` is False.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank : int, default -1
        The blank class; a negative one counts from the end.
    clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, label_windows, implementation, inplace
        As for `rnnt_loss`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In nats; +inf with a zero gradient where U_b > T_b.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    See Also
    --------
    rnnt_loss : Meaning of the common options, and the rules for odd sequences. FastEmit scales the gradient of the
        whole label arc, its blank included.

    References
    ----------
    Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022, arXiv:2206.13236, and k2's
    rnnt_type="constrained".

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import constrained_rnnt_loss
    >>> logits, targets = jnp.zeros((4, 3, 5)), jnp.array([1, 2])
    >>> loss = constrained_rnnt_loss(logits, targets, jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)  # 6 log 5 - log 6
    7.865
    """
    loss = build(
        "constrained_rnnt_loss", ConstrainedRNNTLoss,
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, implementation=implementation, inplace=inplace,
    )  # fmt: skip
    return loss._value("constrained_rnnt_loss", logits, targets, logit_lengths, target_lengths, label_windows)
