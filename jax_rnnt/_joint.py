"""joint_rnnt_loss: any loss of the family on logits that never exist as a whole."""

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks
from jax_rnnt._loss_argument import apply_loss, given
from jax_rnnt._rnnt import rnnt_loss
from jax_rnnt.emissions.joint import LinearJoint, check_rows, row_avals
from jax_rnnt.emissions.softmax import accumulation_dtype
from jax_rnnt.emissions.virtual import JointLogits


def _checked_linear(name, joint, widths):
    """The `LinearJoint` of arrays for rows of these widths."""
    weight, bias, activation = joint.weight, joint.bias, joint.activation
    weight = _checks.floating(name, "joint.weight", weight, 2, "[H, V]")
    if weight.ndim != 2 or weight.shape[1] < 1 or widths != (weight.shape[0],) * 2:
        expected = f"[H, V], H the width of encoder_out and predictor_out, here {widths}"
        raise ValueError(f"{name}: joint.weight must have shape {expected}, got {weight.shape}.")
    if bias is not None:
        bias = _checks.floating(name, "joint.bias", bias, 1, "[V]")
        if bias.shape != weight.shape[1:]:
            raise ValueError(f"{name}: joint.bias must have shape [V] = {weight.shape[1:]}, got {bias.shape}.")
    if not isinstance(activation, Hashable) or not callable(activation):
        raise TypeError(f"{name}: joint.activation must be a hashable function, got {activation!r}.")
    units = jax.ShapeDtypeStruct((1, 1, 1, weight.shape[0]), accumulation_dtype(weight.dtype))
    made = jax.eval_shape(activation, units)
    if getattr(made, "shape", None) != units.shape or not jnp.issubdtype(made.dtype, jnp.floating):
        raise ValueError(f"{name}: joint.activation must be element-wise, got {made} of {units}.")
    return LinearJoint(weight, bias, activation)


def _logits(name, joint, encoder_out, predictor_out):
    """Shape and dtype of what a function makes of two rows, checked."""
    made = jax.eval_shape(lambda *rows: joint(*rows), *row_avals(2, encoder_out, predictor_out))
    check_rows(made, 2)
    if str(made.dtype) not in _checks.FLOATS:
        raise TypeError(f"{name}: joint must make logits of a floating dtype, got {made.dtype}.")
    return made


