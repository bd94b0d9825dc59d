"""One step of beam search: `advance` the networks, `score` and `expand` hypotheses, `merge` equal ones, `keep_best`.

B utterances, W hypotheses of each, V tokens, C candidates, L labels at most. All utterances step together, each at its
own frame. A hypothesis that has left the frame waits in the same beam, so those of all frames compete, and one that
reads several frames at once needs no place of its own.

The networks of a hypothesis occupy one of 2 W slots of its utterance. A new label moves them to a free slot, so rows
are written in place, pack by pack (`_packing`). The arrays of the joint network's scores are kept from step to step for
the same reason. For 128 utterances with an LSTM, selecting whole arrays took 2.5 ms a step, and filling new ones 0.5.

Hypotheses of an utterance with equal predictor rows and states share one row of both networks: with a predictor that
sees two labels, a third of the joint network's rows are left.
"""

from __future__ import annotations

import functools
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _pytree
from jax_rnnt.decode._gather import flat, hypothesis_rows, one_after_another, over_hypotheses, rows_at, take, take_each
from jax_rnnt.decode.search import _fusion
from jax_rnnt.decode.search._fusion import Fusion, Networks
from jax_rnnt.decode.search._hashing import append_label, fingerprints
from jax_rnnt.decode.search._largest import largest, largest_sums
from jax_rnnt.decode.search._packing import any_or_always, compute_rows, empty_results, packs, step_rows
from jax_rnnt.decode.search._problem import Problem

NEVER = np.iinfo(np.int32).max  # later than any frame
STEPS = 32  # after so many, new labels go into the table of all
WAITING = 4  # at most one in so many utterances waits for a pack of the predictor to fill


class Rules(typing.NamedTuple):
    """What stays the same from step to step."""

    problem: Problem
    fusion: Fusion
    recurrent: bool  # a state holds floating-point numbers, so hypotheses seldom share networks
    first: jax.Array  # [B]: frames of the stream before these
    width: int
    max_labels: int
    merge: bool
    threshold: Any
    window: int = 1  # K

    @property
    def rows(self):
        return self.first.shape[0] * self.width

    @property
    def nodes(self):
        """Rows of the joint network: a hypothesis has K nodes."""
        return self.first.shape[0] * self.width * self.window

    @property
    def kinds(self):
        """Of each W candidates: (frames that the move reads, frames that it needs), from where it begins.

        Blanks that leave a window of several frames count from its last one.
        """
        symbols = self.problem.symbols
        blanks = [(move.frames, move.needs) for move in symbols.blanks]
        if self.window > 1:
            beyond = 0 if all(move.may_end for move in symbols.blanks) else 1
            blanks = [(1 + i, 1 + i + beyond) for i in range(self.longest_blank)]
        return [(0, 0), *blanks, *((move.frames, move.needs) for move in symbols.labels)]

    @property
    def longest_blank(self):
        return max(move.frames for move in self.problem.symbols.blanks)

    @property
    def reads(self):
        """[C]: frames that each of the candidates reads."""
        return np.repeat([reads for reads, _ in self.kinds], self.width).astype(np.int32)

    def end(self, frame):
        """[B]: behind the window of these first frames [B]. Windows begin at multiples of K frames of the stream."""
        if self.window == 1:
            return frame + 1
        end = frame + self.window - (self.first + frame) % self.window
        return jnp.minimum(end, self.problem.lengths)


@_pytree.exportable("Beam")
class Beam(typing.NamedTuple):
    """The hypotheses of all utterances; a dead one has the score -inf."""

    score: jax.Array  # [B, W]: log of the sum over alignments, with fusion
    path_score: jax.Array  # [B, W]: of the best alignment
    frame: jax.Array  # [B, W]: the next one to read, counted in this part of the stream
    counts: jax.Array  # [B, W]: labels
    count_here: jax.Array  # [B, W]: labels on that frame
    unread: jax.Array  # [B, W]: the last label, if the networks have not read it yet, else -1
    slot: jax.Array  # [B, W]: where its networks are
    key: tuple  # two of [B, W]: hash of the labels
    written: jax.Array  # [B, W, 3 + n, L]: labels, their frames and durations, and the bits of numbers (`as_bits`)


