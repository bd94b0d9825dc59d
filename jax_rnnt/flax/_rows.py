"""What the NNX and the Linen modules share: labels in, rows out.

B sequences, U labels, P and H the widths of predictor rows and hidden units.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt.decode import Predictor, predict


def projected(predictor, project: Callable[[jax.Array], jax.Array]) -> Predictor:
    """The predictor with `project` after each row."""

    def step(state, labels):
        rows, state = predictor.step(state, labels)
        return project(rows), state

    return Predictor(predictor.initial, step)


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


def scanned(predictor, targets, start: int) -> jax.Array:
    """Rows [..., U + 1, P] of a predictor that reads the start label and then the targets [..., U]."""
    batch = targets.shape[:-1]
    rows = predict(predictor, targets.reshape(-1, targets.shape[-1]), start)
    return rows.reshape(*batch, *rows.shape[1:])
