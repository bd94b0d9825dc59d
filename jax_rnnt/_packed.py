"""rnnt_loss_packed: rnnt_loss of logits without padding."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _transducer
from jax_rnnt.emissions.packed import Packed, offsets


def rnnt_loss_packed(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    clamp: float | jax.Array = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    max_frames: int | None = None,
    fastemit_lambda: float | jax.Array = 0.0,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
    inplace: bool = True,
) -> jax.Array:
    """`rnnt_loss` of packed logits: the nodes of all sequences one after the other, without padding.

    B sequences, T frames, U labels, V classes (blank included), N rows. Row T_0 (U_0 + 1) + ... + T_{b-1} (U_{b-1} + 1)
    + t (U_b + 1) + u of the logits is node (t, u) of sequence b; rows past the last sequence are never read.

    Parameters
    ----------
    logits : Array, float16 | bfloat16 | float32 | float64 [N, V]
        Output of the joint network, unnormalised unless `fused_log_softmax` is False. N is static: at least the sum of
        T_b (U_b + 1), or more.
    targets : Array, integer [B, U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [B]
        T_b and U_b of each sequence.
    blank : int, default -1
        The blank class; a negative one counts from the end.
    max_frames : int, optional
        A bound of T_b, known at trace time: beside the logits there are planes [B, max_frames, U + 1]. Taken from
        `logit_lengths` where these are known, and else N, which is correct but wasteful: give it under jit.
    clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, label_windows, implementation, inplace
        As for `rnnt_loss`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [B] for reduction "none", else []
        In nats, with the rules of `rnnt_loss` for odd sequences. NaN also for T_b > max_frames and for sequences that
        do not fit into the N rows. A sequence whose lengths are out of range takes the rows that they say, none if one
        is negative.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As for `rnnt_loss`.

    Notes
    -----
    More batch dimensions come by `jax.vmap`. The rows of a sequence may lie on any device of a sharded array: under
    `jax.shard_map` every device can pack its own sequences, under jit the rows are gathered.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import rnnt_loss_packed
    >>> logits = jnp.zeros((4 * 3 + 3 * 2, 5))
    >>> loss = rnnt_loss_packed(logits, jnp.array([[1, 2], [3, 0]]), jnp.array([4, 3]), jnp.array([2, 1]))
    >>> round(float(loss), 3)
    6.347
    """
    name = "rnnt_loss_packed"
    logits = _checks.floating(name, "logits", logits, 2, "[N, V]")
    if logits.ndim != 2 or logits.shape[-1] < 1:
        raise ValueError(f"{name}: logits must have shape [N, V] with V >= 1, got {tuple(logits.shape)}.")
    _checks.unsplit(name, "logits", logits, {-2: "N"})
    if np.ndim(targets) != 2:
        raise ValueError(f"{name}: targets must have shape [B, U], got {np.shape(targets)}.")
    batch, labels = np.shape(targets)
    rest = _checks.sequences(name, targets, logit_lengths, target_lengths, (batch,), labels)
    rows = logits.shape[0]
    if max_frames is None:
        known = not isinstance(rest[1], jax.core.Tracer)
        max_frames = max(min(int(np.max(rest[1], initial=0)), rows), 0) if known else rows
    elif not isinstance(max_frames, (int, np.integer)) or isinstance(max_frames, bool):
        raise TypeError(f"{name}: max_frames must be an integer known at trace time, got {max_frames!r}.")
    elif max_frames < 0:
        raise ValueError(f"{name}: max_frames must be 0 or more, got {max_frames}.")
    blank = _checks.class_index(name, "blank", blank, logits.shape[-1])
    emission = Packed((blank,), _checks.boolean(name, "fused_log_softmax", fused_log_softmax), int(max_frames))
    targets, num_frames, num_labels = rest
    first, end = offsets(num_frames, num_labels, rows)
    num_frames = jnp.where(end > rows, -1, num_frames)  # does not fit: as any other length out of range
    return _transducer.evaluate(
        name, (logits, targets, num_frames, num_labels), emission, operands={"first_row": first, "end_row": end},
        clamp=clamp, reduction=reduction, implementation=implementation, inplace=inplace,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, label_windows=label_windows,
    )  # fmt: skip
