"""rnnt_loss_packed: the RNN-T loss of `PackedLogits`."""

from __future__ import annotations

import jax

from jax_rnnt._layouts import PackedLogits
from jax_rnnt._loss import build
from jax_rnnt._rnnt import RNNTLoss


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
        A bound of T_b, known at trace time: beside the logits there are planes [B, max_frames, U + 1]. Default: the
        largest of `logit_lengths`; where these are traced, N: correct but wasteful, so give it under jit.
    clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, label_windows, implementation, inplace
        As for `rnnt_loss`.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [B] for reduction "none", else []
        In nats, with the rules of `rnnt_loss` for odd sequences. NaN also for T_b > max_frames and for sequences that
        do not fit into the N rows. A sequence whose lengths are out of range still takes as many rows as they say, or
        none if one is negative.

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
    loss = build(
        name, RNNTLoss,
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, implementation=implementation, inplace=inplace,
    )  # fmt: skip
    return loss._value(name, PackedLogits(logits, max_frames), targets, logit_lengths, target_lengths, label_windows)
