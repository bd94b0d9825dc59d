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

from jax_rnnt import _checks, _pytree
from jax_rnnt.decode._gather import replace_rows
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode._streams import begin_part
from jax_rnnt.decode.search import _fusion, _options
from jax_rnnt.decode.search._fusion import Fusion, Networks, check_utterances
from jax_rnnt.decode.search._packing import any_or_always
from jax_rnnt.decode.search._problem import Problem, beyond_the_end, checked, on_devices, prepare


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
    return jax.lax.while_loop(functools.partial(running, rules), functools.partial(step, rules), state)


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
    walk = walk_to_label(rules, state, *best_moves(rules, state))
    return advance(rules, *write(rules, state, walk))


def best_moves(rules: Rules, state: State):
    """Of each frame of the windows [B, K]: score, frames read, frames that an exact end needs, label or -1, and its
    log-probability and confidence in the model alone.
    """
    problem, symbols, window = rules.problem, rules.problem.symbols, rules.window
    offsets = np.arange(window, dtype=np.int32)[None]
    frame = state.frame[:, None] + offsets
    encoder = problem.frame(frame).reshape(frame.shape[0] * window, problem.encoder_out.shape[-1])
    logits = problem.joint(encoder, jnp.repeat(state.networks.rows, window, 0)).reshape(-1, window, problem.classes)
    scores, labels = symbols.scores(logits)
    count_here = jnp.where(offsets == 0, state.count_here[:, None], 0)
    may_write = (count_here < symbols.labels_per_frame) & (state.counts < rules.max_labels)[:, None]
    allowed = symbols.allowed(frame, problem.lengths[:, None], may_write, problem.ends_here)
    if rules.fusion.adds:
        labels = labels._replace(bonus=state.networks.bonus[:, None])
    score, move, label, log_prob = rules.choose(symbols, scores, labels, allowed, frame, count_here)
    reads, needs = (symbols.of_move(move, x) for x in zip(*((x.frames, x.needs) for x in symbols.moves)))
    # Computed once: the walk reads single numbers of each frame.
    return jax.lax.optimization_barrier((score, reads, needs, label, log_prob, symbols.confidence(logits)))


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


def walk_to_label(rules: Rules, state: State, score, reads, needs, label, log_prob, confidence) -> Walk:
    """The best moves up to the first label, or out of the window."""
    problem, zeros = rules.problem, jnp.zeros_like(state.frame)
    sure = [jax.tree.map(lambda x, k=k: x[:, k], confidence) for k in range(rules.window)]
    walk = Walk(zeros, state.reached, state.scores, zeros - 1, log_prob[:, 0], zeros, zeros, sure[0])
    for k in range(rules.window):
        frame = state.frame + k
        here = (walk.ahead == k) & (walk.label < 0) & (frame < problem.lengths)
        reached = frame + needs[:, k] if problem.symbols.reach else walk.reached
        score_after, at = walk.score + score[:, k], zeros + k
        move = Walk(k + reads[:, k], reached, score_after, label[:, k], log_prob[:, k], at, reads[:, k], sure[k])
        walk = replace_rows(here, move, walk)
    return walk


def write(rules: Rules, state: State, walk: Walk):
    """(the state after the walk, its label [B]), which the networks have not read yet."""
    writes = walk.label >= 0
    going = state.frame < rules.problem.lengths
    before = jnp.where(walk.at == 0, state.count_here, 0)
    after = jnp.where(going, 0, state.count_here)
    count_here = jnp.where(writes & (walk.reads == 0), before + 1, after)
    frame, symbols = state.frame + walk.ahead, rules.problem.symbols
    if symbols.scoring.token_first:  # the last label of a frame leaves it
        leaves = count_here >= symbols.labels_per_frame
        frame, count_here = frame + leaves.astype(jnp.int32), jnp.where(leaves, 0, count_here)
    counts, at = state.counts + writes.astype(jnp.int32), rules.first + state.frame + walk.at
    fields: dict[str, Any] = dict(frame=frame, count_here=count_here, counts=counts)
    fields |= dict(reached=walk.reached, scores=walk.score)
    new = dict(labels=walk.label, frames=at, durations=walk.reads, log_probs=walk.log_prob)
    new |= {} if walk.confidence is None else {"confidences": walk.confidence}
    # The walk is computed once, and what follows reads no array of the old state that it replaces: no copies.
    fields, new = jax.lax.optimization_barrier((fields, new))
    places = np.arange(1, rules.max_labels + 1, dtype=np.int32)[None]
    here = (places == fields["counts"][:, None]) & (new["labels"] >= 0)[:, None]
    fields |= {name: jnp.where(here, x[:, None], getattr(state, name)) for name, x in new.items()}
    return state._replace(**fields), new["labels"]


def advance(rules: Rules, state: State, label) -> State:
    """The networks read the new label [B] where there is one."""

    def read(networks):
        after = _fusion.read(rules.fusion, rules.problem, networks, jnp.where(label >= 0, label, 0))
        return replace_rows(label >= 0, after, networks)

    networks = jax.lax.cond(any_or_always(label >= 0), read, lambda networks: networks, state.networks)
    return state._replace(networks=networks)