class Recent(typing.NamedTuple):
    """What a few steps have written. They do not touch the table of the beam, which has room for all labels."""

    steps: jax.Array  # [B, W]: how many, of the utterance; a GPU counts them in the kernel of other such arrays
    # [B, W, 3 + n, K + 1]: as in the table, label i of a hypothesis at i modulo K. Last come, in the first two places,
    # the hypothesis of the table from which this one comes, and its labels.
    written: jax.Array


class State(typing.NamedTuple):
    """Of the loops over steps."""

    reached: jax.Array  # [B]: frames that an exact end needs, as no kept hypothesis has other moves
    beam: Beam
    networks: Networks  # in their slots [B, 2 W, ...]; without a key where rows are not packed
    bad: jax.Array  # [B, W]: the utterance has met NaN or +inf
    recent: Any = None  # `Recent`; this and the next one in the inner loop
    results: Any = None  # of `score_rows`, kept for their arrays

    @property
    def frame(self):
        """[B]: of the utterance, the first one that a live hypothesis has still to read."""
        frame = jnp.where(self.beam.score > -jnp.inf, self.beam.frame, NEVER)
        return over_hypotheses(jnp.minimum, frame)


class Scores(typing.NamedTuple):
    """Log-probabilities out of the K nodes of each hypothesis; rows of labels are shared by those of an utterance."""

    frame: jax.Array  # [B, W K]: of the node
    active: jax.Array  # [B, W K]: a live hypothesis may move from it
    moves: jax.Array  # [B, W K, moves]: without those of labels
    labels: jax.Array  # [R, V]: with fusion
    row: jax.Array  # [B, W K]: of each node in `labels`
    model_labels: jax.Array  # [R, V]: of the model alone
    model_row: jax.Array  # [B, W K]
    confidence: jax.Array | None  # [R]: of the model alone
    bad: jax.Array  # [B, W K]: NaN or +inf has been met


class Nodes(typing.NamedTuple):
    """Where moves begin, M of each hypothesis: its own node; in a window those of its K frames, then those behind."""

    score: jax.Array  # [B, W M]: of the way there
    path_score: jax.Array  # [B, W M]
    frame: jax.Array  # [B, W M]: of a node behind the window, its last one
    counts: jax.Array  # [B, W M]: as of `Beam`
    count_here: jax.Array  # [B, W M]
    key: tuple


class Expansion(typing.NamedTuple):
    """Hypotheses, and the move that each takes."""

    parent: jax.Array  # [B, C]: the node
    gain: jax.Array  # [B, C]: log-probability
    label: jax.Array  # [B, C]: -1 for none


class Candidates(typing.NamedTuple):
    """Moves of hypotheses, and hypotheses that wait for their frame: the next beam is chosen from them.

    W that wait, then W of each blank (that leaves a window, for each frame behind it that one reaches), then W of each
    arc with a label, as no more than these can stay.
    """

    score: Any  # [B, C]
    path_score: jax.Array  # [B, C]
    parent: jax.Array  # [B, C]: the next two as in `Expansion`
    label: jax.Array  # [B, C]
    frame: jax.Array  # [B, C]: after the move, as the next two
    counts: jax.Array  # [B, C]
    count_here: jax.Array  # [B, C]
    key: tuple  # two of [B, C]
    bad: jax.Array  # [B, C]: as in `State`

    @property
    def identity(self):
        """Candidates with equal numbers here have the same labels and the same future."""
        return self.frame, self.count_here, *self.key


