"""Beam search: the N most probable label sequences, each a sum over its alignments.

B utterances, W hypotheses of each, V tokens, C candidates, L labels at most. One `lax.while_loop` steps all utterances
together, each at its own frame. A step takes the hypotheses that stand on the frame of their utterance, runs the
predictor where they have a new label, and expands them by every move of the loss. Hypotheses that have left the frame
wait in the same pool. Candidates with equal labels on the same frame are one hypothesis: their probabilities are added.
The W best of all make the next pool. Once none is left on the frame, the utterance goes on to the next frame on which
one waits. So hypotheses of all frames compete, and a hypothesis that reads several frames at once needs no place of its
own.

On a CPU time is rows of the networks, so rows are packed (`packs`). Hypotheses of an utterance whose predictors have
equal rows and states share one row of both networks: with a predictor that sees two labels, a third of the joint's rows
are left. Utterances with new labels may wait for others to fill a pack of the predictor. Neither changes a result.

Networks lie in 2 W slots of an utterance. A new label goes to a slot that no live hypothesis has, so rows are written
in place, pack by pack: nothing is selected, copied or filled. The arrays of the joint network's scores stay from step
to step for the same reason. Of a step of 128 utterances with an LSTM, selections of whole arrays took 2.5 ms, and fills
0.5.

Labels are compared by hashes of 64 bits, and so are predictors: by all labels where the state holds floating-point
numbers, else by rows and state. Two that differ are taken for one with a probability of 2^-64.
"""

from __future__ import annotations

import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks
from jax_rnnt.decode import _predictor
from jax_rnnt.decode._predictor import same_state
from jax_rnnt.decode._search import (
    Hypotheses,
    beyond_the_end,
    checked,
    compute_rows,
    fingerprints,
    flat,
    largest_sums,
    on_devices,
    packs,
    prepare,
    room,
    rows_at,
    rows_of,
    scrambled,
    step_rows,
    take,
)
from jax_rnnt.emissions._softmax import row_sum

LAST = np.iinfo(np.int32).max  # later than any frame
WAITING = 4  # at most one in so many utterances waits for a pack of the predictor to fill


class Beam(typing.NamedTuple):
    """The hypotheses of all utterances; a dead one has the score -inf."""

    score: jax.Array  # [B, W]: log of the sum over alignments, with fusion
    path: jax.Array  # [B, W]: of its best alignment
    frame: jax.Array  # [B, W]: the next one, in this part
    counts: jax.Array  # [B, W]
    symbols: jax.Array  # [B, W]: labels on that frame
    pending: jax.Array  # [B, W]: the last label, if the networks have not seen it yet, else -1
    slot: jax.Array  # [B, W]: where its networks are
    hash: jax.Array  # [B, W, 2]: of the labels
    written: jax.Array  # [B, W, 3, L]: labels, their frames and durations


class Networks(typing.NamedTuple):
    """Leaves [B, 2 W, ...], one row a slot: after the last label that is not pending of each hypothesis of the slot."""

    rows: jax.Array  # [B, 2 W, P]
    predictor: Any
    lm: Any
    fused: Any  # [B, 2 W, V]: added to the score of each next label; None without fusion
    alike: Any  # [B, 2 W, 2]: equal where the rest is equal; None where rows are not packed


class Carry(typing.NamedTuple):
    frame: jax.Array  # [B]: of the utterance
    reached: jax.Array  # [B]: frames that an exact end needs, in this part, as no kept hypothesis has other moves
    beam: Beam
    networks: Networks
    scores: Any  # of the joint network's last rows; kept for their arrays


class Stream(typing.NamedTuple):
    """Where a part of a stream ended; the beam's frames count from the start of the next part."""

    first: jax.Array  # [B]: frames of the stream before the next part
    bad: jax.Array  # [B]: NaN has been met
    reached: jax.Array  # [B]: frames of the next part that an exact end after it needs, for the same search
    beam: Beam
    networks: Networks


