"""The classes of a row as a decoder sees them: moves out of a node, from the `DecodingRules` of a loss.

V tokens (labels and blanks), D durations; `...` is any number of dimensions.
"""

import dataclasses
import functools
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks
from jax_rnnt.decode import _model
from jax_rnnt.decode._gather import pick
from jax_rnnt.decode.search import _options
from jax_rnnt.decode.search._entropy import Entropy, checked_confidence
from jax_rnnt.decode.search._largest import peak
from jax_rnnt.emissions import Softmax
from jax_rnnt.losses import DecodingRules, TransducerLoss

LONGEST = 2**30  # frames of a move: more than any utterance has, and int32 holds its end


class Scoring(typing.NamedTuple):
    """Options of a search that change what its moves are, or what they score."""

    max_symbols: int
    blank_penalty: Any = 0.0
    temperature: Any = 1.0
    blank_threshold: Any = 1.0
    token_first: bool = False
    entropy: Entropy | None = None  # of `Symbols.confidence`

    @property
    def penalizes(self) -> bool:
        return not _checks.is_zero(self.blank_penalty)

    @property
    def tempers(self) -> bool:
        return not (_checks.is_number(self.temperature) and self.temperature == 1)

    @property
    def skips(self) -> bool:
        return not (_checks.is_number(self.blank_threshold) and self.blank_threshold == 1)

    @classmethod
    def names(cls) -> list[str]:
        """Of the numbers."""
        return [name for name, x in cls._field_defaults.items() if isinstance(x, float)]

    @property
    def numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.names()}

    def tempered(self, logits, apart=None):
        """Logits [..., V] of one softmax over the temperature, up to a number of each row, in the dtype of scores.

        `apart` [..., V]: logits that belong to no softmax, and are divided alone. The largest one of a row becomes 0
        before it is multiplied. Otherwise a compiler may contract the product and the subtraction of its maximum, which
        then differ by the rounding of the product: by more than 100 nats from 2^31 on.
        """
        if not self.tempers:
            return logits
        x = logits.astype(_model.scores_dtype(logits.dtype))
        apart = False if apart is None else apart
        largest = jax.lax.stop_gradient(jnp.max(jnp.where(apart, -jnp.inf, x), -1, keepdims=True, initial=-jnp.inf))
        largest = jnp.where(jnp.isneginf(largest) | apart, 0, largest)
        return (x - largest) * self._inverse(x.dtype)

    def _inverse(self, dtype):
        """1 / temperature. XLA divides by a constant in another way than by a number that it does not know."""
        known = _checks.known(self.temperature)
        numpy, temperature = (jnp, self.temperature) if known is None else (np, known)
        inverse = numpy.asarray(1, dtype) / numpy.asarray(temperature, dtype)
        return numpy.maximum(inverse, np.finfo(dtype).tiny)  # 0 would make NaN of -inf


def checked_scoring(function, max_symbols, duration_choice="pair", confidence=None, **numbers) -> Scoring:
    max_symbols = _options.size(function, "max_symbols", max_symbols)
    numbers = {name: _checks.scalar(function, name, x) for name, x in numbers.items()}
    choice = _checks.choice(function, "duration_choice", duration_choice, ("pair", "token_first"))
    entropy = checked_confidence(function, confidence)
    return Scoring(max_symbols, token_first=choice == "token_first", entropy=entropy, **numbers)


class Move(typing.NamedTuple):
    """An arc of a node. Its log-probability is that of `token`, or of a label, plus that of duration `duration`."""

    token: int | None  # class of the blank; None: a label
    duration: int | None
    frames: int
    may_end: bool
    weight: Any = 0.0  # in nats, of the arc alone

    @property
    def needs(self) -> int:
        """Frames that an utterance must have from the node on, if it has one."""
        return max(self.frames + (not self.may_end), 1)


class Labels(typing.NamedTuple):
    """Log-probabilities of labels. That of one is the sum over all moves that write it."""

    logits: jax.Array  # [..., V]: -inf for blanks
    log_probability: Callable  # of logits, one of each row [...] or all
    weight: Any = None  # [...]: log of the summed weight of those moves; None: 0
    bonus: Any = None  # [..., V]: what fusion adds to the scores

    def of(self, logits):
        """Of logits [...] or [..., V], in the model alone."""
        x = self.log_probability(logits)
        if self.weight is None:
            return x
        return x + (self.weight if x.ndim == self.weight.ndim else self.weight[..., None])

    def at(self, label):
        """[...]: of one label of each row, in the model alone."""
        return self.of(pick(self.logits, label))

    def rows(self):
        """Scores of all [..., V]; -inf for blanks."""
        x = self.of(self.logits)
        return x if self.bonus is None else x + self.bonus

    def best(self):
        """(score, label) [...] of the best one: a softmax keeps the order of logits."""
        if self.bonus is not None:
            return peak(self.rows())
        x, label = peak(self.logits)
        return self.of(x), label


