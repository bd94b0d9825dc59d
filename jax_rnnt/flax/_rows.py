"""What the NNX and the Linen modules share: labels in, rows out.

B sequences, U labels, P and H the widths of predictor rows and hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _xla
from jax_rnnt.decode import Predictor, predict
from jax_rnnt.decode._modules import in_evaluation
from jax_rnnt.decode._predictor import own_start, own_symbols


def projected(predictor, project: Callable[[jax.Array], jax.Array]) -> Predictor:
    """The predictor, in evaluation mode, with `project` after each row."""
    predictor = in_evaluation(predictor)

    def step(state, labels):
        rows, state = predictor.step(state, labels)
        return project(rows), state

    start = own_start("decoder_inputs", "predictor", predictor)
    return Predictor(predictor.initial, step, start, own_symbols(predictor))


def checked(function: str, targets) -> jax.Array:
    """Labels int32 [..., U]."""
    shape = jnp.shape(targets)
    if not shape:
        raise ValueError(f"{function}: targets must have shape [..., U], got ().")
    targets = _checks.integers(function, "targets", targets, shape, "[..., U]")
    _checks.unsplit(function, "targets", targets, {-1: "U"})
    return targets


def embedded(embed, labels):
    """Rows [..., P] of an embedding of Flax for labels [...], split as these over explicit mesh axes."""
    if not _xla.is_split(labels):
        return embed(labels)
    return _xla.rows_of_table(jnp.asarray(embed.embedding).astype(embed.dtype), labels)


def inside(labels, symbols: int):
    """Labels that have an embedding. Padding may hold anything; a NaN row would make all gradients NaN."""
    return jnp.clip(labels, 0, symbols - 1)


def windows(targets, history: int, start: int) -> jax.Array:
    """The last labels of each column [..., U + 1, history], the newest one last."""
    past = jnp.pad(targets, (*((0, 0),) * (targets.ndim - 1), (history, 0)), constant_values=start)
    columns = targets.shape[-1] + 1
    return jnp.stack([past[..., i : i + columns] for i in range(history)], -1)


def scanned(predictor, targets) -> jax.Array:
    """Rows [..., U + 1, P] of a predictor that reads the start label and then the targets [..., U]."""
    *batch, labels = targets.shape
    if len(batch) == 1:
        return predict(predictor, targets)
    rows = predict(predictor, targets.reshape(math.prod(batch), labels))
    return rows.reshape(*batch, *rows.shape[1:])
