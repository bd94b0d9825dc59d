"""Greedy search: every utterance runs from label to label at its own pace.

B utterances, T frames, E and P the widths of encoder and predictor rows, K frames of a window, L labels at most. One
`lax.while_loop` steps all utterances together. A step looks at the next K frames of each, with the predictor row that
they share until a label comes: one matrix product for B K rows. It follows the best moves up to the first label or the
end of the window, then steps the predictor where there is a label. So the predictor runs once a label and not once a
frame, and utterances do not wait for each other's labels.
"""

import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt.decode._gather import replace_rows
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode._streams import begin_part
from jax_rnnt.decode.search import _fusion, _options
from jax_rnnt.decode.search._fusion import Fusion, Networks, check_utterances
from jax_rnnt.decode.search._packing import any_or_always
from jax_rnnt.decode.search._problem import Problem, beyond_the_end, checked, of_parts, on_devices, prepare
from jax_rnnt.decode.search._symbols import Move, Scoring, Symbols
from jax_rnnt.emissions import Softmax


@_pytree.exportable("GreedyStream")
class Stream(typing.NamedTuple):
    """Where a part of a stream ended."""

    fresh: jax.Array  # [B]: the next part starts anew
    bad: jax.Array  # [B]: NaN has been met
    first: jax.Array  # [B]: frames of the stream before the next part
    skip: jax.Array  # [B]: frames of the next part that the last move has read
    reached: jax.Array  # [B]: frames of the next part that an exact end after it needs
    scores: jax.Array  # [B]
    networks: Networks


class Rules(typing.NamedTuple):
    """What stays the same from step to step."""

    problem: Problem
    fusion: Fusion
    first: jax.Array  # [B]: frames of the stream before these
    window: int
    max_labels: int
    choose: Callable  # of the move out of each node, as `most_probable`


class State(typing.NamedTuple):
    """Of the loop over steps."""

    frame: jax.Array  # [B]: the next one to read, counted in this part
    count_here: jax.Array  # [B]: labels on that frame
    counts: jax.Array  # [B]
    reached: jax.Array  # [B]: frames that an exact end needs
    scores: jax.Array  # [B]
    labels: jax.Array  # [B, L]
    frames: jax.Array  # [B, L]
    durations: jax.Array  # [B, L]
    log_probs: jax.Array  # [B, L]: of the labels
    confidences: jax.Array | None  # [B, L]
    networks: Networks


class Walk(typing.NamedTuple):
    """What an utterance does in a step: blanks, and the first label that it meets."""

    ahead: jax.Array  # [B]: frames from the first one of the window
    reached: jax.Array  # [B]: as in `State`
    score: jax.Array  # [B]: as in `State`
    label: jax.Array  # [B]: -1 for none
    log_prob: jax.Array  # [B]: of the label, in the model alone
    at: jax.Array  # [B]: where in the window the last move was taken
    reads: jax.Array  # [B]: frames that it read
    confidence: jax.Array | None  # [B]: of the label


def run(search, encoder_out, lengths, exact_end, state) -> Hypotheses:
    """`Search.greedy`."""
    function = "greedy"
    max_labels, window = _options.sizes(function, max_labels=search.max_labels, window=search.window)
    scoring, models = search._scoring(function), search._models(function)
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)
    window = frames_at_once(window, encoder_out)
    check_utterances(function, models, encoder_out)

    def of_device(encoder_out, lengths, exact_end, state):
        batch = encoder_out, lengths, exact_end
        problem, label, first = prepare(function, search, *batch, scoring, numbers=models.numbers)
        if problem.symbols.scoring.token_first and exact_end is not False:
            raise ValueError(
                f"{function}: exact_end must be False with duration_choice='token_first', got {exact_end}."
            )
        start_stream = functools.partial(first_stream, problem, models, label, first)
        stream = begin_part(function, start_stream, state, problem.vary)
        if state is not None:
            stream = stream._replace(networks=_fusion.placed(models, function, stream.networks))
        bad = stream.bad | beyond_the_end(problem, exact_end, stream.reached)
        rules = Rules(problem, models, stream.first, window, max_labels, most_probable)
        return result(rules, run_steps(rules, stream), bad)

    return on_devices(of_device, encoder_out, lengths, exact_end, state)


def frames_at_once(window: int, encoder_out) -> int:
    """Frames of a window; no more than there are."""
    frames = encoder_out.shape[1]
    return max(frames, 1) if _checks.smaller(frames, window) else window


