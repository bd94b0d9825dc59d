"""Greedy search: every utterance runs from label to label at its own pace.

B utterances, T frames, E and P the widths of encoder and predictor rows, K frames of a window, L labels at most. One
`lax.while_loop` steps all utterances together. A step looks at the next K frames of each, with the predictor row that
they share until a label comes: one matrix product for B K rows. It follows the best moves up to the first label or the
end of the window, then steps the predictor where there is a label. So the predictor runs once a label and not once a
frame, and utterances do not wait for each other's labels.
"""

from __future__ import annotations

import typing
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks
from jax_rnnt.decode._predictor import same_state
from jax_rnnt.decode._search import Hypotheses, beyond_the_end, checked, on_devices, peak, prepare, replace_rows


class Stream(typing.NamedTuple):
    """Where a part of a stream ended."""

    first: jax.Array  # [B]: frames of the stream before this part
    skip: jax.Array  # [B]: frames of the next part that the last move has read
    reached: jax.Array  # [B]: frames of the next part that an exact end after it needs
    scores: jax.Array  # [B]
    rows: jax.Array  # [B, P]
    predictor: Any


class Carry(typing.NamedTuple):
    frame: jax.Array  # [B]: the next one, in this part
    written: jax.Array  # [B]: labels on that frame
    counts: jax.Array  # [B]
    reached: jax.Array  # [B]: frames that an exact end needs, in this part
    scores: jax.Array  # [B]
    labels: jax.Array  # [B, L]
    frames: jax.Array
    durations: jax.Array
    rows: jax.Array  # [B, P]
    predictor: Any


def greedy(
    loss,
    joint,
    predictor,
    encoder_out: jax.Array,
    lengths: jax.Array,
    max_labels: int,
    *,
    max_symbols: int = 10,
    window: int = 4,
    start: int | None = None,
    exact_end: bool | jax.Array = False,
    state: Any = None,
) -> Hypotheses:
    """The most probable move out of each node, from the first frame to the last.

    B utterances, T frames, E and P the widths of encoder and predictor rows, V classes. A move is an arc of the loss: a
    blank, or the most probable label, with each of its durations. It has the log-probability that the arc has in the
    loss; ties prefer blanks, then lower classes. Utterances run from label to label at their own pace in one loop.

    Parameters
    ----------
    loss : TransducerLoss
        Says what the classes mean: any loss of the family, or yours (`TransducerLoss.decoding`). Options that act in
        training alone (sigma, FastEmit, delay penalty, omega) change nothing.
    joint : callable or LinearJoint
        ``joint(encoder rows [N, E], predictor rows [N, P]) -> logits [N, V]``, each row by itself, as in `JointLogits`.
        It runs in the loop: project `encoder_out` before.
        One that draws random numbers is an error; a Flax NNX module runs in evaluation mode.
    predictor : Predictor
        Or any object with its two methods, and `start` if it has one; as `joint` without dropout.
    encoder_out : Array, float16 | bfloat16 | float32 | float64 [B, T, E]
        Output of the encoder.
    lengths : Array, integer [B]
        Frames of each utterance; later ones are never read.
    max_labels : int
        Labels that a hypothesis has room for; `Hypotheses.full` tells where it was filled. No label follows then.
    max_symbols : int, default 10
        Labels that one frame may emit; only blanks leave it then.
    window : int, default 4
        Frames that a step looks at. More frames make fewer and larger steps.
    start : int, optional
        The label before the first one, of a predictor that has no `start`. Default: the blank. Negative: from the end
        of the predictor's `symbols`, an error without them.
    exact_end : bool or bool Array [B], default False
        True: only paths of the loss's lattice, so no move reads beyond the last frame and the score is that of one
        alignment. False: the last move may read further, as a stream's end is not known before. Only durations, big
        blanks and `final_blank` make a difference. In a stream: which utterances end with this part.
    state : pytree, optional
        `Hypotheses.state` of the previous part of a stream, whose predictor and start then count. Labels are those of
        this part; frames and scores count from the start of the stream.

    Returns
    -------
    Hypotheses
        One of each utterance.

    Raises
    ------
    TypeError, ValueError
        An argument has the wrong type, shape or range; a loss that lacks its `DecodingRules`; a predictor whose state
        changes, or that knows fewer labels than the joint network has; another `start` than the predictor's own, or one
        beyond its symbols; `exact_end` where an earlier part of the stream has read
        beyond the end. Where the values are traced, these utterances get the score NaN and no labels.

    See Also
    --------
    beam : The N best hypotheses.

    References
    ----------
    Xu, Bataev, Jia and Ginsburg, "Label-Looping: Highly Efficient Decoding for Transducers", 2024, arXiv:2406.06220.

    Examples
    --------
    Each frame asks for a class, and the predictor forbids to repeat the last label:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.Predictor(lambda batch: (), lambda state, labels: (-9 * jax.nn.one_hot(labels, 3), state))
    >>> frames = 5 * jax.nn.one_hot(jnp.array([[1, 0, 2, 0]]), 3)
    >>> search = lambda frames: decode.greedy(RNNTLoss(blank=0), jnp.add, predictor, frames, jnp.array([4]), 5)
    >>> found = jax.jit(search)(frames)
    >>> found.labels.tolist(), found.frames.tolist(), found.counts.tolist()
    ([[1, 2, -1, -1, -1]], [[0, 2, -1, -1, -1]], [2])
    """
    function = "greedy"
    most = _checks.positive(function, "max_labels", max_labels)
    size = _checks.positive(function, "window", window)
    encoder_out, lengths, exact_end = checked(function, encoder_out, lengths, exact_end)
    networks = loss, joint, predictor

    def run(encoder_out, lengths, exact_end, state):
        return _greedy(function, *networks, encoder_out, lengths, exact_end, state, most, max_symbols, size, start)

    return on_devices(run, encoder_out, lengths, exact_end, state)


