"""Questions about the alignment of targets and frames, as functions: posteriors, the best path, expected frames."""

from __future__ import annotations

from typing import Any

import jax

from jax_rnnt._loss import TransducerLoss, build
from jax_rnnt._rnnt import RNNTLoss
from jax_rnnt._transducer import Alignment


class _Default:
    """Marks a default, to recognise an explicit argument: no option may be given both in `loss` and at the call."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == (other.value if isinstance(other, _Default) else other)

    def __hash__(self):
        return hash(self.value)

    def __repr__(self):
        return repr(self.value)


RNNT = RNNTLoss()
BLANK: Any = _Default(-1)
CLAMP: Any = _Default(-1.0)
REDUCTION: Any = _Default("mean")
FUSED: Any = _Default(True)
FASTEMIT: Any = _Default(0.0)
DELAY_PENALTY: Any = _Default(0.0)
IMPLEMENTATION: Any = _Default(None)


def chosen(function: str, loss: Any, **options) -> TransducerLoss:
    """`loss`, or the default one with these options."""
    if not isinstance(loss, TransducerLoss):
        names = ", ".join(
            sorted(kind.__name__ for kind in TransducerLoss.__subclasses__() if kind.__module__.startswith("jax_rnnt"))
        )
        expected = f"a TransducerLoss, such as {names}"
        raise TypeError(f"{function}: loss must be {expected}, got {loss!r}.")
    given = {name: x for name, x in options.items() if not isinstance(x, _Default)}
    if loss is RNNT:
        return build(function, RNNTLoss, **given)
    if given:
        name, value = next(iter(given.items()))
        expected = f"given in loss alone, as {type(loss).__name__}({name}={value!r})"
        raise TypeError(f"{function}: {name} must be {expected}, got it at the call beside loss={loss!r}.")
    return loss


def rnnt_posteriors(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = BLANK,
    fused_log_softmax: bool = FUSED,
    *,
    loss: TransducerLoss = RNNT,
    delay_penalty: float | jax.Array = DELAY_PENALTY,
    label_windows: jax.Array | None = None,
    key: jax.Array | None = None,
    implementation: str | None = IMPLEMENTATION,
) -> tuple[jax.Array, jax.Array]:
    """Posterior probability of every blank and every label, given the targets.

    T frames, U labels, V classes; `...` is any number of batch dimensions. The posterior of an arc is the probability
    that an alignment drawn from the model uses it: alpha(source) * arc * beta(destination) / alpha(T_b, U_b). Several
    arcs of a kind that leave one node (big blanks, durations) are summed.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network, or another layout, such as `JointLogits`.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank : int, default -1
        The blank class; a negative one counts from the end.
    fused_log_softmax : bool, default True
        False: `logits` already are log-probabilities and are used as they are.
    loss : TransducerLoss, default RNNTLoss()
        Any loss of the family. It holds all options: giving one at the call as well is a TypeError.
    label_windows : Array, integer [..., U, 2], optional
        As for `rnnt_loss`.
    key : Array, optional
        JAX random key, for a loss that draws.
    delay_penalty, implementation
        As for `rnnt_loss`, for the default loss.

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
    loss = chosen(
        "rnnt_posteriors", loss, blank=blank, fused_log_softmax=fused_log_softmax,
        delay_penalty=delay_penalty, implementation=implementation,
    )  # fmt: skip
    return loss._posteriors("rnnt_posteriors", logits, targets, logit_lengths, target_lengths, label_windows, key)


