"""`TransducerLoss.validate`, under the docstring that users see, and its checks."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.typing import ArrayLike

from jax_rnnt import _checks, _pytree
from jax_rnnt.emissions._emission import inside_targets
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.lattices import _order as order
from jax_rnnt.layouts import _layout
from jax_rnnt.losses._adjustments import adjust
from jax_rnnt.losses._call import Logits, in_class, softmax_of, switched_off
from jax_rnnt.sharding._device import devices_of


@in_class
def validate(self, logits: Logits, targets: ArrayLike, logit_lengths: ArrayLike, target_lengths: ArrayLike) -> None:
    """Checks the data of a batch: raises an error where lengths or labels would make the loss NaN or +inf.

    The loss itself never raises on data. It accepts a label that equals a blank, which is an error here. The checks
    read no logits, so they find neither NaN nor masks there, and they leave options and windows out.

    Outside of `jax.jit` they wait for lengths and targets. Under `jax.jit` they need arrays that are known while
    tracing, or `jax.experimental.checkify.checkify` around the function, whose error value then has the checks.

    Parameters
    ----------
    logits, targets, logit_lengths, target_lengths
        As for the call.

    Raises
    ------
    TypeError, ValueError
        For static mistakes, as the call raises them. ValueError for the first length out of range, label outside
        the token classes, label that is a blank, sequence without rows (`PackedLogits`), or number of labels that
        no path of the lattice reaches: it names argument, position, expected range and value. TypeError for traced
        lengths or targets outside of checkify.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss
    >>> RNNTLoss().validate(jnp.zeros((1, 4, 3, 5)), jnp.array([[1, 9]]), jnp.array([4]), jnp.array([2]))
    Traceback (most recent call last):
    ...
    ValueError: RNNTLoss.validate: targets[0, 1] must lie in [0, 5), got 9.
    """
    function = f"{type(self).__name__}.validate"
    layout = _layout.as_layout(logits)
    # The clamp stays, as a layout may refuse it.
    loss = _pytree.replace(self._without_options(), clamp=switched_off(self).clamp, implementation=None)
    softmax = softmax_of(loss).resolved(layout.classes * devices_of(loss)[1])
    sequences = targets, logit_lengths, target_lengths
    names = "targets", "logit_lengths", "target_lengths", *("first" for _ in layout.integers)
    values = *sequences, *layout.integers, *jax.tree.leaves(loss)
    traced = [i for i, x in enumerate(values) if _checks.known(x) is None]
    known = not traced
    if traced and not _in_checkify():
        got = names[traced[0]] if traced[0] < len(names) else "option of the loss"
        expected = "known (outside of jax.jit), or the function that calls it wrapped by checkify.checkify"
        raise TypeError(f"{function}: lengths and targets must be {expected}, got a traced {got}.")

    def now():  # under jit, operations on known arrays would be traced
        return jax.ensure_compile_time_eval() if known else contextlib.nullcontext()

    with now():
        targets, num_frames, num_labels = layout.sequences(*sequences)
    # This raises an error where the two do not fit.
    emission, logits = layout.emission(loss, softmax, targets, num_frames, num_labels)
    check = functools.partial(_check, function)
    in_frames, in_classes = devices_of(loss)
    frames, labels = layout.frames * in_frames, targets.shape[-1]
    classes = softmax.tokens(layout.classes * in_classes)
    with now():
        check("logit_lengths", num_frames, (num_frames >= 0) & (num_frames <= frames), f"lie in [0, {frames}]")
        check("target_lengths", num_labels, (num_labels >= 0) & (num_labels <= labels), f"lie in [0, {labels}]")
        unused = ~inside_targets(targets, num_labels)
        tokens = f"lie in [0, {classes})" + (
            f", before the {softmax.num_durations} durations" if softmax.num_durations else ""
        )
        check("targets", targets, unused | ((targets >= 0) & (targets < classes)), tokens)
        is_blank = functools.reduce(jnp.logical_or, (targets == blank for blank in softmax.blanks))
        blanks = ", ".join(map(str, softmax.blanks))
        check("targets", targets, unused | ~is_blank, f"not be a blank class ({blanks})")
        if (fits := emission.placement.fits(logits, num_frames, num_labels)) is not None:
            check("logit_lengths", num_frames, fits, "leave a row of logits for every node")
        if known:
            frames = int(np.max(num_frames, initial=0))
        path = _has_path(loss, layout.kept(frames, labels + 1), num_frames, num_labels, frames, labels)
        expected = (
            f"be labels that {type(loss).__name__} can emit in {{frames}} frames (without a path the loss is +inf)"
        )
        check("target_lengths", num_labels, path, expected, frames=num_frames)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _has_path(loss, kept, num_frames, num_labels, frames, labels):
    """Returns bool [...]: True if a path of the loss leads to (T_b, U_b) over the nodes that the layout keeps."""
    composition = loss.compose()
    zero = jnp.zeros((1,) * num_frames.ndim + (frames, labels + 1), jnp.float32)
    plane = zero + jnp.zeros_like(num_frames, jnp.float32)[..., None, None]  # sharded as the lengths are
    plane = plane if kept is None else jnp.where(kept, plane, -jnp.inf)
    token = order.in_blocks.set(False)  # only finite entries count
    try:
        arcs = adjust(loss, dict.fromkeys(composition.emission._names(), plane), num_frames, num_labels, None)
    finally:
        order.in_blocks.reset(token)
    return ~jnp.isneginf(lattice.log_likelihood(composition.topology, arcs, num_frames, num_labels))


def _check(function, argument, values, good, expected, **more):
    """Raises an error for the first bad one of `values`, or adds the check to checkify's error value."""
    index = [f"i{axis}" for axis in range(values.ndim)]
    at = f"[{', '.join(f'{{{name}}}' for name in index)}]" if index else ""
    message = f"{function}: {argument}{at} must {expected}, got {{value}}."
    more = {"value": values, **more}
    if not isinstance(good, jax.core.Tracer):
        if not np.all(good):
            where = tuple(int(i) for i in np.argwhere(~np.asarray(good))[0])
            numbers = {name: np.asarray(x)[where] for name, x in more.items()}
            raise ValueError(message.format(**dict(zip(index, where)), **numbers))
        return
    if values.size:
        first = jnp.argmin(good.ravel())
        place = dict(zip(index, jnp.unravel_index(first, values.shape)))
        shown: dict[str, Any] = place | {name: x.ravel()[first] for name, x in more.items()}
        checkify.check(jnp.all(good), message, **shown)


def _in_checkify() -> bool:
    """Returns True if checkify traces the caller: without it, a check under jit fails with JAX's own message."""
    file = checkify.checkify.__code__.co_filename
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    return frame is not None
