"""Search without a predictor: the joint network runs on all frames at once, and then on the labels of these.

B utterances, T frames, E and P the widths of encoder and predictor rows, V classes, L labels at most.
"""

import typing
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jax_rnnt import _renamed
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._gather import in_rows
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode.search import _options
from jax_rnnt.decode.search._greedy import most_probable
from jax_rnnt.decode.search._search import Search, checked, on_devices, prepare
from jax_rnnt.decode.search._symbols import checked_scoring
from jax_rnnt.losses import TransducerLoss


class Draft(typing.NamedTuple):
    """Labels from the first place on, the frames that emitted and that they read, their log-probabilities [B, L]."""

    labels: jax.Array
    frames: jax.Array
    durations: jax.Array
    log_probs: jax.Array
    counts: jax.Array  # [B]
    bad: jax.Array  # [B]: a label was chosen from NaN or +inf


@_renamed.argument(durations="duration_choice")
@keywords
def parallel(
    loss: TransducerLoss,
    joint: Callable[..., jax.Array],
    predictor: Any,
    encoder_out: jax.Array,
    lengths: jax.Array,
    max_labels: int,
    *,
    rounds: int = 0,
    blank_penalty: float | jax.Array = 0.0,
    temperature: float | jax.Array = 1.0,
    duration_choice: Literal["pair", "token_first"] = "pair",
    start: int | None = None,
    exact_end: bool | jax.Array = False,
) -> Hypotheses:
    """The most probable moves without a predictor, all frames at once; then labels are chosen again, with it.

    B utterances, T frames, E and P the widths of encoder and predictor rows, V classes. The model must be trained with
    masked predictor rows, as ``Joint(masking=0.5)`` of `jax_rnnt.flax` does (HAINAN, Xu et al. 2024). Without rounds it
    is greedy search with one predictor row at every node, that of a masked predictor, and at most one label a frame:
    the joint network runs once, on B T rows, and the predictor never. The logits of all frames are in memory.

    In a round (semi-autoregressive), the predictor reads all labels of an utterance. Then each label becomes the most
    probable one at its frame, after the labels before it, for all labels at once. Frames, durations and counts stay.

    Parameters
    ----------
    loss, joint, encoder_out, lengths, max_labels, blank_penalty, temperature, duration_choice, exact_end
        As for `greedy`; `exact_end` is that of an utterance, as there are no streams.
    predictor : Predictor
        As for `greedy`. Its `masked_row` takes the place of its rows; zeros where it has none.
    rounds : int, default 0
        How many times all labels are chosen again.
    start : int, optional
        As for `greedy`, of the rounds.

    Returns
    -------
    Hypotheses
        One of each utterance. `scores` are those of the moves without a predictor, also after rounds; `label_log_probs`
        those of the last choice. `state` is None.

    Raises
    ------
    TypeError, ValueError
        As for `greedy`; `masked_row` is no row of the predictor.

    See Also
    --------
    greedy : With the predictor at every node.

    References
    ----------
    Xu, Bartley, Bataev and Ginsburg, "HAINAN: Fast and Accurate Transducer for Hybrid-Autoregressive ASR", 2024,
    arXiv:2410.02597.

    Examples
    --------
    Frames ask for the classes 1, 1 and 2. The predictor forbids to repeat a label; class 2 is the next best one:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.Predictor(lambda batch: (), lambda state, labels: (-9 * jax.nn.one_hot(labels, 3), state))
    >>> frames = jnp.array([[[0.0, 5.0, 1.0], [0.0, 5.0, 1.0], [5.0, 0.0, 1.0]]])
    >>> search = lambda n: decode.parallel(RNNTLoss(blank=0), jnp.add, predictor, frames, jnp.array([3]), 4, rounds=n)
    >>> search(0).labels.tolist(), search(1).labels.tolist()
    ([[1, 1, -1, -1]], [[1, 2, -1, -1]])
    """
    function = "parallel"
    max_labels, rounds = _options.sizes(function, max_labels=max_labels, rounds=rounds)
    scoring = checked_scoring(function, 1, blank_penalty, temperature, duration_choice)
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)

    def run(encoder_out, lengths, exact_end, _):
        batch = (loss, joint, predictor), encoder_out, lengths, exact_end
        search, _, first = prepare(function, *batch, scoring, start)
        row, _ = jax.eval_shape(first)
        draft, scores = without_predictor(search, masked_row(function, search.predictor, row), max_labels)
        if rounds:
            draft = jax.lax.fori_loop(0, rounds, lambda _, x: choose_again(search, first, x), search.vary(draft))
        scores = jnp.where(search.bad | draft.bad | (scores == jnp.inf), jnp.nan, scores)
        written = draft.labels, draft.frames, draft.durations, draft.log_probs
        return hypotheses(*written, draft.counts, scores, None)

    return on_devices(run, encoder_out, lengths, exact_end, None)


def masked_row(function: str, predictor, like):
    """The row [P] in place of the predictor's, which are as `like` [B, P]."""
    row = getattr(predictor, "masked_row", None)
    if row is None:
        return jnp.zeros(like.shape[1:], like.dtype)
    if getattr(row, "shape", None) != like.shape[1:]:
        expected = f"an array [P] = {like.shape[1:]}, as a row of the predictor"
        raise ValueError(f"{function}: predictor.masked_row must be {expected}, got {row!r}.")
    return jnp.asarray(row, like.dtype)