@dataclasses.dataclass(frozen=True)
class Symbols:
    """Moves of a loss: `blanks` write nothing, `labels` write any class that is no blank."""

    emission: Softmax
    blanks: tuple[Move, ...]
    labels: tuple[Move, ...]
    labels_per_frame: int
    scoring: Scoring
    numbers: dict[str, Any]  # weights of arcs, as for `out_of_range`

    @property
    def moves(self) -> tuple[Move, ...]:
        return self.blanks + self.labels

    @property
    def writes(self):
        """bool [moves]: which of them write a label."""
        return jnp.arange(len(self.moves)) >= len(self.blanks)

    def of_move(self, move, numbers):
        """int32 [...]: the one of `numbers`, one for each move, of this move [...]."""
        found = jnp.full(move.shape, numbers[0], jnp.int32)
        for i, number in enumerate(numbers[1:], 1):
            found = jnp.where(move == i, number, found)
        return found

    @property
    def reach(self) -> int:
        """Frames that a move of one part of a stream may ask of the next one, so that it ends inside or at the end."""
        return max(move.needs for move in self.moves) - 1

    def is_blank(self, like):
        """bool, the shape of `like` [..., V] up to broadcasting."""
        blanks = [_model.is_class(blank, like) for blank in self.emission.blanks]
        return functools.reduce(jnp.logical_or, blanks)

    def scores(self, logits):
        """(log-probability of each move [..., moves] without that of its label, `Labels`)."""
        rows = self.tempered(logits)
        log_probability, blanks, durations = self.emission.heads(rows)
        all_labels = self.all_labels(durations, jnp.zeros_like(blanks[0]))
        if self.scoring.token_first:  # the best duration alone
            best = peak(jnp.stack(durations, -1))[1]
            durations = [jnp.where(best == i, x, -jnp.inf) for i, x in enumerate(durations)]
        tokens = rows[..., : rows.shape[-1] - self.emission.num_durations].astype(_model.scores_dtype(rows.dtype))
        labels = Labels(jnp.where(self.is_blank(tokens), -jnp.inf, tokens), log_probability, all_labels)
        return self.scores_of_moves(blanks, durations, all_labels), labels

    def scores_of_moves(self, blanks, durations, all_labels=None):
        """[..., moves]: as of `scores`, of log-probabilities [...] of each blank and each duration."""
        move_scores = []
        for move in self.moves:
            is_label = move.token is None
            score = jnp.zeros_like(blanks[0]) if is_label else blanks[self.emission.blanks.index(move.token)]
            if self.scoring.penalizes and not is_label:
                score = score - jnp.asarray(self.scoring.blank_penalty, score.dtype)
            if not _checks.is_zero(move.weight):
                score = score + jnp.asarray(move.weight, score.dtype)
            score = score if move.duration is None else score + durations[move.duration]
            if all_labels is not None and is_label:
                score = score - jnp.where(jnp.isneginf(all_labels), 0, all_labels)
            if self.scoring.skips and is_label:
                score = jnp.where(self.is_sure(blanks), -jnp.inf, score)
            move_scores.append(score)
        return jnp.stack(move_scores, -1)

    def is_sure(self, blanks):
        """bool [...]: where blanks have together the probability of the threshold; of their log-probabilities [...]."""
        threshold = jnp.asarray(self.scoring.blank_threshold, blanks[0].dtype)
        total = blanks[0] if len(blanks) == 1 else jax.nn.logsumexp(jnp.stack(blanks), 0)
        return (total >= jnp.log(threshold)) & (threshold < 1)

    def confidence(self, logits):
        """Of labels in rows [..., V + D]: [...]; None without an entropy. A compiler shares the softmax of `scores`."""
        entropy = self.scoring.entropy
        return entropy and entropy.confidence(self.emission.log_probabilities(self.tempered(logits)))

    def tempered(self, logits):
        """Rows [..., V + D] of logits over the temperature, each head up to a number."""
        if not self.scoring.tempers:
            return logits
        tokens = logits.shape[-1] - self.emission.num_durations
        heads = [logits[..., :tokens], logits[..., tokens:]]
        apart = self.is_blank(heads[0]) if self.emission.bernoulli else None
        tempered = [self.scoring.tempered(heads[0], apart)]
        return jnp.concatenate(tempered + [self.scoring.tempered(heads[1])] * (heads[1].shape[-1] > 0), -1)

    @property
    def weighs_labels(self) -> bool:
        """Whether the weights of the moves that write one label may add up to another number than 1."""
        every = sorted(-1 if move.duration is None else move.duration for move in self.labels)
        weighted = not all(_checks.is_zero(move.weight) for move in self.labels)
        return weighted or every not in ([-1], [*range(self.emission.num_durations)])

    def all_labels(self, durations, nothing):
        """log of the summed weight of the moves that write one label [...], without the label; None: exactly 0.

        `nothing` [...]: zeros.
        """
        if not self.weighs_labels:
            return None
        parts = [nothing if move.duration is None else durations[move.duration] for move in self.labels]
        parts = [x + jnp.asarray(move.weight, x.dtype) for x, move in zip(parts, self.labels)]
        return jax.nn.logsumexp(jnp.stack(parts), 0)

    def allowed(self, frame, lengths, may_write, exact_end):
        """bool [..., moves]: which moves may leave a node of this frame, [...]; `may_write` [...]: a label may be.

        `exact_end`: whether the utterance ends here, [...] or one for all.
        """
        moves = []
        for move in self.moves:
            allowed = jnp.ones_like(frame, bool) if move.token is not None else may_write
            if exact_end is not False:
                after = frame + move.frames
                inside = (after <= lengths) if move.may_end else (after < lengths)
                allowed &= inside if exact_end is True else inside | ~exact_end
            moves.append(allowed)
        return jnp.stack(moves, -1)


