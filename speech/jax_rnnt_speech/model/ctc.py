"""Connectionist temporal classification (Graves et al. 2006): the loss of a head, and the greedy search.

B utterances, N encoder frames, V classes, with the blank as the last one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_rnnt import decode
from jax_rnnt.lattices import Arc, log_likelihood

# States are columns of a lattice: even ones are the blanks between labels, odd ones are labels. Each path occurs once:
# a label is left by `skip`, to the blank's state, on the frame of what follows it; before the same label, by `next`, a
# blank.
TOPOLOGY = Arc("stay", 1, 0), Arc("next", 1, 1), Arc("skip", 0, 1)


def loss(logits, targets, frame_lengths, target_lengths):
    """Returns losses [B] of logits [B, N, V]; 0 where the labels do not fit: equal neighbours need a blank between.

    `jax_rnnt.lattices` sums over all paths, by its kernels where there are some. A scan would launch kernels for
    each frame on a GPU.
    """
    used = (jnp.arange(logits.shape[1]) < frame_lengths[:, None])[..., None]
    log_probs = jax.nn.log_softmax(jnp.where(used, logits.astype(jnp.float32), 0))
    log_probs = jnp.pad(log_probs, ((0, 0), (0, 1), (0, 0)))  # for the frame that leaves the last label
    last = (jnp.arange(log_probs.shape[1]) == frame_lengths[:, None])[..., None]
    label = jnp.where(last, -jnp.inf, jnp.take_along_axis(log_probs, targets[:, None], -1))
    blank = jnp.where(last, 0, log_probs[..., -1:])
    places = jnp.arange(1, targets.shape[1] + 1)
    again = (targets == jnp.roll(targets, -1, 1)) & (places < target_lengths[:, None])

    def states(before, of, after):
        """Returns [B, N + 1, 2 U + 1] from the blanks before labels, labels, and the last blank."""
        before, of, after = (jnp.broadcast_to(x, y.shape) for x, y in ((before, label), (of, label), (after, blank)))
        return jnp.concatenate([jnp.stack([before, of], -1).reshape(*label.shape[:2], -1), after], -1)

    arcs = {
        "stay": states(blank, label, blank),
        "next": states(label, jnp.where(again[:, None], blank, -jnp.inf), -jnp.inf),
        "skip": states(-jnp.inf, jnp.where(again[:, None], -jnp.inf, 0.0), -jnp.inf),
    }
    losses = -log_likelihood(TOPOLOGY, arcs, frame_lengths + 1, 2 * target_lengths)
    return jnp.where(target_lengths + again.sum(1) <= frame_lengths, losses, 0)


def consistency(logits, frame_lengths):
    """Returns how far the logits [B, N, V] are from those of an utterance's other copy, [B] (Yao et al. 2024).

    Rows 2 i and 2 i + 1 are copies. The divergence of Kullback and Leibler of their posteriors is summed over frames;
    the other copy, from which a row learns, has no gradient.
    """
    used = (jnp.arange(logits.shape[1]) < frame_lengths[:, None])[..., None]
    log_probs = jax.nn.log_softmax(jnp.where(used, logits.astype(jnp.float32), 0))
    pairs = log_probs.reshape(-1, 2, *log_probs.shape[1:])
    others = jax.lax.stop_gradient(pairs[:, ::-1]).reshape(log_probs.shape)
    return (jnp.exp(others) * (others - log_probs)).sum((1, 2))


class State(NamedTuple):
    """The state of streams for `decode.reset_streams`: the last class, frames so far, log-probability."""

    fresh: jax.Array
    bad: jax.Array
    last: jax.Array
    frames: jax.Array
    scores: jax.Array


def search(logits, lengths, room, state=None, allowed=None):
    """Returns `decode.Hypotheses` with the most probable class of each frame, without repetitions and blanks.

    `allowed`, bool [V], has the labels that may be written, by the log-probabilities of all; blanks always may.
    """
    batch, count, classes = logits.shape
    blank, zeros = classes - 1, jnp.zeros(batch, jnp.int32)
    if state is None:
        state = State(zeros == 0, zeros > 0, zeros, zeros, zeros.astype(jnp.float32))
    last, before, total, bad = (
        jnp.where(state.fresh, start, x)
        for start, x in ((blank, state.last), (0, state.frames), (0.0, state.scores), (False, state.bad))
    )
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    if allowed is not None:
        log_probs = jnp.where(allowed | (jnp.arange(classes) == blank), log_probs, -jnp.inf)
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
    again = (best != blank) & (place >= 0)  # a label that began in an earlier part counts nothing here
    return decode.Hypotheses(
        labels=spread(best.astype(jnp.int32), begins, -1),
        frames=spread(before[:, None] + jnp.arange(count, dtype=jnp.int32), begins, -1),
        durations=spread(jnp.ones_like(best, jnp.int32), again, -1),
        counts=counts, scores=scores, label_log_probs=spread(values, begins, 0.0), full=counts > room, stable=counts,
        label_confidences=None, state=State(zeros > 0, bad, last, before + lengths, scores),
    )  # fmt: skip
