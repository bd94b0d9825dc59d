"""Operations on the state of `greedy` and `beam` for streams that come and go, row by row.

A state is a pytree of arrays [B, ...] with the leaves `fresh` and `bad` [B]. A part that meets a fresh row starts this
utterance anew: it has the networks at hand, which `reset_streams` has not.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._fusion import placed
from jax_rnnt.decode._gather import replace_rows
from jax_rnnt.decode._given import Given, Static
from jax_rnnt.decode._hypotheses import Hypotheses
from jax_rnnt.decode._model import constant
from jax_rnnt.decode._predictor import same_state

FAR = 2.0**16  # scores beyond this, in nats, begin again at 0; a float32 there is a multiple of 2^-7


def begin_part(verb: str, static: Static, given: Given, start, state):
    """Returns the state from which a part of a stream starts; `start()` makes the state of a new stream."""
    if state is None:
        return start()
    expected = jax.eval_shape(start)
    if type(state) is not type(expected):
        got = "that of another search" if hasattr(state, "fresh") else _checks.shown(state)
        raise _checks.bad_type(f"state must be Hypotheses.state of an earlier part by {verb}, got {got}.")
    same_state(f"state of {verb}", expected, state)
    state = given.vary(constant(state))
    # A branch, so that parts without a fresh row run no network here.
    state = jax.lax.cond(jnp.any(state.fresh), lambda x: replace_rows(x.fresh, start(), x), lambda x: x, state)
    return state._replace(networks=placed(static, given, state.networks))


def beyond_the_end(static: Static, given: Given, exact_end, reached):
    """Returns bool [B]: utterances that end here although an earlier part has read further, or ended by a wrong move.

    `reached` [B] is how many of these frames the moves of earlier parts need. A search of the whole utterance at once
    would have made other moves. Known ones raise an error.
    """
    reach, lengths = static.moves.reach, given.lengths
    if exact_end is False or not reach:
        return jnp.zeros(lengths.shape, bool)
    beyond = (reached > lengths) & exact_end
    known = _checks.known(beyond)
    if known is not None and known.any():
        expected = f"False, or True for utterances whose last part has {reach} frames or more"
        where = np.flatnonzero(known).tolist()
        got = f"True where an earlier part has read beyond the end, in the utterances {where}"
        raise _checks.bad_value(f"exact_end must be {expected}, as moves of this loss reach so far, got {got}.")
    return beyond


@keywords
def select_streams(state: Any, rows: jax.Array) -> Any:
    """Returns the state of some utterances of a batch, in a new order; with it the next part decodes a batch of these.

    There are B utterances before, R afterwards.

    Parameters
    ----------
    state : pytree
        `Hypotheses.state` of `greedy` or `beam`.
    rows : Array, integer [R]
        Numbers of utterances, in [0, B). One may occur twice.

    Returns
    -------
    pytree
        The state of R utterances, bit for bit that of the chosen ones. A traced number out of range gives an utterance
        that has the score NaN until `reset_streams`.

    Raises
    ------
    TypeError, ValueError
        `state` is not a state, `rows` are not integers in the range, or explicit mesh axes cannot split R as they split
        B.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 2)), 1, start=0)
    >>> part = jnp.log(jnp.array([[[0.9, 0.1]], [[0.8, 0.2]]]))
    >>> search = decode.Search(RNNTLoss(blank=0), jnp.add, predictor, max_labels=2)
    >>> state = search.greedy(part, jnp.array([1, 1])).state
    >>> state = decode.select_streams(state, jnp.array([1]))
    >>> later = search.greedy(part[:1], jnp.array([1]), state=state)
    >>> round(float(jnp.exp(later.scores[0])), 2)  # 0.8 * 0.9
    0.72
    """
    batch = utterances("state", state)
    shape = np.shape(_checks.array("rows", rows))
    if len(shape) != 1:
        raise _checks.bad_value(f"rows must have shape [R], got {shape}.")
    known, index = _checks.known(rows), _checks.integers("rows", rows, shape, "[R]")
    if known is not None and np.any((known < 0) | (known >= batch)):
        raise _checks.bad_value(f"rows must lie in [0, {batch}), got {known.tolist()}.")
    if shape[0] % (shards := _xla.shards(state.fresh)):
        expected = f"have a multiple of {shards} numbers, as explicit mesh axes split the state into so many parts"
        raise _checks.bad_value(f"rows must {expected}, got {shape[0]}.")
    index = _xla.shard_like(state.fresh, index)
    outside = (index < 0) | (index >= batch)
    selected = jax.tree.map(lambda x: _xla.rows_of_batch(jnp.asarray(x), index), state)
    return selected._replace(fresh=selected.fresh & ~outside, bad=selected.bad | outside)


@keywords
def concatenate_streams(states: Sequence[Any]) -> Any:
    """Joins several states into one, with their utterances one after another.

    Parameters
    ----------
    states : sequence of pytrees
        `Hypotheses.state` of one search with the same options; batches may have different sizes.

    Returns
    -------
    pytree
        The state of all their utterances.

    Raises
    ------
    TypeError, ValueError
        There is no state, or they belong to searches that differ in kind, networks or sizes.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 2)), 1, start=0)
    >>> search = decode.Search(RNNTLoss(blank=0), jnp.add, predictor, max_labels=2)
    >>> states = [search.greedy(jnp.zeros((n, 1, 2)), jnp.ones(n, int)).state for n in (2, 1)]
    >>> state = decode.concatenate_streams(states)
    >>> state.fresh.shape
    (3,)
    """
    if not isinstance(states, Sequence) or hasattr(states, "_fields") or not states:
        raise _checks.bad_type(f"states must be a sequence of states, at least one, got {states!r}.")
    expected = None
    for i, state in enumerate(states):
        utterances(f"states[{i}]", state)
        got = jax.tree.structure(state), [(x.dtype, x.shape[1:]) for x in jax.tree.leaves(state)]
        expected = expected or got
        if got != expected:
            wanted = f"of the same search and sizes as states[0], {expected}"
            raise _checks.bad_value(f"states[{i}] must be {wanted}, got {got}.")
    return jax.tree.map(lambda *x: jnp.concatenate(x), *states)


@keywords
def reset_streams(state: Any, where: jax.Array) -> Any:
    """Returns the state with some utterances at their start: the next part begins new ones in their rows.

    It only marks them. The next call starts these rows as a call without a state does, bit for bit.

    Parameters
    ----------
    state : pytree
        `Hypotheses.state` of `greedy` or `beam`. Or its shapes, as `jax.eval_shape` gives them, so that the first
        part runs in the program of all others; rows that are not marked have the score NaN then.
    where : Array, bool [B]
        Which utterances to reset.

    Returns
    -------
    pytree
        The state, of the same shapes.

    Raises
    ------
    TypeError, ValueError
        `state` is not a state, or `where` is not bool [B].

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 2)), 1, start=0)
    >>> part, ones = jnp.log(jnp.array([[[0.9, 0.1]], [[0.8, 0.2]]])), jnp.ones(2, int)
    >>> greedy = decode.Search(RNNTLoss(0), jnp.add, predictor, max_labels=2).greedy
    >>> search = jax.jit(lambda part, state: greedy(part, ones, state=state))
    >>> state = decode.reset_streams(jax.eval_shape(search, part, None).state, jnp.ones(2, bool))
    >>> state = search(part, state).state
    >>> later = search(part, decode.reset_streams(state, jnp.array([True, False])))
    >>> [round(float(x), 2) for x in jnp.exp(later.scores)]
    [0.9, 0.64]
    """
    batch = utterances("state", state)
    where = _checks.array("where", where)
    if where.dtype != np.bool_ or tuple(where.shape) != (batch,):
        raise _checks.bad_value(f"where must be bool [B] with B = {batch}, got {where.dtype} {tuple(where.shape)}.")
    if isinstance(state.fresh, jax.ShapeDtypeStruct):
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)
        state = state._replace(bad=~state.bad)
    return state._replace(fresh=state.fresh | where)


@keywords
def commit_labels(hypotheses: Hypotheses, counts: jax.Array) -> Any:
    """Returns the state of `beam` without the first labels of its best hypotheses, whose room is free again.

    Hypotheses that do not begin with these labels are dropped. With `hypotheses.stable` there are none, and the stream
    goes on bit for bit as it would have; later parts return the labels after the committed ones. These have the frames
    of the hypothesis that was the best one: another may have the next label on an earlier frame.

    Parameters
    ----------
    hypotheses : Hypotheses
        A result of `beam`, with its state.
    counts : Array, integer [B]
        How many labels of the best hypothesis of each utterance to commit; more than it has means all. They may exceed
        `stable`: all at the end of a sentence, or the oldest ones, so that `max_labels` always suffices.

    Returns
    -------
    pytree
        The state, of the same shapes. Frames still count from the start of the stream, and so do scores until the best
        one is beyond 65536 nats: there they begin again at 0, as float32 would round them more and more.

    Raises
    ------
    TypeError, ValueError
        `hypotheses` are not a result of `beam`, or `counts` are not integers [B].

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 2)), 1, start=0)
    >>> search = decode.Search(RNNTLoss(0), jnp.add, predictor, max_labels=2, max_symbols=1)
    >>> part = jnp.log(jnp.array([[[0.1, 0.9]]])), jnp.array([1])
    >>> found = search.beam(*part, width=1)
    >>> found = search.beam(*part, width=1, state=decode.commit_labels(found, found.stable))
    >>> found.labels[0, 0].tolist(), found.frames[0, 0].tolist()
    ([1, -1], [1, -1])
    """
    state: Any = getattr(hypotheses, "state", None)
    batch = utterances("hypotheses.state", state)
    if not hasattr(state, "beam") or hypotheses.counts.ndim != 2:
        raise _checks.bad_type("hypotheses must be those of Search.beam, the N best of each utterance.")
    counts = _checks.integers("counts", counts, (batch,), "[B]")
    counts = jnp.clip(counts, 0, hypotheses.counts[:, 0])
    now, place = state.beam, jnp.arange(hypotheses.labels.shape[-1], dtype=jnp.int32)[None]
    differ = (now.written[:, :, 0] != hypotheses.labels[:, :1]) & (place < counts[:, None])[:, None]
    score = jnp.where(jnp.any(differ, -1), -jnp.inf, now.score)
    best = score.max(-1, keepdims=True)
    shift = jnp.where((jnp.abs(best) > FAR) & jnp.isfinite(best), best, 0)
    after = place + counts[:, None]
    kept = jnp.take_along_axis(now.written, jnp.minimum(after, place[:, -1:])[:, None, None], -1)
    nothing = jnp.where(jnp.arange(now.written.shape[2]) < 3, -1, 0).astype(jnp.int32)[None, None, :, None]
    written = jnp.where((after <= place[:, -1:])[:, None, None], kept, nothing)
    beam = now._replace(
        score=score - shift,
        path_score=now.path_score - shift,
        counts=jnp.maximum(now.counts - counts[:, None], 0),
        written=written,
    )
    return state._replace(beam=beam, committed=state.committed + counts)


def utterances(name: str, state) -> int:
    """Returns the number of utterances B in a state."""
    if not {"fresh", "bad"} <= {*getattr(state, "_fields", ())}:
        raise _checks.bad_type(f"{name} must be Hypotheses.state of Search.greedy or Search.beam, got {state!r}.")
    return state.fresh.shape[0]
