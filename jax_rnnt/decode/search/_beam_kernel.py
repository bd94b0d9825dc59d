"""Steps of beam search for CUDA: one kernel chooses, merges and gathers, and plans what the networks read next.

Its arrays hold a beam: float32 [B, W, 2], int32 [B, W, 14] and the labels of a few steps. `choose` is its definition.
"""

import functools
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _xla
from jax_rnnt.decode._gather import flat, hypothesis_rows, put_hypothesis_rows
from jax_rnnt.decode._model import is_class
from jax_rnnt.decode.search import _beam_step
from jax_rnnt.decode.search._beam_step import Beam, Recent, Rules, Scores, State
from jax_rnnt.decode.search._fusion import Networks
from jax_rnnt.decode.search._packing import free_slots
from jax_rnnt.decode.search._problem import of_parts
from jax_rnnt.decode.search._symbols import Move
from jax_rnnt.emissions import Softmax

WIDEST, MOST_SUMS = 16, 8192  # hypotheses; sums of labels that a block has in shared memory


NAMES = (
    *("frame", "counts", "count_here", "unread", "slot", "key", "other_key", "bad"),
    *("active", "label", "target", "steps", "reached", "first"),
)


class Packed(typing.NamedTuple):
    """A beam as the kernel has it, and what the networks read in the next step."""

    floats: jax.Array  # [B, W, 2]: score and path_score
    ints: jax.Array  # [B, W, 14]: `NAMES`
    written: jax.Array  # as of `Recent`

    def __getattr__(self, name: str):
        return self.ints[..., NAMES.index(name)]


class Turn(typing.NamedTuple):
    """Of the loop."""

    packed: Packed
    networks: Networks  # without a key


def fits(rules: Rules, state: State) -> bool:
    """Whether the kernel takes the problem."""
    symbols, labels = rules.problem.symbols, min(rules.width, rules.problem.tokens)
    sums = rules.width * rules.window * labels * len(symbols.labels)
    known = all(isinstance(x, int) for x in state.beam.written.shape)
    plain = rules.problem.dtype == jnp.float32 and symbols.scoring.entropy is None
    return known and plain and rules.width <= WIDEST and sums <= MOST_SUMS and len(symbols.moves) <= 32


def by_kernel(rules: Rules, state: State, room: int, plain) -> State:
    """The inner loop of `_beam_step.few_steps`, by the kernel where there is one that takes the problem."""
    if not fits(rules, state):
        return plain(state)
    return _xla.where_steps(functools.partial(run, rules, room), plain, state)


def run(rules: Rules, room: int, state: State) -> State:
    """The loop with the kernel."""
    lengths, key = rules.problem.lengths, state.networks.key
    threshold = jnp.inf if rules.threshold is None else rules.threshold
    threshold = jnp.broadcast_to(jnp.asarray(threshold, jnp.float32), rules.first.shape)
    # XLA would make constants anew in each step.
    first, threshold = jax.lax.optimization_barrier((rules.first, threshold))
    rules = rules._replace(first=first, threshold=threshold)

    def more(turn):
        going = turn.packed.first[:, 0] < lengths
        return jnp.any(going & (turn.packed.steps[:, 0] < room))

    start = Turn(packed(rules, state), state.networks._replace(key=None))
    end = jax.lax.while_loop(more, functools.partial(step, rules), start)
    after = unpacked(end.packed)
    beam = after.beam._replace(written=state.beam.written)
    return after._replace(beam=beam, networks=end.networks._replace(key=key))


def step(rules: Rules, turn: Turn) -> Turn:
    """The networks read the labels that were planned, and the best moves of all make the next beam."""
    now = turn.packed
    label, reads = now.label, now.label >= 0

    def write(x, after):
        return put_hypothesis_rows(x, now.target, after, None)

    before = jax.tree.map(lambda x: hypothesis_rows(x, now.slot, None), turn.networks)
    after = _beam_step.read_label(rules, before, flat(jnp.where(reads, label, 0)))
    networks = jax.tree.map(write, turn.networks, after)
    state = unpacked(now)
    beam = state.beam._replace(slot=jnp.where(reads, now.target, now.slot), unread=jnp.where(reads, -1, now.unread))
    state = state._replace(beam=beam, networks=networks)
    scores = score(rules, state, now.active != 0)
    return Turn(Packed(*_choose(*operands(rules, now, state, scores), **attributes(rules))), networks)


def packed(rules: Rules, state: State) -> Packed:
    """With a plan for the networks."""
    beam, frame = state.beam, state.frame[:, None]
    lengths = rules.problem.lengths[:, None]
    here = beam.frame == frame if rules.window == 1 else beam.frame < rules.end(frame[:, 0])[:, None]
    active = here & (frame < lengths) & (beam.score > -jnp.inf)
    label = jnp.where(active, beam.unread, -1)
    target = jnp.where(label >= 0, free_slots(beam.slot), 2 * rules.width)
    columns = [beam.frame, beam.counts, beam.count_here, beam.unread, beam.slot, *beam.key, state.bad, active, label]
    columns += [target, state.recent.steps, state.reached[:, None], frame]
    ints = jnp.stack([jnp.broadcast_to(x, beam.frame.shape).astype(jnp.int32) for x in columns], 2)
    return Packed(jnp.stack([beam.score, beam.path_score], 2), ints, state.recent.written)


def unpacked(x: Packed) -> State:
    """Without the plan and networks."""
    none: Any = None
    keys = x.key, x.other_key
    beam = Beam(x.floats[..., 0], x.floats[..., 1], x.frame, x.counts, x.count_here, x.unread, x.slot, keys, none)
    return State(x.reached[:, 0], beam, none, x.bad != 0, Recent(x.steps, x.written))


