"""tdt_loss: token-and-duration emission o lattice of durations."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _transducer, seam
from jax_rnnt.emissions.softmax import Softmax
from jax_rnnt.lattices import topology


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
    """Token-and-duration transducer loss (Xu et al. 2023): every symbol says how many frames it reads.

    T frames, U labels, V token classes (blank included), D durations d_i; `...` is any number of batch dimensions. Node
    (t, u): t frames read, u labels written. With log-probabilities l of the softmax over the first V logits and q of
    the one over the last D::

        alpha(0, 0) = 1
        alpha(t, u) = sum over d_i >= 1 of alpha(t - d_i, u) exp(l[t - d_i, u, blank] + q[t - d_i, u, i] - sigma)
                      + sum over i of alpha(t - d_i, u - 1) exp(l[.., targets[u - 1]] + q[t - d_i, u - 1, i] - sigma)
        loss        = -log alpha(T_b, U_b)

    where (T_b, U_b) is entered by a blank, exactly; a label leads to nodes with t < T_b only.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V + D]
        Output of the joint network, durations last.
    targets : Array, integer [..., U]
        Labels in [0, V); those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    durations : sequence of int
        Frames that duration i reads, 0 or more and one of them 1 or more, no two alike, in any order. Kernels take 32;
        with `omega` the frames 0 and 1 count among them.
    blank : int, default -1
        The blank class; a negative one counts from the end of the tokens: -1 is V - 1.
    sigma : float or scalar Array, default 0.0
        Logit under-normalisation: every arc pays sigma once. The returned loss includes it.
    omega : float or scalar Array, default 0.0
        Probability that this call is the RNN-T loss of the token logits instead, without durations and sigma; one coin
        for the whole batch.
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
        As for `rnnt_loss`; ValueError also for omega without a key.

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
    name = "tdt_loss"
    arrays = _checks.arrays(name, logits, targets, logit_lengths, target_lengths)
    durations = _checks.durations(name, "durations", durations, 0)
    classes = arrays[0].shape[-1] - len(durations)
    if not any(durations):
        raise ValueError(f"{name}: durations must hold one of 1 frame or more, got {durations}.")
    if classes < 1:
        expected = f"shape [..., T, U + 1, V + D] with V >= 1 and D = {len(durations)}"
        raise ValueError(f"{name}: logits must have {expected}, got {arrays[0].shape}.")
    blank = _checks.class_index(name, "blank", blank, classes)
    normalize = _checks.boolean(name, "fused_log_softmax", fused_log_softmax)
    omega = _checks.scalar(name, "omega", omega)
    fastemit_lambda = _checks.scalar(name, "fastemit_lambda", fastemit_lambda)
    operands = {}
    arcs, step = topology.products(durations), seam.under_normalize_tokens
    if not _checks.is_zero(fastemit_lambda) or not _checks.is_zero(omega):
        # FastEmit scales both heads of label arcs alone, and the RNN-T has arcs without a duration.
        arcs, step = topology.durations(durations), seam.Durations(durations)
    if not _checks.is_zero(omega):
        if key is None:
            raise ValueError(f"{name}: key must be a JAX random key where omega is not 0, got None.")
        # In float32 always: the coin must not depend on jax_enable_x64.
        operands["sampled"] = jax.random.uniform(key, dtype=jnp.float32) < jnp.asarray(omega, jnp.float32)
        arcs = topology.durations(durations + tuple(d for d in (0, 1) if d not in durations))
    return _transducer.evaluate(
        name, arrays, Softmax((blank,), normalize, durations=len(durations)), arcs,
        steps=(step,), operands=operands, sigma=sigma,
        clamp=clamp, reduction=reduction, implementation=implementation, inplace=inplace,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, label_windows=label_windows,
    )  # fmt: skip
