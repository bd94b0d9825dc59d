"""Greedy search, in which every utterance runs from label to label at its own pace.

B utterances, T frames, E and P the widths of encoder and predictor rows, K frames at once, L labels at most. One
`lax.while_loop` steps all utterances together. A step reads a window, the next K frames of each, with the predictor row
that they share until a label comes: one matrix product for B K rows. It follows the best moves up to the first label or
the end of the window, then steps the predictor where there is a label. So the predictor runs once a label and not once
a frame, and utterances do not wait for each other's labels.
"""

import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import in_name_of
from jax_rnnt.decode import _fusion, _given, _guard, _scores
from jax_rnnt.decode._fusion import Networks
from jax_rnnt.decode._gather import pick, replace_rows
from jax_rnnt.decode._given import Given, Static
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode._packing import any_or_always
from jax_rnnt.decode._streams import begin_part, beyond_the_end


@_pytree.exportable("GreedyStream")
class GreedyStream(typing.NamedTuple):
    """The state of a stream after one of its parts."""

    fresh: jax.Array  # [B]: whether the next part starts anew
    bad: jax.Array  # [B]: whether NaN has been met
    first: jax.Array  # [B]: frames of the stream before the next part
    skip: jax.Array  # [B]: frames of the next part that the last move has read
    reached: jax.Array  # [B]: frames of the next part that an exact end after it needs
    scores: jax.Array  # [B]
    networks: Networks


class Carry(typing.NamedTuple):
    """The carry of the loop over steps."""

    frame: jax.Array  # [B]: the next frame to read, counted in this part
    count_here: jax.Array  # [B]: number of labels on that frame
    counts: jax.Array  # [B]
    reached: jax.Array  # [B]: frames that an exact end needs
    scores: jax.Array  # [B]
    labels: jax.Array  # [B, L]
    frames: jax.Array  # [B, L]
    durations: jax.Array  # [B, L]
    log_probs: jax.Array  # [B, L]: log-probabilities of the labels
    confidences: jax.Array | None  # [B, L]
    networks: Networks


class Walk(typing.NamedTuple):
    """The moves of an utterance in one step: blanks, and the first label that it meets."""

    ahead: jax.Array  # [B]: frames from the first one of the window
    reached: jax.Array  # [B]: as in `Carry`
    score: jax.Array  # [B]: as in `Carry`
    label: jax.Array  # [B]: its code in `_guard`, -1 for none
    log_prob: jax.Array  # [B]: of the label, in the model alone
    at: jax.Array  # [B]: the frame of the window where the last move began
    reads: jax.Array  # [B]: number of frames that it read
    confidence: jax.Array | None  # [B]: of the label


@in_name_of("greedy")
def run(search, encoder_out, lengths, exact_end, state, frames_at_once) -> Hypotheses:
    """Implements `Search.greedy`."""
    search, encoder_out, lengths, exact_end = _given.checked(search, encoder_out, lengths, exact_end)
    window = _given.window(frames_at_once, encoder_out)

    def of_device(encoder_out, lengths, exact_end, state):
        static, given = _given.prepare(search, encoder_out, lengths, exact_end, window, greedy=True)
        if static.moves.token_first and exact_end is not False:
            raise _checks.bad_value(f"exact_end must be False with duration_choice='token_first', got {exact_end}.")
        stream = begin_part("greedy", static, given, functools.partial(start_stream, static, given), state)
        bad = stream.bad | beyond_the_end(static, given, exact_end, stream.reached)
        given = given._replace(first=stream.first)
        return result(static, given, run_steps(static, given, stream), bad)

    return _given.on_devices(of_device, encoder_out, lengths, exact_end, state)


def start_stream(static: Static, given: Given) -> GreedyStream:
    zeros = jnp.zeros(given.lengths.shape, jnp.int32)
    none, networks = jnp.zeros(zeros.shape, bool), _fusion.begin(static, given, zeros.shape[0])
    return GreedyStream(none, none, zeros, zeros, zeros, zeros.astype(static.dtype), networks)