def beam(
    loss,
    joint,
    predictor,
    encoder_out: jax.Array,
    lengths: jax.Array,
    max_labels: int,
    width: int,
    *,
    max_symbols: int = 10,
    merge: bool = True,
    threshold: float | jax.Array | None = None,
    length_norm: float = 0.0,
    lm=None,
    lm_weight: float | jax.Array | None = None,
    ilm_weight: float | jax.Array = 0.0,
    start: int | None = None,
    exact_end: bool | jax.Array = False,
    state: Any = None,
) -> Hypotheses:
    """The N best label sequences of each utterance, by time-synchronous beam search.

    B utterances, T frames, E and P the widths of encoder and predictor rows, V classes. As in `greedy`, a move is an
    arc of the loss with its log-probability. Hypotheses with equal labels are merged: their score is the log of the
    summed probability of their alignments. With a beam that loses none, and `exact_end`, it is minus the loss of these
    labels.

    Parameters
    ----------
    loss, joint, predictor, encoder_out, lengths, start, exact_end
        As for `greedy`. The predictor runs on B `width` sequences.
    max_labels : int
        Labels that a hypothesis has room for, over the whole stream.
    width : int
        Hypotheses that are kept, N.
    max_symbols : int, default 10
        Labels that one frame may emit.
    merge : bool, default True
        False: alignments of equal labels stay apart. With `width` 1 this is `greedy`.
    threshold : float or scalar Array, optional
        Drops hypotheses of which the score is more than this, in nats, below the best. Time follows the hypotheses that
        are left.
    length_norm : float, default 0.0
        Ranks the result by score / (labels + 1)^length_norm; 0: by score. Scores and search stay as they are.
    lm : Predictor, optional
        A language model: ``step(state, labels) -> (log_probs [N, V], state)`` with a column for every token (those of
        blanks are not read). It gets its own `start`; without one, that of the predictor.
    lm_weight : float or scalar Array
        Adds lm_weight times the language model's log-probability to each label (shallow fusion); -inf forbids the
        label. 0 adds nothing to any label; a Python 0 skips the network. `lm` needs it.
    ilm_weight : float or scalar Array
        Subtracts ilm_weight times the log-probability of each label in the internal language model: the label softmax
        of ``joint(0, predictor row)``. If `encoder_out` was projected before, its bias belongs to the joint. For
        `HATLoss` it is the model's own (Variani et al. 2020); for others, without blanks, an estimate (Meng et al.
        2021). A Python 0 skips its network.
    state : pytree, optional
        `Hypotheses.state` of the previous part of a stream. Labels, frames and scores are those of the whole stream.

    Returns
    -------
    Hypotheses
        The `width` best of each utterance, best first.

    Raises
    ------
    TypeError, ValueError
        As for `greedy`; a language model of another vocabulary.

    See Also
    --------
    mwer_loss : Training with N-best lists.

    References
    ----------
    Graves, "Sequence Transduction with Recurrent Neural Networks", 2012, arXiv:1211.3711.
    Saon, Tüske and Audhkhasi, "Alignment-Length Synchronous Decoding for RNN Transducer", ICASSP 2020.
    Meng et al., "Internal Language Model Estimation for Domain-Adaptive End-to-End Speech Recognition", 2021,
    arXiv:2011.01991.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 3)), 1, start=0)
    >>> frames = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))
    >>> found = decode.beam(RNNTLoss(blank=0), jnp.add, predictor, frames, jnp.array([1]), max_labels=2, width=3)
    >>> found.labels[0].tolist(), [round(float(x), 3) for x in jnp.exp(found.scores[0])]
    ([[-1, -1], [1, -1], [2, -1]], [0.5, 0.15, 0.1])
    """
    function = "beam"
    most, width = _checks.positive(function, "max_labels", max_labels), _checks.positive(function, "width", width)
    merge = _checks.boolean(function, "merge", merge)
    if threshold is not None:
        threshold = _checks.scalar(function, "threshold", threshold)
        if isinstance(threshold, float) and not threshold >= 0:
            raise ValueError(f"{function}: threshold must be 0 or more, got {threshold!r}.")
    if lm is not None and lm_weight is None:
        raise ValueError(f"{function}: lm_weight must be given with lm, got None.")
    lm_weight = 0.0 if lm_weight is None else lm_weight
    weights = {"length_norm": length_norm, "lm_weight": lm_weight, "ilm_weight": ilm_weight}
    for name, x in weights.items():
        _checks.scalar(function, name, x)
    if lm is None and not _checks.is_zero(lm_weight):
        raise ValueError(f"{function}: lm must be given with lm_weight={lm_weight!r}, got None.")
    lm = None if _checks.is_zero(lm_weight) else lm
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)
    sizes = most, width, max_symbols, merge, threshold
    fusion = length_norm, lm, lm_weight, ilm_weight

    def run(encoder_out, lengths, exact_end, state):
        networks = loss, joint, predictor
        return _beam(function, *networks, encoder_out, lengths, exact_end, state, start, *sizes, *fusion)

    return on_devices(run, encoder_out, lengths, exact_end, state)


