"""MultiblankRNNTLoss: several blanks, lattice with blanks over several frames."""

import dataclasses
from collections.abc import Sequence

import jax

from jax_rnnt import _checks
from jax_rnnt._pytree import option, static
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.lattices import _topology as topology
from jax_rnnt.losses._adjustments import UnderNormalize
from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._composition import Composition


@dataclasses.dataclass(frozen=True, eq=False)
class _BigBlanks:  # a separate base, so that its field is the first argument
    big_blank_durations: Sequence[int] = static()


class MultiblankRNNTLoss(TransducerLoss, _BigBlanks):
    """Multi-blank transducer loss (Xu et al. 2022): big blanks read several frames at once.

    T frames, U labels, V classes (all blanks included), big blank i reads d_i frames. Node (t, u): t frames read, u
    labels written. With log-probabilities l of the softmax over V::

        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) exp(l[t - 1, u, blank] - sigma)
                      + sum over i of alpha(t - d_i, u) exp(l[t - d_i, u, blank - 1 - i] - sigma)
                      + alpha(t, u - 1) exp(l[t, u - 1, targets[u - 1]] - sigma)
        loss        = -log alpha(T_b, U_b)

    A blank of any size enters (T_b, U_b); no blank reads beyond it.

    Parameters
    ----------
    big_blank_durations : sequence of int
        Frames that each big blank reads: distinct integers >= 2, in any order. Big blank i is class blank - 1 - i.
        Kernels take 62.
    sigma : float or scalar Array, default 0.0
        Logit under-normalisation: every arc pays sigma once, which favours paths of fewer, longer steps. The returned
        loss includes it; it has a gradient.
    **options
        Those of `TransducerLoss`; `blank` is the blank of one frame.

    References
    ----------
    Xu, Jia, Majumdar, Watanabe and Ginsburg, "Multi-blank Transducers for Speech Recognition", 2022, arXiv:2211.03541.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import MultiblankRNNTLoss
    >>> criterion = MultiblankRNNTLoss([2, 3], sigma=0.05)
    >>> loss = criterion(jnp.zeros((4, 3, 6)), jnp.array([1, 2]), jnp.array(4), jnp.array(2))
    >>> round(float(loss), 3)
    4.873
    """

    sigma: float | jax.Array = option(0.0)

    def _check(self):
        super()._check()
        durations = _checks.distinct_integers("big_blank_durations", self.big_blank_durations, 2)
        self._set("big_blank_durations", durations)
        if 0 <= self.blank < len(durations):
            expected = f"at least {len(durations)}, as big blank i is class blank - 1 - i"
            raise _checks.bad_value(f"blank must be {expected}, got {self.blank}.")

    def compose(self) -> Composition:
        """Returns the softmax with a plane for each blank, and arcs over several frames."""
        durations = tuple(self.big_blank_durations)
        blanks = tuple(range(self.blank, self.blank - 1 - len(durations), -1))
        emission = Softmax(blanks, self.fused_log_softmax, ("blank", *(f"blank+{d}" for d in durations)))
        arcs = topology.multi_blank(durations)
        if self.sigma is None:
            return Composition(emission, arcs, bounded=True)
        return Composition(emission, arcs, (UnderNormalize(self.sigma),), bounded=self.sigma == 0)
