"""One step of beam search: `advance` the networks, `score` and `expand` hypotheses, `merge` equal ones, `keep_best`.

There are B utterances, W hypotheses of each, V tokens, C candidates, and at most L labels. All utterances step
together, each at its own frame. A hypothesis that has left the frame waits in the same beam. So the hypotheses of all
frames compete, and one that reads several frames at once needs no place of its own.

The networks of a hypothesis occupy one of the 2 W slots of its utterance. A new label moves them to a free slot, so
rows are written in place, pack by pack (`_packing`). The arrays of the joint network's scores are kept from step to
step for the same reason. For 128 utterances with an LSTM, selecting whole arrays took 2.5 ms a step, and filling new
ones took 0.5 ms.

Hypotheses of an utterance with equal predictor rows and states share one row of both networks. With a predictor that
sees two labels, this leaves a third of the joint network's rows.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt.decode import _beam_window, _fusion, _given, _guard, _scores
from jax_rnnt.decode._beam_state import (
    NEVER,
    BeamNodes,
    BeamStatic,
    Candidates,
    Carry,
    Expansion,
    NodeScores,
    Recent,
    as_bits,
)
from jax_rnnt.decode._fusion import Networks
from jax_rnnt.decode._gather import flat, hypothesis_rows, one_after_another, over_hypotheses, rows_at, take, take_each
from jax_rnnt.decode._given import Given
from jax_rnnt.decode._hashing import append_label, fingerprints
from jax_rnnt.decode._largest import largest, largest_sums
from jax_rnnt.decode._packing import any_or_always, compute_rows, empty_results, step_rows

STEPS = 32  # steps after which the new labels are copied into the beam's table
WAITING = 4  # at most one in this many utterances waits for a pack of the predictor to fill


def few_steps(static: BeamStatic, given: Given, carry: Carry) -> Carry:
    """Steps to the end of these frames, or as many times as it may before the new labels must be in the table."""
    beam, max_labels = carry.beam, static.max_labels
    room = min(STEPS, max_labels)
    itself = jnp.broadcast_to(jnp.arange(static.width, dtype=jnp.int32)[None], beam.counts.shape)
    origin = jnp.stack([itself, beam.counts, *(beam.written.shape[2] - 2) * [itself]], 2)
    recent = Recent(jnp.zeros_like(itself), jnp.repeat(origin[..., None], room + 1, 3))
    scored, nodes = functools.partial(score_rows, static, given), itself.size * static.frames_at_once
    results = empty_results(nodes, scored, given.encoder_out, carry.networks.rows)
    carry = carry._replace(recent=given.vary(recent), results=given.vary(results))

    def more(carry):
        return jnp.any((carry.frame < given.lengths) & (carry.recent.steps[:, 0] < room))

    carry = jax.lax.while_loop(more, functools.partial(step, static, given), carry)
    beam, (_, written) = carry.beam, carry.recent
    place = np.arange(max_labels, dtype=np.int32)[None, None]
    is_new = (place >= written[:, :, 1, -1:]) & (place < beam.counts[..., None])
    new = jnp.tile(written[..., :-1], -(-max_labels // room))[..., :max_labels]
    table = jnp.where(is_new[:, :, None], new, take(beam.written, written[:, :, 0, -1]))
    return carry._replace(beam=beam._replace(written=table), recent=None, results=None)


def step(static: BeamStatic, given: Given, carry: Carry) -> Carry:
    """Makes all moves of the hypotheses on each utterance's frame; the utterance goes on once none is left there."""
    ends = _beam_window.ends_of(static, given, carry)
    carry, active = advance(static, given, carry, ends)
    carry, scores = score(static, given, carry, ends, active)
    # After the barriers of this step nothing reads the old beam, so a GPU need not copy it.
    gains = gains_of(static, given, carry, scores)
    candidates = jax.lax.optimization_barrier(expand(static, carry, ends, active, scores, gains))
    alive = candidates.score > -jnp.inf
    if static.merge:
        candidates = merge(candidates)
    return keep_best(static, given, carry, scores, candidates, alive)


# ---------------------------------------------------------------------------------------------------- advance


