"""Beam search: the N most probable label sequences, each a sum over its alignments.

One `lax.while_loop` runs `_beam_step.step` until every utterance is at its end. Labels are compared by hashes of 64
bits, and so are predictors: by all labels where the state holds floating-point numbers, else by rows and state. Two
that differ are taken for one with a probability of 2^-64.
"""

import functools
import typing

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _pytree
from jax_rnnt.decode._gather import flat, hypothesis_rows, take
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode._model import constant
from jax_rnnt.decode._streams import begin_part
from jax_rnnt.decode.search import _beam_step, _fusion, _greedy, _options
from jax_rnnt.decode.search._beam_step import Beam, Rules, State
from jax_rnnt.decode.search._fusion import Fusion, Networks, check_utterances
from jax_rnnt.decode.search._hashing import append_label
from jax_rnnt.decode.search._packing import by_platform, packs
from jax_rnnt.decode.search._problem import Problem, beyond_the_end, checked, on_devices, prepare


@_pytree.exportable("BeamStream")
class Stream(typing.NamedTuple):
    """Where a part of a stream ended; the beam's frames count from the start of the next part."""

    fresh: jax.Array  # [B]: the next part starts anew
    bad: jax.Array  # [B]: NaN has been met
    first: jax.Array  # [B]: frames of the stream before the next part
    reached: jax.Array  # [B]: frames of the next part that an exact end after it needs, for the same search
    committed: jax.Array  # [B]: labels of the stream that the beam has let go
    beam: Beam
    networks: Networks


def run(
    search, encoder_out, lengths, width, merge, threshold, length_norm, exact_end, state, frames_at_once
) -> Hypotheses:
    """`Search.beam`."""
    function = "beam"
    sizes = _options.size(function, "width", width), _options.size(function, "max_labels", search.max_labels)
    merge = _checks.boolean(function, "merge", merge)
    window = _options.size(function, "frames_at_once", frames_at_once)
    if window > 1 and not merge:
        raise ValueError(f"{function}: frames_at_once must be 1 with merge=False, got {window}.")
    window = _greedy.frames_at_once(window, encoder_out)
    length_norm = constant(_checks.scalar(function, "length_norm", length_norm))
    numbers = {"length_norm": length_norm}
    if threshold is not None:
        threshold = constant(_checks.scalar(function, "threshold", threshold))
        numbers["threshold"] = threshold
    scoring, models = search._scoring(function), search._models(function)
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)
    check_utterances(function, models, encoder_out)

    def of_device(encoder_out, lengths, exact_end, state):
        batch = encoder_out, lengths, exact_end
        problem, label, first = prepare(function, search, *batch, scoring, width, models.numbers | numbers)
        start_stream = functools.partial(first_stream, problem, models, *sizes, label, first)
        stream = begin_part(function, start_stream, fitted(state, problem.lengths.shape[0] * width), problem.vary)
        if state is not None:
            stream = stream._replace(networks=_fusion.placed(models, function, stream.networks))
        beyond = beyond_the_end(problem, exact_end, stream.reached)
        rules = Rules(problem, models, _beam_step.recurrent(stream.networks), stream.first, *sizes, merge, threshold)
        rules = rules._replace(window=window)
        return result(rules, stream.committed, run_steps(rules, stream, beyond), length_norm)

    return on_devices(of_device, encoder_out, lengths, exact_end, state)


def first_stream(problem: Problem, fusion: Fusion, width: int, max_labels: int, start: int, first) -> Stream:
    """The start of a stream; `first` makes rows and state of the predictor."""
    batch = problem.lengths.shape[0]
    zeros, none = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool)
    networks = _beam_step.first_networks(problem, fusion, batch, width, start, *first())
    return Stream(none, none, zeros, zeros, zeros, _beam_step.first_beam(problem, width, max_labels), networks)


def fitted(state, rows: int):
    """The state of a stream with keys if so many rows are packed, and without if not: a batch may change its size."""
    if not isinstance(state, Stream) or (state.networks.key is not None) == packs(rows):
        return state
    key = unshared_keys(state.networks) if packs(rows) else None
    return state._replace(networks=state.networks._replace(key=key))


def unshared_keys(networks: Networks):
    """Keys [B, 2 W, 2] by which slots share no rows until their next labels."""
    batch, slots, _ = networks.rows.shape
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None], (batch, slots))
    return jnp.stack(append_label((slot, slot), slot), 2)


def run_steps(rules: Rules, stream: Stream, bad) -> State:
    """The state after all frames of this part; `bad` [B]: utterances without a result."""
    problem, beam, networks = rules.problem, stream.beam, stream.networks
    bad = jnp.broadcast_to((stream.bad | problem.bad | bad)[:, None], beam.score.shape)
    state = problem.vary(State(stream.reached, beam, networks, bad))
    few_steps = functools.partial(_beam_step.few_steps, rules)
    return jax.lax.while_loop(lambda state: jnp.any(state.frame < problem.lengths), few_steps, state)


def result(rules: Rules, committed, state: State, length_norm) -> Hypotheses:
    """The hypotheses at the end of these frames, best first."""
    state = state._replace(bad=jnp.any(state.bad, -1))
    now, lengths = state.beam, rules.problem.lengths
    part = now._replace(frame=now.frame - lengths[:, None])
    first, reached, networks = rules.first + lengths, state.reached - lengths, state.networks
    if networks.key is not None:  # elsewhere than on a CPU they are those of the first state
        unshared = rules.problem.vary(unshared_keys(networks))
        key = by_platform(rules.rows, lambda key: key, lambda _: unshared, networks.key)
        networks = networks._replace(key=key)
    after = Stream(jnp.zeros_like(state.bad), state.bad, first, reached, committed, part, networks)
    score = now.score
    if rules.merge:  # moves that read beyond the last frame by different numbers of frames end here alike
        score, _ = _beam_step.merged(score, now.path_score, now.key)
    score, bad = with_final_scores(rules, state, score)
    _, order = jax.lax.top_k(ranks(score, now.counts + committed[:, None], length_norm), rules.width)
    score, counts, written = (take(x, order) for x in (score, now.counts, now.written))
    score = jnp.where(bad[:, None], jnp.nan, score)
    labels, frames, durations = (written[:, :, i] for i in range(3))
    log_probs, *confidences = _beam_step.of_bits(written[:, :, 3:], rules.problem.dtype)
    return hypotheses(labels, frames, durations, log_probs, counts, score, after, *confidences)


def ranks(score, counts, length_norm):
    """What hypotheses are ordered by [B, W]; the norm of a label may be infinite, or 0."""
    if _checks.is_zero(length_norm):
        return score
    norm = (counts + 1).astype(score.dtype) ** jnp.asarray(length_norm, score.dtype)
    least = jnp.finfo(score.dtype).min  # of a hypothesis; a dead one has -inf
    return jnp.where((score == 0) | jnp.isneginf(score), score, jnp.maximum(score / norm, least))


def with_final_scores(rules: Rules, state: State, score):
    """(scores [B, W] of hypotheses that end here, bad [B]): models of fusion may score an end."""
    if not rules.fusion.ends:
        return score, state.bad
    now, models = state.beam, state.networks.models
    rows = jax.tree.map(lambda x: hypothesis_rows(x, now.slot, None), models)
    score = _fusion.at_the_end(rules.fusion, rows, flat(now.unread), flat(score)).reshape(score.shape)
    return score, state.bad | jnp.any(jnp.isnan(score), -1)