def score(rules: Rules, state: State, active) -> Scores:
    """As `_beam_step.score`, of the best labels of each node alone."""
    problem, symbols = rules.problem, rules.problem.symbols
    labels = min(rules.width, problem.tokens)
    slot, frame, active_nodes, bad_before = _beam_step.spread(rules, state, active)
    shape, row = active_nodes.shape, jnp.arange(rules.nodes, dtype=jnp.int32).reshape(active_nodes.shape)
    emission, (joint, bias) = symbols.emission, problem.parts
    if symbols.of_softmax and not rules.fusion.adds:
        encoder = hypothesis_rows(problem.encoder_out, problem.inside(frame), None)
        logits = joint(encoder, hypothesis_rows(state.networks.rows, slot, None))
        if logits.dtype == jnp.float32:
            kind = dict(blanks=tuple(emission.blanks), durations=emission.num_durations, best=labels)
            heads, best, places, bad = _rows(logits, *([] if bias is None else [bias]), **kind)
            heads, blanks = [heads[:, i] for i in range(heads.shape[1])], len(emission.blanks)
            moves = symbols.scores_of_moves(heads[:blanks], heads[blanks:]).reshape(*shape, -1)
            bad = bad_before | (bad.reshape(shape) & active_nodes)
            return Scores(frame, active_nodes, moves, best, row, best, row, None, bad, places)
    _, scores = _beam_step.score(rules, state, active, in_packs=False)
    best, places = jax.lax.top_k(scores.labels, labels)
    sure = best
    if rules.fusion.adds:
        sure = jnp.take_along_axis(scores.model_labels, places, 1, mode="promise_in_bounds")
    return scores._replace(labels=best, model_labels=sure, places=places.astype(jnp.int32))


def operands(rules: Rules, now: Packed, state: State, scores: Scores):
    """Those of `choose`."""
    gains = _beam_step.gains_of(rules, state, scores)
    gains = jnp.concatenate([gains, scores.bad[..., None].astype(gains.dtype)], 2)
    lists: Any = scores.labels, scores.places, scores.model_labels
    lists = [x.reshape(*scores.bad.shape, -1) for x in lists]
    return *now, gains, *lists, rules.problem.lengths, rules.first, rules.threshold


def attributes(rules: Rules):
    symbols = rules.problem.symbols
    frames, may_end = (tuple(int(getattr(x, name)) for x in symbols.moves) for name in ("frames", "may_end"))
    kinds = dict(frames=frames, may_end=may_end, blanks=len(symbols.blanks))
    return kinds | dict(window=rules.window, merge=int(rules.merge))


def choose(*arrays, window: int, merge: int, blanks: int, frames: tuple, may_end: tuple):
    """The next beam of B utterances, in plain JAX: arrays of `Packed`.

    Operands: those of `Packed`; gains of moves, -inf where one is not allowed, and whether the row is bad
    [B, W K, moves + 1]; the best labels of each node by their scores with fusion, their numbers, and their scores in
    the model alone [B, W K, k]; lengths, first and threshold [B].
    """
    before, (gains, best, places, sure, lengths, first, threshold) = Packed(*arrays[:3]), arrays[3:]
    gains, bad = gains[..., :-1], gains[..., -1] != 0
    moves = [Move(0 if i < blanks else None, None, *x) for i, x in enumerate(zip(frames, map(bool, may_end)))]
    reach = max(move.needs for move in moves) - 1
    symbols = types.SimpleNamespace(moves=moves, blanks=moves[:blanks], labels=moves[blanks:], reach=reach)
    problem = types.SimpleNamespace(symbols=symbols, lengths=lengths, dtype=before.floats.dtype)
    width = before.floats.shape[1]
    rules = Rules(problem, None, False, first, width, 0, bool(merge), threshold[:, None], window)  # type: ignore[arg-type]
    state = unpacked(before)
    read = before.label >= 0
    beam = state.beam._replace(
        slot=jnp.where(read, before.target, before.slot), unread=jnp.where(read, -1, before.unread)
    )
    state = state._replace(beam=beam)
    labels, places, sure = (flat(x) for x in (best, places, sure))
    row = jnp.arange(labels.shape[0], dtype=jnp.int32).reshape(bad.shape)
    scores = Scores(None, None, None, labels, row, sure, row, None, bad, places)  # type: ignore[arg-type]
    candidates = _beam_step.expand(rules, state, before.active != 0, scores, gains)
    alive = candidates.score > -jnp.inf
    if merge:
        candidates = _beam_step.merge(candidates)
    return [*packed(rules, _beam_step.keep_best(rules, state, scores, candidates, alive))]


def rows(logits, *bias, blanks: tuple, durations: int, best: int):
    """Of rows of logits in parts: log-probabilities of blanks and durations [R, ...], the best labels in order, their
    log-probabilities and numbers [R, best], and whether a logit is NaN or +inf [R].
    """
    logits = of_parts(logits, *bias)
    emission = Softmax(blanks, num_durations=durations, slots=tuple(f"blank{i}" for i in range(len(blanks))))
    log_probability, of_blanks, of_durations = emission.heads(logits)
    tokens = logits[:, : logits.shape[1] - durations]
    labels = log_probability(
        jnp.where(functools.reduce(jnp.logical_or, [is_class(i, tokens) for i in blanks]), -jnp.inf, tokens)
    )
    labels, places = jax.lax.top_k(jnp.where(labels < jnp.inf, labels, -jnp.inf), best)
    bad = jnp.any(~(logits < jnp.inf), 1)
    return [jnp.stack([*of_blanks, *of_durations], 1), labels, places.astype(jnp.int32), bad]


_rows = _xla.Step("jax_rnnt_search_rows", rows, {})
_choose = _xla.Step("jax_rnnt_search_choice", choose, {i: i for i in range(3)})