def advance(static: BeamStatic, given: Given, carry: Carry, ends):
    """Lets networks of hypotheses on the frame read new labels; returns (carry, active [B, W]: which may move).

    New labels wait for others until a pack of the predictor is full or too few utterances can go on without. Utterances
    that are behind come first. Otherwise the last ones fall back further, and the steps at the end have few rows.
    """
    now, networks, lengths = carry.beam, carry.networks, given.lengths
    going = carry.frame < lengths
    here = now.frame == carry.frame[:, None] if ends is None else now.frame < ends[:, None]
    active = here & going[:, None] & (now.score > -jnp.inf)
    label = jnp.where(active, now.unread, -1)
    may_wait = WAITING * jnp.sum(jnp.any(label >= 0, 1)) < jnp.sum(going)
    source = first_equal(label >= 0, keys(networks, now.slot), label)
    lag = carry.frame - jnp.min(carry.frame, initial=NEVER, where=going)
    read = functools.partial(read_label, static, given)
    stepped, slot, networks = step_rows(read, networks, label, label >= 0, source, now.slot, may_wait, lag)
    unread = jnp.where(stepped, -1, now.unread)
    active &= ~over_hypotheses(jnp.logical_or, (label >= 0) & ~stepped)[:, None]
    unread, slot = jax.lax.optimization_barrier((unread, slot))
    return carry._replace(beam=now._replace(unread=unread, slot=slot), networks=networks), active


def read_label(static: BeamStatic, given: Given, networks: Networks, label) -> Networks:
    """Returns the rows of the networks after one more label [N]."""
    after, key = _fusion.read(static, given, networks, label), networks.key
    if key is not None and static.recurrent:
        key = jnp.stack(append_label((key[..., 0], key[..., 1]), label), 1)
    elif key is not None:
        key = fingerprints((after.rows, after.predictor, after.models))
    return after._replace(key=key)


def keys(networks: Networks, slot):
    """Returns the key [B, W, 2] of each hypothesis; None where rows are not packed."""
    return None if networks.key is None else take(networks.key, slot)


def first_equal(wanted, key, label=None):
    """For each row [B, W], the number (of all B W) of its utterance's first wanted row with the same key and label."""
    batch, width = wanted.shape
    rows = jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    if key is None:
        return rows
    identity = [key[..., 0], key[..., 1]] + ([] if label is None else [label])
    same = functools.reduce(jnp.logical_and, [x[:, :, None] == x[:, None] for x in identity]) & wanted[:, None]
    return jnp.where(wanted, jnp.where(same, rows[:, None], batch * width).min(-1), rows)


# ------------------------------------------------------------------------------------------------------ score


def score(static: BeamStatic, given: Given, carry: Carry, ends, active):
    """Returns (carry, `NodeScores`) after the joint network has run for the active hypotheses [B, W]."""
    networks, slot, bad_before = carry.networks, carry.beam.slot, carry.bad
    if ends is None:
        frame = jnp.broadcast_to(carry.frame[:, None], active.shape)
    else:
        slot, frame, active, bad_before = _beam_window.spread(static, ends, slot, carry.beam.frame, active, bad_before)
    shape = active.shape

    def score_pack(rows):
        encoder = hypothesis_rows(given.encoder_out, given.inside(frame), rows)
        return score_rows(static, given, encoder, hypothesis_rows(networks.rows, slot, rows))

    source = first_equal(active, keys(networks, slot), None if ends is None else frame)
    usual = active.size // (1 if static.recurrent else 4)
    results, row = compute_rows(flat(active), flat(source), usual, score_pack, carry.results)
    moves, labels, bad, confidence = results
    moves, bad = (rows_at(x, row).reshape(*shape, *x.shape[1:]) for x in (moves, bad))
    row = row.reshape(shape)
    model, breaks = (labels, row), None
    if _fusion.adds(given.search):
        labels, added = rows_at(labels, flat(row)), hypothesis_rows(networks.bonus, slot, None)
        if networks.matches:
            matches = jax.tree.map(lambda x: hypothesis_rows(x, slot, None), networks.matches)
            below = _guard.shortfalls(static.moves, flat(moves), labels)
            total, _, breaks = _guard.added(given.search.guard, matches, below, greedy=False)
            added = added + jnp.where(_scores.is_blank(static.moves, total), 0, total)
        labels = labels + added
        bad |= ~(jnp.max(labels, -1) < jnp.inf).reshape(shape)
        labels = jnp.where(labels < jnp.inf, labels, -jnp.inf)
        row = jnp.arange(active.size, dtype=jnp.int32).reshape(shape)
    carry = carry._replace(results=results)
    bad = bad_before | (bad & active)
    return carry, NodeScores(frame, active, moves, labels, row, *model, confidence, bad, breaks)


def score_rows(static: BeamStatic, given: Given, encoder, rows):
    """Returns (scores of moves [N, moves], of labels [N, V], whether logits are NaN or +inf [N], confidence [N])."""
    logits = _given.logits_of(static, given, encoder, rows)
    moves, labels = _scores.scores(static.moves, given, logits)
    # This costs little: the softmax computes the maximum of the logits anyhow.
    bad = functools.reduce(jnp.logical_or, [jnp.isnan(moves[:, i]) for i in range(moves.shape[1])])
    bad |= ~(jnp.max(logits, -1).astype(static.dtype) < jnp.inf)
    labels = labels.rows()
    # Rows stay until a later step computes them again, and +inf of a bad utterance could meet -inf of another one.
    sure = _scores.confidence(static.moves, given.search, logits)
    return moves, jnp.where(labels < jnp.inf, labels, -jnp.inf), bad, sure


