"""Predictors as decoders take them: two functions of any pytree of state.

B sequences, U labels, P the width of a predictor row.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks


class Predictor(typing.NamedTuple):
    """A prediction network, or a language model, one label at a time. Any object with these two methods will do.

    Parameters
    ----------
    initial : callable
        ``initial(batch) -> state``: a pytree of arrays [batch, ...].
    step : callable
        ``step(state, labels [B]) -> (rows [B, P], state)``, each sequence by itself. The first label is the start
        label, so the first row is that of column 0. Shapes and dtypes of the state must not change.

    Examples
    --------
    A predictor whose row is the one-hot last label:

    >>> import jax
    >>> from jax_rnnt.decode import Predictor, predict
    >>> predictor = Predictor(lambda batch: (), lambda state, labels: (jax.nn.one_hot(labels, 3), state))
    >>> predict(predictor, jax.numpy.array([[1, 2]]), start=0)[0].tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    initial: Callable[[int], Any]
    step: Callable[[Any, jax.Array], tuple[jax.Array, Any]]


def shifted(past: jax.Array, labels: jax.Array) -> jax.Array:
    """The last labels [B, history] after one more."""
    return jnp.concatenate([past[:, 1:], labels.astype(past.dtype)[:, None]], 1)


def stateless_predictor(function: Callable[[jax.Array], jax.Array], history: int, start: int) -> Predictor:
    """A predictor that sees the last labels only (Ghodsi et al. 2020).

    Parameters
    ----------
    function : callable
        ``function(labels int32 [B, history]) -> rows [B, P]``, the newest label last.
    history : int
        Labels that it sees, at least 1.
    start : int
        Stands for labels before the first one; also the `start` of the decoder.

    Returns
    -------
    Predictor

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt.decode import predict, stateless_predictor
    >>> predictor = stateless_predictor(lambda labels: labels.astype(jnp.float32), 2, start=0)
    >>> predict(predictor, jnp.array([[3, 4]]), start=0)[0].tolist()
    [[0.0, 0.0], [0.0, 3.0], [3.0, 4.0]]
    """
    _checks.positive("stateless_predictor", "history", history)

    def step(past, labels):
        past = shifted(past, labels)
        return function(past), past

    return Predictor(lambda batch: jnp.full((batch, history), start, jnp.int32), step)


def nnx_predictor(module, *, initial: str = "initial", step: str = "step") -> Predictor:
    """The predictor of a Flax NNX module with two methods, in evaluation mode.

    Parameters
    ----------
    module : flax.nnx.Module
        Its parameters are read now. Dropout is off, and nothing that a step changes in the module is kept.
    initial, step : str
        Names of its methods, as in `Predictor`.

    Returns
    -------
    Predictor

    Examples
    --------
    ::

        decode.greedy(loss, joint, decode.nnx_predictor(model.predictor), encoder_out, lengths, max_labels=200)
    """
    from flax import nnx

    graph, values = nnx.split(module)

    def method(name):
        def call(*arguments):
            copy = nnx.merge(graph, values)
            copy.eval()
            return getattr(copy, name)(*arguments)

        return call

    return Predictor(method(initial), method(step))


def linen_predictor(module, variables, *, initial: str = "initial", step: str = "step", **options) -> Predictor:
    """The predictor of a Flax Linen module with two methods.

    Parameters
    ----------
    module : flax.linen.Module
        Unbound.
    variables : pytree
        As for ``module.apply``; no collection is changed.
    initial, step : str
        Names of its methods, as in `Predictor`.
    **options
        Keywords of both calls of ``module.apply``.

    Returns
    -------
    Predictor

    Examples
    --------
    ::

        predictor = decode.linen_predictor(Predictor(), {"params": params["predictor"]})
        decode.greedy(loss, joint, predictor, encoder_out, lengths, max_labels=200)
    """

    def method(name):
        return lambda *arguments: module.apply(variables, *arguments, method=name, **options)

    return Predictor(method(initial), method(step))


def predict(predictor: Predictor, targets: jax.Array, start: int) -> jax.Array:
    """Rows of all columns of a lattice: the predictor after the start label and after each target.

    Parameters
    ----------
    predictor : Predictor
    targets : Array, integer [B, U]
        Labels; what stands beyond the lengths is fed in, too, and changes no earlier row.
    start : int
        The label before the first one, as in the decoder.

    Returns
    -------
    Array [B, U + 1, P]
        `predictor_out` of `JointLogits`. A loop over U: a network that takes all labels at once trains faster.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt.decode import predict, stateless_predictor
    >>> predict(stateless_predictor(jnp.sin, 1, start=0), jnp.zeros((2, 3), int), start=0).shape
    (2, 4, 1)
    """
    targets = _checks.array("predict", "targets", targets)
    if targets.ndim != 2 or not jnp.issubdtype(targets.dtype, jnp.integer):
        got = f"{targets.dtype} {tuple(targets.shape)}"
        raise ValueError(f"predict: targets must be an integer array [B, U], got {got}.")
    first = jnp.full((targets.shape[0], 1), start, jnp.int32)
    labels = jnp.concatenate([first, jnp.asarray(targets, jnp.int32)], 1)

    def step(state, labels):
        rows, state = predictor.step(state, labels)
        return state, rows

    _, rows = jax.lax.scan(step, predictor.initial(targets.shape[0]), labels.T)
    return jnp.swapaxes(rows, 0, 1)


def begin(function: str, name: str, predictor, batch: int, start: int):
    """(rows [batch, P], state) after the start label, checked: every later step makes the same types."""
    for method in ("initial", "step"):
        if not callable(getattr(predictor, method, None)):
            raise TypeError(f"{function}: {name} must have the functions initial and step, got {predictor!r}.")
    state = jax.tree.map(jnp.asarray, predictor.initial(batch))
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.ndim < 1 or x.shape[0] != batch:
            place = jax.tree_util.keystr(path)
            raise ValueError(
                f"{function}: {name}.initial({batch}) must make arrays [{batch}, ...], got {x.shape} at state{place}."
            )
    labels = jnp.full((batch,), start, jnp.int32)
    made = jax.eval_shape(predictor.step, state, labels)
    if not isinstance(made, tuple) or len(made) != 2:
        raise TypeError(f"{function}: {name}.step must return (rows [B, P], state), got {made!r}.")
    rows, after = made
    if getattr(rows, "ndim", None) != 2 or rows.shape[0] != batch:
        raise ValueError(f"{function}: {name}.step must make rows [B, P] with B = {batch}, got {rows!r}.")
    same_state(function, name, state, after)
    return predictor.step(state, labels)


def same_state(function: str, name: str, before, after):
    """Raises unless both states have the same structure, shapes and dtypes."""
    structures: list[Any] = [jax.tree.structure(x) for x in (before, after)]
    expected, got = structures
    if expected != got:
        raise ValueError(f"{function}: {name} must keep the structure of its state, {expected}, got {got}.")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            place = jax.tree_util.keystr(path)
            expected, got = f"{x.dtype} {tuple(x.shape)}", f"{y.dtype} {tuple(y.shape)}"
            raise ValueError(f"{function}: {name} must keep its state's shapes: state{place} is {expected}, got {got}.")
