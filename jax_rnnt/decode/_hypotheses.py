"""The result of a search."""

import typing
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _pytree


@_pytree.exportable("Hypotheses")
class Hypotheses(typing.NamedTuple):
    """Decoded label sequences: one of each utterance [B], or the N best, the best one first [B, N].

    L is `max_labels`; `...` is [B] or [B, N].

    Parameters
    ----------
    labels : Array, int32 [..., L]
        -1 from `counts` on.
    frames : Array, int32 [..., L]
        The frame that emitted each label, counted from the start of the stream; -1 from `counts` on. A merged
        hypothesis has those of its best alignment.
    durations : Array, int32 [..., L]
        Frames that each label read, 0 for labels that stay on their frame; -1 from `counts` on.
    counts : Array, int32 [...]
        Labels of each hypothesis; 0 where the score is -inf or NaN.
    scores : Array, float32 (float64 for float64 logits) [...]
        Log-probability in nats, from the start of the stream, with what `fusion` adds. -inf: there is no (further)
        hypothesis, so no labels. NaN: logits held NaN or +inf, the length was out of range, or the last part of a
        stream was too short for `exact_end`.
    label_log_probs : Array, dtype of `scores` [..., L]
        Log-probability of each label where the hypothesis took it: the sum over all arcs of the loss that write it
        there, whatever they read. It is that of the model alone, at the temperature of the search, without fusion,
        internal language model or penalty. A merged hypothesis has those of its best alignment. 0 from `counts` on.
    full : Array, bool [...]
        The hypothesis holds L labels. Some may be missing: decode again with more room.
    stable : Array, int32 [B]
        Leading labels that all hypotheses of the utterance share; `counts` where there is one. Later parts of a stream
        of `beam` keep them, so a caption of these labels never changes.
    label_confidences : Array, dtype of `scores` [..., L], or None
        From 0 to 1, with the argument `confidence`: by the entropy of the row that gives the label its
        `label_log_probs`. 0 from `counts` on.
    state : pytree
        For the next part of a stream.

    Examples
    --------
    >>> from jax_rnnt.decode import Hypotheses
    >>> Hypotheses._fields[:5]
    ('labels', 'frames', 'durations', 'counts', 'scores')
    """

    labels: jax.Array
    frames: jax.Array
    durations: jax.Array
    counts: jax.Array
    scores: jax.Array
    label_log_probs: jax.Array
    full: jax.Array
    stable: jax.Array
    label_confidences: jax.Array | None
    state: Any


def hypotheses(labels, frames, durations, label_log_probs, counts, scores, state, label_confidences=None) -> Hypotheses:
    """Returns the result, without labels where the score is -inf or NaN."""
    dead = ~(scores > -jnp.inf)
    counts = jnp.where(dead, 0, counts)
    full = counts == labels.shape[-1]
    labels, frames, durations = (jnp.where(dead[..., None], -1, x) for x in (labels, frames, durations))
    log_probs, confidences = jax.tree.map(
        lambda x: jnp.where(dead[..., None], 0, x), (label_log_probs, label_confidences)
    )
    stable = shared(labels, counts, dead)
    return Hypotheses(labels, frames, durations, counts, scores, log_probs, full, stable, confidences, state)


def shared(labels, counts, dead):
    """Returns how many leading labels all live hypotheses share [B]; `counts` where each utterance has only one."""
    if counts.ndim == 1:
        return counts
    size = labels.shape[-1]
    least = jnp.where(dead, size, counts).min(-1)
    differ = jnp.any((labels != labels[:, :1]) & ~dead[..., None], 1)
    first = jnp.where(differ, jnp.arange(size, dtype=jnp.int32)[None], size).min(-1)
    return jnp.where(dead[:, 0], 0, jnp.minimum(first, least))
