"""Phrases that a head for CTC finds, in place of the words that a search wrote there (Andrusenko et al. 2024).

The search stays as it is, so that it costs nothing; `decode.find_phrases` finds the phrases.
"""

import dataclasses
import functools
import math

import jax
import numpy as np

from jax_rnnt import decode
from jax_rnnt_speech.recognition.results import Labels, spliced, words_of
from jax_rnnt_speech.recognition.search import ctc_logits
from jax_rnnt_speech.system import programs

NEAR = 1  # frames by which the middle of a word may be outside of its phrase


@dataclasses.dataclass(frozen=True)
class Spotter:
    """Phrases, and nats that each of their labels may be worse than the head's best class."""

    labels: tuple  # a tuple of tuples
    weights: tuple
    depth: float = 0.0

    def found(self, model, rows, lengths):
        """Returns [FoundPhrase] of each utterance, in rows [B, N, E] of an encoder."""
        return decode.find_phrases(
            logits_of(model, model.params, rows), lengths, [*self.labels], [*self.weights], depth=self.depth
        )

    def earned(self, i):
        """Returns the nats that a phrase earns, as in `Phrases`."""
        count, weight = len(self.labels[i]), self.weights[i]
        if not self.depth:
            return count * weight
        return weight + sum(weight * (1 + self.depth) + math.log(k) for k in range(2, count + 1))

    def put(self, model, heard, places):
        """Returns labels with the phrases of some places (FoundPhrase, with frames from the start of the recording)."""
        for place in places:
            labels, (a, b) = self.labels[place.phrase], (place.start, place.end)
            over = [(i, j) for i, j in self.spoken(model.tokens, heard) if a - NEAR <= middle(heard, i, j) <= b + NEAR]
            first = over[0][0] if over else sum(x < a for x in heard.frames)
            last = over[-1][1] if over else first
            text, written = (model.tokens.decode(x).strip() for x in (labels, heard.labels[first:last]))
            if text in written:
                continue  # the search has found it, with better times of its labels, perhaps within a longer word
            worse = min(0.0, (place.score - self.earned(place.phrase)) / len(labels))
            frames = np.linspace(a, b, len(labels)).astype(int).tolist()
            same = [[x] * len(labels) for x in (worse, math.exp(worse), 1)]
            heard = spliced(model.tokens, heard, first, last, Labels([*labels], frames, *same)) or heard
        return heard

    def spoken(self, tokens, heard):
        """Yields [first, last) of the labels of each word, without a label before it that is a space."""
        for i, j in words_of(tokens, heard.labels):
            while i < j and tokens.texts[heard.labels[i]] == tokens.separator:
                i += 1
            if tokens.decode(heard.labels[i:j]).strip():
                yield i, j


def middle(heard, first, last):
    """Returns the frame in the middle of a word."""
    return (heard.frames[first] + heard.frames[last - 1] + max(heard.durations[last - 1], 1) - 1) / 2


@programs.announced("a head for CTC")
@functools.partial(jax.jit, static_argnums=0)
def logits_of(model, params, rows):
    return ctc_logits(model.network(params), rows)