def first_stream(problem: Problem, fusion: Fusion, start: int, first) -> Stream:
    """The start of a stream; `first` makes rows and state of the predictor."""
    zeros = jnp.zeros(problem.lengths.shape, jnp.int32)
    none, networks = jnp.zeros(zeros.shape, bool), _fusion.begin(fusion, problem, start, *first())
    return Stream(none, none, zeros, zeros, zeros, zeros.astype(problem.dtype), networks)


def run_steps(rules: Rules, stream: Stream) -> State:
    """The state after all frames of this part."""
    zeros = jnp.zeros_like(stream.skip)
    none = jnp.full((zeros.shape[0], rules.max_labels), -1, jnp.int32)
    sure = jnp.zeros(none.shape, rules.problem.dtype)
    written = none, none, none, sure, sure if rules.problem.symbols.scoring.entropy else None
    state = State(stream.skip, zeros, zeros, stream.reached, stream.scores, *written, stream.networks)
    state = rules.problem.vary(state)

    def plain(state):
        return jax.lax.while_loop(functools.partial(running, rules), functools.partial(step, rules), state)

    def with_kernel(state):
        """The kernel tells whether there is another step. XLA would make a constant anew in each one."""
        ends = jnp.broadcast_to(rules.problem.ends_here, (zeros.shape[0], 1))[:, 0].astype(jnp.int32)
        first, ends = jax.lax.optimization_barrier((rules.first, rules.problem.vary(ends)))

        def turn(carry):
            best = best_by_kernel(rules, carry[0], ends)
            state, label, going = walk_by_kernel(rules._replace(first=first), carry[0], *best)
            return advance(rules, state, label), going

        return jax.lax.while_loop(lambda carry: carry[1], turn, (state, running(rules, state)))[0]

    known = all(isinstance(x, int) for x in state.labels.shape)
    if rules.problem.dtype != np.float32 or state.confidences is not None or not known:
        return plain(state)
    return _xla.where_steps(with_kernel, plain, state)


def result(rules: Rules, state: State, bad) -> Hypotheses:
    """The hypotheses at the end of these frames; `bad` [B]: utterances without a result."""
    problem, lengths = rules.problem, rules.problem.lengths
    scores = jnp.where(problem.bad | bad | (state.scores == jnp.inf), jnp.nan, state.scores)
    skip, reached = state.frame - lengths, state.reached - lengths
    bad = jnp.isnan(scores)
    after = Stream(jnp.zeros_like(bad), bad, rules.first + lengths, skip, reached, scores, state.networks)
    written = state.labels, state.frames, state.durations, state.log_probs
    scores = _fusion.at_the_end(rules.fusion, state.networks.models, None, scores)
    return hypotheses(*written, state.counts, scores, after, state.confidences)


# ----------------------------------------------------------------------------------------------------- one step


def running(rules: Rules, state: State):
    return jnp.any(state.frame < rules.problem.lengths)


def step(rules: Rules, state: State) -> State:
    """Every utterance goes on to its next label, or to the end of its window."""
    limits = limits_of(rules)
    walk = walk_to_label(limits, state, *best_moves(rules, state))
    return advance(rules, *write(limits, state, walk))


class Limits(typing.NamedTuple):
    """What a walk has to know."""

    lengths: jax.Array  # [B]
    first: jax.Array  # [B]: as of `Rules`
    labels_per_frame: int
    token_first: bool
    reach: bool


def limits_of(rules: Rules) -> Limits:
    symbols = rules.problem.symbols
    token_first, reach = symbols.scoring.token_first, symbols.reach > 0
    return Limits(rules.problem.lengths, rules.first, symbols.labels_per_frame, token_first, reach)


def best_moves(rules: Rules, state: State):
    """Of each frame of the windows [B, K]: score, frames read, frames that an exact end needs, label or -1, and its
    log-probability and confidence in the model alone.
    """
    problem = rules.problem
    logits = window_rows(rules, state, problem.joint).reshape(-1, rules.window, problem.classes)
    bonus = state.networks.bonus[:, None] if rules.fusion.adds else None
    now = state.frame, state.count_here, state.counts, problem.lengths, problem.ends_here
    best = moves_out(problem.symbols, rules.max_labels, rules.choose, logits, *now, bonus)
    # Computed once: the walk reads single numbers of each frame.
    return jax.lax.optimization_barrier((*best, problem.symbols.confidence(logits)))


def window_rows(rules: Rules, state: State, joint):
    """What `joint` makes of the frames of the windows, [B K, ...]."""
    problem, window = rules.problem, rules.window
    encoder = problem.frame(state.frame[:, None] + np.arange(window, dtype=np.int32)[None])
    encoder = encoder.reshape(encoder.shape[0] * window, problem.encoder_out.shape[-1])
    return joint(encoder, jnp.repeat(state.networks.rows, window, 0))