def joint_rnnt_loss(
    joint: Callable[[jax.Array, jax.Array], jax.Array],
    encoder_out: jax.Array,
    predictor_out: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
    clamp: float | jax.Array = -1.0,
    reduction: str = "mean",
    fused_log_softmax: bool = True,
    *,
    loss: Callable[..., jax.Array] = rnnt_loss,
    chunk: int | None = None,
    fastemit_lambda: float | jax.Array = 0.0,
    delay_penalty: float | jax.Array = 0.0,
    label_windows: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Transducer loss of a joint network whose logits are never in memory as a whole.

    T frames, U labels, V classes, E and P the widths of encoder and predictor; `...` is any number of batch dimensions.
    The value and the gradient of

        loss(joint(encoder_out[..., :, None, :], predictor_out[..., None, :, :]), targets, ...)

    without logits [..., T, U + 1, V]: the joint network runs on tiles of rows, forward and once more backward, which
    takes the memory of one tile and some planes [..., T, U + 1].

    Parameters
    ----------
    joint : callable or LinearJoint
        ``joint(encoder rows [N, E], predictor rows [N, P]) -> logits [N, V]``, each row by itself. Gradients reach what
        it closes over: arrays, a Flax module. Projections of encoder or predictor alone belong outside, where they run
        once a frame, or column, and not once a node. A `LinearJoint` is as fast as a function, sums gradients in
        float32 whatever its dtype, and compiles once outside of `jax.jit` too.
    encoder_out : Array, float16 | bfloat16 | float32 | float64 [..., T, E]
        Output of the encoder; frames from `logit_lengths` on are never read.
    predictor_out : Array, float16 | bfloat16 | float32 | float64 [..., U + 1, P]
        Output of the predictor; columns after `target_lengths` are never read.
    targets : Array, integer [..., U]
        Labels; those from `target_lengths` on are never read.
    logit_lengths, target_lengths : Array, integer [...]
        T_b and U_b of each sequence.
    loss : callable, default rnnt_loss
        Any loss of this library that takes logits [..., T, U + 1, V]; its own arguments bound by `functools.partial`,
        or an `RNNTLoss`.
    chunk : int, optional
        Rows of a tile, about; chosen from the shapes and the device unless given. More rows take more memory, fewer
        more time; the result is the same up to rounding.
    blank, clamp, reduction, fused_log_softmax, fastemit_lambda, delay_penalty, label_windows
        As for `rnnt_loss`; passed on to `loss` where they differ from the default.
    implementation : {None, "kernel", "reference"}
        As for `rnnt_loss`. "reference" makes all logits at once: plain JAX, differentiable twice and in forward mode.

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
    pruned_rnnt_loss : Fewer logits, instead of less memory for all.

    Notes
    -----
    The backward pass leaves out blocks of nodes whose posteriors are so small that all of them together are below the
    rounding of the gradient. Time follows the lengths, not the padding.

    Sharding over the batch exchanges the gradient of the parameters alone. An output layer that jit splits over V is
    right, but every tile of logits is gathered. Inside `shard_map` a part of V is taken for all of V, and the loss is
    wrong: call ``jax.lax.all_gather(..., tiled=True)`` on the output layer first.

    Random numbers that `joint` draws from a key that it closes over are the same in every tile, and the same in both
    passes. Outside of `jax.jit`, every call with a joint that is no `LinearJoint` compiles anew.

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
    if not callable(joint):
        raise TypeError(f"{name}: joint must be callable, got {joint!r}.")
    if chunk is not None and (not isinstance(chunk, (int, np.integer)) or isinstance(chunk, bool)):
        raise TypeError(f"{name}: chunk must be an integer known at trace time or None, got {chunk!r}.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"{name}: chunk must be 1 or more, got {chunk}.")
    encoder_out = _checks.floating(name, "encoder_out", encoder_out, 2, "[..., T, E]")
    predictor_out = _checks.floating(name, "predictor_out", predictor_out, 2, "[..., U + 1, P]")
    if encoder_out.shape[:-2] != predictor_out.shape[:-2] or predictor_out.shape[-2] < 1:
        expected = (
            f"shape [..., U + 1, P] with the batch dimensions {encoder_out.shape[:-2]} of encoder_out, U + 1 >= 1"
        )
        raise ValueError(f"{name}: predictor_out must have {expected}, got {predictor_out.shape}.")
    _checks.unsplit(name, "encoder_out", encoder_out, {-2: "T", -1: "E"})
    _checks.unsplit(name, "predictor_out", predictor_out, {-2: "U + 1", -1: "P"})

    nodes = encoder_out.shape[:-1] + predictor_out.shape[-2:-1]
    if isinstance(joint, LinearJoint):
        joint = linear = _checked_linear(name, joint, (encoder_out.shape[-1], predictor_out.shape[-1]))
        made = linear.weight
    else:
        made = _logits(name, joint, encoder_out, predictor_out)
    logits = JointLogits((*nodes, made.shape[-1]), made.dtype, joint, encoder_out, predictor_out, chunk)
    options = given(
        blank=blank, clamp=clamp, reduction=reduction, fused_log_softmax=fused_log_softmax,
        fastemit_lambda=fastemit_lambda, delay_penalty=delay_penalty, label_windows=label_windows,
        implementation=implementation,
    )  # fmt: skip
    arrays = logits, targets, logit_lengths, target_lengths
    expected = "a loss of this library that takes logits [..., T, U + 1, V], not jitted, its own arguments bound"
    return apply_loss(name, loss, expected, *arrays, **options)
