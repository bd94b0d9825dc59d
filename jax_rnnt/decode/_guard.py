"""The guard of phrases: phrases earn only where the model itself holds a label possible.

There are N rows and V tokens. For the i-th guarded model, `unread` has the code k + V 2^i if label k breaks its match.
"""

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp

from jax_rnnt import _checks, _pytree
from jax_rnnt._keywords import keywords
from jax_rnnt.decode._gather import pick

# For (greedy search, beams), chosen on 76 held-out utterances of LibriSpeech, by what lab/benchmarks/hotwords.py
# counts. Weights of 10 nats a label then change the WER by -0.1 to 0.4 points with 500 words that nobody says (greedy
# search, five such lists, from 39.9) and by -0.2 to 0.2 (a beam of 8, two lists, from 38.5). That beam finds 41 of 56
# rare words, greedy search 19 (9 and 7 without phrases).
USUAL = {"margin": (5.0, 8.0), "blank_margin": (1.5, 5.0), "most": (2.5, 1.0)}
# How far a label may be below the best move: in nats, and as a share of what its match has earned. Without this, a beam
# of 8 writes two words more over 30 s of a rising tone, and in greedy search 500 words cost up to 1.2 points.
REACH = (0.0, 0.3), (2.0, 2.0)
CHARGED = 0.3  # nats that a broken match costs at most in the choices of greedy search


@keywords
@_pytree.register
@dataclasses.dataclass(frozen=True)
class Guard:
    """Keeps `Phrases` from writing what nobody said: the default of `guard=` of `Search`; None switches it off.

    At a node, take the log-probabilities of all moves in the model alone, at the temperature and with penalties, before
    fusion. A label goes on with a phrase if the list earns more by it than by a label of no phrase. It earns only if it
    is at most `margin` below the best label, and at most `blank_margin` below the best blank; and below either at most
    2 nats, plus twice what its match has earned so far. Otherwise it breaks the match: it gives back what the match has
    earned, and with the next label another one may begin.

    Greedy search cannot go back from a phrase that it has begun. There, 0.3 times what the match has earned takes the
    place of the 2 nats and of twice that: so a match begins with a label that is the best move by itself. And in
    choosing the next move, though not in the score, labels that break a match give back 0.3 nats at most.

    If a phrase of a list earns more than `most` nats a label, on average over its labels, all that the list earns is
    divided by the same number, so that none does. Negative weights are not guarded. A hypothesis of a beam that
    other alignments of its labels are merged with keeps the match of the one with the best path.

    Parameters
    ----------
    margin : float or scalar Array, optional
        Nats, 0 or more. Default: 5 in greedy search, 8 in beams.
    blank_margin : float or scalar Array, optional
        Nats, 0 or more. Default: 1.5 in greedy search, 5 in beams.
    most : float or scalar Array, optional
        Nats, above 0, with the weight of fusion. Default: 2.5 in greedy search, 1 in beams.

    Examples
    --------
    The second frame holds label 2 for as good as impossible, and the phrase "1 2" cannot write it:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import RNNTLoss, decode
    >>> predictor = decode.stateless_predictor(lambda labels: jnp.zeros((len(labels), 3)), 1, start=0)
    >>> phrases = decode.Phrases([[1, 2]], weights=9.0, classes=3)
    >>> options = dict(max_labels=4, max_symbols=1, fusion=[(phrases, 1.0)])
    >>> batch = jnp.array([[[0.0, 9.0, 0.0], [8.0, 0.0, 0.0]]]), jnp.array([2])
    >>> [decode.Search(RNNTLoss(0), jnp.add, predictor, guard=guard, **options).greedy(*batch).labels[0, :2].tolist()
    ...  for guard in (decode.Guard(), None)]
    [[1, -1], [1, 2]]
    """

    margin: float | jax.Array | None = None
    blank_margin: float | jax.Array | None = None
    most: float | jax.Array | None = None

    def __post_init__(self):
        for name in USUAL:
            if (x := getattr(self, name)) is not None:
                object.__setattr__(self, name, _checks.scalar(name, x))

    def of_verb(self, greedy: bool) -> "Guard":
        """Returns the guard with the defaults of greedy search or of beams."""
        chosen = {name: usual[not greedy] for name, usual in USUAL.items() if getattr(self, name) is None}
        return _pytree.replace(self, **chosen)