def moves_out(symbols: Symbols, max_labels, choose, logits, frame, count_here, counts, lengths, ends_here, bonus=None):
    """`best_moves` of logits [B, K, V + D], without the confidence; `ends_here` as of `Problem`."""
    offsets = np.arange(logits.shape[1], dtype=np.int32)[None]
    frame = frame[:, None] + offsets
    scores, labels = symbols.scores(logits)
    count_here = jnp.where(offsets == 0, count_here[:, None], 0)
    may_write = (count_here < symbols.labels_per_frame) & (counts < max_labels)[:, None]
    allowed = symbols.allowed(frame, lengths[:, None], may_write, ends_here)
    labels = labels if bonus is None else labels._replace(bonus=bonus)
    score, move, label, log_prob = choose(symbols, scores, labels, allowed, frame, count_here)
    reads, needs = (symbols.of_move(move, x) for x in zip(*((x.frames, x.needs) for x in symbols.moves)))
    return score, reads, needs, label, log_prob


def most_probable(symbols, scores, labels, allowed, *_):
    """Of the best move [B, K]: score, number, label or -1, and the log-probability of this label in the model alone.

    From what `Symbols.scores` and `allowed` give.
    """
    label_score, label = labels.best()
    log_prob = label_score if labels.bonus is None else labels.at(label)
    move, best = jnp.zeros(label.shape, jnp.int32), jnp.full(label.shape, -jnp.inf, scores.dtype)
    for i in range(len(symbols.moves)):  # an argmax would be a kernel of its own on a GPU
        score = scores[..., i] if i < len(symbols.blanks) else scores[..., i] + label_score
        score = jnp.where(allowed[..., i], score, -jnp.inf)
        better = (score > best) | (jnp.isnan(score) & ~jnp.isnan(best))
        move, best = jnp.where(better, i, move), jnp.maximum(best, score)
    return best, move, jnp.where(move >= len(symbols.blanks), label, -1), log_prob


def walk_to_label(limits: Limits, state: State, score, reads, needs, label, log_prob, confidence) -> Walk:
    """The best moves up to the first label, or out of the window."""
    window, zeros = score.shape[1], jnp.zeros_like(state.frame)
    sure = [jax.tree.map(lambda x, k=k: x[:, k], confidence) for k in range(window)]
    walk = Walk(zeros, state.reached, state.scores, zeros - 1, log_prob[:, 0], zeros, zeros, sure[0])
    for k in range(window):
        frame = state.frame + k
        here = (walk.ahead == k) & (walk.label < 0) & (frame < limits.lengths)
        reached = frame + needs[:, k] if limits.reach else walk.reached
        score_after, at = walk.score + score[:, k], zeros + k
        move = Walk(k + reads[:, k], reached, score_after, label[:, k], log_prob[:, k], at, reads[:, k], sure[k])
        walk = replace_rows(here, move, walk)
    return walk


def write(limits: Limits, state: State, walk: Walk):
    """(the state after the walk, its label [B]), which the networks have not read yet."""
    writes = walk.label >= 0
    going = state.frame < limits.lengths
    before = jnp.where(walk.at == 0, state.count_here, 0)
    after = jnp.where(going, 0, state.count_here)
    count_here = jnp.where(writes & (walk.reads == 0), before + 1, after)
    frame = state.frame + walk.ahead
    if limits.token_first:  # the last label of a frame leaves it
        leaves = count_here >= limits.labels_per_frame
        frame, count_here = frame + leaves.astype(jnp.int32), jnp.where(leaves, 0, count_here)
    counts, at = state.counts + writes.astype(jnp.int32), limits.first + state.frame + walk.at
    fields: dict[str, Any] = dict(frame=frame, count_here=count_here, counts=counts)
    fields |= dict(reached=walk.reached, scores=walk.score)
    new = dict(labels=walk.label, frames=at, durations=walk.reads, log_probs=walk.log_prob)
    new |= {} if walk.confidence is None else {"confidences": walk.confidence}
    # The walk is computed once, and what follows reads no array of the old state that it replaces: no copies.
    fields, new = jax.lax.optimization_barrier((fields, new))
    places = np.arange(1, state.labels.shape[1] + 1, dtype=np.int32)[None]
    here = (places == fields["counts"][:, None]) & (new["labels"] >= 0)[:, None]
    fields |= {name: jnp.where(here, x[:, None], getattr(state, name)) for name, x in new.items()}
    return state._replace(**fields), new["labels"]


