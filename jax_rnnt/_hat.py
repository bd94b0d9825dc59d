"""hat_loss: Bernoulli blank and label softmax o any unit-step lattice."""

import jax

from jax_rnnt import _checks, _transducer
from jax_rnnt._topologies import by_name
from jax_rnnt.emissions.softmax import Softmax


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
    """Hybrid autoregressive transducer loss (Variani et al. 2020): blank or not, and only then which label.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions. With logits x::

        l[blank] = log sigmoid(x[blank])
        l[k]     = log(1 - sigmoid(x[blank])) + x[k] - log sum over classes j other than blank of exp(x[j])

    take the place of the softmax in the recursion of `rnnt_loss`.

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
    name = "hat_loss"
    arrays = _checks.arrays(name, logits, targets, logit_lengths, target_lengths)
    blank = _checks.class_index(name, "blank", blank, arrays[0].shape[-1])
    arcs, steps = by_name(name, topology)
    normalize = _checks.boolean(name, "fused_log_softmax", fused_log_softmax)
    emission = Softmax((blank,), normalize, bernoulli=normalize)
    return _transducer.evaluate(
        name, arrays, emission, arcs, steps=steps,
        clamp=clamp, reduction=reduction, implementation=implementation, inplace=inplace,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, label_windows=label_windows,
    )  # fmt: skip
