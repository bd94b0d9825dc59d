"""What is known about the alignment of targets and frames: posteriors, the best path, expected frames."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _transducer, seam
from jax_rnnt._loss_argument import apply_loss, given
from jax_rnnt._reduce import reduce
from jax_rnnt._rnnt import rnnt_loss
from jax_rnnt.emissions.virtual import Inquiry


def _composition(name, loss, logits, targets, logit_lengths, target_lengths, **options):
    """(spec, arrays, operands) that `loss` makes of these arguments."""
    expected = "a loss of this library that takes logits, not jitted, its own arguments bound"
    logits = Inquiry(_checks.array(name, "logits", logits))
    arrays = dict(logits=logits, targets=targets, logit_lengths=logit_lengths, target_lengths=target_lengths)
    found = apply_loss(name, loss, expected, **arrays, **given(**options))
    if not isinstance(found, _transducer.Composition):
        raise TypeError(f"{name}: loss must be {expected}, got {loss!r}.")
    return found.spec, found.arrays, found.operands


def rnnt_posteriors(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    fused_log_softmax: bool = True,
    *,
    loss: Callable[..., Any] = rnnt_loss,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Posterior probability of every blank and every label, given the targets.

    T frames, U labels, V classes; `...` is any number of batch dimensions. The posterior of an arc is the probability
    that an alignment drawn from the model uses it: alpha(source) * arc * beta(destination) / alpha(T_b, U_b). Where
    several arcs of a kind leave a node (big blanks, durations), it is their sum.

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
    loss : callable, default rnnt_loss
        Any loss of this library that takes logits, its own arguments bound by `functools.partial`; or an `RNNTLoss`,
        which brings all options itself. Logits have the shape that it wants: a band's [..., T, S, V], packed ones
        [N, V].
    delay_penalty, label_windows, implementation
        As for `rnnt_loss`. These, `blank` and `fused_log_softmax` are passed on to `loss` where they differ from the
        default, so that it may have others bound.

    Returns
    -------
    blank : Array, float32 (float64 for float64 logits) [..., T, U + 1]
        Posterior of a blank, of any duration, that leaves node (t, u).
    label : Array, float32 (float64 for float64 logits) [..., T, U + 1]
        Posterior of the label, of any duration, that leaves node (t, u). Every label u < U_b sums to 1 over t; on the
        standard lattice the blanks of every frame t < T_b sum to 1 over u. 0 outside the lengths and where no path
        exists; NaN for a sequence whose lengths or labels are out of range or whose logits hold NaN or +inf.

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
    spec, arrays, operands = _composition(
        "rnnt_posteriors", loss, logits, targets, logit_lengths, target_lengths,
        blank=blank, fused_log_softmax=fused_log_softmax, delay_penalty=delay_penalty, label_windows=label_windows,
        implementation=implementation,
    )  # fmt: skip
    return _transducer.posteriors(spec, *arrays, operands)


def expected_emission_frames(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    fused_log_softmax: bool = True,
    *,
    loss: Callable[..., Any] = rnnt_loss,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Expected frame of every label, over all alignments of the targets.

    T frames, U labels, V classes; `...` is any number of batch dimensions. With the label posteriors of
    `rnnt_posteriors`::

        frame(u) = sum over t of t * label(t, u)

    in which frames count from 0.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank, fused_log_softmax, loss, delay_penalty, label_windows, implementation
        As for `rnnt_posteriors`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [..., U]
        0 past U_b and where no path exists; NaN as for `rnnt_posteriors`. It has a gradient, by way of the reference.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    See Also
    --------
    rnnt_align : Frames of the best alignment alone.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import expected_emission_frames
    >>> frames = expected_emission_frames(jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> [round(float(t), 3) for t in frames]
    [1.0]
    """
    spec, arrays, operands = _composition(
        "expected_emission_frames", loss, logits, targets, logit_lengths, target_lengths,
        blank=blank, fused_log_softmax=fused_log_softmax, delay_penalty=delay_penalty, label_windows=label_windows,
        implementation=implementation,
    )  # fmt: skip
    label = _transducer.posteriors(spec, *arrays, operands)[1][..., :-1]
    return jnp.sum(seam.frame(label).astype(label.dtype) * label, -2)