@_pytree.exportable("Match")
class Match(typing.NamedTuple):
    """The scores that the phrases of one model of fusion add to the next labels, with the weight of fusion."""

    broken: jax.Array  # [N]: what a label gets that goes on with no phrase: what the match has earned is given back
    gain: jax.Array  # [N, V]: how much more each label gets if it goes on with a phrase

    def earned(self):
        """Returns what the match in progress has earned [N, 1]."""
        return -self.broken[..., None]


def watched(search) -> list[int]:
    """Returns the numbers of the models of fusion that the guard watches."""
    if search.guard is None:
        return []
    return [i for i, (model, _) in enumerate(search.fusion) if hasattr(model, "most_a_label")]


def given_back(search, i: int, state, dtype):
    """Returns (what the match in progress of model i gives back [N], the weight of the model's scores [N])."""
    model, weight = search.fusion[i]
    weight = jnp.asarray(weight, dtype)
    most, earned = jnp.asarray(search.guard.most, dtype), weight * model.most_a_label(state).astype(dtype)
    weight = jnp.where(earned > most, weight * (most / jnp.where(earned > most, earned, 1)), weight)
    return weight * model.final(state).astype(dtype), weight


def match(search, i: int, scores, state, dtype) -> Match:
    """Returns the Match of model i with these scores [N, V] and states."""
    broken, weight = given_back(search, i, state, dtype)
    return Match(broken, weight[:, None] * scores.astype(dtype) - broken[:, None])


def shortfalls(moves, of_moves, labels):
    """Returns how far each label [..., V] is below the best label, and below the best blank, in the model alone.

    The arguments are log-probabilities: `of_moves` [..., moves] without those of `labels` [..., V].
    """
    blanks = len(moves.blanks)
    of_label = of_moves[..., blanks:].max(-1)[..., None]
    label = of_label + labels
    return label.max(-1, keepdims=True) - label, of_moves[..., :blanks].max(-1)[..., None] - label


def added(guard: Guard, matches, below, greedy: bool):
    """Returns (what labels get [..., V], how much counts in the score alone, bits of the matches that they break)."""
    to_label, to_blank = below
    total, unseen, bits = jnp.zeros_like(to_label), jnp.zeros_like(to_label), jnp.zeros(to_label.shape, jnp.int32)
    for i, each in enumerate(matches):
        start, share = REACH[not greedy]
        reach = start + share * each.earned()
        margin, blank_margin = (jnp.minimum(jnp.asarray(x), reach) for x in (guard.margin, guard.blank_margin))
        breaks = (each.gain > 0) & ~((to_label <= margin) & (to_blank <= blank_margin))
        gain = jnp.where(breaks, 0, each.gain)
        score = each.broken[..., None] + gain
        total, bits = total + score, bits + jnp.where(breaks, 1 << i, 0)
        if greedy:
            at_least = jnp.where(gain > 0, 0, gain - CHARGED)
            unseen = unseen + jnp.where(each.earned() > 0, jnp.minimum(score - at_least, 0), 0)
    return total, unseen, bits


def code_of(tokens: int, label, bits):
    """Returns the codes of labels [...], -1 for none; `bits` [..., V] has the matches that each label breaks."""
    return jnp.where(label >= 0, label + tokens * pick(bits, jnp.maximum(label, 0)), label)


def after(model, i: int | None, state, codes, tokens: int) -> Any:
    """Calls ``model.step`` with codes; `i` is the model's place among the guarded ones, or None."""
    labels = codes % tokens
    if i is None:
        return model.step(state, labels)
    return model.step(state, jnp.where((codes // tokens >> i) & 1 == 1, model.breaks, labels))
