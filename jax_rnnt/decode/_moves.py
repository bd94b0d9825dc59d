"""Moves, the steps that a search may make at a node, from the `DecodingRules` of a loss. Static, hashable, no arrays.

There are V tokens (labels and blanks) and D durations.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jax_rnnt import _checks
from jax_rnnt.emissions import Softmax
from jax_rnnt.losses import DecodingRules, TransducerLoss

LONGEST = 2**30  # frames of a move: more than any utterance has, and its end still fits int32


@dataclasses.dataclass(frozen=True)
class Move:
    """An arc of a node. Its log-probability is that of `token`, or of a label, plus that of duration `duration`."""

    token: int | None  # class of the blank; None for a label
    duration: int | None
    frames: int
    may_end: bool
    arc: int | None  # its number in the topology, which gives it its weight; None if the lattice lacks it

    @property
    def needs(self) -> int:
        """The frames from the node on that an utterance must have for this move, if it has one frame there."""
        return max(self.frames + (not self.may_end), 1)


@dataclasses.dataclass(frozen=True)
class Moves:
    """The moves out of every node: `blanks` write nothing, `labels` write any class that is no blank."""

    emission: Softmax
    classes: int  # V + D, the number in a row of logits
    blanks: tuple[Move, ...]
    labels: tuple[Move, ...]
    labels_per_frame: int
    token_first: bool = False  # whether the best duration is chosen by itself

    @property
    def all(self) -> tuple[Move, ...]:
        """All moves, blanks first."""
        return self.blanks + self.labels

    @property
    def tokens(self) -> int:
        """V, the number of labels and blanks."""
        return self.classes - self.emission.num_durations

    @property
    def symbols(self) -> int:
        """The number of classes up to the last one that is no blank."""
        return next(n for n in range(self.tokens, -1, -1) if n - 1 not in self.emission.blanks)

    @property
    def reach(self) -> int:
        """The frames of a stream's next part that a move may need, so that it ends inside them or at their end."""
        return max(move.needs for move in self.all) - 1

    @property
    def longest_blank(self) -> int:
        """The frames that the longest blank reads."""
        return max(move.frames for move in self.blanks)


def moves_of(loss, classes: int, max_symbols: int, duration_choice: str) -> tuple[Moves, dict]:
    """Returns the moves of a loss in rows of `classes` logits, and the weights of its arcs by their names in errors."""
    if not isinstance(loss, TransducerLoss):
        lacks = "a method decoding() that returns DecodingRules"
        if isinstance(loss, type) and issubclass(loss, TransducerLoss):
            lacks = f"its options: {loss.__name__}() makes a loss"
        raise _checks.bad_type(f"loss must be a TransducerLoss, got {_checks.shown(loss)}, which lacks {lacks}.")
    name = f"{type(loss).__name__}.decoding()"
    composer, decoder = (next(x for x in type(loss).__mro__ if f in vars(x)) for f in ("compose", "decoding"))
    if decoder is not TransducerLoss and issubclass(composer, decoder) and composer is not decoder:
        lacks = f"decoding(), as its compose() changes that of {decoder.__name__}, whose decoding() may not hold for it"
        raise _checks.bad_type(f"{composer.__name__} lacks {lacks}.")
    rules = loss.decoding()
    if not isinstance(rules, DecodingRules):
        raise _checks.bad_type(f"{name} must return DecodingRules, got {rules!r}.")
    emission = rules.emission.resolved(classes)
    blanks, labels = arcs_as_moves(name, rules.topology, emission)
    token_first = duration_choice == "token_first" and emission.num_durations > 0
    if token_first:
        blanks += more_blanks(blanks, labels, emission.num_durations)
    limits = max_symbols, rules.labels_per_frame, np.iinfo(np.int32).max
    limit = min(x for x in limits if x is not None)
    weights = {f"{name} arc_weights[{i}]": x for i, x in enumerate(rules.arc_weights or (0.0,) * len(rules.topology))}
    return Moves(emission, classes, tuple(blanks), tuple(labels), limit, token_first), weights


def arcs_as_moves(source: str, topology, emission: Softmax) -> tuple[list[Move], list[Move]]:
    """Returns (moves of blanks, moves of labels) of a topology; errors name the `source` of its arcs."""
    blanks, labels = [], []
    durations = [f"duration+{i}" for i in range(emission.num_durations)]
    for i, arc in enumerate(topology):
        if arc.other is not None and arc.other not in durations:
            expected = f"the slot of a duration, one of {durations}"
            raise _checks.bad_type(f"{source}: the second slot of an arc must be {expected}, got {arc}.")
        duration = None if arc.other is None else durations.index(arc.other)
        frames = min(arc.dt, LONGEST)
        if arc.du == 0 and arc.slot in emission.slots:
            token = emission.blanks[emission.slots.index(arc.slot)]
            blanks.append(Move(token, duration, frames, arc.may_end, i))
        elif arc.du == 1 and arc.slot == "label":
            labels.append(Move(None, duration, frames, arc.may_end, i))
        else:
            expected = f"the slot of a blank, one of {emission.slots}, and du=0, or the slot 'label' and du=1"
            raise _checks.bad_type(f"{source}: an arc must have {expected}, got {arc}.")
    if not blanks or not labels:
        lacks = "an arc without a label (du=0), which reads a frame" if not blanks else "an arc with a label (du=1)"
        raise _checks.bad_type(f"{source} lacks {lacks}.")
    return blanks, labels


def more_blanks(blanks, labels, durations: int) -> list[Move]:
    """Returns moves of blanks with durations that the lattice denies them; these read at least one frame."""
    frames = {move.duration: move.frames for move in labels}
    known = {(move.token, move.duration) for move in blanks}
    pairs = [(token, i) for token in dict.fromkeys(move.token for move in blanks) for i in range(durations)]
    return [Move(*pair, max(frames.get(pair[1], 0), 1), True, None) for pair in pairs if pair not in known]