def run_steps(static: Static, given: Given, stream: GreedyStream) -> Carry:
    """Returns the loop's carry after all frames of this part."""
    zeros = jnp.zeros_like(stream.skip)
    none = jnp.full((zeros.shape[0], static.max_labels), -1, jnp.int32)
    sure = jnp.zeros(none.shape, static.dtype)
    written = none, none, none, sure, sure if given.search.confidence else None
    carry = Carry(stream.skip, zeros, zeros, stream.reached, stream.scores, *written, stream.networks)

    def running(carry):
        return jnp.any(carry.frame < given.lengths)

    return jax.lax.while_loop(running, functools.partial(step, static, given), given.vary(carry))


def result(static: Static, given: Given, carry: Carry, bad) -> Hypotheses:
    """Returns the hypotheses at the end of these frames; `bad` [B] marks utterances without a result."""
    scores = jnp.where(given.bad | bad | (carry.scores == jnp.inf), jnp.nan, carry.scores)
    skip, reached = carry.frame - given.lengths, carry.reached - given.lengths
    bad = jnp.isnan(scores)
    after = GreedyStream(jnp.zeros_like(bad), bad, given.first + given.lengths, skip, reached, scores, carry.networks)
    written = carry.labels, carry.frames, carry.durations, carry.log_probs
    if given.draws is None:  # an end is no choice, so its score does not belong to a draw
        scores = _fusion.at_the_end(given.search, static.moves.tokens, carry.networks.models, None, scores)
    return hypotheses(*written, carry.counts, scores, after, carry.confidences)


# ----------------------------------------------------------------------------------------------------- one step


def step(static: Static, given: Given, carry: Carry) -> Carry:
    """Takes every utterance to its next label, or to the end of its window."""
    walk = walk_to_label(static, given, carry, *best_moves(static, given, carry))
    return advance(static, given, *write(static, given, carry, walk))


def best_moves(static: Static, given: Given, carry: Carry):
    """Returns the best move out of each frame of the windows [B, K], as arrays.

    They are its score, the frames that it reads, those that an exact end needs, the code of its label or -1, and the
    label's log-probability and confidence in the model alone.
    """
    moves, window = static.moves, static.frames_at_once
    offsets = np.arange(window, dtype=np.int32)[None]
    frame = carry.frame[:, None] + offsets
    encoder = given.frame(frame, static.copies).reshape(frame.shape[0] * window, given.encoder_out.shape[-1])
    logits = _given.logits_of(static, given, encoder, jnp.repeat(carry.networks.rows, window, 0))
    logits = logits.reshape(-1, window, moves.classes)
    scores, labels = _scores.scores(moves, given, logits)
    count_here = jnp.where(offsets == 0, carry.count_here[:, None], 0)
    may_write = (count_here < moves.labels_per_frame) & (carry.counts < static.max_labels)[:, None]
    allowed = _scores.allowed(static, given, frame, may_write)
    if _fusion.adds(given.search):
        labels = labels._replace(bonus=carry.networks.bonus[:, None])
    unseen, bits = None, None
    if carry.networks.matches:
        matches = jax.tree.map(lambda x: x[:, None], carry.networks.matches)
        below = _guard.shortfalls(moves, scores, labels.of(labels.logits))
        total, unseen, bits = _guard.added(given.search.guard, matches, below, greedy=True)
        seen = jnp.where(_scores.is_blank(moves, total), 0, total - unseen)
        labels = labels._replace(bonus=labels.bonus + seen)
    choose = most_probable if given.draws is None else given.draws.choose
    score, move, label, log_prob = choose(moves, scores, labels, allowed, frame, count_here)
    if unseen is not None:
        score = score + jnp.where(label >= 0, pick(unseen, jnp.maximum(label, 0)), 0)
        label = _guard.code_of(moves.tokens, label, bits)
    reads, needs = (_scores.of_move(move, x) for x in zip(*((x.frames, x.needs) for x in moves.all)))
    # The barrier makes XLA compute this once, although the walk reads single numbers of each frame.
    sure = _scores.confidence(moves, given.search, logits)
    return jax.lax.optimization_barrier((score, reads, needs, label, log_prob, sure))