def expected_emission_frames(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = BLANK,
    fused_log_softmax: bool = FUSED,
    *,
    loss: TransducerLoss = RNNT,
    delay_penalty: float | jax.Array = DELAY_PENALTY,
    label_windows: jax.Array | None = None,
    key: jax.Array | None = None,
    implementation: str | None = IMPLEMENTATION,
) -> jax.Array:
    """Expected frame of every label, over all alignments of the targets.

    T frames, U labels, V classes; `...` is any number of batch dimensions. With the label posteriors of
    `rnnt_posteriors`::

        frame(u) = sum over t of t * label(t, u)

    Frames count from 0.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network, or another layout, such as `JointLogits`.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank, fused_log_softmax, loss, delay_penalty, label_windows, key, implementation
        As for `rnnt_posteriors`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [..., U]
        0 past U_b and where no path exists; NaN as for `rnnt_posteriors`. Its gradient runs on the reference lattice.

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
    loss = chosen(
        "expected_emission_frames", loss, blank=blank, fused_log_softmax=fused_log_softmax,
        delay_penalty=delay_penalty, implementation=implementation,
    )  # fmt: skip
    return loss._emission_frames(
        "expected_emission_frames", logits, targets, logit_lengths, target_lengths, label_windows, key
    )


def minimum_latency(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = BLANK,
    reduction: str = REDUCTION,
    fused_log_softmax: bool = FUSED,
    *,
    loss: TransducerLoss = RNNT,
    delay_penalty: float | jax.Array = DELAY_PENALTY,
    label_windows: jax.Array | None = None,
    key: jax.Array | None = None,
    implementation: str | None = IMPLEMENTATION,
) -> jax.Array:
    """Expected latency of the labels (Shinohara and Watanabe 2022), a regulariser to add to a loss.

    T frames, U labels, V classes; `...` is any number of batch dimensions. With the label posteriors of
    `rnnt_posteriors`::

        latency = sum over u < U_b, t < T_b of (t + 1) * label(t, u) / max(U_b, 1)

    Unlike FastEmit it is a function with a gradient of its own. This gradient differentiates all posteriors on the
    reference lattice, which takes several times as long as the loss.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network, or another layout, such as `JointLogits`.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank, fused_log_softmax, loss, delay_penalty, label_windows, key, implementation
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
    loss = chosen(
        "minimum_latency", loss, blank=blank, reduction=reduction, fused_log_softmax=fused_log_softmax,
        delay_penalty=delay_penalty, implementation=implementation,
    )  # fmt: skip
    return loss._latency("minimum_latency", logits, targets, logit_lengths, target_lengths, label_windows, key)


def rnnt_align(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = BLANK,
    fused_log_softmax: bool = FUSED,
    *,
    loss: TransducerLoss = RNNT,
    delay_penalty: float | jax.Array = DELAY_PENALTY,
    label_windows: jax.Array | None = None,
    key: jax.Array | None = None,
    implementation: str | None = IMPLEMENTATION,
) -> Alignment:
    """Forced alignment: the best path of the lattice, and the frame in which it emits each label.

    T frames, U labels, V classes (blank included); `...` is any number of batch dimensions. With log-probabilities l,
    on the lattice of `rnnt_loss`::

        best(0, 0) = 0
        best(t, u) = max(best(t - 1, u) + l[t - 1, u, blank], best(t, u - 1) + l[t, u - 1, targets[u - 1]])
        score      = best(T_b, U_b)

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [..., T, U + 1, V]
        Output of the joint network, or another layout, such as `JointLogits`.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    blank, fused_log_softmax, loss, delay_penalty, label_windows, key, implementation
        As for `rnnt_posteriors`.

    Returns
    -------
    score : Array, float32 (float64 for float64 logits) [...]
        Log-probability of the path, delay penalty and `sigma` included; 0 for T_b = U_b = 0, -inf where no path exists,
        NaN where a length or a label is out of range or logits inside the lengths are NaN or +inf. Its gradient with
        respect to an arc is 1 on the path, else 0.
    frames : Array, int32 [..., U]
        The frame of label u, counted from 0 and never decreasing; -1 past U_b, and where there is no path or the score
        is NaN. Ties do not depend on the batch: of equally good arcs into a node the blank wins, so labels come early;
        of equally good durations the first one of the loss wins.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`; the search itself has no kernel.

    See Also
    --------
    rnnt_posteriors, expected_emission_frames : Averages over all alignments.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from jax_rnnt import rnnt_align
    >>> logits = jax.nn.one_hot(jnp.array([[4, 4], [1, 4], [4, 4]]), 5) * 9.0  # label 1 in frame 1, else blank
    >>> score, frames = rnnt_align(logits, jnp.array([1]), jnp.array(3), jnp.array(1))
    >>> frames.tolist()
    [1]
    """
    loss = chosen(
        "rnnt_align", loss, blank=blank, fused_log_softmax=fused_log_softmax,
        delay_penalty=delay_penalty, implementation=implementation,
    )  # fmt: skip
    return loss._align("rnnt_align", logits, targets, logit_lengths, target_lengths, label_windows, key)
