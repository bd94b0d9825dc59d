"""What moves score: log-probabilities of rows of logits, with the options of a search that change them.

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
    """Log-probabilities of labels. That of one is the sum over all moves that write it."""

    logits: jax.Array  # [..., V]: -inf for blanks
    log_probability: Callable  # of logits, one of each row [...] or all
    weight: Any = None  # [...]: log of the summed weight of those moves; None: 0
    bonus: Any = None  # [..., V]: what fusion adds to the scores

    def of(self, logits):
        """Log-probabilities of logits [...] or [..., V], in the model alone."""
        x = self.log_probability(logits)
        if self.weight is None:
            return x
        return x + (self.weight if x.ndim == self.weight.ndim else self.weight[..., None])

    def at(self, label):
        """The log-probability [...] of one label of each row, in the model alone."""
        return self.of(pick(self.logits, label))

    def rows(self):
        """The scores of all labels [..., V]; -inf for blanks."""
        x = self.of(self.logits)
        return x if self.bonus is None else x + self.bonus

    def best(self):
        """(score, label) [...] of the best one: a softmax keeps the order of logits."""
        if self.bonus is not None:
            return peak(self.rows())
        x, label = peak(self.logits)
        return self.of(x), label


# ------------------------------------------------------------------------------------------------------------- rows


def is_blank(moves: Moves, like):
    """bool, the shape of `like` [..., V] up to broadcasting."""
    blanks = [_model.is_class(blank, like) for blank in moves.emission.blanks]
    return functools.reduce(jnp.logical_or, blanks)


def tempered_head(search, logits, apart=None):
    """The logits [..., V] of one softmax over the temperature, up to a number of each row, in the dtype of scores.

    `apart` [..., V]: logits that belong to no softmax, and are divided alone. The largest one of a row becomes 0
    before it is multiplied. Otherwise a compiler may contract the product and the subtraction of its maximum, which
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
    """1 / temperature. XLA divides by a constant in another way than by a number that it does not know."""
    known = _checks.known(temperature)
    numpy, temperature = (jnp, temperature) if known is None else (np, known)
    result = numpy.asarray(1, dtype) / numpy.asarray(temperature, dtype)
    return numpy.maximum(result, np.finfo(dtype).tiny)  # 0 would make NaN of -inf


def tempered(moves: Moves, search, logits):
    """Rows [..., V + D] of logits over the temperature, each head up to a number."""
    if not is_on(search, "temperature"):
        return logits
    heads = [logits[..., : moves.tokens], logits[..., moves.tokens :]]
    apart = is_blank(moves, heads[0]) if moves.emission.bernoulli else None
    result = [tempered_head(search, heads[0], apart)]
    return jnp.concatenate(result + [tempered_head(search, heads[1])] * (heads[1].shape[-1] > 0), -1)


def confidence(moves: Moves, search, logits):
    """That of labels [...] in rows [..., V + D]; None without an entropy. A compiler shares the softmax of `scores`."""
    entropy = search.confidence
    return entropy and entropy.confidence(moves.emission.log_probabilities(tempered(moves, search, logits)))


# ------------------------------------------------------------------------------------------------------------ moves


def scores(moves: Moves, given, logits):
    """(log-probability of each move [..., moves] without that of its label, `LabelScores`) in rows [..., V + D]."""
    rows = tempered(moves, given.search, logits)
    log_probability, blanks, durations = moves.emission.heads(rows)
    all_labels = weight_of_labels(moves, given, durations, jnp.zeros_like(blanks[0]))
    if moves.token_first:  # the best duration alone
        best = peak(jnp.stack(durations, -1))[1]
        durations = [jnp.where(best == i, x, -jnp.inf) for i, x in enumerate(durations)]
    tokens = rows[..., : moves.tokens].astype(_model.scores_dtype(rows.dtype))
    labels = LabelScores(jnp.where(is_blank(moves, tokens), -jnp.inf, tokens), log_probability, all_labels)
    return jnp.stack([score_of(moves, given, move, blanks, durations, all_labels) for move in moves.all], -1), labels


def score_of(moves: Moves, given, move: Move, blanks, durations, all_labels):
    """The log-probability [...] of a move without its label, of those of each blank and each duration [...]."""
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
    """bool [...]: whether blanks have together the probability of the threshold; of their log-probabilities [...]."""
    threshold = jnp.asarray(search.blank_threshold, blanks[0].dtype)
    total = blanks[0] if len(blanks) == 1 else jax.nn.logsumexp(jnp.stack(blanks), 0)
    return (total >= jnp.log(threshold)) & (threshold < 1)


def arc_weight(given, move: Move):
    """The weight of the arc of a move; None: nothing is added."""
    return None if move.arc is None else given.arc_weights[move.arc]


def weight_of_labels(moves: Moves, given, durations, nothing):
    """The log of the summed weight of the moves that write one label [...], without the label; None: exactly 0.

    `nothing` [...]: zeros.
    """
    every = sorted(-1 if move.duration is None else move.duration for move in moves.labels)
    weights = [arc_weight(given, move) for move in moves.labels]
    whole = every in ([-1], [*range(moves.emission.num_durations)])  # so they add up to 1 if they have no weights
    if whole and all(weight is None for weight in weights):
        return None
    terms = [nothing if move.duration is None else durations[move.duration] for move in moves.labels]
    terms = [x + jnp.asarray(0.0 if weight is None else weight, x.dtype) for x, weight in zip(terms, weights)]
    return jax.nn.logsumexp(jnp.stack(terms), 0)


def allowed(static, given, frame, may_write):
    """bool [..., moves]: which moves may leave a node of this frame, [...]; `may_write` [...]: a label may be."""
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
    """bool [moves]: which of them write a label."""
    return jnp.arange(len(moves.all)) >= len(moves.blanks)


def of_move(move, numbers):
    """int32 [...]: the one of `numbers`, one for each move, of this move [...]."""
    found = jnp.full(move.shape, numbers[0], jnp.int32)
    for i, number in enumerate(numbers[1:], 1):
        found = jnp.where(move == i, number, found)
    return found
