"""The interface of predictors: two functions on a state of any pytree, a start label and a number of labels.

There are B sequences and U labels; P is the width of a predictor row.
"""

import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._model import constant


class Predictor(typing.NamedTuple):
    """A prediction network, or a model of `fusion`, one label at a time.

    Any object with these attributes is a predictor, such as the modules of `jax_rnnt.flax`.

    Parameters
    ----------
    initial : callable
        ``initial(batch) -> state``: a pytree of arrays [batch, ...].
    step : callable
        ``step(state, labels [B]) -> (rows [B, P], state)``, each sequence by itself. The first label is the start
        label, so the first row is that of column 0. Shapes and dtypes of the state must not change.
    start : int, optional
        The start label of its training, the first one that `step` gets. Without it, decoders and `predict` take an
        argument `start`.
    symbols : int, optional
        Labels that `step` takes, with the start label; the joint network must not have more. A negative start label
        counts from their end, and is an error without `symbols`.

    Notes
    -----
    In place of rows, `step` of a model of fusion makes scores in nats [N, V] of each next label, such as
    log-probabilities. V is the number of labels, of labels and blanks, or of all classes of the joint network; columns
    of blanks and durations are not read. A model without `start` gets the start label of the predictor. Beam search
    runs it on several rows of each utterance, utterance by utterance: row n of N is of utterance n // (N // B). Where
    the states of all networks hold integers alone, its hypotheses share rows with equal states. These attributes are
    optional:

    * ``final(state) -> scores [N]`` of an end after the labels, as of </s>. Scores and ranks of a result are those of
      utterances that end with its frames; the state of a stream goes on without it.
    * ``utterances``: how many utterances B a model with tables for each of them serves. None: any.
    * ``place(state) -> state``, for such a model: the rows of a stream's state, each with the number of the utterance
      that has this row in the present call.

    Examples
    --------
    A predictor whose row is the one-hot last label:

    >>> import jax
    >>> from jax_rnnt.decode import Predictor, predict
    >>> predictor = Predictor(lambda batch: (), lambda state, labels: (jax.nn.one_hot(labels, 3), state), start=0)
    >>> predict(predictor, jax.numpy.array([[1, 2]]))[0].tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """

    initial: Callable[[int], Any]
    step: Callable[[Any, jax.Array], tuple[jax.Array, Any]]
    start: int | None = None
    symbols: int | None = None


def declared_symbols(predictor) -> int | None:
    symbols = getattr(predictor, "symbols", None)
    if isinstance(symbols, bool) or not isinstance(symbols, (int, np.integer)):
        return None  # an attribute of another meaning
    return int(symbols)


def start_label(name: str, start, symbols: int | None) -> int:
    """Returns a start label in [0, symbols). A negative one counts from the end, perhaps beyond the joint's tokens."""
    if symbols is not None:
        return _checks.class_index(name, start, symbols)
    start = _checks.index(name, start)
    if start < 0:
        expected = "0 or more, or count from the end of a predictor with the attribute symbols"
        way = "decode.Predictor(initial, step, start, symbols) makes one"
        raise _checks.bad_value(f"{name} must be {expected}, got {start} without symbols; {way}.")
    return start


def check_symbols(name: str, predictor, labels: int):
    """Raises an error if the predictor has fewer than `labels` symbols."""
    symbols = declared_symbols(predictor)
    if symbols is not None and symbols < labels:
        expected = f"{labels} or more, as the joint network has labels up to {labels - 1}"
        raise _checks.bad_value(f"{name}.symbols must be {expected}, got {symbols}.")


def declared_start(name: str, predictor) -> int | None:
    start = getattr(predictor, "start", None)
    if start is not None and (isinstance(start, bool) or not isinstance(start, (int, np.integer))):
        wrapped = "decode.Predictor(initial, step, start) makes a predictor of two functions"
        raise _checks.bad_type(f"{name}.start must be an integer or None, got {start!r}; {wrapped}.")
    return None if start is None else start_label(f"{name}.start", start, declared_symbols(predictor))


def start_of(predictor, start) -> int | None:
    """Returns the start label that the predictor declares, else the argument `start` of the call."""
    declared = declared_start("predictor", predictor)
    start = None if start is None else start_label("start", start, declared_symbols(predictor))
    if declared is not None and start is not None and declared != start:
        expected = f"left out, or predictor.start = {declared}, the label that the predictor was trained with"
        raise _checks.bad_value(f"start must be {expected}, got start={start}.")
    return start if declared is None else declared


def no_labels(batch: int, history: int, start: int) -> tuple[jax.Array, ...]:
    """Returns the last labels but one before the first: an array [batch] for each, which GPUs shift without a copy.

    No two of them share a buffer, since a program could not take such arrays as donated.
    """
    return tuple(jnp.full(batch, start, jnp.int32) for _ in range(history - 1))


