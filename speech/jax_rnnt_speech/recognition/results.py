"""The results of a search in a recording; and labels of one search in the text of another, between its words."""

import itertools
from typing import NamedTuple

import numpy as np

from jax_rnnt_speech.recognition.spellings import Written


class Labels(NamedTuple):
    """Final labels, each with its frame, probability, confidence and duration."""

    labels: list
    frames: list  # of the encoder, in which the labels were found: each lasts `model.seconds`
    log_probs: list
    confidences: list  # from 0 to 1
    durations: list  # frames that each label read

    @classmethod
    def of(cls, hypotheses, row, count, decoding):
        """Returns the first labels of a row of Hypotheses [B]."""
        sure = np.exp(hypotheses.label_log_probs) if decoding.confidence is None else hypotheses.label_confidences
        fields = hypotheses.labels, hypotheses.frames, hypotheses.label_log_probs, sure, hypotheses.durations
        return cls(*(np.asarray(x)[row, :count].tolist() for x in fields))

    def extend(self, more):
        """Puts labels behind these. Their frames never go back: a beam may choose another alignment."""
        frames = np.maximum.accumulate([*self.frames[-1:], *more.frames])[len(self.frames[-1:]) :].tolist()
        for x, y in zip(self, more._replace(frames=frames)):
            x.extend(y)

    def part(self, *bounds):
        return Labels(*(x[slice(*bounds)] for x in self))

    def chosen(self, places):
        return Labels(*([x[i] for i in places] for x in self))

    def joined(self, *more):
        """Returns these labels with others behind them, which keep their frames."""
        return Labels(*(list(itertools.chain(*x)) for x in zip(self, *more)))


def no_labels():
    return Labels([], [], [], [], [])


class Result(NamedTuple):
    """The text of a recording, or an `error`, in one line, that says why there is none."""

    name: str
    text: str = ""
    labels: list = ()
    frames: list = ()  # of the encoder, in which the labels were found: each lasts `model.seconds`
    log_probs: list = ()  # of the labels
    confidences: list = ()  # of the labels, from 0 to 1
    durations: list = ()  # frames that each label read
    duration: float = 0.0  # seconds of the recording
    nbest: list = ()  # of a beam: (text, score), the best one first
    error: str = ""
    unheard: tuple = ()  # [begin, end) in seconds of speech without words, also after another try
    invented: tuple = ()  # `transcripts.words` where nobody speaks; with `Decoding.drop_invented` the text lacks them
    written: Written = Written()  # of the spellings in `labels`; the text and `nbest` have it


def words_of(tokens, labels):
    """Returns [first, last) of the labels of each word."""
    if not tokens.separates:
        return [(i, i + 1) for i in range(len(labels))]
    starts = [i for i, x in enumerate(labels) if tokens.texts[x].startswith(tokens.separator)]
    return [*itertools.pairwise(sorted({0, *starts, len(labels)}))]


def spliced(tokens, labels, first, last, more):
    """Returns labels with `more` in place of [first, last); None if that is within a word.

    Where a space is a label of its own, it is added on both sides.
    """
    before = tokens.texts[labels.labels[first - 1]] if first else None
    after = tokens.texts[labels.labels[last]] if last < len(labels.labels) else None
    mark, left, right = tokens.separator, [], []
    ends, begins = before is None or before.endswith(mark), after is None or after.startswith(mark)
    if tokens.separates and mark in tokens.texts:
        if first == last and not (ends or begins):
            return None
        label, texts = tokens.texts.index(mark), [tokens.texts[x] for x in more.labels]
        left = [label] * (not ends and not texts[0].startswith(mark))
        right = [label] * (not begins and not texts[-1].endswith(mark))
    elif tokens.separates and not begins:
        return None
    left, right = silent(left, more.frames[0]), silent(right, more.frames[-1])
    return labels.part(first).joined(left, more, right, labels.part(last, None))


def silent(labels, frame):
    """Returns labels that nobody said, in a frame."""
    return Labels(labels, *([x] * len(labels) for x in (frame, 0.0, 1.0, 0)))
