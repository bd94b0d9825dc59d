"""Transcribes recordings of any length, by encoders of any kind, in memory that does not depend on the length.

An encoder that streams takes its steps (`streams`). Another one hears a window of at most `WINDOW` seconds, or of its
limit: what is to be transcribed, and `MARGIN` seconds on both sides, of which the rows are dropped. A quick greedy
search of the window finds where it pauses. The search proper ends in the last pause of the latter half, or as far from
labels as it can, and the next window goes on there: one state goes from window to window, so texts are never merged,
and frames count from the start of the recording. Windows of several recordings make a batch, of one of two sizes.
Recordings that fit into a window are sorted by length, and their batches have few shapes: a program takes seconds to
compile, and memory as long as the process lasts.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import decode
from jax_rnnt_speech.data import features
from jax_rnnt_speech.recognition.results import Labels, Result, no_labels
from jax_rnnt_speech.recognition.search import GREEDY, NEVER, Decoding, next_part
from jax_rnnt_speech.recognition.spellings import Written
from jax_rnnt_speech.recognition.streams import Stream
from jax_rnnt_speech.recognition.transcripts import places_of_words
from jax_rnnt_speech.recognition.unheard import Ear, joined, sifted
from jax_rnnt_speech.system import UserError, programs

WINDOW = 30.0  # seconds of a window, margins included
MARGIN = 2.0  # seconds that the encoder sees before and after the part to transcribe
PAUSE = 0.8  # seconds without a label in which the last place serves as well as any


class Batches(NamedTuple):
    """The shapes of batches. Each one is compiled, and each place in it costs something, whether it is taken or not."""

    windows: int  # windows of long recordings
    frames: int  # frames of several shorter ones, padding included
    room: int  # places for each of them, at most
    sizes: int  # sizes of lengths in an octave


# On CPUs a second of audio costs as much alone as in a batch (31 million parameters, one core: 20 ms, of eight 19; two
# cores: 13, 16), so padding is all that counts. Elsewhere small batches cost more, and so does compiling.
BATCHES = {"cpu": Batches(windows=1, frames=2_048, room=1, sizes=4)}
ELSEWHERE = Batches(windows=4, frames=16_384, room=2, sizes=2)


def batches():
    return BATCHES.get(jax.default_backend(), ELSEWHERE)


@programs.announced("an encoder")
@functools.partial(jax.jit, static_argnums=0)
def window(model, params, x, lengths, first, context=None):
    """Returns rows [B, N, E] from the `first` [B] on, of features [B, T, F], and their lengths [B]."""
    rows, lengths = model.network(params).encode(x, lengths, context)
    place = jnp.minimum(jnp.arange(rows.shape[1]) + first[:, None], rows.shape[1] - 1)
    return jnp.take_along_axis(rows, place[..., None], 1), lengths - first


def encoded(model, parts, frames, context=None):
    """Calls `window` for parts padded to so many frames, each (features [T, F], rows before its first one) or None."""
    batch = np.zeros((len(parts), frames, len(model.mean)), np.float32)
    lengths, first = np.zeros((2, len(parts)), np.int32)
    for i, part in enumerate(parts):
        if part is not None:
            x, first[i] = part
            batch[i, : len(x)], lengths[i] = x, len(x)
    return window(model, model.params, batch, lengths, first, context)


@programs.announced("a search")
@functools.partial(jax.jit, static_argnums=0)
def taken(model, params, rows, lengths, decoder=None, decoding=GREEDY):
    """Calls `next_part` for rows of windows."""
    return next_part(model, model.network(params), rows, lengths, decoder, -NEVER, decoding)


def before_all(model, rows, lengths, decoding):
    """Returns the state of `taken` before the first rows, shaped for rows such as these."""
    shapes = jax.eval_shape(functools.partial(taken, model), model.params, rows, lengths, None, decoding)
    return decode.reset_streams(shapes[2], np.ones(len(lengths), bool))


class Recording:
    """A recording as it is read: samples of its next window, or of all of it if it is not `long`."""

    def __init__(self, name, samples, model, watch=None, again=False, progress=None, own=None, drop=False):
        self.ear = None if again else Ear(model.extractor.rate)  # nothing is searched a third time
        self.name, self.model, self.extractor, self.watch, self.own = name, model, model.extractor, watch, own
        self.progress, self.passed = progress, 0.0  # seconds that `progress` has counted
        self.error, self.total, self.samples, self.found, self.nbest = "", 0, np.zeros(0, np.float32), no_labels(), ()
        self.drop, self.kept = drop, (0, no_labels())  # whether to drop invented words; labels, and those that stay
        self.spotted, self.done = [], False  # phrases, as `decode.find_phrases` has them
        self.written = Written()  # the one of the Decoding
        self.begin = self.row = 0  # rows of the encoder before the samples, and before what is to be transcribed
        self.step, rate = self.extractor.hop * model.subsampling, self.extractor.rate  # samples of a row
        most = max(1, round(min(WINDOW, model.longest) * rate) // self.step)  # rows
        self.size, self.margin = most * self.step, min(round(MARGIN * rate / self.step), most // 4)
        if isinstance(samples, UserError):
            self.fail(samples)
        else:
            self.pieces = iter([samples] if isinstance(samples, np.ndarray) else samples)
            self.fill()
        self.long = len(self.samples) > self.size

    @property
    def last(self):
        """True if the window ends with the recording."""
        return len(self.samples) <= self.size

    @property
    def frames(self):
        """The number of feature frames of the samples."""
        return self.extractor.count(len(self.samples))

    @property
    def window(self):
        """Features [T, F] of the next window, and rows before the part to transcribe."""
        return self.model.features(self.samples[: self.size]), self.row - self.begin

    def fail(self, error):
        self.error = f"{error}" if isinstance(error, UserError) else f"{self.name}: {error}"
        self.samples = self.samples[:0]

    def wanted(self):
        """Returns True if a client waits for the rest, by `watch` of `recognise.transcribe`."""
        if self.watch and not self.error and not self.watch(self.so_far()):
            self.fail("nobody waits for it")
        return not self.error

    def so_far(self):
        """Returns labels of the text so far. Words before the last one are settled, so they are sifted once."""
        if not self.drop or self.done:
            return self.sifted()[0]
        before, kept = self.kept
        tail = self.found.part(before, None)
        *_, last = [0, *(a for a, _ in places_of_words(self.model.tokens, tail.labels))]
        kept = kept.joined(sifted(self.model, tail.part(last), self.ear)[0])
        self.kept = before + last, kept
        return kept.joined(sifted(self.model, tail.part(last, None), self.ear)[0])

    def sifted(self):
        """Returns (Labels of the text, invented words)."""
        seconds = self.total / self.extractor.rate
        kept, invented = sifted(self.model, self.found, self.ear, seconds) if self.ear else (self.found, [])
        return kept if self.drop else self.found, invented

    def read(self):
        """Returns the next piece, of any length, or None."""
        try:
            piece = next(self.pieces, None)
            piece = None if piece is None else features.scaled(piece)
        except (UserError, ValueError) as error:
            return self.fail(error)
        self.total += 0 if piece is None else len(piece)
        if self.ear and piece is not None:
            self.ear.add(piece)
        return piece

    def fill(self):
        """Reads until there is more than a window, or nothing more."""
        held, size = [self.samples], len(self.samples)
        while size <= self.size and (piece := self.read()) is not None:
            held.append(piece)
            size += len(piece)
        if not self.error:
            self.samples = np.concatenate(held)

    def cut(self, rows, frames, durations):
        """Returns how many of the rows to transcribe, by the frames of labels that a search found in them."""
        if self.last:
            return rows
        high = rows - self.margin
        places = np.arange(high, high // 2, -1)
        if not len(frames):
            return high
        begin, end = np.array(frames)[:, None], np.add(frames, np.maximum(durations, 1))[:, None]
        apart = np.maximum(begin - places, places - end).min(0)
        return int(places[np.argmax(np.minimum(apart, round(PAUSE / 2 / self.model.seconds)))])

    def go_on(self, rows):
        """Goes on to the window behind so many rows."""
        self.row += rows
        begin = max(0, self.row - self.margin)
        self.samples, self.begin = self.samples[(begin - self.begin) * self.step :], begin
        self.fill()

    def take(self, i, rows, hypotheses, final, others, decoding):
        """Takes what `search.next_part` found in so many rows, in row i of a batch."""
        self.done, before = self.last, list(self.found.labels)
        labels = Labels.of(hypotheses, i, hypotheses.counts[i], decoding)
        self.found.extend(labels if self.done else labels.part(final[i]))
        self.tell(labels, self.row + rows)
        self.wanted()
        if self.done and others is not None:
            listed = zip(*(x[i].tolist() for x in others))
            text = self.model.text
            self.nbest = [(text(before + x, len(before) + n), score) for x, n, score in listed if score > -np.inf]
        if not self.done:
            self.go_on(rows)
            self.done = bool(self.error)

    def tell(self, labels, rows):
        """Passes labels, which may still change, up to so many rows to the ear and the bar."""
        if self.progress:
            seconds = self.total / self.extractor.rate if self.done else rows * self.model.seconds
            self.progress(seconds - self.passed)
            self.passed = seconds
        if self.ear:
            self.ear.wrote(labels, self.model.seconds)
            self.ear.take(rows * self.model.seconds, self.step, self.done)

    def stream(self, decoding):
        """Finds the labels as a `Stream` does, in the same programs."""
        live, unsure, piece = Stream(self.model, decoding, listens=False, own=self.own), no_labels(), self.samples
        self.samples = self.samples[:0]
        while True:
            for step in live.steps(self.samples if piece is None else piece, piece is None):
                ((part, unsure, rows),) = live.slots.run([step])
                self.found.extend(part)
                self.row += rows
                self.tell(part.joined(unsure), self.row)
            if piece is None:
                self.found.extend(unsure)
                self.done = True
                self.tell(no_labels(), self.row)
            if not self.wanted() or piece is None:
                return
            piece = self.read()

    def result(self):
        if self.error:
            return Result(self.name, error=self.error)
        seconds = self.total / self.extractor.rate
        labels, invented = self.sifted()
        text = self.written.text(self.model.text(labels.labels, len(labels.labels)))
        nbest = [(self.written.text(x), score) for x, score in self.nbest]
        nbest[:1] = [(text, score) for _, score in nbest[: self.drop]] or nbest[:1]
        more = {"unheard": tuple(self.ear.found) if self.ear else (), "written": self.written}
        return Result(self.name, text, *labels, seconds, nbest or (), invented=tuple(invented), **more)


def hear(model, recordings, decoding):
    """Finds the labels of Recordings; speech without labels is searched once more, by itself."""
    hear_once(model, recordings, decoding)
    jobs = [(x, *job) for x in recordings if x.ear and not x.error for job in x.ear.jobs]
    second = [Recording(x.name, samples, model, again=True, own=x.own) for x, *_, samples in jobs]
    hear_once(model, second, decoding)
    for (x, begin, end, first, _), other in zip(jobs, second):
        labels = None if other.error else joined(model, x.found, other.found, first // x.step, begin, end)
        if labels is not None:
            x.found = labels
            x.ear.found.remove((begin, end))
            x.wanted()
    for x in recordings:
        x.written = decoding.written
        if x.spotted and not x.error:
            x.found = decoding.spotter.put(model, x.found, x.spotted)
            x.wanted()


def hear_once(model, recordings, decoding):
    long = [x for x in recordings if x.long]
    if model.chunk:
        for x in long:
            x.stream(decoding)
    else:
        hear_long(model, long, decoding)
    waiting = sorted((x for x in recordings if x.frames and not x.long), key=lambda x: -len(x.samples))
    while waiting := [x for x in waiting if x.wanted()]:
        size, frames = shape_of_batch(waiting[0].frames, len(waiting))
        rows, waiting = waiting[:size], waiting[size:]
        rows += [None] * (size - len(rows))
        hear_windows(model, rows, frames, None, None, decoding)


def shape_of_batch(longest, count):
    """Returns (rows, frames) of the next batch of `count` recordings, of which the longest has so many frames.

    Rows and frames have few values, so that few programs are compiled.
    """
    _, batch, room, sizes = batches()
    power = 1 << max(9, (longest - 1).bit_length())
    frames = next(x for x in range(power // 2, power + 1, power // 2 // sizes) if longest <= x)
    most = 1 << (max(1, batch // frames).bit_length() - 1)
    return next(x for x in (most, most // 8, 1) if 0 < x <= room * count), frames


def hear_long(model, recordings, decoding):
    """Transcribes window by window; a row of the batch that has ended is the next recording's."""
    size = 1 if len(recordings) == 1 else batches().windows
    waiting, rows, state = recordings[::-1], [None] * size, None
    while waiting or any(rows):
        free = np.array([x is None for x in rows])
        rows = [x or (waiting.pop() if waiting else None) for x in rows]
        frames = model.extractor.count(next(filter(None, rows)).size)
        state = hear_windows(model, rows, frames, state, free, decoding)
        rows = [None if x is None or x.done else x for x in rows]


