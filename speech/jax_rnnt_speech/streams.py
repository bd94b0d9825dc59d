"""Words of recordings that arrive in pieces: streams without end, in memory that does not grow.

The encoder takes steps of its chunk, the search goes on from its state, and samples may come in pieces of any size:
steps are the same, and so are all numbers. A beam lets go of labels that no hypothesis changes, and of the oldest ones
where more than `recogniser.OPEN` are open.
"""

import queue

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import decode
from jax_rnnt_speech import audio, transcripts
from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.recogniser import GREEDY
from jax_rnnt_speech.results import Labels, no_labels

BLOCK = 0.1  # seconds of a stream that arrive at once
LONGEST = 200  # labels of a word, at most
NEVER = 2**30  # rows before which no deadline is
ENDS = "<EOU>", "<eou>"  # labels that end an utterance


class Words:
    """Final labels of a recording, one part after the other, to words."""

    def __init__(self, recogniser, silence=0.0):
        self.recogniser, self.waiting, self.rows, self.end = recogniser, no_labels(), 0, 0
        self.patience = round(silence / recogniser.seconds) or NEVER
        tokens, self.mark = recogniser.tokens, transcripts.mark_of(recogniser.tokens)
        self.texts = [x or "" for x in tokens.labels()]
        self.last_labels = {i for i, x in enumerate(tokens.pieces) if x in ENDS}

    @property
    def deadline(self):
        """For the next part: -> `Recogniser.part`."""
        return self.rows - self.patience

    def begins(self):
        """Where words begin that later labels leave as they are, and those before: both hold more than punctuation."""
        texts, frames = [self.texts[i] for i in self.waiting.labels], self.waiting.frames
        groups = [i for i, x in enumerate(texts) if not i or self.mark is None or x.startswith(self.mark)]
        ends = [*groups[1:], len(texts)]
        heard = [any(x.isalnum() for x in "".join(texts[a:b])) for a, b in zip(groups, ends)]
        return [x for i, x in enumerate(groups) if i and heard[i] and heard[i - 1] and frames[x] > frames[x - 1]]

    def take(self, count, duration=float("inf")):
        """Words of the first waiting labels."""
        some, self.waiting = self.waiting.part(count), self.waiting.part(count, None)
        if not some.labels:
            return []
        return transcripts.words(
            self.recogniser, some.labels, some.frames, some.confidences, some.durations, duration=duration
        )

    def add(self, part, rows, more=False):
        """(words that are final, whether an utterance ends) after final labels, and so many encoder rows.

        `more`: the rows have labels that are not final.
        """
        self.rows += rows
        ended = any(i in self.last_labels for i in part.labels)
        kept = [i for i, x in enumerate(part.labels) if x not in self.last_labels]
        self.waiting.extend(Labels(*([x[i] for i in kept] for x in part)))
        if self.waiting.labels:
            self.end = self.waiting.frames[-1] + max(self.waiting.durations[-1], 1)
        ended |= bool(self.end) and not more and self.rows - self.end >= self.patience
        if ended:
            self.end = 0
            return self.take(len(self.waiting.labels)), True
        places = [len(self.waiting.labels)] if len(self.waiting.labels) >= LONGEST else self.begins()
        return self.take(places[-1] if places else 0), False


class Chunks:
    """Features of a recording as it arrives, in the steps of an encoder: (features [T, F], padded; how many count)."""

    def __init__(self, recogniser):
        if not recogniser.chunk:
            raise UserError("the model sees whole utterances: only one that was trained with --chunk can stream")
        self.recogniser, self.extractor = recogniser, recogniser.extractor
        # Emphasised samples from the next frame's first one on, and what came before: samples, their last, frames.
        self.samples, self.total, self.last, self.taken = np.zeros(self.extractor.margin, np.float32), 0, 0.0, 0
        encoder = recogniser.model(recogniser.params).encoder
        self.first, self.later = encoder.frames_of_step(True), encoder.frames_of_step(False)

    @property
    def size(self):
        """Frames of the next step."""
        return self.later if self.taken else self.first

    def chunk(self, x):
        """Features padded to a step, and how many they are."""
        return np.pad(x, ((0, self.size - len(x)), (0, 0))).astype(np.float32), len(x)

    def cut(self, frames):
        """The step of the next frames; drops the samples that no later one has."""
        x = self.recogniser.standardised(self.extractor.spectra(self.samples, frames))
        step, self.samples = self.chunk(x), self.samples[frames * self.extractor.hop :]
        self.taken += frames
        return step

    def steps(self, samples, end=False):
        """Yields those of more samples [S], floats in [-1, 1] or integers; `end`: they are the last ones."""
        samples = audio.scaled(samples)
        if len(samples):
            self.samples = np.concatenate([self.samples, self.extractor.emphasized(samples, before=self.last)])
            self.total, self.last = self.total + len(samples), samples[-1]
        while len(self.samples) >= self.extractor.window + (self.size - 1) * self.extractor.hop:
            yield self.cut(self.size)
        if end:
            self.samples = np.pad(self.samples, (0, self.extractor.margin))
            while remaining := self.extractor.count(self.total) - self.taken:
                yield self.cut(min(remaining, self.size))


