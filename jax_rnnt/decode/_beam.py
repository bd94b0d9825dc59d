"""Beam search for the N most probable label sequences, each scored by the sum over its alignments.

One `lax.while_loop` runs `_beam_step.step` until every utterance is at its end. Label sequences are compared by hashes
of 64 bits. So are predictors: the hash is of all labels where the state holds floating-point numbers, else of rows and
state. Two that differ are mistaken for equal with a probability of 2^-64.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import in_name_of
from jax_rnnt.decode import _beam_step, _fusion, _given, _options
from jax_rnnt.decode._beam_state import Beam, BeamStatic, Carry, first_beam, first_networks, of_bits, recurrent
from jax_rnnt.decode._fusion import Networks
from jax_rnnt.decode._gather import flat, hypothesis_rows, take
from jax_rnnt.decode._given import Given
from jax_rnnt.decode._hashing import append_label
from jax_rnnt.decode._hypotheses import Hypotheses, hypotheses
from jax_rnnt.decode._model import constant
from jax_rnnt.decode._packing import by_platform, packs
from jax_rnnt.decode._streams import begin_part, beyond_the_end


@_pytree.exportable("BeamStream")
class BeamStream(typing.NamedTuple):
    """The state of a stream after one of its parts; the beam's frames count from the start of the next part."""

    fresh: jax.Array  # [B]: the next part starts anew
    bad: jax.Array  # [B]: NaN has been met
    first: jax.Array  # [B]: frames of the stream before the next part
    reached: jax.Array  # [B]: frames of the next part that an exact end after it needs, for the same search
    committed: jax.Array  # [B]: labels of the stream that the beam has let go
    beam: Beam
    networks: Networks


@in_name_of("beam")
def run(
    search, encoder_out, lengths, width, merge, threshold, length_norm, exact_end, state, frames_at_once
) -> Hypotheses:
    """Implements `Search.beam`."""
    width, merge = _options.size("width", width), _checks.boolean("merge", merge)
    several = _options.size("frames_at_once", frames_at_once) > 1
    if several and not merge:
        raise _checks.bad_value(f"frames_at_once must be 1 with merge=False, got {frames_at_once}.")
    length_norm = constant(_checks.scalar("length_norm", length_norm))
    numbers = {"length_norm": length_norm}
    if threshold is not None:
        threshold = numbers["threshold"] = constant(_checks.scalar("threshold", threshold))
    search, encoder_out, lengths, exact_end = _given.checked(search, encoder_out, lengths, exact_end)
    window = _given.window(frames_at_once, encoder_out)

    def of_device(encoder_out, lengths, exact_end, state):
        static, given = _given.prepare(search, encoder_out, lengths, exact_end, window, numbers)
        static = BeamStatic(**vars(static), width=width, merge=merge)
        state = fitted(state, given.lengths.shape[0] * width)
        stream = begin_part("beam", static, given, functools.partial(start_stream, static, given), state)
        beyond = beyond_the_end(static, given, exact_end, stream.reached)
        static = dataclasses.replace(static, recurrent=recurrent(stream.networks))
        given = given._replace(first=stream.first, threshold=threshold)
        carry = run_steps(static, given, stream, stream.bad | given.bad | beyond)
        return result(static, given, stream.committed, carry, length_norm)

    return _given.on_devices(of_device, encoder_out, lengths, exact_end, state)


def start_stream(static: BeamStatic, given: Given) -> BeamStream:
    zeros = jnp.zeros(given.lengths.shape, jnp.int32)
    none, networks = jnp.zeros(zeros.shape, bool), first_networks(static, given)
    return BeamStream(none, none, zeros, zeros, zeros, first_beam(static, given), networks)


def fitted(state, rows: int):
    """Returns the state, with keys if this number of rows is packed, else without: the size of a batch may change."""
    if not isinstance(state, BeamStream) or (state.networks.key is not None) == packs(rows):
        return state
    key = unshared_keys(state.networks) if packs(rows) else None
    return state._replace(networks=state.networks._replace(key=key))


def unshared_keys(networks: Networks):
    """Returns keys [B, 2 W, 2] with which no slots share a row until their next labels."""
    batch, slots, _ = networks.rows.shape
    slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32)[None], (batch, slots))
    return jnp.stack(append_label((slot, slot), slot), 2)


def run_steps(static: BeamStatic, given: Given, stream: BeamStream, bad) -> Carry:
    """Returns the carry of the loops after all frames of this part; `bad` [B] marks utterances without a result."""
    bad = jnp.broadcast_to(bad[:, None], stream.beam.score.shape)
    carry = given.vary(Carry(stream.reached, stream.beam, stream.networks, bad))
    few_steps = functools.partial(_beam_step.few_steps, static, given)
    return jax.lax.while_loop(lambda carry: jnp.any(carry.frame < given.lengths), few_steps, carry)


def result(static: BeamStatic, given: Given, committed, carry: Carry, length_norm) -> Hypotheses:
    """Returns the hypotheses at the end of these frames, best first."""
    carry = carry._replace(bad=jnp.any(carry.bad, -1))
    now, lengths = carry.beam, given.lengths
    beam = now._replace(frame=now.frame - lengths[:, None])
    first, reached, networks = given.first + lengths, carry.reached - lengths, carry.networks
    if networks.key is not None:  # except on a CPU, the keys are still those of the first carry
        unshared = given.vary(unshared_keys(networks))
        key = by_platform(now.score.size, lambda key: key, lambda _: unshared, networks.key)
        networks = networks._replace(key=key)
    after = BeamStream(jnp.zeros_like(carry.bad), carry.bad, first, reached, committed, beam, networks)
    score = now.score
    if static.merge:  # moves that read beyond the last frame by different numbers of frames all end here
        score, _ = _beam_step.merged(score, now.path_score, now.key)
    score, bad = with_final_scores(given.search, static.moves.tokens, carry, score)
    _, order = jax.lax.top_k(ranks(score, now.counts + committed[:, None], length_norm), static.width)
    score, counts, written = (take(x, order) for x in (score, now.counts, now.written))
    score = jnp.where(bad[:, None], jnp.nan, score)
    labels, frames, durations = (written[:, :, i] for i in range(3))
    log_probs, *confidences = of_bits(written[:, :, 3:], static.dtype)
    return hypotheses(labels, frames, durations, log_probs, counts, score, after, *confidences)


def ranks(score, counts, length_norm):
    """Returns the numbers [B, W] that rank the hypotheses; the norm of a label may be infinite or 0."""
    if _checks.is_zero(length_norm):
        return score
    norm = (counts + 1).astype(score.dtype) ** jnp.asarray(length_norm, score.dtype)
    least = jnp.finfo(score.dtype).min  # the least score of a live hypothesis; a dead one has -inf
    return jnp.where((score == 0) | jnp.isneginf(score), score, jnp.maximum(score / norm, least))


def with_final_scores(search, tokens: int, carry: Carry, score):
    """Returns (scores [B, W] of hypotheses that end here, bad [B]); models of fusion may score the end."""
    if not _fusion.ends(search):
        return score, carry.bad
    now, models = carry.beam, carry.networks.models
    rows = jax.tree.map(lambda x: hypothesis_rows(x, now.slot, None), models)
    score = _fusion.at_the_end(search, tokens, rows, flat(now.unread), flat(score)).reshape(score.shape)
    return score, carry.bad | jnp.any(jnp.isnan(score), -1)
