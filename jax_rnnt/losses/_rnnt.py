"""RNNTLoss and rnnt_loss: softmax or log-probabilities on the standard lattice."""

import jax
from jax.typing import ArrayLike

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import keywords
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.losses._base import TransducerLoss
from jax_rnnt.losses._call import Logits, run
from jax_rnnt.losses._composition import Composition
from jax_rnnt.losses._methods import METHODS


class RNNTLoss(TransducerLoss):
    """RNN-Transducer loss (Graves 2012); `rnnt_loss` has the recursion and the rules for odd sequences.

    Parameters
    ----------
    **options
        Those of `TransducerLoss`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> criterion = RNNTLoss(blank=0, reduction="sum")
    >>> criterion
    RNNTLoss(blank=0, reduction='sum')
    >>> loss = criterion(jnp.zeros((1, 4, 3, 5)), jnp.array([[1, 2]]), jnp.array([4]), jnp.array([2]))
    >>> round(float(loss), 3)
    7.354
    """

    def compose(self) -> Composition:
        """Returns the softmax, on the standard lattice."""
        return Composition(Softmax((self.blank,), self.fused_log_softmax), bounded=True)


@keywords
def rnnt_loss(
    logits: Logits,
    targets: ArrayLike,
    logit_lengths: ArrayLike,
    target_lengths: ArrayLike,
    blank: int = -1,
    clamp: float | jax.Array = -1.0,
    reduction: _checks.Reduction = "mean",
    fused_log_softmax: bool = True,
    *,
    fastemit_lambda: float | jax.Array = 0.0,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: ArrayLike | None = None,
    implementation: _checks.Implementation | None = None,
    inplace: bool = True,
) -> jax.Array:
    """RNN-Transducer loss (Graves 2012): minus the log-likelihood of the targets, over all alignments.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions, none included. Node (t, u):
    t frames read, u labels written. With log-probabilities l of the softmax over V::

        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) exp l[t - 1, u, blank] + alpha(t, u - 1) exp l[t, u - 1, targets[u - 1]]
        loss        = -log alpha(T_b, U_b)

    The last arc is a blank. Value and gradient together read the logits twice and write the gradient once.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network, unnormalised unless `fused_log_softmax` is False.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths : Array, integer [...]
        T_b, the number of frames of each sequence, 0 <= T_b <= T.
    target_lengths : Array, integer [...]
        U_b, the number of labels of each sequence, 0 <= U_b <= U.
    blank, clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, implementation, inplace
        As for `TransducerLoss`.
    label_windows : Array, integer [..., U, 2], optional
        First and last frame (inclusive) in which label u may be emitted (alignment-restricted RNN-T, Mahadeokar et al.
        2021).

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In nats. 0 for a sequence with T_b = U_b = 0; +inf with a zero gradient where no path exists or no float holds
        the loss; NaN with a zero gradient where a length or a label is out of range; NaN where logits inside the
        lengths are NaN or +inf. No sequence changes any other.

    Raises
    ------
    TypeError, ValueError
        For a static mistake in an argument, named in the message.
    NotImplementedError
        For implementation="kernel" on a platform without kernels, or beyond their limits: V <= 2^26; with CUDA also
        T (U + 1) < 2^30 and U < 22240 (by the GPU's shared memory: 13280 to 55008).

    Notes
    -----
    Traced numbers (`clamp`, `fastemit_lambda`, `delay_penalty`) can change without recompilation. `delay_penalty` has a
    gradient, which FastEmit also scales by 1 + lambda. `clamp` and `fastemit_lambda` act on gradients alone; their own
    gradient is exactly 0. Sums over float16 and bfloat16 logits are in float32.

    Masking with -1e9 or `finfo.min` works like masking with -inf where another path exists; where none does, the loss
    is finite. A number added to all logits of a node changes neither loss nor gradient beyond the rounding of the
    logits.

    Sharding over the batch costs no collective. Logits that jit splits over V, T or U + 1 are gathered before the
    kernels, so the split saves no memory; inside `shard_map` the loss takes a part of V or T for the whole, and is
    wrong. `RNNTLoss` with `vocab_axis` or `frame_axis` works on the parts.

    References
    ----------
    Graves, "Sequence Transduction with Recurrent Neural Networks", 2012, arXiv:1211.3711.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax_rnnt import rnnt_loss
    >>> logits = jnp.zeros((2, 4, 3, 5))
    >>> targets = jnp.array([[1, 2], [3, 0]])
    >>> loss = rnnt_loss(logits, targets, jnp.array([4, 3]), jnp.array([2, 1]))
    >>> round(float(loss), 3)
    6.347
    """
    options = dict(
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, implementation=implementation, inplace=inplace,
    )  # fmt: skip
    loss = _pytree.make(RNNTLoss, options.keys(), options.values())
    loss._check()
    batch = logits, targets, logit_lengths, target_lengths, label_windows
    return run(METHODS["__call__"], loss, *batch)