def walk(*operands, labels_per_frame: int, token_first: int, reach: int):
    """The walk of a step as the kernel has it; operands as `walk_by_kernel` gives them."""
    best, arrays, (lengths, first) = operands[:5], operands[5:14], operands[14:]
    limits = Limits(lengths, first, labels_per_frame, bool(token_first), bool(reach))
    state = State(*arrays, None, None)  # type: ignore[call-arg]
    state, label = write(limits, state, walk_to_label(limits, state, *best, None))  # type: ignore[call-arg]
    return [*state[:9], label, jnp.any(state.frame < lengths)]


_walk = _xla.Step("jax_rnnt_search_walk", walk, {5 + i: i for i in range(9)})


def walk_by_kernel(rules: Rules, state: State, *best):
    """(state, label [B], whether any utterance goes on): as `write` of `walk_to_label` of these `best_moves`."""
    limits = limits_of(rules)
    attributes = {name: int(getattr(limits, name)) for name in ("labels_per_frame", "token_first", "reach")}
    *after, label, going = _walk(*best, *state[:9], limits.lengths, limits.first, **attributes)
    return State(*after, None, state.networks), label, going  # type: ignore[call-arg]


def moves(
    *operands,
    blanks: tuple,
    durations: int,
    tokens: tuple,
    of_durations: tuple,
    frames: tuple,
    may_end: tuple,
    window: int,
    labels_per_frame: int,
    max_labels: int,
    token_first: int,
):
    """`moves_out` as the kernel has it; operands and attributes as `best_by_kernel` gives them."""
    (logits, frame, count_here, counts, lengths, ends), bias = operands[:6], operands[6:]
    emission = Softmax(blanks, num_durations=durations, slots=tuple(f"blank{i}" for i in range(len(blanks))))
    each = zip((*(None if i < 0 else blanks[i] for i in tokens),), of_durations, frames, map(bool, may_end))
    every = tuple(Move(token, None if i < 0 else i, *more) for token, i, *more in each)
    of_blanks, of_labels = (tuple(x for x in every if (x.token is None) == writes) for writes in (False, True))
    scoring = Scoring(labels_per_frame, token_first=bool(token_first))
    symbols = Symbols(emission, of_blanks, of_labels, labels_per_frame, scoring, {})
    logits = of_parts(logits, *bias).reshape(-1, window, logits.shape[-1])
    now = frame, count_here, counts, lengths, (ends != 0)[:, None]
    return [*moves_out(symbols, max_labels, most_probable, logits, *now)]


_moves = _xla.Step("jax_rnnt_search_moves", moves, {})


def best_by_kernel(rules: Rules, state: State, ends):
    """`best_moves` without the confidence, by the kernel if it knows such moves; `ends` int32 [B]: who ends here."""
    problem, symbols = rules.problem, rules.problem.symbols
    scoring, emission = symbols.scoring, symbols.emission
    weighted = not all(_checks.is_zero(move.weight) for move in symbols.moves)
    own = weighted or scoring.penalizes or scoring.skips or rules.fusion.adds or rules.choose is not most_probable
    joint, bias = problem.parts
    logits = None if own or not symbols.of_softmax else window_rows(rules, state, joint)
    if logits is None or logits.dtype != np.float32:
        return best_moves(rules, state)[:-1]
    tokens = tuple(-1 if x.token is None else emission.blanks.index(x.token) for x in symbols.moves)
    of_durations = tuple(-1 if x.duration is None else x.duration for x in symbols.moves)
    frames, may_end = (tuple(int(getattr(x, name)) for x in symbols.moves) for name in ("frames", "may_end"))
    kinds = dict(tokens=tokens, of_durations=of_durations, frames=frames, may_end=may_end, window=rules.window)
    kinds |= dict(blanks=tuple(emission.blanks), durations=emission.num_durations, max_labels=rules.max_labels)
    kinds |= dict(labels_per_frame=symbols.labels_per_frame, token_first=int(scoring.token_first))
    now = state.frame, state.count_here, state.counts, problem.lengths, ends
    return _moves(logits, *now, *([] if bias is None else [bias]), **kinds)


def advance(rules: Rules, state: State, label) -> State:
    """The networks read the new label [B] where there is one."""

    def read(networks):
        after = _fusion.read(rules.fusion, rules.problem, networks, jnp.where(label >= 0, label, 0))
        return replace_rows(label >= 0, after, networks)

    networks = jax.lax.cond(any_or_always(label >= 0), read, lambda networks: networks, state.networks)
    return state._replace(networks=networks)
