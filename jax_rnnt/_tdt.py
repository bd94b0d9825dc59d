"""TDTLoss and tdt_loss: tokens with durations, lattice of durations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _pytree, seam
from jax_rnnt._loss import Composition, TransducerLoss, build
from jax_rnnt._pytree import option, static
from jax_rnnt.emissions.softmax import Softmax
from jax_rnnt.lattices import topology


@dataclasses.dataclass(frozen=True, eq=False)
class _Durations:  # a separate base, so that its field is the first argument
    durations: Sequence[int] = static()


class TDTLoss(TransducerLoss, _Durations):
    """Token-and-duration transducer loss (Xu et al. 2023): every symbol reads some frames; see `tdt_loss`.

    Parameters
    ----------
    durations : sequence of int
        Frames that duration i reads: distinct integers >= 0, one of them >= 1, in any order.
    sigma : float or scalar Array, default 0.0
        Logit under-normalisation: every arc pays sigma once. It has a gradient.
    omega : float or scalar Array, default 0.0
        Probability that a call takes the RNN-T loss of the token logits instead; every call then needs `key`. Its
        gradient is 0.
    blank, clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, implementation, inplace
        As for `TransducerLoss`; blank=-1 is the last token.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import TDTLoss
    >>> loss = TDTLoss([0, 1, 2], sigma=0.05)(jnp.zeros((4, 3, 8)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    6.38
    """

    sigma: float | jax.Array = option(0.0)
    omega: float | jax.Array = option(0.0)

    def _check(self, function):
        super()._check(function)
        self._set("durations", _checks.durations(function, "durations", self.durations, 0))
        if not any(self.durations):
            raise ValueError(f"{function}: durations must hold one of 1 frame or more, got {self.durations}.")
        if (omega := _checks.known(self.omega)) is not None and not 0 <= omega <= 1:
            raise ValueError(f"{function}: omega must be a probability, from 0 to 1, got {self.omega}.")

    def _draw(self, function, key):
        """The loss with a coin (bool) in the place of omega."""
        if _checks.is_zero(self.omega):
            return self
        if key is None and _checks.known(self.omega):
            raise ValueError(f"{function}: key must be a JAX random key where omega is not 0, got None.")
        if key is None:  # 0, if all is well; NaN where it is not. The arcs stay those of `lattice`.
            sigma = jnp.where(self.omega == 0, jnp.asarray(self.sigma), jnp.nan)
            return _pytree.replace(self, omega=jnp.zeros((), bool), sigma=sigma)
        # In float32 always: the coin must not depend on jax_enable_x64.
        return _pytree.replace(
            self, omega=jax.random.uniform(key, dtype=jnp.float32) < jnp.asarray(self.omega, jnp.float32)
        )

    def compose(self) -> Composition:
        """Two softmaxes; an arc is the sum of a token and a duration."""
        durations = tuple(self.durations)
        emission = Softmax((self.blank,), self.fused_log_softmax, durations=len(durations))
        bounded = self.sigma is None or self.sigma == 0
        if self.fastemit_lambda is None and self.omega is None:
            steps = () if self.sigma is None else (seam.UnderNormalize(self.sigma, ("blank", "label")),)
            return Composition(emission, topology.products(durations), steps, bounded)
        # FastEmit scales both heads of label arcs alone, and the RNN-T has arcs without a duration.
        both = durations if self.omega is None else durations + tuple(d for d in (0, 1) if d not in durations)
        steps = (seam.Durations(durations, self.sigma, self.omega),)
        return Composition(emission, topology.durations(both), steps, bounded)


def tdt_loss(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    durations: Sequence[int],
    blank: int = -1,
    clamp: float | jax.Array = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    sigma: float | jax.Array = 0.0,
    omega: float | jax.Array = 0.0,
    key: jax.Array | None = None,
    fastemit_lambda: float | jax.Array = 0.0,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
    inplace: bool = True,
) -> jax.Array:
    """Token-and-duration transducer loss (Xu et al. 2023): every symbol chooses how many frames it reads.

    T frames, U labels, V token classes (blank included), D durations d_i; `...` is any number of batch dimensions. Node
    (t, u): t frames read, u labels written. With log-probabilities l of the softmax over the first V logits and q of
    the one over the last D::

        alpha(0, 0) = 1
        alpha(t, u) = sum over d_i >= 1 of alpha(t - d_i, u) exp(l[t - d_i, u, blank] + q[t - d_i, u, i] - sigma)
                      + sum over i of alpha(t - d_i, u - 1) exp(l[.., targets[u - 1]] + q[t - d_i, u - 1, i] - sigma)
        loss        = -log alpha(T_b, U_b)

    The last arc is a blank that ends exactly at T_b; labels lead only to nodes with t < T_b.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V + D]
        Output of the joint network, durations last.
    targets : Array, integer [..., U]
        Labels in [0, V); those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    durations : sequence of int
        Frames that duration i reads: distinct integers >= 0, one of them >= 1, in any order. Kernels take 32; with
        `omega` the frames 0 and 1 count among them.
    blank : int, default -1
        The blank class; a negative one counts from the end of the tokens: -1 is V - 1.
    sigma : float or scalar Array, default 0.0
        Logit under-normalisation: every arc pays sigma once. The returned loss includes it.
    omega : float or scalar Array, default 0.0
        Probability that this call takes the RNN-T loss of the token logits instead, without durations and sigma. One
        coin decides for the whole batch. A traced one is not checked: from 1 on always, up to 0 or NaN never.
    key : Array, optional
        JAX random key of that coin; required unless omega is 0.
    clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, label_windows, implementation, inplace
        As for `rnnt_loss`. FastEmit scales the gradient of the whole label arc, in both heads; `clamp` clips that of
        every logit.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In nats; +inf with a zero gradient also where the durations do not add up to T_b.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`; ValueError also for omega without a key, and for one that is known and no probability.

    See Also
    --------
    rnnt_loss : Meaning of the common options, and the rules for odd sequences.

    References
    ----------
    Xu, Jia, Majumdar, Huang, Watanabe and Ginsburg, "Efficient Sequence Transduction by Jointly Predicting Tokens and
    Durations", 2023, arXiv:2304.06795.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import tdt_loss
    >>> logits, targets = jnp.zeros((4, 3, 5 + 3)), jnp.array([1, 2])
    >>> loss = tdt_loss(logits, targets, jnp.array(4), jnp.array(2), [0, 1, 2], sigma=0.05)
    >>> round(float(loss), 3)
    6.38
    """
    loss = build(
        "tdt_loss", TDTLoss, durations=durations, sigma=sigma, omega=omega,
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, implementation=implementation, inplace=inplace,
    )  # fmt: skip
    return loss._value("tdt_loss", logits, targets, logit_lengths, target_lengths, label_windows, key)
