"""Steps of a beam that read several frames at once: windows, and sums over the runs of blanks in them.

B utterances, W hypotheses of each, K frames at once.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from jax_rnnt.decode._beam_state import Beam, BeamNodes, BeamStatic, Carry
from jax_rnnt.decode._given import Given


def ends_of(static: BeamStatic, given: Given, carry: Carry):
    """Returns the frame [B] behind the window of each utterance, or None if a step reads one frame, without windows.

    Windows begin at multiples of K frames of the stream, so that a stream in parts has the same windows as the whole.
    """
    if (size := static.frames_at_once) == 1:
        return None
    frame = carry.frame
    return jnp.minimum(frame + size - (given.first + frame) % size, given.lengths)


def spread(static: BeamStatic, ends, slot, frame, active, bad):
    """Returns (slot, frame, active, bad) [B, W K] of the hypotheses' nodes; windows of hypotheses end at `ends` [B]."""
    size = static.frames_at_once
    ahead = np.tile(np.arange(size, dtype=np.int32), static.width)[None]
    slot, frame, active, bad = (jnp.repeat(x, size, 1) for x in (slot, frame, active, bad))
    frame = frame + ahead
    return slot, frame, active & (frame < ends[:, None]), bad


def nodes_of_window(static: BeamStatic, ends, now: Beam, blanks):
    """Returns the `BeamNodes` where a window's moves begin, and the places there [1, W K] of the nodes of `NodeScores`.

    A hypothesis may leave its window by blanks alone, and may read any number of them before its next label. All
    alignments that reach a frame without a label have the same future, so they are one node whose score is the log of
    their sum: a recursion over frames, in which a blank of n frames leads from a frame to the n-th one after it. So one
    step expands all frames of a window, and the beam chooses among the labels on any of them. `blanks` are the gains
    [B, W K] of each blank. A blank may read beyond the window. The nodes behind it are the frames that a blank of 1, 2
    or more frames reaches from its last frame, so the frames that such a move reads are known while tracing. A
    hypothesis that begins inside the window has fewer than K frames left; its nodes behind come from these alone.
    """
    size, longest = static.frames_at_once, static.moves.longest_blank
    shape = *now.score.shape, size
    gains = [x.reshape(shape) for x in blanks]
    dead = jnp.full(now.score.shape, -jnp.inf, now.score.dtype)
    sums, paths = [now.score], [now.path_score]
    for k in range(1, size + longest):
        steps = [(k - move.frames, gain) for move, gain in zip(static.moves.blanks, gains)]
        steps = [(i, gain[..., i]) for i, gain in steps if 0 <= i < size]
        sums.append(sum_of([sums[i] + gain for i, gain in steps] or [dead]))
        paths.append(functools.reduce(jnp.maximum, [paths[i] + gain for i, gain in steps] or [dead]))
    left = ends[:, None] - now.frame  # frames left in the window, 1 to K
    behind = [[x[i + 1] for i in range(longest)] for x in (sums, paths)]
    for k in range(2, size + 1):
        behind = [[jnp.where(left == k, x[k + i], y) for i, y in enumerate(z)] for x, z in zip((sums, paths), behind)]
    score, path = (jnp.stack([*x[:size], *z], 2) for x, z in zip((sums, paths), behind))
    of_each = size + longest
    ahead = np.minimum(np.arange(of_each), size).astype(np.int32)[None, None]
    frame = jnp.where(ahead < size, now.frame[..., None] + ahead, ends[:, None, None] - 1)
    counts, *key = (jnp.broadcast_to(x[..., None], score.shape) for x in (now.counts, *now.key))
    count_here = jnp.where((np.arange(of_each) == 0)[None, None], now.count_here[..., None], 0)
    every = (x.reshape(x.shape[0], -1) for x in (score, path, frame, counts, count_here, *key))
    score, path, frame, counts, count_here, *key = every
    places = np.arange(static.width, dtype=np.int32)[:, None] * of_each + np.arange(size, dtype=np.int32)
    return BeamNodes(score, path, frame, counts, count_here, tuple(key)), jnp.asarray(places.reshape(1, -1))


def sum_of(terms):
    """Returns the log of the summed exponentials of arrays, without rounding where all but one of them are -inf."""
    peak = functools.reduce(jnp.maximum, terms)
    if len(terms) == 1:
        return peak
    finite = jnp.where(jnp.isneginf(peak), 0, peak)
    total = functools.reduce(jnp.add, [jnp.exp(x - finite) for x in terms])
    return jnp.where(total > 1, peak + jnp.log(total), peak)
