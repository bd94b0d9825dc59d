"""What the NNX and the Linen modules share: labels in, rows out.

B sequences, U labels, P and H the widths of predictor rows and hidden units.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks


class Steps(typing.NamedTuple):
    """A predictor as decoders take it."""

    initial: Callable[[int], Any]
    step: Callable[[Any, jax.Array], tuple[jax.Array, Any]]


def projected(predictor, project: Callable[[jax.Array], jax.Array]) -> Steps:
    """The predictor with `project` after each row."""

    def step(state, labels):
        rows, state = predictor.step(state, labels)
        return project(rows), state

    return Steps(predictor.initial, step)


def positive(function: str, name: str, x) -> int:
    x = _checks.integer(function, name, x)
    if x < 1:
        raise ValueError(f"{function}: {name} must be 1 or more, got {x}.")
    return x


def checked(function: str, targets) -> jax.Array:
    """Labels int32 [..., U]."""
    shape = jnp.shape(targets)
    if not shape:
        raise ValueError(f"{function}: targets must have shape [..., U], got ().")
    return _checks.integers(function, "targets", targets, shape, "[..., U]")


def inside(labels, symbols: int):
    """Labels that have an embedding. Padding may hold anything; a NaN row would make all gradients NaN."""
    return jnp.clip(labels, 0, symbols - 1)


def windows(targets, history: int, start: int) -> jax.Array:
    """The last labels of each column [..., U + 1, history], the newest one last."""
    past = jnp.pad(targets, (*((0, 0),) * (targets.ndim - 1), (history, 0)), constant_values=start)
    columns = targets.shape[-1] + 1
    return jnp.stack([past[..., i : i + columns] for i in range(history)], -1)


def shifted(past, labels) -> jax.Array:
    """The last labels [B, history] after one more."""
    return jnp.concatenate([past[:, 1:], labels.astype(past.dtype)[:, None]], 1)


def scanned(predictor, targets, start: int) -> jax.Array:
    """Rows [..., U + 1, P] of a predictor that reads the start label and then the targets [..., U]."""
    batch = targets.shape[:-1]
    labels = jnp.pad(targets, (*((0, 0),) * len(batch), (1, 0)), constant_values=start)
    labels = labels.reshape(-1, labels.shape[-1])

    def step(state, labels):
        rows, state = predictor.step(state, labels)
        return state, rows

    _, rows = jax.lax.scan(step, predictor.initial(len(labels)), labels.T)
    return jnp.moveaxis(rows, 0, 1).reshape(*batch, labels.shape[-1], -1)