# ------------------------------------------------------------------------------------------------- all frames at once


def without_predictor(search: Search, row, max_labels: int):
    """(draft, scores [B]) with this predictor row [P] at every node."""
    batch, size, width = search.encoder_out.shape
    rows = jnp.broadcast_to(row, (batch * size, *row.shape))
    logits = search.joint(search.encoder_out.reshape(batch * size, width), rows).reshape(batch, size, search.classes)
    symbols = search.symbols
    scores, labels = symbols.scores(logits)
    frame = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    reads = [move.frames for move in symbols.moves]

    def best(may_write):
        allowed = symbols.allowed(frame, search.lengths[:, None], jnp.full(frame.shape, may_write), search.ends_here)
        score, move, label, log_prob = most_probable(symbols, scores, labels, allowed)
        return score, symbols.of_move(move, reads), label, log_prob

    (score, duration, label, log_prob), (blank_score, blank, *_) = best(True), best(False)
    stays = (label >= 0) & (duration == 0)  # a blank follows on the same frame, by the limit of one label
    ahead = jnp.where(stays, blank, duration)
    if not symbols.scoring.token_first:  # there the frame ends without a move
        score = jnp.where(stays, score + blank_score, score)
    met, writes = frames_met(search, label >= 0, ahead, blank, max_labels)
    scores = jnp.sum(jnp.where(met, jnp.where(writes, score, blank_score), 0), 1)
    place, counts = first_places(writes, max_labels)
    written = label, frame, duration, log_prob
    label, frame, duration, log_prob = (in_rows(x, place) for x in written)
    return filled(label, frame, duration, log_prob, counts, jnp.zeros(batch, bool)), scores


def frames_met(search: Search, label, ahead, blank, max_labels: int):
    """bool [B, T] twice: the frames that a move starts from, and those of them that write a label.

    `label` [B, T]: the best move writes one, if there is room. Frames that the moves read, one or more [B, T]: `ahead`
    with a label, `blank` without.
    """
    times = jnp.arange(label.shape[1], dtype=jnp.int32)
    if max(move.frames for move in search.symbols.moves) == 1:
        met = times[None] < search.lengths[:, None]
        return met, met & label & (jnp.cumsum(label, 1) <= max_labels)

    def step(carry, frame):
        goal, count = carry
        time, label, ahead, blank = frame
        here = (goal == time) & (time < search.lengths)
        writes = here & label & (count < max_labels)
        goal = jnp.where(here, time + jnp.where(writes, ahead, blank), goal)
        return (goal, count + writes.astype(jnp.int32)), (here, writes)

    zeros = search.vary(jnp.zeros_like(search.lengths))
    _, (met, writes) = jax.lax.scan(step, (zeros, zeros), (times, label.T, ahead.T, blank.T))
    return met.T, writes.T


def first_places(flags, size: int):
    """(places int32 [B, size] of the first flags of each row [B, N], how many there are, up to `size` [B])."""
    order = jnp.cumsum(flags, 1, dtype=jnp.int32)
    goal = jnp.where(flags & (order <= size), order - 1, size)
    places = jnp.broadcast_to(jnp.arange(flags.shape[1], dtype=jnp.int32), flags.shape)
    place = jax.vmap(lambda i, x: jnp.zeros(size, jnp.int32).at[i].set(x, mode="drop"))(goal, places)
    return place, jnp.minimum(order[:, -1], size)


def filled(labels, frames, durations, log_probs, counts, bad) -> Draft:
    """Arrays [B, L], filled from `counts` on."""
    inside = jnp.arange(labels.shape[1], dtype=jnp.int32)[None] < counts[:, None]
    labels, frames, durations = (jnp.where(inside, x, -1) for x in (labels, frames, durations))
    return Draft(labels, frames, durations, jnp.where(inside, log_probs, 0), counts, bad)


# ------------------------------------------------------------------------------------------------------------- rounds


def choose_again(search: Search, first, draft: Draft) -> Draft:
    """Every label becomes the most probable one at its frame, after those before it."""
    rows = rows_before(search, first, jnp.maximum(draft.labels, 0))
    batch, size, width = rows.shape
    encoder = search.frame(jnp.maximum(draft.frames, 0)).reshape(batch * size, search.encoder_out.shape[-1])
    logits = search.joint(encoder, rows.reshape(batch * size, width)).reshape(batch, size, search.classes)
    _, labels = search.symbols.scores(logits)
    log_probs, label = labels.best()
    inside = draft.labels >= 0
    bad = draft.bad | jnp.any(inside & (jnp.isnan(log_probs) | (log_probs == jnp.inf)), 1)
    return filled(label, draft.frames, draft.durations, log_probs, draft.counts, bad)


def rows_before(search: Search, first, labels):
    """Predictor rows [B, L, P] before each of these labels [B, L]."""

    def step(carry, label):
        row, state = carry
        return search.predictor.step(state, label), row

    _, rows = jax.lax.scan(step, search.vary(first()), labels.T)
    return jnp.swapaxes(rows, 0, 1)