def _greedy(function, loss, joint, predictor, encoder_out, lengths, exact_end, state, most, max_symbols, size, start):
    search, _, _, rows, network = prepare(function, loss, joint, predictor, encoder_out, lengths, max_symbols, start)
    symbols, lengths, predictor = search.symbols, search.lengths, search.predictor
    batch = lengths.shape[0]
    zeros = jnp.zeros(batch, jnp.int32)
    fresh = Stream(zeros, zeros, zeros, jnp.zeros(batch, search.dtype), rows, network)
    if state is None:
        state = fresh
    else:
        same_state(function, "state of greedy", fresh, state)
    beyond = beyond_the_end(function, symbols, exact_end, state.reached, lengths)
    ends_here = exact_end if isinstance(exact_end, bool) else exact_end[:, None]
    moves = symbols.moves
    reads, needs = (jnp.array(x, jnp.int32) for x in zip(*((move.frames, move.needs) for move in moves)))
    offsets, columns = jnp.arange(size, dtype=jnp.int32)[None], jnp.arange(most, dtype=jnp.int32)[None]
    is_label = jnp.arange(len(moves)) >= len(symbols.blanks)

    def running(carry):
        return jnp.any(carry.frame < lengths)

    def step(carry):
        frame = carry.frame[:, None] + offsets  # [B, K]
        encoder = search.frame(frame).reshape(batch * size, search.encoder_out.shape[-1])
        logits = search.joint(encoder, jnp.repeat(carry.rows, size, 0)).reshape(batch, size, search.classes)
        scores, labels = symbols.scores(logits)
        score, best = peak(labels)
        written = jnp.where(offsets == 0, carry.written[:, None], 0)
        may_write = (written < symbols.labels_per_frame) & (carry.counts < most)[:, None]
        allowed = symbols.allowed(frame, lengths[:, None], may_write, ends_here)
        scores = jnp.where(allowed, jnp.where(is_label[None, None], scores + score[..., None], scores), -jnp.inf)
        move = jnp.argmax(scores, -1)
        score, moved = jnp.max(scores, -1), reads[move]
        label = jnp.where(is_label[move], best, -1)

        # Up to the first label, or out of the window.
        place, total, found = zeros, carry.scores, jnp.full_like(zeros, -1)
        at, duration, reached = zeros, zeros, carry.reached
        for k in range(size):
            here = (place == k) & (found < 0) & (frame[:, k] < lengths)
            if symbols.reach:
                reached = jnp.where(here, frame[:, k] + needs[move[:, k]], reached)
            total = jnp.where(here, total + score[:, k], total)
            at, duration = jnp.where(here, k, at), jnp.where(here, moved[:, k], duration)
            found = jnp.where(here, label[:, k], found)
            place = jnp.where(here, k + moved[:, k], place)
        emits, on_frame = found >= 0, jnp.where(at == 0, carry.written, 0)
        going = carry.frame < lengths
        written = jnp.where(emits & (duration == 0), on_frame + 1, jnp.where(going, 0, carry.written))

        here = (columns == carry.counts[:, None]) & emits[:, None]
        new = found, state.first + carry.frame + at, duration
        old = carry.labels, carry.frames, carry.durations
        labels, frames, durations = (jnp.where(here, x[:, None], y) for x, y in zip(new, old))

        def advance(rows, network):
            made = predictor.step(network, jnp.where(emits, found, 0))
            return replace_rows(emits, made, (rows, network))

        rows, network = jax.lax.cond(jnp.any(emits), advance, lambda *x: x, carry.rows, carry.predictor)
        counts = carry.counts + emits.astype(jnp.int32)
        return Carry(carry.frame + place, written, counts, reached, total, labels, frames, durations, rows, network)

    empty = jnp.full((batch, most), -1, jnp.int32)
    reached = state.reached
    carry = Carry(state.skip, zeros, zeros, reached, state.scores, empty, empty, empty, state.rows, state.predictor)
    carry = jax.lax.while_loop(running, step, search.vary(carry))
    scores = jnp.where(search.bad | beyond | (carry.scores == jnp.inf), jnp.nan, carry.scores)
    skip, reached = carry.frame - lengths, carry.reached - lengths
    after = Stream(state.first + lengths, skip, reached, scores, carry.rows, carry.predictor)
    spoiled = jnp.isnan(scores)
    counts = jnp.where(spoiled, 0, carry.counts)
    written = carry.labels, carry.frames, carry.durations
    labels, frames, durations = (jnp.where(spoiled[:, None], -1, x) for x in written)
    return Hypotheses(labels, frames, durations, counts, scores, counts == most, after)
