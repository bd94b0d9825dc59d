"""Search without a predictor: the joint network runs on all frames at once, and then on the labels of these.

B utterances, T frames, E and P the widths of encoder and predictor rows, V classes, L labels at most.
"""

import typing

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt.decode._gather import in_rows
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode.lm._labels import Labels
from jax_rnnt.decode.search import _fusion, _options
from jax_rnnt.decode.search._fusion import Fusion, begin_model, check_utterances
from jax_rnnt.decode.search._greedy import most_probable
from jax_rnnt.decode.search._problem import Problem, checked, on_devices, prepare


class Draft(typing.NamedTuple):
    """Labels from the first place on, the frames that emitted and that they read, their log-probabilities [B, L]."""

    labels: jax.Array
    frames: jax.Array
    durations: jax.Array
    log_probs: jax.Array
    counts: jax.Array  # [B]
    bad: jax.Array  # [B]: a label was chosen from NaN or +inf


def run(search, encoder_out, lengths, rounds, exact_end) -> Hypotheses:
    """`Search.parallel`."""
    function = "parallel"
    max_labels, rounds = _options.sizes(function, max_labels=search.max_labels, rounds=rounds)
    scoring = search._scoring(function, max_symbols=1)
    models = search._models(function)
    for name, model, _ in models.models:
        if not isinstance(model, Labels):
            expected = "a decode.Labels, as this search knows no labels that another model could read"
            raise ValueError(f"{function}: {name} must be {expected}, got {_checks.shown(model)}.")
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)
    check_utterances(function, models, encoder_out)

    def of_device(encoder_out, lengths, exact_end, _):
        batch = encoder_out, lengths, exact_end
        problem, start, first = prepare(function, search, *batch, scoring, numbers=models.numbers)
        row, _ = jax.eval_shape(first)
        bonus = bonus_of(models, problem, start)
        draft, scores = without_predictor(problem, masked_row(function, problem.predictor, row), max_labels, bonus)
        if rounds:
            draft = problem.vary(draft)
            draft = jax.lax.fori_loop(0, rounds, lambda _, x: choose_again(problem, first, x, bonus), draft)
        scores = jnp.where(problem.bad | draft.bad | (scores == jnp.inf), jnp.nan, scores)
        written = draft.labels, draft.frames, draft.durations, draft.log_probs
        return hypotheses(*written, draft.counts, scores, None)

    return on_devices(of_device, encoder_out, lengths, exact_end, None)


def bonus_of(models: Fusion, problem: Problem, start: int):
    """[B, 1, V]: what masks add to the scores of labels, the same at all nodes of an utterance; None: nothing."""
    batch = problem.lengths.shape[0]
    scores = [begin_model(fused, problem, batch, start)[0] for fused in models.models]
    bonus = _fusion.bonus(models, problem, scores, problem.lengths)
    return None if bonus is None else bonus[:, None]


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


def without_predictor(problem: Problem, row, max_labels: int, bonus=None):
    """(draft, scores [B]) with this predictor row [P] at every node; `bonus` [B, 1, V] is that of masks."""
    batch, size, width = problem.encoder_out.shape
    rows = jnp.broadcast_to(row, (batch * size, *row.shape))
    logits = problem.joint(problem.encoder_out.reshape(batch * size, width), rows).reshape(batch, size, problem.classes)
    symbols = problem.symbols
    scores, labels = symbols.scores(logits)
    labels = labels._replace(bonus=bonus)
    frame = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
    reads = [move.frames for move in symbols.moves]

    def best(may_write):
        allowed = symbols.allowed(frame, problem.lengths[:, None], jnp.full(frame.shape, may_write), problem.ends_here)
        score, move, label, log_prob = most_probable(symbols, scores, labels, allowed)
        return score, symbols.of_move(move, reads), label, log_prob

    (score, duration, label, log_prob), (blank_score, blank, *_) = best(True), best(False)
    stays = (label >= 0) & (duration == 0)  # a blank follows on the same frame, by the limit of one label
    ahead = jnp.where(stays, blank, duration)
    if not symbols.scoring.token_first:  # there the frame ends without a move
        score = jnp.where(stays, score + blank_score, score)
    met, writes = frames_met(problem, label >= 0, ahead, blank, max_labels)
    scores = jnp.sum(jnp.where(met, jnp.where(writes, score, blank_score), 0), 1)
    place, counts = first_places(writes, max_labels)
    written = label, frame, duration, log_prob
    label, frame, duration, log_prob = (in_rows(x, place) for x in written)
    return filled(label, frame, duration, log_prob, counts, jnp.zeros(batch, bool)), scores


def frames_met(problem: Problem, label, ahead, blank, max_labels: int):
    """bool [B, T] twice: the frames that a move starts from, and those of them that write a label.

    `label` [B, T]: the best move writes one, if there is room. Frames that the moves read, one or more [B, T]: `ahead`
    with a label, `blank` without.
    """
    times = jnp.arange(label.shape[1], dtype=jnp.int32)
    if max(move.frames for move in problem.symbols.moves) == 1:
        met = times[None] < problem.lengths[:, None]
        return met, met & label & (jnp.cumsum(label, 1) <= max_labels)

    def step(carry, frame):
        goal, count = carry
        time, label, ahead, blank = frame
        here = (goal == time) & (time < problem.lengths)
        writes = here & label & (count < max_labels)
        goal = jnp.where(here, time + jnp.where(writes, ahead, blank), goal)
        return (goal, count + writes.astype(jnp.int32)), (here, writes)

    zeros = problem.vary(jnp.zeros_like(problem.lengths))
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


def choose_again(problem: Problem, first, draft: Draft, bonus=None) -> Draft:
    """Every label becomes the most probable one at its frame, after those before it, that masks allow."""
    rows = rows_before(problem, first, jnp.maximum(draft.labels, 0))
    batch, size, width = rows.shape
    encoder = problem.frame(jnp.maximum(draft.frames, 0)).reshape(batch * size, problem.encoder_out.shape[-1])
    logits = problem.joint(encoder, rows.reshape(batch * size, width)).reshape(batch, size, problem.classes)
    _, labels = problem.symbols.scores(logits)
    log_probs, label = labels._replace(bonus=bonus).best()
    inside = draft.labels >= 0
    if bonus is not None:  # a mask allows one, but the model may forbid it here
        label = jnp.where(jnp.isneginf(log_probs) & inside, draft.labels, label)
        log_probs = jnp.where(jnp.isnan(log_probs), log_probs, labels.at(label))
    bad = draft.bad | jnp.any(inside & (jnp.isnan(log_probs) | (log_probs == jnp.inf)), 1)
    return filled(label, draft.frames, draft.durations, log_probs, draft.counts, bad)


def rows_before(problem: Problem, first, labels):
    """Predictor rows [B, L, P] before each of these labels [B, L]."""

    def step(carry, label):
        row, state = carry
        return problem.predictor.step(state, label), row

    _, rows = jax.lax.scan(step, problem.vary(first()), labels.T)
    return jnp.swapaxes(rows, 0, 1)
