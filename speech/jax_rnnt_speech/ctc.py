"""Connectionist temporal classification (Graves et al. 2006): the loss of a head, and the greedy search.

B utterances, N encoder frames, V classes, with the blank as the last one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_rnnt import decode


def loss(logits, targets, frame_lengths, target_lengths):
    """Losses [B] of logits [B, N, V]; 0 where the labels do not fit: equal neighbours need a blank between them."""
    logits = logits.astype(jnp.float32)
    places = jnp.arange(targets.shape[1])
    again = (targets[:, 1:] == targets[:, :-1]) & (places[1:] < target_lengths[:, None])
    fits = target_lengths + again.sum(1) <= frame_lengths
    sizes = (logits.shape[1], frame_lengths), (targets.shape[1], target_lengths)
    frames_end, targets_end = ((jnp.arange(n) >= count[:, None]).astype(jnp.float32) for n, count in sizes)
    blank = logits.shape[-1] - 1
    return jnp.where(fits, optax.ctc_loss(logits, frames_end, targets, targets_end, blank_id=blank), 0)


class State(NamedTuple):
    """Of streams, as `decode.reset_streams` takes it: the last class, frames so far, log-probability."""

    fresh: jax.Array
    bad: jax.Array
    last: jax.Array
    frames: jax.Array
    scores: jax.Array


def search(logits, lengths, room, state=None):
    """`decode.Hypotheses` of the most probable class of each frame, without repetitions and blanks."""
    batch, count, classes = logits.shape
    blank, zeros = classes - 1, jnp.zeros(batch, jnp.int32)
    if state is None:
        state = State(zeros == 0, zeros > 0, zeros, zeros, zeros.astype(jnp.float32))
    last, before, total, bad = (
        jnp.where(state.fresh, start, x)
        for start, x in ((blank, state.last), (0, state.frames), (0.0, state.scores), (False, state.bad))
    )
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    here = jnp.arange(count) < lengths[:, None]
    best, values = jnp.where(here, jnp.argmax(log_probs, -1), blank), jnp.where(here, log_probs.max(-1), 0)
    past = jnp.concatenate([last[:, None], best], 1)
    begins = (best != blank) & (best != past[:, :-1])
    counts, place = begins.sum(1), jnp.cumsum(begins, 1) - 1
    rows, left = jnp.arange(batch)[:, None], jnp.arange(room) >= counts[:, None]

    def spread(x, where, fill):
        added = jnp.zeros((batch, room), jnp.asarray(x).dtype)
        return jnp.where(left, fill, added.at[rows, jnp.where(where, place, room)].add(x, mode="drop"))

    last = jnp.take_along_axis(past, lengths[:, None], 1)[:, 0]
    scores = jnp.where(bad, jnp.nan, total + values.sum(1))
    again = (best != blank) & (place >= 0)  # of a label that began in an earlier part, nothing is counted
    return decode.Hypotheses(
        labels=spread(best.astype(jnp.int32), begins, -1),
        frames=spread(before[:, None] + jnp.arange(count, dtype=jnp.int32), begins, -1),
        durations=spread(jnp.ones_like(best, jnp.int32), again, -1),
        counts=counts, scores=scores, label_log_probs=spread(values, begins, 0.0), full=counts > room, stable=counts,
        label_confidences=None, state=State(zeros > 0, bad, last, before + lengths, scores),
    )  # fmt: skip
