"""Functions that the NNX and the Linen modules share: labels in, rows out.

There are B sequences and U labels; E, P and H are the widths of encoder rows, predictor rows and hidden units.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _xla
from jax_rnnt._keywords import in_name_of
from jax_rnnt.decode import Predictor, predict
from jax_rnnt.decode._modules import in_evaluation
from jax_rnnt.decode._predictor import check_methods, declared_start, declared_symbols

Layer = Callable[..., Any]
_GATES = "gates of an LSTM"


@in_name_of("decoder_inputs")
def decoder_inputs(encoder: Layer, predictor: Layer, affine: bool, steps, encoder_out) -> tuple[Predictor, jax.Array]:
    """Returns predictor and encoder rows [B, T, H] of a decoder, after a joint's projections `encoder` and `predictor`.

    A row of zeros should mean no encoder. So the predictor's rows contain the result of `encoder` for zeros, its bias.
    The encoder's rows are what remains: the derivative where `encoder` is affine, which has no rounding error, else the
    difference.
    """
    check_methods("predictor", steps)
    steps = in_evaluation(steps)
    bias = encoder(jnp.zeros((1, encoder_out.shape[-1]), encoder_out.dtype))[0]
    if affine:
        _, rows = jax.jvp(encoder, (jnp.zeros_like(encoder_out),), (encoder_out,))
    else:
        rows = encoder(encoder_out) - bias

    def step(state, labels):
        row, state = steps.step(state, labels)
        return predictor(row) + bias, state

    start = declared_start("predictor", steps)
    return Predictor(steps.initial, step, start, declared_symbols(steps)), rows


def dropped(dropout: Layer, rows: jax.Array, **options) -> jax.Array:
    """Drops single entries of rows, and scales the others.

    The mask is drawn for all devices: Linen's Dropout takes no array that explicit mesh axes split (flax 0.12).
    """
    mask = _xla.shard_like(rows, dropout(jnp.ones(rows.shape, rows.dtype), **options))
    return jnp.where(mask > 0, rows * mask, 0)


def check_output(plain: bool, layer, expected: str):
    """Raises an error unless kernel and bias alone determine the output layer of a joint."""
    if not plain:
        way = "JointLogits(joint, encoder_out, predictor_out) takes any joint network"
        raise TypeError(f"Joint: output must be {expected}, got {type(layer).__name__}; {way}.")


def checked(name: str, targets) -> jax.Array:
    """Returns labels int32 [..., U] of the module of this name, checked."""
    with in_name_of(name):
        shape = jnp.shape(targets)
        if not shape:
            raise _checks.bad_value("targets must have shape [..., U], got ().")
        targets = _checks.integers("targets", targets, shape, "[..., U]")
        _checks.unsplit("targets", targets, {-1: "U"})
        return targets


def embedded(embed, labels):
    """Returns rows [..., P] of an embedding of Flax for labels [...], split as these over explicit mesh axes."""
    if not _xla.is_split(labels):
        return embed(labels)
    return _xla.rows_of_table(jnp.asarray(embed.embedding).astype(embed.dtype), labels)


def embedded_sum(embed, past, symbols: int):
    """Returns rows [..., P] after the last labels [..., history]: a label has an embedding for each distance."""
    offsets = symbols * jnp.arange(past.shape[-1], dtype=past.dtype)
    return embedded(embed, inside(past, symbols) + offsets).sum(-2)


def inside(labels, symbols: int):
    """Clips labels to those with an embedding. Padding may hold anything; a NaN row would make all gradients NaN."""
    return jnp.clip(labels, 0, symbols - 1)


def windows(targets, history: int, start: int) -> jax.Array:
    """Returns the last labels of each column [..., U + 1, history], the newest one last."""
    past = jnp.pad(targets, (*((0, 0),) * (targets.ndim - 1), (history, 0)), constant_values=start)
    columns = targets.shape[-1] + 1
    return jnp.stack([past[..., i : i + columns] for i in range(history)], -1)


def layered(predictor, cells, products, targets) -> jax.Array:
    """Returns rows [..., U + 1, P] of an LSTM predictor that reads the start label and then the targets [..., U].

    It works layer by layer: first the product of the input for all columns, then a loop over these with the product of
    the state alone. ``products(cell)`` gives both as functions; None for a cell that may do something else.
    """
    *batch, labels = targets.shape
    if len(batch) != 1:
        rows = layered(predictor, cells, products, targets.reshape(math.prod(batch), labels))
        return rows.reshape(*batch, *rows.shape[1:])
    if any(products(cell) is None for cell in cells):
        return predict(predictor, targets)
    targets = jnp.pad(targets, ((0, 0), (1, 0)), constant_values=predictor.start)
    x = jnp.swapaxes(embedded(predictor.embed, inside(targets, predictor.symbols)), 0, 1)
    for cell, state in zip(cells, predictor.initial(targets.shape[0]), strict=True):
        of_input, of_state = products(cell)
        state = jax.tree.map(lambda x: _xla.state_like(targets, x), state)
        # For fewer launches on a GPU, the backward pass keeps the gates alone and computes the rest again. Long loops
        # have fewer turns where their number is known; a CPU takes longer to compile these.
        kept = jax.checkpoint_policies.save_only_these_names(_GATES)
        step = jax.checkpoint(functools.partial(_lstm, cell, of_state), prevent_cse=False, policy=kept)
        _, x = jax.lax.scan(step, state, of_input(x), unroll=4 if isinstance(labels, int) and labels > 32 else 1)
    return jnp.swapaxes(x, 0, 1)


def _lstm(layer, of_state, state, gates):
    cell, hidden = state
    gates = _xla.named(gates + of_state(hidden), _GATES)
    read, forget, new, write = jnp.split(gates, 4, -1)
    cell = layer.gate_fn(forget) * cell + layer.gate_fn(read) * layer.activation_fn(new)
    hidden = layer.gate_fn(write) * layer.activation_fn(cell)
    return (cell, hidden), hidden


def stacked(cells, state, x):
    """Returns (rows [B, P], state) after LSTM cells, each on the rows of the one before."""
    after = []
    for cell, carry in zip(cells, state, strict=True):
        carry, x = cell(carry, x)
        after.append(carry)
    return x, after