class Stream(Chunks):
    """Words of one recording as it arrives. `how`: greedy or a beam; `silence`: seconds that end an utterance, or 0.

    `feed` and, at the end, `finish` return the words that are final since the call before, as `timing.Interval` with
    seconds from the start. `open` is the text behind them, which may change; `ends` has the seconds of the utterances'
    ends in the last call.
    """

    def __init__(self, recogniser, how=GREEDY, silence=0.0):
        super().__init__(recogniser)
        self.how, self.words, self.ends, self.unsure = how, Words(recogniser, silence), [], no_labels()
        silent = jnp.zeros((1, self.first, len(recogniser.mean))), jnp.zeros(1, jnp.int32)
        state, deadline = recogniser.model(recogniser.params).encoder.initial(1), jnp.zeros(1, jnp.int32)
        shapes = jax.eval_shape(recogniser.continued, recogniser.params, *silent, state, None, deadline, how)
        self.state = state, decode.reset_streams(shapes[2][2], np.ones(1, bool))

    @property
    def open(self):
        return self.recogniser.tokens.decode(self.words.waiting.labels + self.unsure.labels)

    def take(self, x, frames):
        """(Labels that are final, rows) after a step."""
        step, more = (x[None], np.array([frames], np.int32)), (np.array([self.words.deadline], np.int32), self.how)
        encoder, rows, part = self.recogniser.continued(self.recogniser.params, *step, *self.state, *more)
        found, final, decoder, _ = part
        self.state = encoder, decoder
        found, final, rows = jax.device_get((found, final[0], rows[0]))
        labels = Labels.of(found, 0, found.counts[0], self.how)
        self.unsure = labels.part(final, None)
        return labels.part(final), int(rows)

    def parts(self, samples, end=False):
        """Yields what `take` returns, for more samples [S]; `end`: they are the last ones, and all labels final."""
        for step in self.steps(samples, end):
            yield self.take(*step)
        if end:
            some, self.unsure = self.unsure, no_labels()
            yield some, 0

    def heard(self, samples, end):
        found, self.ends = [], []
        for part, rows in self.parts(samples, end):
            some, ended = self.words.add(part, rows, bool(self.unsure.labels))
            found += some
            self.ends += [self.words.rows * self.recogniser.seconds] * ended
        return found

    def feed(self, samples):
        """`samples` [S]: floats in [-1, 1], or integers."""
        return self.heard(samples, False)

    def finish(self):
        found = self.heard(np.zeros(0, np.float32), True)
        return found + self.words.take(LONGEST, self.total / self.extractor.rate)


def blocks_of_file(path, rate):
    """Samples of a file as it is read, `BLOCK` seconds or fewer at once."""
    size = int(BLOCK * rate)
    for piece in audio.pieces(path, rate):
        yield from (piece[start : start + size] for start in range(0, len(piece), size))


def blocks_of_microphone(rate):
    """Samples from the default microphone, without end."""
    try:
        import sounddevice
    except (ImportError, OSError) as error:
        raise UserError(f"--microphone: {error}") from None
    blocks = queue.Queue()
    try:
        with sounddevice.InputStream(
            rate, int(BLOCK * rate), channels=1, callback=lambda x, *_: blocks.put(x[:, 0].copy())
        ):
            while True:
                yield blocks.get()
    except (sounddevice.PortAudioError, ValueError) as error:
        raise UserError(f"--microphone: {error}") from None