# ----------------------------------------------------------------------------------------------------- expand


def gains_of(static: BeamStatic, given: Given, carry: Carry, scores: NodeScores):
    """Returns the log-probabilities [B, W K, moves] of allowed moves, without those of their labels; else -inf."""
    now, later = carry.beam, static.frames_at_once - 1
    may_write = (now.count_here < static.moves.labels_per_frame) & (now.counts < static.max_labels)
    if later:  # no label is on a later frame of the window yet
        more = jnp.broadcast_to((now.counts < static.max_labels)[..., None], (*now.counts.shape, later))
        may_write = jnp.concatenate([may_write[..., None], more], 2).reshape(scores.active.shape)
    allowed = _scores.allowed(static, given, scores.frame, may_write)
    return jnp.where(allowed & scores.active[..., None] & ~jnp.isnan(scores.moves), scores.moves, -jnp.inf)


def expand(static: BeamStatic, carry: Carry, ends, active, scores: NodeScores, gains) -> Candidates:
    """Returns all candidates for the next beam."""
    now, blanks = carry.beam, len(static.moves.blanks)
    moves = [gains[..., i] for i in range(gains.shape[2])]

    none = jnp.zeros(active.shape, jnp.int32)
    waits = jnp.where(active, -jnp.inf, 0).astype(static.dtype)
    itself = jnp.broadcast_to(jnp.arange(static.width, dtype=jnp.int32)[None], active.shape)
    nodes = BeamNodes(now.score, now.path_score, now.frame, now.counts, now.count_here, now.key)
    node: Any = None
    begin = now.score
    if ends is None:
        kinds = [Expansion(itself, gain, none - 1) for gain in (waits, *moves[:blanks])]
    else:
        nodes, node = _beam_window.nodes_of_window(static, ends, now, moves[:blanks])
        of_each = nodes.score.shape[1] // static.width
        kinds = [Expansion(itself * of_each, waits, none - 1)]
        behind = [itself * of_each + static.frames_at_once + i for i in range(static.moves.longest_blank)]
        kinds += [Expansion(x, jnp.where(active, 0, -jnp.inf).astype(static.dtype), none - 1) for x in behind]
        begin = take(nodes.score, jnp.broadcast_to(node, scores.row.shape))
    for gain in moves[blanks:]:
        parent, label, best = largest_sums(scores.labels, scores.row, begin + gain, static.width)
        gain = take(gain, parent) + best
        kinds.append(Expansion(parent if node is None else rows_at(node[0], parent), gain, label))
    move = jax.tree.map(lambda *x: one_after_another(x), *kinds)

    score, path_score, frame, counts, count_here, key = take_each(tuple(nodes), move.parent)
    writes, reads = move.label >= 0, static.reads[None]
    written = writes.astype(jnp.int32)
    return Candidates(
        score=score + move.gain,
        path_score=path_score + move.gain,
        parent=move.parent,
        label=move.label,
        frame=frame + reads,
        counts=counts + written,
        count_here=jnp.where(reads == 0, count_here + written, 0),
        key=tuple(jnp.where(writes, x, y) for x, y in zip(append_label(key, move.label), key)),
        bad=jnp.broadcast_to(over_hypotheses(jnp.logical_or, scores.bad)[:, None], writes.shape),
    )


# ------------------------------------------------------------------------------------------------------ merge


def merge(candidates: Candidates) -> Candidates:
    """Gives the summed probability to the candidate with the best path among equal ones; the others become dead."""
    total, path_total = merged(candidates.score, candidates.path_score, candidates.identity)
    return candidates._replace(score=total, path_score=path_total)


def merged(score, path, identity):
    """Returns (scores, path scores) [B, C] after merging candidates with equal arrays [B, C] in `identity`."""

    def add(score, path, identity):
        alive = score > -jnp.inf
        path = jnp.where(alive, path, -jnp.inf)
        differ = functools.reduce(jnp.bitwise_or, [x[:, :, None] ^ x[:, None] for x in identity])
        apart = jnp.where(differ == 0, 0, -jnp.inf).astype(score.dtype)
        peak = (apart + score[:, None]).max(-1)
        peak = jnp.where(jnp.isneginf(peak), 0, peak)
        weight = jnp.exp(score - peak)  # equal candidates have equal peaks
        total = jnp.where(apart == 0, weight[:, None], 0).sum(-1)
        # The sum over one path is that path's score, without rounding.
        total = jnp.where(total > 1, peak + jnp.log(total), peak)
        first = jnp.tri(score.shape[1], k=-1, dtype=bool)[None]  # of two equal paths, the first one wins
        better = (path[:, None] > path[:, :, None]) | ((path[:, None] == path[:, :, None]) & first)
        rivals = jnp.where((apart == 0) & better, 1, 0).astype(score.dtype).sum(-1)
        return jnp.where(alive & (rivals == 0), total, -jnp.inf), path

    # Outside a branch, XLA for CPUs would compute the identities, including hashes, again for each pair.
    some = any_or_always(score > -jnp.inf)
    return jax.lax.cond(some, add, lambda score, path, _: (score, path), score, path, identity)


