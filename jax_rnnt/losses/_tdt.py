"""TDTLoss: tokens with durations, lattice of durations."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _pytree
from jax_rnnt._pytree import option, static
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.lattices import _topology as topology
from jax_rnnt.losses._adjustments import TokenAndDuration, UnderNormalize
from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._composition import Composition


@dataclasses.dataclass(frozen=True, eq=False)
class _TokenDurations:  # a separate base, so that its field is the first argument
    durations: Sequence[int] = static()


class TDTLoss(TransducerLoss, _TokenDurations):
    """Token-and-duration transducer loss (Xu et al. 2023): every symbol chooses how many frames it reads.

    T frames, U labels, V token classes (blank included), D durations d_i; logits [..., T, U + 1, V + D], durations
    last. Node (t, u): t frames read, u labels written. With log-probabilities l of the softmax over the first V logits
    and q of the one over the last D::

        alpha(0, 0) = 1
        alpha(t, u) = sum over d_i >= 1 of alpha(t - d_i, u) exp(l[t - d_i, u, blank] + q[t - d_i, u, i] - sigma)
                      + sum over i of alpha(t - d_i, u - 1) exp(l[.., targets[u - 1]] + q[t - d_i, u - 1, i] - sigma)
        loss        = -log alpha(T_b, U_b)

    The last arc is a blank that ends exactly at T_b; labels lead only to nodes with t < T_b. Where no such durations
    add up to T_b, the loss is +inf with a zero gradient. FastEmit scales the gradient of the whole label arc, in both
    heads; `clamp` clips that of every logit.

    Parameters
    ----------
    durations : sequence of int
        Frames that duration i reads: distinct integers >= 0, one or more of them >= 1, in any order. Kernels take 32;
        with `omega`, 0 and 1 always count among them.
    sigma : float or scalar Array, default 0.0
        Logit under-normalisation: every arc pays sigma once. The returned loss includes it; it has a gradient.
    omega : float or scalar Array, default 0.0
        Probability that a call takes the RNN-T loss of the token logits instead, without durations and sigma; unless it
        is 0, every call needs `key`. One coin decides for the whole batch. A traced omega that is not a probability, or
        not 0 without `key`, makes the loss NaN. Its gradient is 0.
    **options
        Those of `TransducerLoss`; a negative blank counts from the end of the tokens: -1 is V - 1.

    References
    ----------
    Xu, Jia, Majumdar, Huang, Watanabe and Ginsburg, "Efficient Sequence Transduction by Jointly Predicting Tokens and
    Durations", 2023, arXiv:2304.06795.

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

    def _check(self):
        super()._check()
        self._set("durations", _checks.distinct_integers("durations", self.durations, 0))
        if not any(self.durations):
            raise _checks.bad_value(f"durations must hold one of 1 frame or more, got {self.durations}.")
        if (omega := _checks.known(self.omega)) is not None and not 0 <= omega <= 1:
            raise _checks.bad_value(f"omega must be a probability, from 0 to 1, got {self.omega}.")

    def _draw(self, key):
        """Returns the loss with a coin (bool) in the place of omega."""
        if _checks.is_zero(self.omega):
            return self
        if key is None and _checks.known(self.omega):
            raise _checks.bad_value("key must be a JAX random key where omega is not 0, got None.")
        if key is None:  # 0, if all is well; NaN where it is not. The arcs stay those of `topology`.
            valid, coin = self.omega == 0, jnp.zeros((), bool)
        else:  # in float32 always: the coin must not depend on jax_enable_x64
            valid = (self.omega >= 0) & (self.omega <= 1)
            coin = valid & (jax.random.uniform(key, dtype=jnp.float32) < jnp.asarray(self.omega, jnp.float32))
        if _checks.is_number(self.omega):
            return _pytree.replace(self, omega=coin)
        return _pytree.replace(self, omega=coin, sigma=jnp.where(valid, jnp.asarray(self.sigma), jnp.nan))

    def compose(self) -> Composition:
        """Returns two softmaxes; an arc is the sum of a token and a duration."""
        durations = tuple(self.durations)
        emission = Softmax((self.blank,), self.fused_log_softmax, num_durations=len(durations))
        bounded = self.sigma is None or self.sigma == 0
        if self.fastemit_lambda is None and self.omega is None:
            steps = () if self.sigma is None else (UnderNormalize(self.sigma, ("blank", "label")),)
            return Composition(emission, topology.products(durations), steps, bounded)
        # FastEmit scales both heads of label arcs alone, and the RNN-T has arcs without a duration.
        both = durations if self.omega is None else durations + tuple(d for d in (0, 1) if d not in durations)
        steps = (TokenAndDuration(durations, self.sigma, self.omega),)
        return Composition(emission, topology.token_and_duration(both), steps, bounded)
