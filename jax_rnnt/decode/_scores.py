"""Scores of moves: log-probabilities from rows of logits, with the options of a search that change them.

V tokens (labels and blanks), D durations; `...` is any number of dimensions. `moves` are static; `given` holds the
options of the search and the weights of the loss's arcs.
"""

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
from jax_rnnt.decode._largest import peak
from jax_rnnt.decode._moves import Move, Moves
from jax_rnnt.decode._options import is_on


class LabelScores(typing.NamedTuple):
    """Log-probabilities of labels; each is the sum over all moves that write the label."""

    logits: jax.Array  # [..., V]: -inf for blanks
    log_probability: Callable  # a function of logits, of one class [...] or of all
    weight: Any = None  # [...]: log of the summed weight of those moves; None for 0
    bonus: Any = None  # [..., V]: what fusion adds to the scores

    def of(self, logits):
        """Returns log-probabilities, in the model alone, for logits [...] or [..., V]."""
        x = self.log_probability(logits)
        if self.weight is None:
            return x
        return x + (self.weight if x.ndim == self.weight.ndim else self.weight[..., None])

    def at(self, label):
        """Returns the log-probability [...] of one label of each row, in the model alone."""
        return self.of(pick(self.logits, label))

    def rows(self):
        """Returns the scores of all labels [..., V]; -inf for blanks."""
        x = self.of(self.logits)
        return x if self.bonus is None else x + self.bonus

    def best(self):
        """Returns (score, label) [...] of the best label: a softmax keeps the order of logits."""
        if self.bonus is not None:
            return peak(self.rows())
        x, label = peak(self.logits)
        return self.of(x), label


# ------------------------------------------------------------------------------------------------------------- rows


def is_blank(moves: Moves, like):
    """Returns bool: which classes are blanks, in the shape of `like` [..., V] up to broadcasting."""
    blanks = [_model.is_class(blank, like) for blank in moves.emission.blanks]
    return functools.reduce(jnp.logical_or, blanks)


def tempered_head(search, logits, apart=None):
    """Returns one softmax's logits [..., V] over the temperature, up to a constant in each row, in the scores' dtype.

    `apart` [..., V] marks logits that belong to no softmax, and are divided alone. The largest logit of a row becomes 0
    before the multiplication. Otherwise a compiler may contract the product and the subtraction of its maximum, which
    then differ by the rounding of the product: by more than 100 nats from 2^31 on.
    """
    if not is_on(search, "temperature"):
        return logits
    x = logits.astype(_model.scores_dtype(logits.dtype))
    apart = False if apart is None else apart
    largest = jax.lax.stop_gradient(jnp.max(jnp.where(apart, -jnp.inf, x), -1, keepdims=True, initial=-jnp.inf))
    largest = jnp.where(jnp.isneginf(largest) | apart, 0, largest)
    return (x - largest) * inverse(search.temperature, x.dtype)


def inverse(temperature, dtype):
    """Returns 1 / temperature. XLA divides by a constant in another way than by a number that it does not know."""
    known = _checks.known(temperature)
    numpy, temperature = (jnp, temperature) if known is None else (np, known)
    result = numpy.asarray(1, dtype) / numpy.asarray(temperature, dtype)
    return numpy.maximum(result, np.finfo(dtype).tiny)  # an inverse of 0 would turn -inf into NaN


def tempered(moves: Moves, search, logits):
    """Divides rows [..., V + D] of logits by the temperature, each head up to a constant."""
    if not is_on(search, "temperature"):
        return logits
    heads = [logits[..., : moves.tokens], logits[..., moves.tokens :]]
    apart = is_blank(moves, heads[0]) if moves.emission.bernoulli else None
    result = [tempered_head(search, heads[0], apart)]
    return jnp.concatenate(result + [tempered_head(search, heads[1])] * (heads[1].shape[-1] > 0), -1)


def confidence(moves: Moves, search, logits):
    """Returns labels' confidence [...] from rows [..., V + D], or None; XLA shares the softmax with `scores`."""
    entropy = search.confidence
    return entropy and entropy.confidence(moves.emission.log_probabilities(tempered(moves, search, logits)))


# ------------------------------------------------------------------------------------------------------------ moves