# -------------------------------------------------------------------------------------------------- keep_best


def keep_best(static: BeamStatic, given: Given, carry: Carry, scores: NodeScores, candidates, alive) -> Carry:
    """Makes the W best candidates the next beam; `alive` [B, C] tells which had a path before they were merged."""
    score, chosen = largest(candidates.score, static.width)
    if given.threshold is not None:
        worst = score[:, :1] - jnp.asarray(given.threshold, static.dtype)
        score = jnp.where(score >= worst, score, -jnp.inf)
    reached = carry.reached
    if static.moves.reach:
        needed = frames_needed(static, candidates, alive, chosen)
        reached = jnp.maximum(reached, jnp.where(score > -jnp.inf, needed, 0).max(-1))
    reads = rows_at(jnp.asarray(static.reads), chosen)
    moves = take_each(candidates._replace(score=None), chosen)._replace(score=score)
    beam, written = moved(static, given, carry, scores, moves, reads)
    steps = carry.recent.steps + (carry.frame < given.lengths)[:, None].astype(jnp.int32)
    return carry._replace(reached=reached, beam=beam, recent=Recent(steps, written), bad=moves.bad)


def moved(static: BeamStatic, given: Given, carry: Carry, scores: NodeScores, moves: Candidates, reads):
    """Returns (beam, `Recent.written`) after these moves [B, W] of the hypotheses, which read `reads` [B, W] frames."""
    beam, parent, label, node = carry.beam, moves.parent, moves.label, moves.parent
    if static.frames_at_once > 1:
        of_each = static.frames_at_once + static.moves.longest_blank
        parent, place = parent // of_each, parent % of_each
        node = parent * static.frames_at_once + jnp.minimum(place, static.frames_at_once - 1)
    slot, unread = take_each((beam.slot, beam.unread), parent)
    writes, code = label >= 0, label
    if scores.breaks is not None:
        bits = scores.breaks.at[take(scores.row, node), label].get(mode="clip")
        code = label + static.moves.tokens * bits
    before = carry.recent.written
    room = before.shape[-1] - 1
    places = np.arange(room + 1, dtype=np.int32)[None, None]
    here = (places == (moves.counts[..., None] - 1) % room) & writes[..., None]
    row = take(scores.model_row, node)
    numbers = [scores.model_labels.at[row, label].get(mode="clip")]
    if scores.confidence is not None:
        numbers.append(rows_at(scores.confidence, row))
    new = jnp.stack([label, given.first[:, None] + moves.frame - reads, reads], 2)
    new = jnp.concatenate([new, as_bits(jnp.stack(numbers, 2))], 2)
    beam = beam._replace(
        score=moves.score,
        path_score=moves.path_score,
        frame=moves.frame,
        counts=moves.counts,
        count_here=moves.count_here,
        unread=jnp.where(writes, code, unread),
        slot=slot,
        key=moves.key,
    )
    return beam, jnp.where(here[:, :, None], new[..., None], take(before, parent))


def frames_needed(static: BeamStatic, candidates: Candidates, alive, chosen):
    """Returns the frames [B, W] that an utterance needs for the moves of chosen candidates and of those merged there.

    A part of a stream does not know whether the utterance ends with it, so it makes moves that an exact end may turn
    out to forbid: those that read beyond the last frame, or that may not be the last one. The largest number of frames
    that a kept hypothesis needs, `Carry.reached`, shows the last part whether a search of the whole utterance at once
    would have given the same result. A score is the sum over all alignments that were merged there, so the alignments
    that lose count as the one that stays does.
    """
    needs = np.repeat([needs for _, needs in static.kinds], static.width).astype(np.int32)[None]
    reads = static.reads[None]
    frame = candidates.frame
    needed = take(jnp.where(needs > 0, frame - reads + needs, 0), chosen)
    longer = needs > np.maximum(reads, 1)
    if static.merge and longer.any():  # a merged candidate led to the same frame, and needs one more than that
        equal = [take(x, chosen)[:, :, None] == x[:, None] for x in candidates.identity]
        equal = functools.reduce(jnp.logical_and, equal) & (alive & longer)[:, None]
        needed = jnp.where(equal.any(-1), jnp.maximum(needed, take(frame, chosen) + 1), needed)
    return needed
