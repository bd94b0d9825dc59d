"""The parts of a beam: its static description, and the arrays of the loops over steps.

There are B utterances, W hypotheses of each, V tokens, K frames at once, C candidates, and at most L labels.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _pytree
from jax_rnnt.decode import _fusion
from jax_rnnt.decode._fusion import Networks
from jax_rnnt.decode._gather import over_hypotheses
from jax_rnnt.decode._given import Given, Static
from jax_rnnt.decode._packing import packs

NEVER = np.iinfo(np.int32).max  # after any frame


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamStatic(Static):
    """The static values of a beam's step, known when it is traced."""

    width: int
    merge: bool
    recurrent: bool = False  # a network's state holds floating-point numbers, so hypotheses seldom share networks

    @property
    def kinds(self) -> list[tuple[int, int]]:
        """(frames that the move reads, frames that it needs) for each W candidates, counted from where the move begins.

        Blanks that leave a window of several frames count from its last frame.
        """
        blanks = [(move.frames, move.needs) for move in self.moves.blanks]
        if self.frames_at_once > 1:
            beyond = 0 if all(move.may_end for move in self.moves.blanks) else 1
            blanks = [(1 + i, 1 + i + beyond) for i in range(self.moves.longest_blank)]
        return [(0, 0), *blanks, *((move.frames, move.needs) for move in self.moves.labels)]

    @property
    def reads(self):
        """The number of frames [C] that each candidate reads."""
        return np.repeat([reads for reads, _ in self.kinds], self.width).astype(np.int32)


@_pytree.exportable("Beam")
class Beam(typing.NamedTuple):
    """The hypotheses of all utterances; a dead one has the score -inf."""

    score: jax.Array  # [B, W]: log of the sum over alignments, including fusion
    path_score: jax.Array  # [B, W]: score of the best alignment
    frame: jax.Array  # [B, W]: the next frame to read, counted in this part of the stream
    counts: jax.Array  # [B, W]: number of labels
    count_here: jax.Array  # [B, W]: number of labels on that frame
    unread: jax.Array  # [B, W]: the code (`_guard`) of the last label if the networks have not read it, else -1
    slot: jax.Array  # [B, W]: the slot of its networks
    key: tuple  # two arrays [B, W]: the hash of the labels
    written: jax.Array  # [B, W, 3 + n, L]: labels, their frames and durations, and the bits of numbers (`as_bits`)


class Recent(typing.NamedTuple):
    """Labels that a few steps have written. Steps do not touch the table of the beam, which has room for all labels."""

    steps: jax.Array  # [B, W]: steps of the utterance so far; a GPU counts them in the kernel of other such arrays
    # [B, W, 3 + n, K + 1]: laid out as in the table, with label i of a hypothesis at i modulo K. The last place holds,
    # as its first two numbers, the hypothesis of the table from which this one comes and that hypothesis's number of
    # labels.
    written: jax.Array


class Carry(typing.NamedTuple):
    """The carry of the loops over steps."""

    reached: jax.Array  # [B]: frames that an exact end needs for the kept hypotheses to have the same moves
    beam: Beam
    networks: Networks  # in their slots [B, 2 W, ...]; without a key where rows are not packed
    bad: jax.Array  # [B, W]: the utterance has met NaN or +inf
    recent: Any = None  # `Recent`; this field and the next one are set in the inner loop
    results: Any = None  # results of `score_rows`, kept so that their arrays are used again

    @property
    def frame(self):
        """For each utterance [B], the first frame that a live hypothesis has still to read."""
        frame = jnp.where(self.beam.score > -jnp.inf, self.beam.frame, NEVER)
        return over_hypotheses(jnp.minimum, frame)


class NodeScores(typing.NamedTuple):
    """Log-probabilities out of the K nodes of each hypothesis; those of an utterance share rows of labels."""

    frame: jax.Array  # [B, W K]: the frame of the node
    active: jax.Array  # [B, W K]: whether a live hypothesis may move from the node
    moves: jax.Array  # [B, W K, moves]: without the log-probabilities of the labels
    labels: jax.Array  # [R, V]: including fusion
    row: jax.Array  # [B, W K]: the row of each node in `labels`
    model_labels: jax.Array  # [R, V]: from the model alone
    model_row: jax.Array  # [B, W K]
    confidence: jax.Array | None  # [R]: from the model alone
    bad: jax.Array  # [B, W K]: whether NaN or +inf has been met
    breaks: Any = None  # int32 [R, V]: bits of the matches that each label breaks by the guard's rule


