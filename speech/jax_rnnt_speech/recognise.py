"""Texts of recordings: of many, in batches, or of one as it arrives."""

import queue
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jax_rnnt import decode
from jax_rnnt_speech import audio, manifests
from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.recogniser import GREEDY

ROUND = 256  # recordings are padded to multiples of so many frames, for few programs
HELD = 60_000  # frames of the recordings that are sorted by length at once: 10 minutes of usual features
BATCH = 16_384  # frames of a batch, padding included, if it has more than one recording
BLOCK = 0.1  # seconds of a stream that arrive at once


class Result(NamedTuple):
    """What was heard in a recording, or why nothing: then there is an `error`, in one line."""

    name: str
    text: str = ""
    labels: list = ()
    frames: list = ()  # of the encoder, in which the labels were found: each lasts `recogniser.seconds`
    log_probs: list = ()  # of the labels
    confidences: list = ()  # of the labels, from 0 to 1
    durations: list = ()  # frames that each label read
    duration: float = 0.0  # seconds of the recording
    nbest: list = ()  # of a beam: (text, score), the best one first
    error: str = ""


def listed(arguments, audio_column=""):
    """Entries and Faults of audio files, manifests and folders, which need no texts."""
    for path in map(Path, arguments):
        if manifests.is_list(path):
            yield from manifests.read(path, audio_column, texts=False)
        else:
            yield manifests.Entry(str(path), path, "")


def loaded(entries, rate):
    """(name, samples [S] or the UserError that there are none) of each entry."""
    for x in entries:
        if isinstance(x, manifests.Fault):
            yield x.name, UserError(f"{x.name}: {x.reason}")
            continue
        try:
            yield x.name, audio.read(x.audio, rate, x.start, x.end, x.channel)
        except UserError as error:
            yield x.name, error


def transcribe(recogniser, recordings, how=GREEDY):
    """Yields the Result of each (name, samples or UserError), in their order.

    Samples [S] are floats in [-1, 1] or integers, at `recogniser.extractor.rate`. Some recordings at a time are sorted
    by length and go through the model in batches: memory does not depend on how many there are.
    """
    waiting, held = [], 0
    for name, samples in recordings:
        result, x = Result(name), None
        try:
            if isinstance(samples, UserError):
                raise samples
            x = recogniser.features(samples)
            result = result._replace(duration=len(samples) / recogniser.extractor.rate)
            if recogniser.limit and len(x) > recogniser.limit:
                most = recogniser.longest
                raise UserError(f"{name}: {result.duration:.1f} s, of which the model hears {most:g} s at most")
        except UserError as error:
            result, x = result._replace(error=str(error)), None
        except ValueError as error:
            result = result._replace(error=f"{name}: {error}")
        waiting.append((result, x))
        held += 0 if x is None else len(x)
        if held >= HELD:
            yield from heard(recogniser, waiting, how)
            waiting, held = [], 0
    yield from heard(recogniser, waiting, how)