def _beam(
    function, loss, joint, predictor, encoder_out, lengths, exact_end, state, start,
    most, width, max_symbols, merge, threshold, length_norm, lm, lm_weight, ilm_weight,
):  # fmt: skip
    search, start, labels, rows, network = prepare(
        function, loss, joint, predictor, encoder_out, lengths, max_symbols, start, width
    )
    symbols, lengths, dtype, predictor = search.symbols, search.lengths, search.dtype, search.predictor
    batch = lengths.shape[0]
    tokens = search.classes - symbols.emission.durations

    # ---- the networks after a label

    internal = not _checks.is_zero(ilm_weight)

    def fused(log_probs, rows):
        """[N, V]: what fusion adds to the score of each label."""
        total = jnp.zeros((rows.shape[0], tokens), dtype)
        if log_probs is not None:
            weight = jnp.asarray(lm_weight, dtype)
            forbids = jnp.isneginf(log_probs) & (weight != 0)
            total = jnp.where(forbids, -jnp.inf, total + weighted(weight, log_probs.astype(dtype)))
        if internal:
            silence = jnp.zeros((rows.shape[0], search.encoder_out.shape[-1]), search.encoder_out.dtype)
            logits = search.joint(silence, rows).astype(dtype)[:, :tokens]
            logits = jnp.where(symbols.is_blank(logits), -jnp.inf, logits)
            own = row_sum(logits).log_probability(logits) if symbols.emission.normalize else logits
            total = total - weighted(jnp.asarray(ilm_weight, dtype), jnp.where(jnp.isneginf(own), 0, own))
        return total

    def bundle(rows, network, lm_state, log_probs, alike):
        return Networks(rows, network, lm_state, fused(log_probs, rows) if fuses else None, alike)

    def scores(encoder, rows):
        """(log-probabilities of moves [N, ...], of labels [N, V], whether logits are NaN or +inf [N])"""
        logits = search.joint(encoder, rows)
        moves, labels = symbols.scores(logits)
        # The softmax has the maximum of the logits anyhow.
        spoiled = jnp.isnan(moves).any(-1) | ~(jnp.max(logits, -1).astype(dtype) < jnp.inf)
        # Rows stay until a later step computes them again: +inf of a spoiled utterance could meet -inf of another one.
        return moves, jnp.where(labels < jnp.inf, labels, -jnp.inf), spoiled

    fuses = lm is not None or internal
    log_probs, lm_state = None, None
    if lm is not None:
        lm = _predictor.in_evaluation(lm)
        lm_start = _predictor.own_start(function, "lm", lm)
        if lm_start is None:
            name = "start, by default that of the predictor, of lm"
            lm_start = _predictor.start_label(function, name, start, _predictor.own_symbols(lm))
        _predictor.check_symbols(function, "lm", lm, labels)
        log_probs, lm_state = _predictor.begin(function, "lm", lm, batch * width, lm_start)
        if log_probs.shape[-1] != tokens:
            expected = f"log_probs [N, V] with V = {tokens}, the tokens of the joint network"
            raise ValueError(f"{function}: lm must make {expected}, got {log_probs.shape}.")
    # Hypotheses seldom share rows where the state holds more than labels: then only if all their labels are equal.
    recurrent = not all(jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves((network, lm_state)))
    usual = batch * width // (1 if recurrent else 4)
    same = jnp.zeros((batch * width, 2), jnp.int32) if packs(batch * width) else None
    networks = bundle(rows, network, lm_state, log_probs, same)
    networks = jax.tree.map(lambda x: x.reshape(batch, width, *x.shape[1:]), networks)
    networks = jax.tree.map(lambda x: jnp.concatenate([x, x], 1), networks)

    def alike(networks, slot):
        return None if networks.alike is None else take(networks.alike, slot)

    def after_label(networks, label):
        rows, network = predictor.step(networks.predictor, label)
        log_probs, lm_state = (None, None) if lm is None else lm.step(networks.lm, label)
        same = networks.alike
        if same is not None and recurrent:
            same = jnp.stack(hashed((same[:, 0], same[:, 1]), label), 1)
        elif same is not None:
            same = fingerprints((rows, network, lm_state))
        return bundle(rows, network, lm_state, log_probs, same)

    # ---- the beam at the start

    zeros = jnp.zeros(batch, jnp.int32)
    own = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    none = jnp.zeros((batch, width), jnp.int32)
    first = jnp.where(jnp.arange(width) == 0, 0, -jnp.inf).astype(dtype)
    alone = jnp.broadcast_to(first, (batch, width))
    empty = jnp.full((batch, width, 3, most), -1, jnp.int32)
    hashes = jnp.zeros((batch, width, 2), jnp.int32)
    start_beam = Beam(alone, alone, none, none, none, none - 1, own, hashes, empty)
    fresh = Stream(zeros, jnp.zeros(batch, bool), zeros, start_beam, networks)
    if state is None:
        state = fresh
    else:
        same_state(function, "state of beam", fresh, state)
    beyond = beyond_the_end(function, symbols, exact_end, state.reached, lengths)
    ends_here = exact_end if isinstance(exact_end, bool) else exact_end[:, None]
    # Of each candidate: what its move needs, and whether it needs more than it reads.
    needs = np.repeat([0, *(move.needs for move in symbols.moves)], width).astype(np.int32)[None]
    longer = needs > np.repeat([0, *(max(move.frames, 1) for move in symbols.moves)], width)[None]

    # ---- one step

    def step(carry_and_bad):
        carry, bad = carry_and_bad
        now = carry.beam
        going = carry.frame < lengths
        live = now.score > -jnp.inf
        active = (now.frame == carry.frame[:, None]) & going[:, None] & live
        # New labels wait for others, until a pack of the predictor is full or too few utterances go on without. Those
        # that are behind come first: else the last ones fall back, and steps at the end have few rows.
        label = jnp.where(active, now.pending, -1)
        waits = WAITING * jnp.sum(jnp.any(label >= 0, 1)) < jnp.sum(going)
        maker = first_alike(label >= 0, alike(carry.networks, now.slot), label)
        turn = carry.frame - jnp.min(carry.frame, initial=LAST, where=going)
        arguments = live, after_label, carry.networks, label, waits, turn
        stepped, slot, networks = step_rows(label >= 0, maker, now.slot, *arguments)
        pending = jnp.where(stepped, -1, now.pending)
        active &= ~jnp.any(active & (pending >= 0), 1)[:, None]

        frame = jnp.broadcast_to(carry.frame[:, None], own.shape)

        def scores_of(rows):
            encoder = rows_of(search.encoder_out, search.inside(frame), rows)
            return scores(encoder, rows_of(networks.rows, slot, rows))

        maker = first_alike(active, alike(networks, slot))
        made, row = compute_rows(flat(active), flat(maker), usual, scores_of, carry.scores)
        moves, labels, spoiled = made
        moves, spoiled = (rows_at(x, row).reshape(*own.shape, *x.shape[1:]) for x in (moves, spoiled))
        row = row.reshape(own.shape)
        if fuses:
            labels = rows_at(labels, flat(row)) + rows_of(networks.fused, slot, None)
            spoiled |= jnp.isnan(jnp.max(labels, -1)).reshape(own.shape)
            labels = jnp.where(labels < jnp.inf, labels, -jnp.inf)
            row = jnp.arange(batch * width, dtype=jnp.int32).reshape(own.shape)
        bad |= jnp.any(spoiled & active, -1)
        may_write = (now.symbols < symbols.labels_per_frame) & (now.counts < most)
        allowed = symbols.allowed(frame, lengths[:, None], may_write, ends_here) & active[..., None]
        moves = jnp.where(allowed & ~jnp.isnan(moves), moves, -jnp.inf)
        moves = [moves[..., i] for i in range(len(symbols.moves))]

        # Candidates [B, C]: those that wait for their frame, blanks, and labels, of which no more than W can stay.
        later = jnp.where(active, -jnp.inf, 0).astype(dtype)
        found = [(own, later, none - 1, none)]
        for move, gain in zip(symbols.blanks, moves):
            found.append((own, gain, none - 1, jnp.full_like(own, move.frames)))
        for move, gain in zip(symbols.labels, moves[len(symbols.blanks) :]):
            parent, label, score = largest_sums(labels, row, now.score + gain, width)
            found.append((parent, take(gain, parent) + score, label, jnp.full_like(parent, move.frames)))
        parent, gain, label, reads = (jnp.concatenate(x, 1) for x in zip(*found))

        score, path = (x + gain for x in take_each((now.score, now.path), parent))
        own_hash = now.hash[..., 0], now.hash[..., 1]
        frame, count, on_frame, *key = take_each((now.frame, now.counts, now.symbols, *own_hash), parent)
        writes = label >= 0
        frame, count = frame + reads, count + writes.astype(jnp.int32)
        on_frame = jnp.where(reads == 0, on_frame + writes.astype(jnp.int32), 0)
        key = [jnp.where(writes, new, old) for new, old in zip(hashed(key, label), key)]
        places, alive = (frame, on_frame, *key), score > -jnp.inf
        if merge:
            score, path = merged(score, path, places)
        score, chosen = jax.lax.top_k(score, width)
        if threshold is not None:
            score = jnp.where(score >= score[:, :1] - jnp.asarray(threshold, dtype), score, -jnp.inf)
        reached = carry.reached
        if symbols.reach:
            need = take(jnp.where(needs > 0, frame - reads + needs, 0), chosen)
            if merge and longer.any():  # what is merged with a kept one counts too
                equal = [take(x, chosen)[:, :, None] == x[:, None] for x in places]
                equal = functools.reduce(jnp.logical_and, equal) & (alive & longer)[:, None]
                need = jnp.where(equal.any(-1), jnp.maximum(need, take(frame, chosen) + 1), need)
            reached = jnp.maximum(reached, jnp.where(score > -jnp.inf, need, 0).max(-1))
        path = take(path, chosen)
        parent, label, reads, frame, count, on_frame, *key = take_each(
            (parent, label, reads, frame, count, on_frame, *key), chosen
        )
        slot, pending = take_each((slot, pending), parent)
        writes = label >= 0
        here = (jnp.arange(most, dtype=jnp.int32)[None, None] == count[..., None] - 1) & writes[..., None]
        new = jnp.stack([label, state.first[:, None] + frame - reads, reads], 2)
        written = jnp.where(here[:, :, None], new[..., None], take(now.written, parent))
        pending = jnp.where(writes, label, pending)
        beam = Beam(score, path, frame, count, on_frame, pending, slot, jnp.stack(key, -1), written)

        # The frame of the utterance stays as long as a hypothesis stands on it.
        first = jnp.where(score > -jnp.inf, frame, LAST).min(-1)
        return Carry(jnp.where(carry.frame < lengths, first, carry.frame), reached, beam, networks, made), bad

    def running(carry_and_bad):
        return jnp.any(carry_and_bad[0].frame < lengths)

    now = state.beam
    frame = jnp.where(now.score > -jnp.inf, now.frame, LAST).min(-1)
    made = room(batch * width, usual, scores, search.encoder_out, networks.rows)
    carry = Carry(frame, state.reached, now, state.networks, made)
    carry = search.vary((carry, state.bad | search.bad | beyond))
    (_, reached, now, networks, _), bad = jax.lax.while_loop(running, step, carry)

    part = now._replace(frame=now.frame - lengths[:, None])
    after = Stream(state.first + lengths, bad, reached - lengths, part, networks)
    if merge:  # moves that read beyond the last frame by different numbers of frames end here alike
        score, path = merged(now.score, now.path, (now.hash[..., 0], now.hash[..., 1]))
        now = now._replace(score=score, path=path)
    norm = jnp.asarray(length_norm, dtype)
    ranks = now.score if _checks.is_zero(length_norm) else now.score / (now.counts + 1).astype(dtype) ** norm
    _, order = jax.lax.top_k(ranks, width)
    score, count = take(now.score, order), take(now.counts, order)
    written = take(now.written, order)
    score = jnp.where(bad[:, None], jnp.nan, score)
    dead = ~(score > -jnp.inf)
    count = jnp.where(dead, 0, count)
    labels, times, durations = (jnp.where(dead[..., None], -1, written[:, :, i]) for i in range(3))
    return Hypotheses(labels, times, durations, count, score, count == most, after)


