"""Finds speech for which a search wrote nothing, and words that it wrote where nobody speaks.

`activity` finds speech, and the labels show where something was written. Speech without labels is searched again by
itself, with other samples before and after it and a search that begins anew. Words without speech are named, or left
out.
"""

import numpy as np

from jax_rnnt_speech.recognition import activity, transcripts
from jax_rnnt_speech.recognition.results import spliced, words_of

LEAST = 1.0  # seconds of speech without a label that count, if no pause in them is longer than this
AROUND = 0.5  # seconds before and after a label in which speech may be its own
BEFORE = 0.4  # seconds before and after unheard speech that are searched with it
LONGEST = 20.0  # seconds that are searched again at once
MOST = 600.0  # longest part of a recording that is searched again, in seconds
# Seconds by which a word may come behind its speech, and before it. A small streaming model wrote 8,855 words into 2.43
# hours of LibriSpeech's dev-clean, of which one lies 0.01 s behind what is not QUIET to the detector, and none farther
# away. Larger models that stream wait longer with a label.
LATE, EARLY = 0.5, 0.3
CONFIDENCE = 0.5  # a word's confidence, by its least probable label, that shows that the second text is speech


def without(speech, spans):
    """Yields speech [begin, end) at least `AROUND` from labels' spans, in parts of `LONGEST`; both in order of time."""
    for begin, end in speech:
        for a, b in spans:
            if b + AROUND <= begin or a - AROUND >= end:
                continue
            if a - AROUND > begin:
                yield begin, a - AROUND
            begin = max(begin, b + AROUND)
        while begin < end:
            yield begin, min(end, begin + LONGEST)
            begin += LONGEST


def gaps(speech, spans, until, final=-np.inf):
    """Returns ([begin, end) of unheard speech, time from which on nothing is decided), as far as labels are known.

    `final` is the time of a label that stays, and before which there will be no others.
    """
    until -= AROUND  # a label may come behind its speech
    groups, missed, decided = [], [], until
    for begin, end in without(((a, min(b, until)) for a, b in speech if a < until), spans):
        if groups and begin - groups[-1][-1][1] <= LEAST and end - groups[-1][0][0] <= LONGEST:
            groups[-1].append((begin, end))
        else:
            groups.append([(begin, end)])
    for group in groups:
        # It may go on, unless a label comes first: no group has speech before and after one.
        if group[-1][1] > max(until - LEAST, final) and group[-1][1] - group[0][0] < LONGEST:
            decided = min(decided, group[0][0])
        elif sum(b - a for a, b in group) > LEAST:
            missed.append((group[0][0], group[-1][1]))
    return missed, decided


class Ear:
    """Listens to a recording next to its search, and keeps samples until their labels are known."""

    def __init__(self, rate):
        self.detector, self.rate = activity.Detector(rate), rate
        self.samples, self.begin, self.decided = np.zeros(0, np.float32), 0, 0.0
        self.spans, self.jobs, self.found = [], [], []

    def add(self, samples):
        self.samples = np.concatenate([self.samples, samples])
        self.detector.add(samples)

    def wrote(self, labels, seconds):
        """Takes labels of some frames, which last so many seconds; the same ones may come again."""
        spans = ((x * seconds, (x + max(n, 1)) * seconds) for x, n in zip(labels.frames, labels.durations))
        self.spans = sorted({*self.spans, *spans})

    def forget(self, until):
        """Drops the detector's chunks, except those that words from a time on need."""
        self.detector.forget(min(until - LATE, self.decided) - LEAST)

    def check(self, until, end=False, final=-np.inf):
        """Yields each [begin, end) of unheard speech once labels until then are known. `final` is that of `gaps`."""
        until = until + LEAST + LONGEST if end else until
        found = self.detector.speech(self.decided - LEAST)
        speech = [(max(a, self.decided), b) for a, b in found if b > self.decided]
        missed, decided = gaps(speech, self.spans, until, final)
        self.decided = max(self.decided, decided)
        for a, b in missed:
            self.decided = max(self.decided, b)
            yield a, b
        self.spans = [x for x in self.spans if x[1] + AROUND > self.decided]
        kept = max(0, round((self.decided - BEFORE) * self.rate) - self.begin)
        self.samples, self.begin = self.samples[kept:], self.begin + kept

    def cut(self, begin, end, step):
        """Returns (first sample, a multiple of `step`, samples) around unheard speech."""
        first = max(self.begin, round((begin - BEFORE) * self.rate))
        first = -(-first // step) * step
        return first, self.samples[first - self.begin : round((end + BEFORE) * self.rate) - self.begin].copy()

    def take(self, until, step, end=False, final=-np.inf):
        """Puts unheard speech into `found`, and the parts that are to be searched again into `jobs`."""
        for a, b in self.check(until, end, final):
            self.found.append((a, b))
            if sum(y - x for x, y, *_ in self.jobs) < MOST:
                self.jobs.append((a, b, *self.cut(a, b, step)))


def joined(model, first, second, rows, begin, end):
    """Returns labels with those of another search from `rows` rows on; None if it found no words in [begin, end).

    Whole words are taken, and only between words: the second text counts if one of them is sure.
    """
    tokens, seconds = model.tokens, model.seconds
    chosen, sure = [], 0.0
    for a, b in words_of(tokens, second.labels):
        middle = (second.frames[a] + second.frames[b - 1] + 1) / 2 + rows
        if begin - seconds <= middle * seconds < end + seconds and tokens.decode(second.labels[a:b]).strip():
            chosen += range(a, b)
            sure = max(sure, min(np.exp(second.log_probs[a:b])))
    if sure < CONFIDENCE:
        return None
    more = second.chosen(chosen)
    more = more._replace(frames=[x + rows for x in more.frames])
    place = sum(x * seconds < begin for x in first.frames)
    return spliced(tokens, first, place, place, more)


def sifted(model, labels, ear, duration=np.inf):
    """Returns (Labels of the words that somebody may have said, `transcripts.words` of the others).

    All of a word, and so much before and after it as its labels may be late or early, must lie where nobody speaks.
    """
    words = transcripts.words(model, *labels[:2], labels.confidences, labels.durations, duration=duration)
    wrong = [ear.detector.sure(x.start - LATE, x.end + EARLY) for x in words]
    if not any(wrong):
        return labels, []
    places = zip(transcripts.places_of_words(model.tokens, labels.labels), wrong)
    gone = {i for (a, b), invented in places if invented for i in range(a, b)}
    kept = labels.chosen([i for i in range(len(labels.labels)) if i not in gone])
    return kept, [x for x, invented in zip(words, wrong) if invented]


def lines(name, missed, invented, drop=False):
    """Yields the lines for people about unheard speech and invented words; neighbours of these are one stretch."""
    if missed:
        yield f"{name}: speech without words: {spelled(missed)}"
    if invented:
        spans = []
        for begin, end, *_ in invented:
            begin = spans.pop()[0] if spans and begin - spans[-1][1] <= LEAST else begin
            spans.append((begin, end))
        yield f"{name}: words where nobody speaks{', left out' * drop}: {len(invented)}, {spelled(spans)}"


def spelled(stretches):
    return ", ".join(f"{a:.1f} to {b:.1f} s" for a, b in stretches)