def heard(recogniser, waiting, how):
    """Yields the results of (result so far, features or None), in their order, as soon as they are there."""
    results, ready = [result for result, _ in waiting], 0
    order = [i for i, (_, x) in enumerate(waiting) if x is not None and len(x)]
    order.sort(key=lambda i: len(waiting[i][1]), reverse=True)
    while order:
        frames = -(-len(waiting[order[0]][1]) // ROUND) * ROUND
        most = max(1, BATCH // frames)
        size = 1 << min(most.bit_length() - 1, (len(order) - 1).bit_length())  # powers of 2: few programs
        chosen, order = order[:size], order[size:]
        batch, lengths = np.zeros((size, frames, len(recogniser.mean)), np.float32), np.zeros(size, np.int32)
        for row, i in enumerate(chosen):
            x = waiting[i][1]
            batch[row, : len(x)], lengths[row] = x, len(x)
        if batch.shape not in recogniser.searched:
            recogniser.searched.add(batch.shape)
            tqdm.write(f"compiling: a search, {size} x {frames} frames", file=sys.stderr)
        found, others = jax.device_get(recogniser.heard(recogniser.params, batch, lengths, how))
        sure = np.exp(found.label_log_probs) if how.confidence is None else found.label_confidences
        for row, i in enumerate(chosen):
            count = int(found.counts[row])
            more = {"labels": found.labels, "frames": found.frames, "durations": found.durations}
            more |= {"log_probs": found.label_log_probs, "confidences": sure}
            more = {name: x[row, :count].tolist() for name, x in more.items()}
            if others is not None:
                listed = zip(*(x[row].tolist() for x in others))
                more["nbest"] = [(recogniser.text(x, n), score) for x, n, score in listed if score > -np.inf]
            results[i] = results[i]._replace(text=recogniser.text(found.labels[row], count), **more)
        left = min(order, default=len(results))
        yield from results[ready:left]
        ready = max(ready, left)
    yield from results[ready:]


class Stream:
    """Text of samples as they arrive: what `feed` and, at the end, `finish` return continues what came before."""

    def __init__(self, recogniser):
        if not recogniser.chunk:
            raise UserError("the model sees whole utterances: only one that was trained with --chunk can stream")
        self.recogniser, self.extractor = recogniser, recogniser.extractor
        self.labels, self.frames, self.said = [], [], ""
        # Emphasised samples from the next frame's first one on, and what came before: samples, their last, frames.
        self.samples, self.total, self.last, self.taken = np.zeros(self.extractor.margin, np.float32), 0, 0.0, 0
        encoder = recogniser.model(recogniser.params).encoder
        self.first, self.later = encoder.frames_of_step(True), encoder.frames_of_step(False)
        state, silence = encoder.initial(1), self.chunk(np.zeros((0, len(recogniser.mean))))
        shapes = jax.eval_shape(recogniser.continued, recogniser.params, *silence, state, None)
        self.state = state, decode.reset_streams(shapes[1].state, np.ones(1, bool))

    @property
    def size(self):
        """Frames of the next step."""
        return self.later if self.taken else self.first

    def chunk(self, x):
        """Features padded to a step, and how many they are."""
        return jnp.float32(np.pad(x, ((0, self.size - len(x)), (0, 0))))[None], jnp.array([len(x)], jnp.int32)

    def take(self, frames):
        """Decodes the next frames, and drops the samples that no later one has."""
        x = self.recogniser.standardised(self.extractor.spectra(self.samples, frames))
        self.samples = self.samples[frames * self.extractor.hop :]
        encoder, found = self.recogniser.continued(self.recogniser.params, *self.chunk(x), *self.state)
        self.state, self.taken, count = (encoder, found.state), self.taken + frames, int(found.counts[0])
        self.labels += np.asarray(found.labels[0, :count]).tolist()
        self.frames += np.asarray(found.frames[0, :count]).tolist()

    def news(self):
        """What is to be printed. The text only grows at its end, but for pieces of a character."""
        text = self.recogniser.tokens.decode(self.labels)
        new, self.said = text[len(self.said) :], text
        return new

    def feed(self, samples):
        """`samples` [S]: floats in [-1, 1], or integers."""
        samples = audio.scaled(samples)
        if len(samples):
            self.samples = np.concatenate([self.samples, self.extractor.emphasized(samples, before=self.last)])
            self.total, self.last = self.total + len(samples), samples[-1]
        while len(self.samples) >= self.extractor.window + (self.size - 1) * self.extractor.hop:
            self.take(self.size)
        return self.news()

    def finish(self):
        self.samples = np.pad(self.samples, (0, self.extractor.margin))
        while remaining := self.extractor.count(self.total) - self.taken:
            self.take(min(remaining, self.size))
        return self.news()


def blocks_of_file(path, rate):
    samples, size = audio.read(path, rate), int(BLOCK * rate)
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


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
