"""The way from the arguments of a loss's method to its result, which every loss and every method takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import Refusal, keywords
from jax_rnnt.emissions._softmax import Softmax
from jax_rnnt.layouts import _layout
from jax_rnnt.losses._composition import Composition
from jax_rnnt.sharding import _over_mesh
from jax_rnnt.sharding._device import emission_of_device

Logits: TypeAlias = ArrayLike | _layout.Layout
Decorated = TypeVar("Decorated", bound=Callable)


def in_class(function: Decorated) -> Decorated:
    """Decorates a method that `TransducerLoss` has from another file: help and pickle find it in the class."""
    function.__module__, function.__qualname__ = "jax_rnnt.losses._base", f"TransducerLoss.{function.__name__}"
    return keywords(function)


@dataclasses.dataclass(frozen=True)
class Method:
    """A method of a loss: ``compute(loss, emission, logits, targets, both lengths, windows)`` computes its results."""

    compute: Callable[..., Any]
    per_node: bool = False  # whether results are planes [..., T, U1]
    reduces: bool = False  # whether `loss.reduction` acts on it
    without_kernel: str = ""  # what it searches in plain JAX alone, so that implementation="kernel" is an error


@_pytree.register
@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A method and its arguments."""

    loss: Any  # a `TransducerLoss`, in which options that are off are None
    layout: _layout.Layout
    targets: jax.Array
    logit_lengths: jax.Array
    target_lengths: jax.Array
    label_windows: jax.Array | None
    method: Method = dataclasses.field(metadata={"static": True})


# Messages of JAX, and what to do about them.
_NOTES = {
    "custom_vjp": 'Forward mode (jvp, jacfwd, linearize, hessian) needs implementation="reference" and no clamp.',
    "UnexpectedTracerError": (
        "If joint calls a Flax Linen module that is being initialised: its parameters must exist before the loss. Call "
        "the module on one row first, under `if self.is_initializing():`, or use jax_rnnt.flax.linen.Joint."
    ),
}


def run(method: Method, loss, logits, targets, logit_lengths, target_lengths, label_windows=None, key=None) -> Any:
    """Returns the result of a method with these arguments."""
    if method.without_kernel and loss.implementation == "kernel":
        lacks = f"implementation='kernel': jax_rnnt has no kernel for {method.without_kernel}"
        raise NotImplementedError(Refusal(f"{lacks}; use implementation=None or 'reference'."))
    layout = logits if isinstance(logits, _layout.Layout) else _layout.as_layout(logits)
    _checks.key(key)
    loss = switched_off(loss._draw(key))
    try:
        return _run(Call(loss, layout, targets, logit_lengths, target_lengths, label_windows, method))
    except (TypeError, jax.errors.UnexpectedTracerError) as error:
        text = f"{type(error).__name__}: {error}"
        for note in (note for words, note in _NOTES.items() if words in text):
            error.add_note(Refusal(note))
        raise


def _run(call: Call) -> Any:
    axes = _over_mesh.axes_to_enter(call.loss)
    if not axes:
        return _of_device(call)
    unreduced = _pytree.replace(call, loss=_pytree.replace(call.loss, reduction="none"))
    result = _over_mesh.run(_of_device, unreduced, axes, call.method.per_node)
    return reduce(result, jnp.asarray(call.target_lengths), call.loss.reduction) if call.method.reduces else result


def _of_device(call: Call) -> Any:
    """Returns the result from the arrays of one of the devices over which the loss is split; unsplit, from all."""
    loss, windows = call.loss, call.label_windows
    layout = call.layout.checked()
    batch = layout.sequences(call.targets, call.logit_lengths, call.target_lengths)
    if windows is not None:
        windows = _checks.integers("label_windows", windows, (*batch[0].shape, 2), "[..., U, 2]")
    others = [] if windows is None else [windows]
    layout, *others, targets, logit_lengths, target_lengths = layout.split_alike(*others, *batch)
    batch, windows = (targets, logit_lengths, target_lengths), others[0] if others else None
    softmax = softmax_of(loss)
    emission, logits = emission_of_device(loss, layout, softmax, batch, windows)
    return call.method.compute(loss, emission, logits, *batch, windows)


def softmax_of(loss) -> Softmax:
    """Returns the emission of a loss, for rows of any number of logits."""
    composition = loss.compose()
    if not isinstance(composition, Composition):
        raise _checks.bad_type(f"{type(loss).__name__}.compose() must return a Composition, got {composition!r}.")
    return composition.emission


def switched_off(loss):
    """Replaces options disabled by a Python or NumPy number with None, so that they are not leaves and cost nothing."""
    off = [
        f.name
        for f in dataclasses.fields(loss)
        if "off" in f.metadata and _checks.is_number(x := getattr(loss, f.name)) and f.metadata["off"](x)
    ]
    return _pytree.replace(loss, **dict.fromkeys(off))


def reduce(losses: jax.Array, num_labels: jax.Array, reduction: str) -> jax.Array:
    """ "none", "mean" over sequences, "sum", "mean_target" or "mean_volume"; an empty batch gives 0.

    mean_target is the mean of loss_b / max(U_b, 1); mean_volume is the sum of the losses / max(sum of U_b, 1).
    """
    count = max(losses.size, 1)
    match reduction:
        case "none":
            return losses
        case "sum":
            return jnp.sum(losses)
        case "mean":
            return jnp.sum(losses) / count
        case "mean_target":
            return jnp.sum(losses / jnp.maximum(num_labels, 1).astype(losses.dtype)) / count
        case "mean_volume":
            return jnp.sum(losses) / jnp.maximum(jnp.sum(num_labels), 1).astype(losses.dtype)
        case _:
            raise AssertionError(reduction)
