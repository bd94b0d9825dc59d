"""What a search found in a recording."""

import itertools
from typing import NamedTuple

import numpy as np


class Labels(NamedTuple):
    """Final labels, with what is known of each."""

    labels: list
    frames: list  # of the encoder, in which the labels were found: each lasts `model.seconds`
    log_probs: list
    confidences: list  # from 0 to 1
    durations: list  # frames that each label read

    @classmethod
    def of(cls, found, row, count, decoding):
        """The first ones of a row of Hypotheses [B]."""
        sure = np.exp(found.label_log_probs) if decoding.confidence is None else found.label_confidences
        fields = found.labels, found.frames, found.label_log_probs, sure, found.durations
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
        """These labels with others behind them, which keep their frames."""
        return Labels(*(list(itertools.chain(*x)) for x in zip(self, *more)))


def no_labels():
    return Labels([], [], [], [], [])


class Result(NamedTuple):
    """What was heard in a recording, or why nothing: then there is an `error`, in one line."""

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