def minimum_latency(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    loss: Callable[..., Any] = rnnt_loss,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Expected latency of the labels (Shinohara and Watanabe 2022), to be added to a loss.

    T frames, U labels, V classes; `...` is any number of batch dimensions. With the label posteriors of
    `rnnt_posteriors`::

        latency = sum over u < U_b, t < T_b of (t + 1) * label(t, u) / max(U_b, 1)

    Unlike FastEmit it is a function with a gradient of its own: that of all posteriors, by way of the reference, which
    takes several times as long as the loss.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank, fused_log_softmax, loss, delay_penalty, label_windows, implementation
        As for `rnnt_posteriors`.
    reduction : {"mean", "none", "sum", "mean_target", "mean_volume"}
        As for `rnnt_loss`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        In frames, counted from 1. 0 without labels, and with a zero gradient where no path exists; NaN as for
        `rnnt_posteriors`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    References
    ----------
    Shinohara and Watanabe, "Minimum latency training of sequence transducers for streaming end-to-end speech
    recognition", Interspeech 2022.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import minimum_latency, rnnt_loss
    >>> batch = jnp.zeros((3, 2, 4)), jnp.array([1]), jnp.array(3), jnp.array(1)
    >>> loss = rnnt_loss(*batch) + 0.1 * minimum_latency(*batch)
    >>> round(float(minimum_latency(*batch)), 3)
    2.0
    """
    name = "minimum_latency"
    spec, arrays, operands = _composition(
        name, loss, logits, targets, logit_lengths, target_lengths,
        blank=blank, fused_log_softmax=fused_log_softmax, delay_penalty=delay_penalty, label_windows=label_windows,
        implementation=implementation,
    )  # fmt: skip
    reduction = _checks.reduction(name, reduction)
    _, label = _transducer.posteriors(spec, *arrays, operands)
    total = jnp.sum((seam.frame(label) + 1).astype(label.dtype) * label, (-1, -2))
    num_labels = arrays[3]
    return reduce(total / jnp.maximum(num_labels, 1).astype(total.dtype), num_labels, reduction)


def rnnt_align(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    fused_log_softmax: bool = True,
    *,
    loss: Callable[..., Any] = rnnt_loss,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Forced alignment: the best path of the lattice, and the frame in which it emits each label.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions. With log-probabilities l,
    on the lattice of `rnnt_loss`::

        best(0, 0) = 0
        best(t, u) = max(best(t - 1, u) + l[t - 1, u, blank], best(t, u - 1) + l[t, u - 1, targets[u - 1]])
        score      = best(T_b, U_b)

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank, fused_log_softmax, loss, delay_penalty, label_windows, implementation
        As for `rnnt_posteriors`.

    Returns
    -------
    score : Array, float32 (float64 for float64 logits) [...]
        Log-probability of the path, delay penalty and `sigma` included; 0 for T_b = U_b = 0, -inf where no path exists,
        NaN where a length or a label is out of range or logits inside the lengths are NaN or +inf. Its gradient is that
        of the path's own arcs.
    frames : Array, int32 [..., U]
        The frame of label u, counted from 0 and never decreasing; -1 past U_b and where there is no path. Of ways into
        a node that are equally good the blank is taken, so labels come early, and of several durations the one that the
        loss is given first: deterministic, whatever the batch.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`; the search itself has no kernel.

    See Also
    --------
    rnnt_posteriors, expected_emission_frames : Over all alignments and not the best alone.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax_rnnt import rnnt_align
    >>> logits = jax.nn.one_hot(jnp.array([[4, 4], [1, 4], [4, 4]]), 5) * 9.0  # label 1 in frame 1, else blank
    >>> score, frames = rnnt_align(logits, jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> frames.tolist()
    [1]
    """
    spec, arrays, operands = _composition(
        "rnnt_align", loss, logits, targets, logit_lengths, target_lengths,
        blank=blank, fused_log_softmax=fused_log_softmax, delay_penalty=delay_penalty, label_windows=label_windows,
        implementation=implementation,
    )  # fmt: skip
    return _transducer.align(spec, *arrays, operands)