def shifted(past: tuple[jax.Array, ...], labels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the last labels and one more as [B, history], and those that the next label needs, as in `no_labels`."""
    seen = *past, labels.astype(jnp.int32)
    return jnp.stack(seen, 1), seen[1:]


@keywords
def stateless_predictor(
    function: Callable[[jax.Array], jax.Array], history: int, start: int, symbols: int | None = None
) -> Predictor:
    """Makes a predictor that sees the last labels only (Ghodsi et al. 2020).

    Parameters
    ----------
    function : callable
        ``function(labels int32 [B, history]) -> rows [B, P]``, the newest label last.
    history : int
        How many labels it sees, at least 1.
    start : int
        The label that comes before the first one; also the predictor's `start`.
    symbols : int, optional
        As for `Predictor`.

    Returns
    -------
    Predictor

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt.decode import predict, stateless_predictor
    >>> predictor = stateless_predictor(lambda labels: labels.astype(jnp.float32), 2, start=0)
    >>> predict(predictor, jnp.array([[3, 4]]))[0].tolist()
    [[0.0, 0.0], [0.0, 3.0], [3.0, 4.0]]
    """
    _checks.positive("history", history)
    start = start_label("start", start, symbols)

    def step(past, labels):
        seen, past = shifted(past, labels)
        return function(seen), past

    return Predictor(lambda batch: no_labels(batch, history, start), step, start, symbols)


@keywords
def predict(predictor: Predictor, targets: jax.Array, start: int | None = None) -> jax.Array:
    """Returns the rows of all columns of a lattice: the predictor after the start label and after each target.

    Parameters
    ----------
    predictor : Predictor
    targets : Array, integer [B, U]
        Labels. Padding is read too, but changes no earlier row.
    start : int, optional
        The label before the first one, of a predictor that has no `start`. Negative: from the end of its `symbols`.

    Returns
    -------
    Array [B, U + 1, P]
        `predictor_out` of `JointLogits`. The rows come from a loop over U: a network that takes all labels at once
        trains faster.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt.decode import predict, stateless_predictor
    >>> predict(stateless_predictor(jnp.sin, 1, start=0), jnp.zeros((2, 3), int)).shape
    (2, 4, 1)
    """
    targets = _checks.array("targets", targets)
    if targets.ndim != 2 or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise _checks.bad_value(f"targets must be an integer array [B, U], got {targets.dtype} {tuple(targets.shape)}.")
    _checks.unsplit("targets", targets, {-1: "U"})
    check_methods("predictor", predictor)
    label = start_of(predictor, start)
    if label is None:
        raise _checks.bad_value("start must be given, as the predictor has no start of its own, got None.")
    labels = jnp.pad(jnp.asarray(targets, jnp.int32), ((0, 0), (1, 0)), constant_values=label)
    try:
        return _rows(predictor, labels)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError" or not _xla.is_split(labels):
            raise
    # JAX leaves some functions of split labels to their author, such as `table[labels]`. In that case each device
    # computes the rows of all sequences, and keeps its own.
    rows, _ = _xla.split_alike(1, _rows(predictor, *_xla.whole(labels)), labels)
    return rows


def _rows(predictor, labels):
    """Returns the rows [B, U + 1, P] after each of the labels [B, U + 1]."""
    # On explicit mesh axes, every sequence must have its state where its labels are.
    state = jax.tree.map(lambda x: _xla.state_like(labels, jnp.asarray(x)), predictor.initial(labels.shape[0]))

    def step(state, labels):
        rows, state = predictor.step(state, labels)
        return state, rows

    _, rows = jax.lax.scan(step, state, labels.T)
    return jnp.swapaxes(rows, 0, 1)


def check_methods(name: str, predictor, methods=("initial", "step")):
    if lacks := [method for method in methods if not callable(getattr(predictor, method, None))]:
        ways = "decode.Predictor(initial, step, start) of two functions, decode.nnx_predictor or linen_predictor"
        raise _checks.bad_type(
            f"{name} must have the methods {methods[0]}(batch) and {methods[1]}(state, labels), got "
            f"{_checks.shown(predictor)}, which has no {' and no '.join(lacks)}: make it by {ways} of a module."
        )


def begin(name: str, predictor, batch: int, start: int, makes: str = "rows [B, P]"):
    """Returns (rows [batch, P], state) after the start label, checked: every later step must make the same types."""
    check_methods(name, predictor)
    state = jax.tree.map(jnp.asarray, predictor.initial(batch))
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.ndim < 1 or x.shape[0] != batch:
            place = jax.tree_util.keystr(path)
            raise _checks.bad_value(
                f"{name}.initial({batch}) must make arrays [{batch}, ...], got {x.shape} at state{place}."
            )
    labels = jnp.full((batch,), start, jnp.int32)
    returned, draws = _xla.shape_of(f"{name}.step", predictor.step, state, labels)
    _checks.no_draws(f"{name}.step", draws)
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise _checks.bad_type(f"{name}.step must return ({makes}, state), got {returned!r}.")
    rows, after = returned
    if getattr(rows, "ndim", None) != 2 or rows.shape[0] != batch:
        raise _checks.bad_value(f"{name}.step must make {makes}, {batch} of them, got {rows!r}.")
    same_state(name, state, after)
    return constant(predictor.step(constant(state), labels))


def same_state(name: str, before, after):
    """Raises an error unless both states have the same structure, shapes and dtypes."""
    structures: list[Any] = [jax.tree.structure(x) for x in (before, after)]
    expected, got = structures
    if expected != got:
        raise _checks.bad_value(f"{name} must keep the structure of its state, {expected}, got {got}.")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            place = jax.tree_util.keystr(path)
            expected, got = f"{x.dtype} {tuple(x.shape)}", f"{y.dtype} {tuple(y.shape)}"
            raise _checks.bad_value(f"{name} must keep its state's shapes: state{place} is {expected}, got {got}.")