def scores(moves: Moves, given, logits):
    """Returns (log-probability of each move [..., moves] without its label's, `LabelScores`) for rows [..., V + D]."""
    rows = tempered(moves, given.search, logits)
    log_probability, blanks, durations = moves.emission.heads(rows)
    all_labels = weight_of_labels(moves, given, durations, jnp.zeros_like(blanks[0]))
    if moves.token_first:  # keep the best duration alone
        best = peak(jnp.stack(durations, -1))[1]
        durations = [jnp.where(best == i, x, -jnp.inf) for i, x in enumerate(durations)]
    tokens = rows[..., : moves.tokens].astype(_model.scores_dtype(rows.dtype))
    labels = LabelScores(jnp.where(is_blank(moves, tokens), -jnp.inf, tokens), log_probability, all_labels)
    return jnp.stack([score_of(moves, given, move, blanks, durations, all_labels) for move in moves.all], -1), labels


def score_of(moves: Moves, given, move: Move, blanks, durations, all_labels):
    """Returns the log-probability [...] of a move without its label, from those of all blanks and durations [...]."""
    search, is_label = given.search, move.token is None
    score = jnp.zeros_like(blanks[0]) if is_label else blanks[moves.emission.blanks.index(move.token)]
    if is_on(search, "blank_penalty") and not is_label:
        score = score - jnp.asarray(search.blank_penalty, score.dtype)
    if (weight := arc_weight(given, move)) is not None:
        score = score + jnp.asarray(weight, score.dtype)
    score = score if move.duration is None else score + durations[move.duration]
    if all_labels is not None and is_label:
        score = score - jnp.where(jnp.isneginf(all_labels), 0, all_labels)
    if is_on(search, "blank_threshold") and is_label:
        score = jnp.where(is_sure(search, blanks), -jnp.inf, score)
    return score


def is_sure(search, blanks):
    """Returns bool [...]: True where all blanks together, given log-probabilities [...], reach the threshold."""
    threshold = jnp.asarray(search.blank_threshold, blanks[0].dtype)
    total = blanks[0] if len(blanks) == 1 else jax.nn.logsumexp(jnp.stack(blanks), 0)
    return (total >= jnp.log(threshold)) & (threshold < 1)


def arc_weight(given, move: Move):
    """Returns the weight of a move's arc; None if nothing is added."""
    return None if move.arc is None else given.arc_weights[move.arc]


def weight_of_labels(moves: Moves, given, durations, nothing):
    """Returns the log of the summed weight [...] of the moves that write one label, without the label; None: exactly 0.

    `nothing` [...] holds zeros.
    """
    every = sorted(-1 if move.duration is None else move.duration for move in moves.labels)
    weights = [arc_weight(given, move) for move in moves.labels]
    whole = every in ([-1], [*range(moves.emission.num_durations)])  # then they add up to 1 if they have no weights
    if whole and all(weight is None for weight in weights):
        return None
    terms = [nothing if move.duration is None else durations[move.duration] for move in moves.labels]
    terms = [x + jnp.asarray(0.0 if weight is None else weight, x.dtype) for x, weight in zip(terms, weights)]
    return jax.nn.logsumexp(jnp.stack(terms), 0)


def allowed(static, given, frame, may_write):
    """Returns which moves may leave a node of this frame, bool [..., moves]; `may_write` [...] allows labels."""
    found, lengths = [], given.lengths[:, None]
    for move in static.moves.all:
        may = jnp.ones_like(frame, bool) if move.token is not None else may_write
        if static.exact_end is not False:
            after = frame + move.frames
            inside = (after <= lengths) if move.may_end else (after < lengths)
            may &= inside if static.exact_end else inside | ~given.ends_here
        found.append(may)
    return jnp.stack(found, -1)


def writes(moves: Moves):
    """Returns bool [moves]: which of them write a label."""
    return jnp.arange(len(moves.all)) >= len(moves.blanks)


def of_move(move, numbers):
    """Returns, as int32 [...], the entry of `numbers`, one for each move, for each move [...]."""
    found = jnp.full(move.shape, numbers[0], jnp.int32)
    for i, number in enumerate(numbers[1:], 1):
        found = jnp.where(move == i, number, found)
    return found