class BeamNodes(typing.NamedTuple):
    """The M nodes of each hypothesis where moves begin: its own, or those of a window's K frames and those behind."""

    score: jax.Array  # [B, W M]: score on reaching the node
    path_score: jax.Array  # [B, W M]
    frame: jax.Array  # [B, W M]: for a node behind the window, the window's last frame
    counts: jax.Array  # [B, W M]: as in `Beam`
    count_here: jax.Array  # [B, W M]
    key: tuple


class Expansion(typing.NamedTuple):
    """Hypotheses, and the move that each of them makes."""

    parent: jax.Array  # [B, C]: the node where the move begins
    gain: jax.Array  # [B, C]: log-probability
    label: jax.Array  # [B, C]: -1 if the move writes none


class Candidates(typing.NamedTuple):
    """Moves of hypotheses, and hypotheses that wait for their frame; the next beam is chosen from them.

    First come the W that wait, then W for each blank (if blanks leave a window, W for each frame behind it that one
    reaches), then W for each arc with a label, since no more than these can stay.
    """

    score: Any  # [B, C]
    path_score: jax.Array  # [B, C]
    parent: jax.Array  # [B, C]: this and the next field as in `Expansion`
    label: jax.Array  # [B, C]
    frame: jax.Array  # [B, C]: after the move, as are the next two fields
    counts: jax.Array  # [B, C]
    count_here: jax.Array  # [B, C]
    key: tuple  # two arrays [B, C]
    bad: jax.Array  # [B, C]: as in `Carry`

    @property
    def identity(self):
        """Candidates with equal values here have the same labels and the same future."""
        return self.frame, self.count_here, *self.key


def first_beam(static: BeamStatic, given: Given) -> Beam:
    """Returns one live hypothesis without labels for each utterance, and one slot for each hypothesis."""
    batch, width, dtype = given.lengths.shape[0], static.width, static.dtype
    none = jnp.zeros((batch, width), jnp.int32)
    score = jnp.broadcast_to(jnp.where(jnp.arange(width) == 0, 0, -jnp.inf).astype(dtype), (batch, width))
    slot = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (batch, width))
    numbers = jnp.zeros((batch, width, 2 if given.search.confidence else 1), dtype)
    bits = as_bits(numbers)
    bits = jnp.broadcast_to(bits[..., None], (*bits.shape, static.max_labels))
    written = jnp.concatenate([jnp.full((batch, width, 3, static.max_labels), -1, jnp.int32), bits], 2)
    return Beam(score, score, none, none, none, none - 1, slot, (none, none), written)


def as_bits(numbers):
    """Returns numbers [B, W, n] as int32 [B, W, n or 2 n]: a beam keeps all that labels have in one array."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.int32)
    return bits.reshape(*numbers.shape[:2], math.prod(bits.shape[2:]))


def of_bits(bits, dtype):
    """Returns the n arrays [B, W, L] of numbers whose bits are [B, W, n or 2 n, L]."""
    words = np.dtype(dtype).itemsize // 4
    each = [bits[:, :, i : i + words] for i in range(0, bits.shape[2], words)]
    each = [x[:, :, 0] if words == 1 else jnp.moveaxis(x, 2, -1) for x in each]
    return [jax.lax.bitcast_convert_type(x, dtype) for x in each]


def first_networks(static: BeamStatic, given: Given) -> Networks:
    """Returns the networks after their start labels, in all slots."""
    batch, rows = given.lengths.shape[0], given.lengths.shape[0] * static.width
    networks = _fusion.begin(static, given, rows)
    networks = networks._replace(key=jnp.zeros((rows, 2), jnp.int32) if packs(rows) else None)
    networks = jax.tree.map(lambda x: x.reshape(batch, static.width, *x.shape[1:]), networks)
    return jax.tree.map(lambda x: jnp.concatenate([x, x], 1), networks)


def recurrent(networks: Networks) -> bool:
    """Returns True if the state of a network holds floating-point numbers."""
    states = networks.predictor, networks.models
    return not all(jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves(states))
