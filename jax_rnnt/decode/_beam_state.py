"""What a beam is made of: its static description, and the arrays of the loops over steps.

B utterances, W hypotheses of each, V tokens, K frames at once, C candidates, L labels at most.
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

NEVER = np.iinfo(np.int32).max  # later than any frame


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamStatic(Static):
    """What a step of a beam knows when it is traced."""

    width: int
    merge: bool
    recurrent: bool = False  # a network's state holds floating-point numbers, so hypotheses seldom share networks

    @property
    def kinds(self) -> list[tuple[int, int]]:
        """(frames that the move reads, frames that it needs) of each W candidates, counted from where it begins.

        Blanks that leave a window of several frames count from its last one.
        """
        blanks = [(move.frames, move.needs) for move in self.moves.blanks]
        if self.frames_at_once > 1:
            beyond = 0 if all(move.may_end for move in self.moves.blanks) else 1
            blanks = [(1 + i, 1 + i + beyond) for i in range(self.moves.longest_blank)]
        return [(0, 0), *blanks, *((move.frames, move.needs) for move in self.moves.labels)]

    @property
    def reads(self):
        """[C]: frames that each of the candidates reads."""
        return np.repeat([reads for reads, _ in self.kinds], self.width).astype(np.int32)


@_pytree.exportable("Beam")
class Beam(typing.NamedTuple):
    """The hypotheses of all utterances; a dead one has the score -inf."""

    score: jax.Array  # [B, W]: log of the sum over alignments, with fusion
    path_score: jax.Array  # [B, W]: of the best alignment
    frame: jax.Array  # [B, W]: the next one to read, counted in this part of the stream
    counts: jax.Array  # [B, W]: labels
    count_here: jax.Array  # [B, W]: labels on that frame
    unread: jax.Array  # [B, W]: the code (`_guard`) of the last label, if the networks have not read it, else -1
    slot: jax.Array  # [B, W]: where its networks are
    key: tuple  # two of [B, W]: hash of the labels
    written: jax.Array  # [B, W, 3 + n, L]: labels, their frames and durations, and the bits of numbers (`as_bits`)


class Recent(typing.NamedTuple):
    """What a few steps have written. They do not touch the table of the beam, which has room for all labels."""

    steps: jax.Array  # [B, W]: how many, of the utterance; a GPU counts them in the kernel of other such arrays
    # [B, W, 3 + n, K + 1]: as in the table, label i of a hypothesis at i modulo K. Last come, in the first two places,
    # the hypothesis of the table from which this one comes, and its labels.
    written: jax.Array


class Carry(typing.NamedTuple):
    """What the loops over steps carry."""

    reached: jax.Array  # [B]: frames that an exact end needs, as no kept hypothesis has other moves
    beam: Beam
    networks: Networks  # in their slots [B, 2 W, ...]; without a key where rows are not packed
    bad: jax.Array  # [B, W]: the utterance has met NaN or +inf
    recent: Any = None  # `Recent`; this and the next one in the inner loop
    results: Any = None  # of `score_rows`, kept for their arrays

    @property
    def frame(self):
        """[B]: of the utterance, the first one that a live hypothesis has still to read."""
        frame = jnp.where(self.beam.score > -jnp.inf, self.beam.frame, NEVER)
        return over_hypotheses(jnp.minimum, frame)


class NodeScores(typing.NamedTuple):
    """Log-probabilities out of the K nodes of each hypothesis; rows of labels are shared by those of an utterance."""

    frame: jax.Array  # [B, W K]: of the node
    active: jax.Array  # [B, W K]: a live hypothesis may move from it
    moves: jax.Array  # [B, W K, moves]: without those of labels
    labels: jax.Array  # [R, V]: with fusion
    row: jax.Array  # [B, W K]: of each node in `labels`
    model_labels: jax.Array  # [R, V]: of the model alone
    model_row: jax.Array  # [B, W K]
    confidence: jax.Array | None  # [R]: of the model alone
    bad: jax.Array  # [B, W K]: NaN or +inf has been met
    breaks: Any = None  # int32 [R, V]: bits of the matches that each label breaks, by the guard


class BeamNodes(typing.NamedTuple):
    """Where moves begin, M of each hypothesis: its own node; in a window those of its K frames, then those behind."""

    score: jax.Array  # [B, W M]: of the way there
    path_score: jax.Array  # [B, W M]
    frame: jax.Array  # [B, W M]: of a node behind the window, its last one
    counts: jax.Array  # [B, W M]: as of `Beam`
    count_here: jax.Array  # [B, W M]
    key: tuple


class Expansion(typing.NamedTuple):
    """Hypotheses, and the move that each takes."""

    parent: jax.Array  # [B, C]: the node
    gain: jax.Array  # [B, C]: log-probability
    label: jax.Array  # [B, C]: -1 for none


class Candidates(typing.NamedTuple):
    """Moves of hypotheses, and hypotheses that wait for their frame: the next beam is chosen from them.

    W that wait, then W of each blank (that leaves a window, for each frame behind it that one reaches), then W of each
    arc with a label, as no more than these can stay.
    """

    score: Any  # [B, C]
    path_score: jax.Array  # [B, C]
    parent: jax.Array  # [B, C]: the next two as in `Expansion`
    label: jax.Array  # [B, C]
    frame: jax.Array  # [B, C]: after the move, as the next two
    counts: jax.Array  # [B, C]
    count_here: jax.Array  # [B, C]
    key: tuple  # two of [B, C]
    bad: jax.Array  # [B, C]: as in `Carry`

    @property
    def identity(self):
        """Candidates with equal numbers here have the same labels and the same future."""
        return self.frame, self.count_here, *self.key


def first_beam(static: BeamStatic, given: Given) -> Beam:
    """One live hypothesis of each utterance, without labels, and one slot of each hypothesis."""
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
    """int32 [B, W, n or 2 n] of floating-point numbers [B, W, n]: a beam keeps all that labels have in one array."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.int32)
    return bits.reshape(*numbers.shape[:2], math.prod(bits.shape[2:]))


def of_bits(bits, dtype):
    """The n numbers [B, W, L] of their bits [B, W, n or 2 n, L]."""
    words = np.dtype(dtype).itemsize // 4
    each = [bits[:, :, i : i + words] for i in range(0, bits.shape[2], words)]
    each = [x[:, :, 0] if words == 1 else jnp.moveaxis(x, 2, -1) for x in each]
    return [jax.lax.bitcast_convert_type(x, dtype) for x in each]


def first_networks(static: BeamStatic, given: Given) -> Networks:
    """The networks after their start labels, in all slots."""
    batch, rows = given.lengths.shape[0], given.lengths.shape[0] * static.width
    networks = _fusion.begin(static, given, rows)
    networks = networks._replace(key=jnp.zeros((rows, 2), jnp.int32) if packs(rows) else None)
    networks = jax.tree.map(lambda x: x.reshape(batch, static.width, *x.shape[1:]), networks)
    return jax.tree.map(lambda x: jnp.concatenate([x, x], 1), networks)


def recurrent(networks: Networks) -> bool:
    """Whether the state of a network holds floating-point numbers."""
    states = networks.predictor, networks.models
    return not all(jnp.issubdtype(x.dtype, jnp.integer) for x in jax.tree.leaves(states))