def weighted(weight, x):
    """weight x, and 0 for the weight 0 whatever x is. Its derivative by the weight is x where x is finite."""
    return weight * jnp.where((weight == 0) & ~jnp.isfinite(x), 0, x)


def first_alike(wanted, alike, label=None):
    """[B, W], of all B W rows: the first wanted one of this utterance with the networks, and the label, of this one."""
    batch, width = wanted.shape
    rows = jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    if alike is None:
        return rows
    parts = [alike[..., 0], alike[..., 1]] + ([] if label is None else [label])
    same = functools.reduce(jnp.logical_and, [x[:, :, None] == x[:, None] for x in parts]) & wanted[:, None]
    return jnp.where(wanted, jnp.where(same, rows[:, None], batch * width).min(-1), rows)


def take_each(arrays, index):
    """`take` of arrays of one shape, by one gather."""
    taken = take(jnp.stack([x.astype(arrays[-1].dtype) for x in arrays], 2), index)
    return [taken[:, :, i] for i in range(len(arrays))]


def hashed(key, label):
    """The two hashes [...] of the labels behind `key`, two arrays [...], and of one more label [...]."""
    labels = (label + 1).astype(jnp.uint32)
    made = (scrambled(x.astype(jnp.uint32) ^ labels * np.uint32(y)) for x, y in zip(key, (0x9E3779B1, 0x27D4EB2F)))
    return [x.astype(jnp.int32) for x in made]