def symbols_of(function: str, loss, classes: int, scoring: Scoring) -> Symbols:
    """The moves of a loss in rows of `classes` logits."""
    if not isinstance(loss, TransducerLoss):
        lacks = "a method decoding() that returns DecodingRules"
        if isinstance(loss, type) and issubclass(loss, TransducerLoss):
            lacks = f"its options: {loss.__name__}() makes a loss"
        raise TypeError(f"{function}: loss must be a TransducerLoss, got {_checks.shown(loss)}, which lacks {lacks}.")
    name = f"{type(loss).__name__}.decoding()"
    composer, decoder = (next(x for x in type(loss).__mro__ if f in vars(x)) for f in ("compose", "decoding"))
    if decoder is not TransducerLoss and issubclass(composer, decoder) and composer is not decoder:
        lacks = f"decoding(), as its compose() changes that of {decoder.__name__}, whose decoding() may not hold for it"
        raise TypeError(f"{function}: {composer.__name__} lacks {lacks}.")
    rules = loss.decoding()
    if not isinstance(rules, DecodingRules):
        raise TypeError(f"{function}: {name} must return DecodingRules, got {rules!r}.")
    emission = rules.emission.resolved(function, classes)
    if scoring.tempers and not emission.normalize:
        expected = "1 with fused_log_softmax=False: rows are log-probabilities already"
        raise ValueError(f"{function}: temperature must be {expected}, got {scoring.temperature!r}.")
    weights = _model.constant(rules.arc_weights or (0.0,) * len(rules.topology))
    blanks, labels = moves_of(f"{function}: {name}", rules.topology, weights, emission)
    if scoring.token_first:
        blanks += more_blanks(blanks, labels, emission.num_durations)
    limits = scoring.max_symbols, rules.labels_per_frame
    limit = min(x for x in (*limits, np.iinfo(np.int32).max) if x is not None)
    scoring = scoring._replace(token_first=scoring.token_first and emission.num_durations > 0)
    numbers = {f"{name} arc_weights[{i}]": weight for i, weight in enumerate(weights)}
    return Symbols(emission, tuple(blanks), tuple(labels), limit, scoring, numbers)


def moves_of(source: str, topology, weights, emission: Softmax):
    """(moves of blanks, moves of labels) of arcs with their weights; errors name the `source` of the arcs."""
    blanks, labels = [], []
    durations = [f"duration+{i}" for i in range(emission.num_durations)]
    for arc, weight in zip(topology, weights, strict=True):
        if arc.other is not None and arc.other not in durations:
            expected = f"the slot of a duration, one of {durations}"
            raise TypeError(f"{source}: the second slot of an arc must be {expected}, got {arc}.")
        duration = None if arc.other is None else durations.index(arc.other)
        frames = min(arc.dt, LONGEST)
        if arc.du == 0 and arc.slot in emission.slots:
            token = emission.blanks[emission.slots.index(arc.slot)]
            blanks.append(Move(token, duration, frames, arc.may_end, weight))
        elif arc.du == 1 and arc.slot == "label":
            labels.append(Move(None, duration, frames, arc.may_end, weight))
        else:
            expected = f"the slot of a blank, one of {emission.slots}, and du=0, or the slot 'label' and du=1"
            raise TypeError(f"{source}: an arc must have {expected}, got {arc}.")
    if not blanks or not labels:
        lacks = "an arc without a label (du=0), which reads a frame" if not blanks else "an arc with a label (du=1)"
        raise TypeError(f"{source} lacks {lacks}.")
    return blanks, labels


def more_blanks(blanks, labels, durations):
    """Moves of blanks with durations that the lattice denies them: they read one frame at least."""
    frames = {move.duration: move.frames for move in labels}
    known = {(move.token, move.duration) for move in blanks}
    pairs = [(token, i) for token in dict.fromkeys(move.token for move in blanks) for i in range(durations)]
    return [Move(*pair, max(frames.get(pair[1], 0), 1), True) for pair in pairs if pair not in known]
