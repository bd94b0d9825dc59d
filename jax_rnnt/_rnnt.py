"""rnnt_loss: softmax or log-probs emission o standard lattice."""

import dataclasses
from typing import Any

import jax

from jax_rnnt import _checks, _transducer
from jax_rnnt._transducer import Spec


def _arguments(function, logits, targets, logit_lengths, target_lengths):
    """The four arrays every loss takes, checked."""
    logits = _checks.floating(function, "logits", logits, 3, "[..., T, U + 1, V]")
    batch, columns, classes = logits.shape[:-3], logits.shape[-2], logits.shape[-1]
    if columns < 1 or classes < 1:
        expected = "shape [..., T, U + 1, V] with U + 1 >= 1 and V >= 1"
        raise ValueError(f"{function}: logits must have {expected}, got {logits.shape}.")
    targets = _checks.integers(function, "targets", targets, (*batch, columns - 1), "[..., U]")
    logit_lengths = _checks.integers(function, "logit_lengths", logit_lengths, batch, "[...]")
    target_lengths = _checks.integers(function, "target_lengths", target_lengths, batch, "[...]")
    return logits, targets, logit_lengths, target_lengths


def _options(function, targets, *, fastemit_lambda=0.0, delay_penalty=0.0, label_windows=None):
    """Operands of the seam; a number known to be 0 is left out."""
    options = {"fastemit_lambda": fastemit_lambda, "delay_penalty": delay_penalty}
    options = {name: _checks.scalar(function, name, x) for name, x in options.items()}
    options = {name: x for name, x in options.items() if not _checks.is_zero(x)}
    if label_windows is not None:
        shape = (*targets.shape, 2)
        options["label_windows"] = _checks.integers(function, "label_windows", label_windows, shape, "[..., U, 2]")
    return options


def _clamp(function, clamp):
    """The bound, or None where it is known to be off."""
    clamp = _checks.scalar(function, "clamp", clamp)
    return None if isinstance(clamp, float) and clamp <= 0 else clamp