def merged(score, path, places):
    """(scores, paths) [B, C]: of equal candidates the one with the best path has the sum, the others are dead."""

    def add(score, path, places):
        alive = score > -jnp.inf
        path = jnp.where(alive, path, -jnp.inf)
        differ = functools.reduce(jnp.bitwise_or, [x[:, :, None] ^ x[:, None] for x in places])
        apart = jnp.where(differ == 0, 0, -jnp.inf).astype(score.dtype)
        peak = (apart + score[:, None]).max(-1)
        peak = jnp.where(jnp.isneginf(peak), 0, peak)
        weight = jnp.exp(score - peak)  # equal candidates have equal peaks
        total = jnp.where(apart == 0, weight[:, None], 0).sum(-1)
        # With one path the sum is that path's, without rounding.
        total = jnp.where(total > 1, peak + jnp.log(total), peak)
        first = jnp.tri(score.shape[1], k=-1, dtype=bool)[None]  # of two equal paths
        better = (path[:, None] > path[:, :, None]) | ((path[:, None] == path[:, :, None]) & first)
        rivals = jnp.where((apart == 0) & better, 1, 0).astype(score.dtype).sum(-1)
        return jnp.where(alive & (rivals == 0), total, -jnp.inf), path

    # Outside a branch XLA would compute the places, hashes among them, again for each pair.
    return jax.lax.cond(jnp.any(score > -jnp.inf), add, lambda score, path, _: (score, path), score, path, places)
