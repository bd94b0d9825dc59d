"""joint_rnnt_loss: any loss of the family on `JointLogits`, which never exist as a whole."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jax_rnnt._align import BLANK, CLAMP, DELAY_PENALTY, FASTEMIT, FUSED, IMPLEMENTATION, REDUCTION, RNNT, chosen
from jax_rnnt._layouts import JointLogits
from jax_rnnt._loss import TransducerLoss


def joint_rnnt_loss(
    joint: Callable[[jax.Array, jax.Array], jax.Array],
    encoder_out: jax.Array,
    predictor_out: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = BLANK,
    clamp: float | jax.Array = CLAMP,
    reduction: str = REDUCTION,
    fused_log_softmax: bool = FUSED,
    *,
    loss: TransducerLoss = RNNT,
    chunk: int | None = None,
    fastemit_lambda: float | jax.Array = FASTEMIT,
    delay_penalty: float | jax.Array = DELAY_PENALTY,
    label_windows: jax.Array | None = None,
    key: jax.Array | None = None,
    implementation: str | None = IMPLEMENTATION,
) -> jax.Array:
    """Transducer loss of a joint network whose logits are never in memory as a whole.

    T frames, U labels, V classes, E and P the widths of encoder and predictor; `...` is any number of batch dimensions.
    Computes the value and the gradient of

        loss(joint(encoder_out[..., :, None, :], predictor_out[..., None, :, :]), targets, ...)

    without logits [..., T, U + 1, V]. The joint network runs on tiles of rows, once forward and once more backward. It
    needs the memory of one tile and some planes [..., T, U + 1].

    Parameters
    ----------
    joint : callable or LinearJoint
        ``joint(encoder rows [N, E], predictor rows [N, P]) -> logits [N, V]``, each row by itself. Gradients reach the
        arrays and Flax modules it closes over. Projections of encoder or predictor alone belong outside, where they run
        once a frame or column and not once a node. A `LinearJoint` is as fast as a function, sums gradients in float32
        whatever its dtype, and compiles once outside of `jax.jit` too.
    encoder_out : Array, float16 | bfloat16 | float32 | float64 [..., T, E]
        Output of the encoder; frames from `logit_lengths` on are never read.
    predictor_out : Array, float16 | bfloat16 | float32 | float64 [..., U + 1, P]
        Output of the predictor; columns after `target_lengths` are never read.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    loss : TransducerLoss, default RNNTLoss()
        Any loss of the family. It holds all options: giving one at the call as well is a TypeError.
    chunk : int, optional
        Approximate number of rows in a tile; the default depends on the shapes and the device. More rows take more
        memory, fewer rows more time. The result is the same up to rounding.
    label_windows : Array, integer [..., U, 2], optional
        As for `rnnt_loss`.
    key : Array, optional
        JAX random key, for a loss that draws.
    blank, clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty
        As for `rnnt_loss`, for the default loss.
    implementation : {None, "kernel", "reference"}
        As for `rnnt_loss`. "reference" makes all logits at once, in plain JAX: differentiable any number of times, and
        in forward mode if `clamp` is off.

    Returns
    -------
    Array, float32 (float64 for float64 logits) [...] for reduction "none", else []
        As `loss`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As `loss`, and for arguments of the wrong shape or type.

    See Also
    --------
    LinearJoint : The usual joint network.
    rnnt_loss : Meaning of the common options, and the rules for odd sequences.
    pruned_rnnt_loss : Makes fewer logits, instead of all in less memory.

    Notes
    -----
    The backward pass skips blocks of nodes whose posteriors together stay below the rounding error of the gradient.
    Time follows the lengths, not the padding.

    Sharding over the batch exchanges the gradient of the parameters alone. With an output layer that jit splits over V
    the result is right, but every tile of logits is gathered. Inside `shard_map` a part of V is taken for all of V, and
    the loss is wrong: call ``jax.lax.all_gather(..., tiled=True)`` on the output layer first.

    If `joint` closes over a random key, it draws the same numbers in every tile and in both passes. Outside of
    `jax.jit`, every call with a joint that is no `LinearJoint` compiles anew.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import LinearJoint, joint_rnnt_loss
    >>> joint = LinearJoint(jnp.zeros((8, 5)))
    >>> encoder_out, predictor_out = jnp.zeros((2, 4, 8)), jnp.zeros((2, 3, 8))
    >>> targets = jnp.array([[1, 2], [3, 0]])
    >>> loss = joint_rnnt_loss(joint, encoder_out, predictor_out, targets, jnp.array([4, 3]), jnp.array([2, 1]))
    >>> round(float(loss), 3)
    6.347
    """
    name = "joint_rnnt_loss"
    logits = JointLogits(joint, encoder_out, predictor_out, chunk)
    loss = chosen(
        name, loss,
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, implementation=implementation,
    )  # fmt: skip
    return loss._value(name, logits, targets, logit_lengths, target_lengths, label_windows, key)
