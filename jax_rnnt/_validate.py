"""validate_inputs: the opt-in check of data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from jax_rnnt import _checks, _layouts


def validate_inputs(
    logits: jax.Array,
    targets: jax.Array,
    logit_lengths: jax.Array,
    target_lengths: jax.Array,
    blank: int = -1,
) -> None:
    """Checks lengths and labels; the losses return NaN for such sequences instead of raising.

    T frames, U labels, V classes; `...` is any number of batch dimensions. Eager calls raise. Under
    `jax.experimental.checkify.checkify` the checks become part of the function's error value. An eager call waits for
    the lengths and targets.

    Parameters
    ----------
    logits : Array, floating [..., T, U + 1, V]
        An array, `JointLogits` or `AdditiveLogits`: only shape and dtype count. For `tdt_loss` pass the V token logits.
    targets : Array, integer [..., U]
        Each of the first `target_lengths` must lie in [0, V).
    logit_lengths, target_lengths : Array, integer [...]
        Must lie in [0, T] and [0, U].
    blank : int, default -1
        Checked to be a class; labels equal to blank are allowed, as in the losses.

    Raises
    ------
    TypeError, ValueError
        For static mistakes, as the losses raise them. Eager calls also raise a ValueError that names the first
        offending position, the expected range and the given value.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import validate_inputs
    >>> validate_inputs(jnp.zeros((1, 4, 3, 5)), jnp.array([[1, 9]]), jnp.array([4]), jnp.array([2]))
    Traceback (most recent call last):
    ...
    ValueError: validate_inputs: targets[0, 1] must lie in [0, 5), got 9.
    """
    name = "validate_inputs"
    layout = _layouts.of(name, logits)
    targets, logit_lengths, target_lengths = layout.sequences(name, targets, logit_lengths, target_lengths)
    frames, labels, classes = layout.frames, targets.shape[-1], layout.classes
    _checks.class_index(name, "blank", blank, classes)
    column = jax.lax.broadcasted_iota(jnp.int32, targets.shape, targets.ndim - 1)
    used = column < target_lengths[..., None]
    checks = (
        ("logit_lengths", logit_lengths, (logit_lengths >= 0) & (logit_lengths <= frames), f"[0, {frames}]"),
        ("target_lengths", target_lengths, (target_lengths >= 0) & (target_lengths <= labels), f"[0, {labels}]"),
        ("targets", targets, ~used | ((targets >= 0) & (targets < classes)), f"[0, {classes})"),
    )
    for argument, values, good, expected in checks:
        if isinstance(good, jax.core.Tracer):
            if good.size:
                first = jnp.argmin(good.ravel())
                message = f"{name}: {argument} must lie in {expected}, got {{value}} at flat position {{position}}."
                checkify.check(jnp.all(good), message, value=values.ravel()[first], position=first)
        elif not np.all(good):
            where = tuple(int(i) for i in np.argwhere(~np.asarray(good))[0])
            at = f"[{', '.join(map(str, where))}]" if where else ""
            raise ValueError(f"{name}: {argument}{at} must lie in {expected}, got {np.asarray(values)[where]}.")