def rnnt_loss(
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
    """RNN-Transducer loss (Graves 2012): minus the log-likelihood of the targets, over all alignments.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions, none included. Node (t, u):
    t frames read, u labels written. With log-probabilities l of the softmax over V::

        alpha(0, 0) = 1
        alpha(t, u) = alpha(t - 1, u) exp l[t - 1, u, blank] + alpha(t, u - 1) exp l[t, u - 1, targets[u - 1]]
        loss        = -log alpha(T_b, U_b)

    where (T_b, U_b) is entered by a blank. The gradient with respect to the logits is computed with the loss and reads
    and writes the logits once.

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
    blank : int, default -1
        The blank class; a negative one counts from the end.
    clamp : float or scalar Array, default -1.0
        Clips the gradient of each sequence's loss to [-clamp, clamp], before the incoming cotangent and the reduction
        multiply it; <= 0: off.
    reduction : {"mean", "none", "sum", "mean_target", "mean_volume"}
        "mean": sum / number of sequences; "mean_target": mean of loss_b / max(U_b, 1); "mean_volume": sum of the losses
        / max(sum of U_b, 1).
    fused_log_softmax : bool, default True
        False: `logits` already are log-probabilities and are used as they are.
    fastemit_lambda : float or scalar Array, default 0.0
        FastEmit (Yu et al. 2021): scales the gradient of label arcs by 1 + lambda. The returned loss stays the nll.
    delay_penalty : float or scalar Array, default 0.0
        Adds delay_penalty * ((T_b - 1) / 2 - t) to the label arcs of frame t (k2), which rewards early labels. The
        returned loss includes it.
    label_windows : Array, integer [..., U, 2], optional
        First and last frame (inclusive) in which label u may be emitted (alignment-restricted RNN-T, Mahadeokar et al.
        2021).
    implementation : {None, "kernel", "reference"}
        "kernel": compiled kernels, an error where there are none; "reference": plain JAX, differentiable twice and in
        forward mode; None: kernels where there are some, else the reference.
    inplace : bool, default True
        Lets the gradient take the memory of the logits, which saves their size at the peak. Logits that are still
        needed are copied first, so set it to False where the logits are an argument of the differentiated program that
        is not donated.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In nats. 0 for a sequence with T_b = U_b = 0; +inf with a zero gradient where no path exists; NaN with a zero
        gradient where a length or a label is out of range; NaN where logits inside the lengths are NaN or +inf. No
        sequence changes any other.

    Raises
    ------
    TypeError, ValueError
        For a static mistake in an argument, named in the message.
    NotImplementedError
        For implementation="kernel" on a platform without kernels.

    Notes
    -----
    Traced numbers (`clamp`, `fastemit_lambda`, `delay_penalty`) can change without recompilation; hyper-parameters have
    no gradient. Float16 and bfloat16 logits are read as they are, sums are float32.

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
    name = "rnnt_loss"
    logits, *rest = _arguments(name, logits, targets, logit_lengths, target_lengths)
    spec = Spec(
        blank=_checks.class_index(name, "blank", blank, logits.shape[-1]),
        normalize=_checks.boolean(name, "fused_log_softmax", fused_log_softmax),
        reduction=_checks.choice(name, "reduction", reduction, _checks.REDUCTIONS),
        implementation=_checks.choice(name, "implementation", implementation, _checks.IMPLEMENTATIONS),
        inplace=_checks.boolean(name, "inplace", inplace),
    )
    options = _options(
        name, rest[0], fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, label_windows=label_windows
    )
    return _transducer.loss(spec, logits, *rest, _clamp(name, clamp), options)


def rnnt_posteriors(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    fused_log_softmax: bool = True,
    *,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Posterior probability of every arc of the RNN-T lattice, given the targets.

    T frames, U labels, V classes; `...` is any number of batch dimensions. The posterior of an arc is the probability
    that an alignment drawn from the model uses it: alpha(source) * arc * beta(destination) / alpha(T_b, U_b).

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank : int, default -1
        The blank class; a negative one counts from the end.
    fused_log_softmax : bool, default True
        False: `logits` already are log-probabilities and are used as they are.
    delay_penalty : float or scalar Array, default 0.0
        As for `rnnt_loss`.
    label_windows : Array, integer [..., U, 2], optional
        As for `rnnt_loss`.
    implementation : {None, "kernel", "reference"}
        As for `rnnt_loss`.

    Returns
    -------
    blank : Array, float32 (float64 for float64 logits) [..., T, U + 1]
        Posterior of the blank arc that leaves node (t, u).
    label : Array, float32 (float64 for float64 logits) [..., T, U + 1]
        Posterior of the label arc that leaves node (t, u). In every frame t < T_b the blanks sum to 1
        over u; every label u < U_b sums to 1 over t; 0 outside the lengths and where no path exists; NaN for a sequence
        whose lengths or labels are out of range.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    See Also
    --------
    rnnt_loss : The loss, whose gradient with respect to an arc is minus its posterior.

    References
    ----------
    Graves, "Sequence Transduction with Recurrent Neural Networks", 2012, arXiv:1211.3711.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import rnnt_posteriors
    >>> blank, label = rnnt_posteriors(jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> [round(float(p), 3) for p in label[:, 0]]
    [0.333, 0.333, 0.333]
    """
    name = "rnnt_posteriors"
    logits, *rest = _arguments(name, logits, targets, logit_lengths, target_lengths)
    spec = Spec(
        blank=_checks.class_index(name, "blank", blank, logits.shape[-1]),
        normalize=_checks.boolean(name, "fused_log_softmax", fused_log_softmax),
        implementation=_checks.choice(name, "implementation", implementation, _checks.IMPLEMENTATIONS),
    )
    options = _options(name, rest[0], delay_penalty=delay_penalty, label_windows=label_windows)
    return _transducer.posteriors(spec, logits, *rest, options)


@dataclasses.dataclass(frozen=True)
class RNNTLoss:
    """`rnnt_loss` with its options bound: frozen, hashable, callable.

    Parameters
    ----------
    blank : int, default -1
        As for `rnnt_loss`.
    clamp : float, default -1.0
        As for `rnnt_loss`; numbers must be Python numbers for the object to be hashable.
    reduction : {"mean", "none", "sum", "mean_target", "mean_volume"}
        As for `rnnt_loss`.
    fused_log_softmax : bool, default True
        As for `rnnt_loss`.
    fastemit_lambda : float, default 0.0
        As for `rnnt_loss`.
    delay_penalty : float, default 0.0
        As for `rnnt_loss`.
    implementation : {None, "kernel", "reference"}
        As for `rnnt_loss`.
    inplace : bool, default True
        As for `rnnt_loss`.
    label_windows : Array, integer [..., U, 2], optional
        As for `rnnt_loss`. Windows belong to a batch, so they are usually given at the call; an object that binds an
        array is not hashable.

    See Also
    --------
    rnnt_loss : Meaning of all options.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> criterion = RNNTLoss(blank=0, reduction="sum")
    >>> loss = criterion(jnp.zeros((1, 4, 3, 5)), jnp.array([[1, 2]]), jnp.array([4]), jnp.array([2]))
    >>> round(float(loss), 3)
    7.354
    """

    blank: int = -1
    clamp: float = -1.0
    reduction: str = "mean"
    fused_log_softmax: bool = True
    _: dataclasses.KW_ONLY
    fastemit_lambda: float = 0.0
    delay_penalty: float = 0.0
    label_windows: Any = None
    implementation: str | None = None
    inplace: bool = True

    def __post_init__(self):
        for name in ("fastemit_lambda", "delay_penalty", "clamp"):
            _checks.scalar("RNNTLoss", name, getattr(self, name))
        _checks.choice("RNNTLoss", "reduction", self.reduction, _checks.REDUCTIONS)
        _checks.choice("RNNTLoss", "implementation", self.implementation, _checks.IMPLEMENTATIONS)

    def __call__(
        self,
        logits: jax.Array,
        targets: jax.Array,
        logit_lengths: jax.Array,
        target_lengths: jax.Array,
        *,
        label_windows: jax.Array | None = None,
    ) -> jax.Array:
        """The loss of a batch; arguments and result as for `rnnt_loss`."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if label_windows is not None:
            options["label_windows"] = label_windows
        return rnnt_loss(logits, targets, logit_lengths, target_lengths, **options)