def most_probable(moves, scores, labels, allowed, *_):
    """Returns the best move [B, K]: its score, number, label or -1, and the label's log-probability in the model alone.

    The arguments come from `_scores.scores` and `allowed`.
    """
    label_score, label = labels.best()
    log_prob = label_score if labels.bonus is None else labels.at(label)
    blanks, move = len(moves.blanks), jnp.zeros(label.shape, jnp.int32)
    best = jnp.full(label.shape, -jnp.inf, scores.dtype)
    for i in range(len(moves.all)):  # an argmax would be a kernel of its own on a GPU
        score = scores[..., i] if i < blanks else scores[..., i] + label_score
        score = jnp.where(allowed[..., i], score, -jnp.inf)
        better = (score > best) | (jnp.isnan(score) & ~jnp.isnan(best))
        move, best = jnp.where(better, i, move), jnp.maximum(best, score)
    return best, move, jnp.where(move >= blanks, label, -1), log_prob


def walk_to_label(static: Static, given: Given, carry: Carry, score, reads, needs, label, log_prob, confidence) -> Walk:
    """Follows the best moves up to the first label, or out of the window."""
    window, zeros = static.frames_at_once, jnp.zeros_like(carry.frame)
    sure = [jax.tree.map(lambda x, k=k: x[:, k], confidence) for k in range(window)]
    walk = Walk(zeros, carry.reached, carry.scores, zeros - 1, log_prob[:, 0], zeros, zeros, sure[0])
    for k in range(window):
        frame = carry.frame + k
        here = (walk.ahead == k) & (walk.label < 0) & (frame < given.lengths)
        reached = frame + needs[:, k] if static.moves.reach else walk.reached
        score_after, at = walk.score + score[:, k], zeros + k
        move = Walk(k + reads[:, k], reached, score_after, label[:, k], log_prob[:, k], at, reads[:, k], sure[k])
        walk = replace_rows(here, move, walk)
    return walk


def write(static: Static, given: Given, carry: Carry, walk: Walk):
    """Returns (the carry after the walk, the code of its label [B]); the networks have not read this label yet."""
    writes = walk.label >= 0
    going = carry.frame < given.lengths
    before = jnp.where(walk.at == 0, carry.count_here, 0)
    after = jnp.where(going, 0, carry.count_here)
    count_here = jnp.where(writes & (walk.reads == 0), before + 1, after)
    frame = carry.frame + walk.ahead
    if static.moves.token_first:  # the last label of a frame leaves it
        leaves = count_here >= static.moves.labels_per_frame
        frame, count_here = frame + leaves.astype(jnp.int32), jnp.where(leaves, 0, count_here)
    counts, at = carry.counts + writes.astype(jnp.int32), given.first + carry.frame + walk.at
    fields: dict[str, Any] = dict(frame=frame, count_here=count_here, counts=counts)
    fields |= dict(reached=walk.reached, scores=walk.score)
    new = dict(labels=walk.label, frames=at, durations=walk.reads, log_probs=walk.log_prob)
    new |= {} if walk.confidence is None else {"confidences": walk.confidence}
    # The barrier makes XLA compute the walk once; what follows reads no array that it replaces, so nothing is copied.
    fields, new = jax.lax.optimization_barrier((fields, new))
    code = new["labels"]
    if carry.networks.matches:
        new["labels"] = jnp.where(code >= 0, code % static.moves.tokens, code)
    places = np.arange(1, static.max_labels + 1, dtype=np.int32)[None]
    here = (places == fields["counts"][:, None]) & (new["labels"] >= 0)[:, None]
    fields |= {name: jnp.where(here, x[:, None], getattr(carry, name)) for name, x in new.items()}
    return carry._replace(**fields), code


def advance(static: Static, given: Given, carry: Carry, label) -> Carry:
    """Lets the networks read the new label [B], given by its code, where there is one."""

    def read(networks):
        after = _fusion.read(static, given, networks, jnp.where(label >= 0, label, 0))
        return replace_rows(label >= 0, after, networks)

    networks = jax.lax.cond(any_or_always(label >= 0), read, lambda networks: networks, carry.networks)
    return carry._replace(networks=networks)