def first_beam(problem: Problem, width: int, max_labels: int) -> Beam:
    """One live hypothesis of each utterance, without labels, and one slot of each hypothesis."""
    batch, dtype = problem.lengths.shape[0], problem.dtype
    none = jnp.zeros((batch, width), jnp.int32)
    score = jnp.broadcast_to(jnp.where(jnp.arange(width) == 0, 0, -jnp.inf).astype(dtype), (batch, width))
    slot = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    numbers = jnp.zeros((batch, width, 2 if problem.symbols.scoring.entropy else 1), dtype)
    bits = as_bits(numbers)
    bits = jnp.broadcast_to(bits[..., None], (*bits.shape, max_labels))
    written = jnp.concatenate([jnp.full((batch, width, 3, max_labels), -1, jnp.int32), bits], 2)
    return Beam(score, score, none, none, none, none - 1, slot, (none, none), written)


def as_bits(numbers):
    """int32 [B, W, n or 2 n] of floating-point numbers [B, W, n]: a beam keeps all that labels have in one array."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.int32)
    return bits.reshape(*numbers.shape[:2], math.prod(bits.shape[2:]))


def of_bits(bits, dtype):
    """The n numbers [B, W, L] of their bits [B, W, n or 2 n, L]."""
    words = np.dtype(dtype).itemsize // 4
    parts = [bits[:, :, i : i + words] for i in range(0, bits.shape[2], words)]
    parts = [x[:, :, 0] if words == 1 else jnp.moveaxis(x, 2, -1) for x in parts]
    return [jax.lax.bitcast_convert_type(x, dtype) for x in parts]


def first_networks(problem: Problem, fusion: Fusion, batch: int, width: int, start: int, rows, state) -> Networks:
    """The networks after their start labels, in all slots."""
    networks = _fusion.begin(fusion, problem, start, rows, state)
    networks = networks._replace(key=jnp.zeros((batch * width, 2), jnp.int32) if packs(batch * width) else None)
    networks = jax.tree.map(lambda x: x.reshape(batch, width, *x.shape[1:]), networks)
    return jax.tree.map(lambda x: jnp.concatenate([x, x], 1), networks)


def recurrent(networks: Networks) -> bool:
    """Whether a state holds floating-point numbers."""
    states = networks.predictor, networks.models
    return not all(jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves(states))


def few_steps(rules: Rules, state: State) -> State:
    """Steps to the end of these frames, or as many as may come before the table has the new labels."""
    problem, beam = rules.problem, state.beam
    room = min(STEPS, rules.max_labels)
    itself = jnp.broadcast_to(jnp.arange(rules.width, dtype=jnp.int32)[None], beam.counts.shape)
    origin = jnp.stack([itself, beam.counts, *(beam.written.shape[2] - 2) * [itself]], 2)
    recent = Recent(jnp.zeros_like(itself), jnp.repeat(origin[..., None], room + 1, 3))
    scored = functools.partial(score_rows, problem)
    results = empty_results(rules.nodes, scored, problem.encoder_out, state.networks.rows)
    state = state._replace(recent=problem.vary(recent), results=problem.vary(results))

    def more(state):
        return jnp.any((state.frame < problem.lengths) & (state.recent.steps[:, 0] < room))

    state = jax.lax.while_loop(more, functools.partial(step, rules), state)
    beam, (_, written) = state.beam, state.recent
    place = np.arange(rules.max_labels, dtype=np.int32)[None, None]
    is_new = (place >= written[:, :, 1, -1:]) & (place < beam.counts[..., None])
    new = jnp.tile(written[..., :-1], -(-rules.max_labels // room))[..., : rules.max_labels]
    table = jnp.where(is_new[:, :, None], new, take(beam.written, written[:, :, 0, -1]))
    return state._replace(beam=beam._replace(written=table), recent=None, results=None)


def step(rules: Rules, state: State) -> State:
    """Every utterance takes all moves of the hypotheses on its frame, and goes on once none is left there."""
    state, active = advance(rules, state)
    state, scores = score(rules, state, active)
    # Behind the barriers of this step nothing reads the old beam, which a GPU then need not copy.
    gains = gains_of(rules, state, scores)
    candidates = jax.lax.optimization_barrier(expand(rules, state, active, scores, gains))
    alive = candidates.score > -jnp.inf
    if rules.merge:
        candidates = merge(candidates)
    return keep_best(rules, state, scores, candidates, alive)


# ---------------------------------------------------------------------------------------------------- advance


def advance(rules: Rules, state: State):
    """(state, active [B, W]): the networks of hypotheses on the frame read new labels; active ones may move.

    New labels wait for others until a pack of the predictor is full or too few utterances go on without. Utterances
    that are behind come first: else the last ones fall back, and steps at the end have few rows.
    """
    now, networks, lengths = state.beam, state.networks, rules.problem.lengths
    going = state.frame < lengths
    here = now.frame == state.frame[:, None]
    if rules.window > 1:
        here = now.frame < rules.end(state.frame)[:, None]
    active = here & going[:, None] & (now.score > -jnp.inf)
    label = jnp.where(active, now.unread, -1)
    may_wait = WAITING * jnp.sum(jnp.any(label >= 0, 1)) < jnp.sum(going)
    source = first_equal(label >= 0, keys(networks, now.slot), label)
    lag = state.frame - jnp.min(state.frame, initial=NEVER, where=going)
    read = functools.partial(read_label, rules)
    stepped, slot, networks = step_rows(read, networks, label, label >= 0, source, now.slot, may_wait, lag)
    unread = jnp.where(stepped, -1, now.unread)
    active &= ~over_hypotheses(jnp.logical_or, (label >= 0) & ~stepped)[:, None]
    unread, slot = jax.lax.optimization_barrier((unread, slot))
    return state._replace(beam=now._replace(unread=unread, slot=slot), networks=networks), active


def read_label(rules: Rules, networks: Networks, label) -> Networks:
    """Rows of the networks after one more label [N]."""
    after, key = _fusion.read(rules.fusion, rules.problem, networks, label), networks.key
    if key is not None and rules.recurrent:
        key = jnp.stack(append_label((key[..., 0], key[..., 1]), label), 1)
    elif key is not None:
        key = fingerprints((after.rows, after.predictor, after.models))
    return after._replace(key=key)


def keys(networks: Networks, slot):
    """[B, W, 2]: of each hypothesis; None where rows are not packed."""
    return None if networks.key is None else take(networks.key, slot)


def first_equal(wanted, key, label=None):
    """[B, W], of all B W rows: the first wanted one of the utterance with the key, and the label, of this one."""
    batch, width = wanted.shape
    rows = jnp.arange(batch * width, dtype=jnp.int32).reshape(batch, width)
    if key is None:
        return rows
    parts = [key[..., 0], key[..., 1]] + ([] if label is None else [label])
    same = functools.reduce(jnp.logical_and, [x[:, :, None] == x[:, None] for x in parts]) & wanted[:, None]
    return jnp.where(wanted, jnp.where(same, rows[:, None], batch * width).min(-1), rows)


# ------------------------------------------------------------------------------------------------------ score


def score(rules: Rules, state: State, active):
    """(state, `Scores`) after the joint network has seen the active hypotheses [B, W]."""
    problem, networks = rules.problem, state.networks
    slot, frame, active, bad_before = spread(rules, state, active)
    shape = active.shape

    def score_pack(rows):
        encoder = hypothesis_rows(problem.encoder_out, problem.inside(frame), rows)
        return score_rows(problem, encoder, hypothesis_rows(networks.rows, slot, rows))

    source = first_equal(active, keys(networks, slot), frame if rules.window > 1 else None)
    usual = rules.nodes // (1 if rules.recurrent else 4)
    results, row = compute_rows(flat(active), flat(source), usual, score_pack, state.results)
    moves, labels, bad, confidence = results
    moves, bad = (rows_at(x, row).reshape(*shape, *x.shape[1:]) for x in (moves, bad))
    row = row.reshape(shape)
    model = labels, row
    if rules.fusion.adds:
        labels = rows_at(labels, flat(row)) + hypothesis_rows(networks.bonus, slot, None)
        bad |= ~(jnp.max(labels, -1) < jnp.inf).reshape(shape)
        labels = jnp.where(labels < jnp.inf, labels, -jnp.inf)
        row = jnp.arange(rules.nodes, dtype=jnp.int32).reshape(shape)
    state = state._replace(results=results)
    return state, Scores(frame, active, moves, labels, row, *model, confidence, bad_before | (bad & active))


def spread(rules: Rules, state: State, active):
    """(slot, frame, active, bad) [B, W K] of the nodes of hypotheses."""
    if rules.window == 1:
        return state.beam.slot, jnp.broadcast_to(state.frame[:, None], active.shape), active, state.bad
    ahead = np.tile(np.arange(rules.window, dtype=np.int32), rules.width)[None]
    each = [jnp.repeat(x, rules.window, 1) for x in (state.beam.slot, state.beam.frame, active, state.bad)]
    slot, frame, active, bad = each[0], each[1] + ahead, each[2], each[3]
    return slot, frame, active & (frame < rules.end(state.frame)[:, None]), bad


def score_rows(problem: Problem, encoder, rows):
    """(log-probabilities of moves [N, moves], of labels [N, V], whether logits are NaN or +inf [N], confidence [N])"""
    logits = problem.joint(encoder, rows)
    moves, labels = problem.symbols.scores(logits)
    # The softmax has the maximum of the logits anyhow.
    bad = functools.reduce(jnp.logical_or, [jnp.isnan(moves[:, i]) for i in range(moves.shape[1])])
    bad |= ~(jnp.max(logits, -1).astype(problem.dtype) < jnp.inf)
    labels = labels.rows()
    # Rows stay until a later step computes them again: +inf of a bad utterance could meet -inf of another one.
    return moves, jnp.where(labels < jnp.inf, labels, -jnp.inf), bad, problem.symbols.confidence(logits)


# ----------------------------------------------------------------------------------------------------- expand


def gains_of(rules: Rules, state: State, scores: Scores):
    """[B, W K, moves]: log-probabilities of the moves that are allowed, without those of labels; else -inf."""
    problem, now, symbols = rules.problem, state.beam, rules.problem.symbols
    may_write = (now.count_here < symbols.labels_per_frame) & (now.counts < rules.max_labels)
    if rules.window > 1:  # no label is on a later frame of the window yet
        more = jnp.broadcast_to((now.counts < rules.max_labels)[..., None], (*now.counts.shape, rules.window - 1))
        may_write = jnp.concatenate([may_write[..., None], more], 2).reshape(scores.active.shape)
    allowed = symbols.allowed(scores.frame, problem.lengths[:, None], may_write, problem.ends_here)
    return jnp.where(allowed & scores.active[..., None] & ~jnp.isnan(scores.moves), scores.moves, -jnp.inf)


def expand(rules: Rules, state: State, active, scores: Scores, gains) -> Candidates:
    """All candidates for the next beam."""
    problem, now, blanks = rules.problem, state.beam, len(rules.problem.symbols.blanks)
    moves = [gains[..., i] for i in range(gains.shape[2])]

    none = jnp.zeros(active.shape, jnp.int32)
    waits = jnp.where(active, -jnp.inf, 0).astype(problem.dtype)
    itself = jnp.broadcast_to(jnp.arange(rules.width, dtype=jnp.int32)[None], active.shape)
    nodes = Nodes(now.score, now.path_score, now.frame, now.counts, now.count_here, now.key)
    node: Any = None
    begin = now.score
    if rules.window == 1:
        kinds = [Expansion(itself, gain, none - 1) for gain in (waits, *moves[:blanks])]
    else:
        nodes, node = nodes_of_window(rules, state, moves[:blanks])
        of_each = nodes.score.shape[1] // rules.width
        kinds = [Expansion(itself * of_each, waits, none - 1)]
        behind = [itself * of_each + rules.window + i for i in range(rules.longest_blank)]
        kinds += [Expansion(x, jnp.where(active, 0, -jnp.inf).astype(problem.dtype), none - 1) for x in behind]
        begin = take(nodes.score, jnp.broadcast_to(node, scores.row.shape))
    for gain in moves[blanks:]:
        parent, label, best = largest_sums(scores.labels, scores.row, begin + gain, rules.width)
        gain = take(gain, parent) + best
        kinds.append(Expansion(parent if node is None else rows_at(node[0], parent), gain, label))
    move = jax.tree.map(lambda *x: one_after_another(x), *kinds)

    score, path_score, frame, counts, count_here, key = take_each(tuple(nodes), move.parent)
    writes, reads = move.label >= 0, rules.reads[None]
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


def nodes_of_window(rules: Rules, state: State, blanks):
    """(`Nodes`, places there of the nodes [1, W K] of `Scores`): sums over runs of `blanks`, [B, W K] of each blank.

    The nodes behind a window are that of its last frame for a blank of 1 frame, 2 and so on.
    """
    now, window, longest = state.beam, rules.window, rules.longest_blank
    shape = *now.score.shape, window
    gains = [x.reshape(shape) for x in blanks]
    dead = jnp.full(now.score.shape, -jnp.inf, now.score.dtype)
    sums, paths = [now.score], [now.path_score]
    for k in range(1, window + longest):
        ends = [(k - move.frames, gain) for move, gain in zip(rules.problem.symbols.blanks, gains)]
        ends = [(i, gain[..., i]) for i, gain in ends if 0 <= i < window]
        sums.append(sum_of([sums[i] + gain for i, gain in ends] or [dead]))
        paths.append(functools.reduce(jnp.maximum, [paths[i] + gain for i, gain in ends] or [dead]))
    # The frames of the window that are left to a hypothesis, 1 to K; what its runs reach beyond comes from these alone.
    left = rules.end(state.frame)[:, None] - now.frame
    behind = [[x[i + 1] for i in range(longest)] for x in (sums, paths)]
    for k in range(2, window + 1):
        behind = [[jnp.where(left == k, x[k + i], y) for i, y in enumerate(z)] for x, z in zip((sums, paths), behind)]
    score, path = (jnp.stack([*x[:window], *z], 2) for x, z in zip((sums, paths), behind))
    of_each, first = window + longest, (np.arange(window + longest) == 0)[None, None]
    ahead = np.minimum(np.arange(of_each), window).astype(np.int32)[None, None]
    last = rules.end(state.frame)[:, None, None] - 1
    frame = jnp.where(ahead < window, now.frame[..., None] + ahead, last)
    counts, *key = (jnp.broadcast_to(x[..., None], score.shape) for x in (now.counts, *now.key))
    count_here = jnp.where(first, now.count_here[..., None], 0)
    every: list[Any] = [score, path, frame, counts, count_here, *key]
    score, path, frame, counts, count_here, *key = (x.reshape(x.shape[0], -1) for x in every)
    places = np.arange(rules.width, dtype=np.int32)[:, None] * of_each + np.arange(window, dtype=np.int32)
    return Nodes(score, path, frame, counts, count_here, tuple(key)), jnp.asarray(places.reshape(1, -1))


def sum_of(terms):
    """log of the sum of exponentials of arrays; of one alone, or one that is not -inf, without rounding."""
    peak = functools.reduce(jnp.maximum, terms)
    if len(terms) == 1:
        return peak
    finite = jnp.where(jnp.isneginf(peak), 0, peak)
    total = functools.reduce(jnp.add, [jnp.exp(x - finite) for x in terms])
    return jnp.where(total > 1, peak + jnp.log(total), peak)


# ------------------------------------------------------------------------------------------------------ merge


def merge(candidates: Candidates) -> Candidates:
    """Of equal candidates the one with the best path has the summed probability, the others are dead."""
    total, path_total = merged(candidates.score, candidates.path_score, candidates.identity)
    return candidates._replace(score=total, path_score=path_total)


def merged(score, path, identity):
    """(scores, path scores) [B, C] after merging candidates with equal arrays [B, C] in `identity`."""

    def add(score, path, identity):
        alive = score > -jnp.inf
        path = jnp.where(alive, path, -jnp.inf)
        differ = functools.reduce(jnp.bitwise_or, [x[:, :, None] ^ x[:, None] for x in identity])
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

    # Outside a branch XLA for CPUs would compute the identities, hashes among them, again for each pair.
    some = any_or_always(score > -jnp.inf)
    return jax.lax.cond(some, add, lambda score, path, _: (score, path), score, path, identity)


# -------------------------------------------------------------------------------------------------- keep_best


def keep_best(rules: Rules, state: State, scores: Scores, candidates: Candidates, alive) -> State:
    """The W best candidates are the next beam; `alive` [B, C]: which had a path before they were merged."""
    score, chosen = largest(candidates.score, rules.width)
    if rules.threshold is not None:
        worst = score[:, :1] - jnp.asarray(rules.threshold, rules.problem.dtype)
        score = jnp.where(score >= worst, score, -jnp.inf)
    reached = state.reached
    if rules.problem.symbols.reach:
        needed = frames_needed(rules, candidates, alive, chosen)
        reached = jnp.maximum(reached, jnp.where(score > -jnp.inf, needed, 0).max(-1))
    reads = rows_at(jnp.asarray(rules.reads), chosen)
    moves = take_each(candidates._replace(score=None), chosen)._replace(score=score)
    beam, written = moved(rules, state, scores, moves, reads)
    steps = state.recent.steps + (state.frame < rules.problem.lengths)[:, None].astype(jnp.int32)
    return state._replace(reached=reached, beam=beam, recent=Recent(steps, written), bad=moves.bad)


def moved(rules: Rules, state: State, scores: Scores, moves: Candidates, reads):
    """(beam, `Recent.written`) after these moves [B, W] of the hypotheses, which read so many frames [B, W]."""
    beam, parent, label, node = state.beam, moves.parent, moves.label, moves.parent
    if rules.window > 1:
        of_each = rules.window + rules.longest_blank
        parent, place = parent // of_each, parent % of_each
        node = parent * rules.window + jnp.minimum(place, rules.window - 1)
    slot, unread = take_each((beam.slot, beam.unread), parent)
    writes = label >= 0
    before = state.recent.written
    room = before.shape[-1] - 1
    places = np.arange(room + 1, dtype=np.int32)[None, None]
    here = (places == (moves.counts[..., None] - 1) % room) & writes[..., None]
    row = take(scores.model_row, node)
    numbers = [scores.model_labels.at[row, label].get(mode="clip")]
    if scores.confidence is not None:
        numbers.append(rows_at(scores.confidence, row))
    new = jnp.stack([label, rules.first[:, None] + moves.frame - reads, reads], 2)
    new = jnp.concatenate([new, as_bits(jnp.stack(numbers, 2))], 2)
    beam = beam._replace(
        score=moves.score,
        path_score=moves.path_score,
        frame=moves.frame,
        counts=moves.counts,
        count_here=moves.count_here,
        unread=jnp.where(writes, label, unread),
        slot=slot,
        key=moves.key,
    )
    return beam, jnp.where(here[:, :, None], new[..., None], take(before, parent))


def frames_needed(rules: Rules, candidates: Candidates, alive, chosen):
    """[B, W]: frames that the utterance must have for the moves of the chosen candidates, and of those merged there."""
    needs = np.repeat([needs for _, needs in rules.kinds], rules.width).astype(np.int32)[None]
    reads = rules.reads[None]
    frame = candidates.frame
    needed = take(jnp.where(needs > 0, frame - reads + needs, 0), chosen)
    longer = needs > np.maximum(reads, 1)
    if rules.merge and longer.any():  # what is merged with a kept one counts too
        equal = [take(x, chosen)[:, :, None] == x[:, None] for x in candidates.identity]
        equal = functools.reduce(jnp.logical_and, equal) & (alive & longer)[:, None]
        needed = jnp.where(equal.any(-1), jnp.maximum(needed, take(frame, chosen) + 1), needed)
    return needed
