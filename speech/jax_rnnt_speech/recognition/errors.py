"""Counts the errors of transcripts, by kind and place. Edits come from rapidfuzz, the interval from SciPy."""

import collections
import itertools
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein

RESAMPLES = 1000  # of the utterances, for the interval
CONFIDENCE = 0.95


class Counts(NamedTuple):
    """The fewest edits between references and hypotheses, and the words (or characters) of the references."""

    insertions: int
    deletions: int
    substitutions: int
    length: int

    @property
    def errors(self):
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self):
        """Errors in per cent of the references' length, infinite where an empty reference has errors."""
        return 100 * self.errors / self.length if self.length else float("inf") if self.errors else 0.0


class Tested(NamedTuple):
    """An utterance and its recognised text. `words` and `characters` have its errors; characters include spaces."""

    name: str
    speaker: str  # "": unknown
    seconds: float
    reference: str
    hypothesis: str
    words: Counts
    characters: Counts


def tested(name, speaker, seconds, reference, hypothesis):
    """Returns the Tested of an utterance, with its errors counted over words and over characters."""
    words = counted(reference.split(), hypothesis.split())
    return Tested(name, speaker, seconds, reference, hypothesis, words, counted(reference, hypothesis))


def counted(reference, hypothesis):
    """Returns the Counts between two lists of words, or between two strings."""
    tags = collections.Counter(x.tag for x in Levenshtein.editops(reference, hypothesis))
    return Counts(tags["insert"], tags["delete"], tags["replace"], len(reference))


def summed(counts):
    return Counts(*map(sum, zip(*counts)))


def interval(counts, seed=0):
    """Returns the error rate's 95% interval [low, high] over the choice of utterances, in % (Bisani and Ney 2004).

    Whole utterances are drawn anew, with replacement. It is None for one utterance, which says nothing about others.
    """
    if len(counts) < 2:
        return None
    from scipy import stats  # half a second: not at every start

    pairs = [x.errors for x in counts], [x.length for x in counts]
    drawn = stats.bootstrap(
        pairs, lambda errors, length, axis: 100 * errors.sum(axis) / np.maximum(length.sum(axis), 1), paired=True,
        vectorized=True, n_resamples=RESAMPLES, batch=100, confidence_level=CONFIDENCE, method="percentile", rng=seed,
    )  # fmt: skip
    return [float(x) for x in drawn.confidence_interval]


def by_speaker(results):
    """Returns {speaker: results}, the highest word error rate first; empty where no speaker is known."""
    groups = collections.defaultdict(list)
    for x in results:
        groups[x.speaker].append(x)
    if set(groups) == {""}:
        return {}
    rates = {speaker: summed(x.words for x in group).rate for speaker, group in groups.items()}
    return {speaker: groups[speaker] for speaker in sorted(groups, key=lambda x: (-rates[x], x))}


def worst(results, count):
    """Returns the utterances with the most wrong words."""
    wrong = sorted((x for x in results if x.words.errors), key=lambda x: (-x.words.errors, -x.words.rate, x.name))
    return wrong[:count]


def edits(reference, hypothesis):
    """Yields (words of the reference, words in their place) of two lists of words; equal ones where both agree."""
    for x in Levenshtein.opcodes(reference, hypothesis):
        yield reference[x.src_start : x.src_end], hypothesis[x.dest_start : x.dest_end]


def confusions(results, count):
    """Returns the most frequent ((reference word, word in its place), times); "" is no word."""
    pairs = collections.Counter()
    for x in results:
        for old, new in edits(x.reference.split(), x.hypothesis.split()):
            pairs.update((a, b) for a, b in itertools.zip_longest(old, new, fillvalue="") if a != b)
    return sorted(pairs.items(), key=lambda x: (-x[1], x[0]))[:count]


def difference(reference, hypothesis):
    """Returns both texts as one, in the form of wdiff: the [-cat-]{+hat+} sat."""
    parts = []
    for old, new in edits(reference.split(), hypothesis.split()):
        before, after = " ".join(old), " ".join(new)
        changed = f"[-{before}-]" * bool(old) + f"{{+{after}+}}" * bool(new)
        parts.append(before if old == new else changed)
    return " ".join(parts)