def hear_windows(model, rows, frames, state, free, decoding):
    """Takes the next window of each Recording or None; returns the state of the search after it.

    `free` marks rows that begin; with None, all do, and end.
    """
    decoding = decoding.of([x and x.own for x in rows])
    heard, cuts = encoded(model, [x and x.window for x in rows], frames)
    if not all(x is None or x.last for x in rows):
        cuts = np.array(cuts)
        same = {name: getattr(decoding, name) for name in ("ctc", "language", "allowed")}
        probing = Decoding(**same)  # a greedy search, whatever comes after it
        probe = jax.device_get(taken(model, model.params, heard, cuts, None, probing)[0])
        labels = [(probe.frames[i, :n], probe.durations[i, :n]) for i, n in enumerate(probe.counts)]
        cuts = np.array([0 if x is None else x.cut(int(n), *y) for x, n, y in zip(rows, cuts, labels)], np.int32)
    if free is not None:
        state = decode.reset_streams(before_all(model, heard, cuts, decoding) if state is None else state, free)
    *part, state, others = taken(model, model.params, heard, cuts, state, decoding)
    part, cuts = jax.device_get(((*part, others), cuts))  # not before: a search is traced while the encoder works
    spotted = decoding.spotter.found(model, heard, cuts) if decoding.spotter else [[]] * len(rows)
    for i, x in enumerate(rows):
        if x is not None:
            x.spotted += [y._replace(start=x.row + y.start, end=x.row + y.end) for y in spotted[i]]
            x.take(i, int(cuts[i]), *part, decoding)
    return state
