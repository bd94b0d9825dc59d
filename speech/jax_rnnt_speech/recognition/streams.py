"""Words of recordings that arrive in pieces: streams without end, in memory that does not grow.

The encoder takes steps of its chunk, the search goes on from its state, and samples may come in pieces of any size:
steps are the same, and so are all numbers. A beam lets go of labels that no hypothesis changes, and of the oldest ones
where more than `search.OPEN` are open. Several streams that come and go are one batch.
"""

import contextlib
import functools
import itertools
import math
import queue
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import decode
from jax_rnnt_speech.data import audio, features
from jax_rnnt_speech.data.tokens import ENDS
from jax_rnnt_speech.recognition import timed, transcripts, unheard
from jax_rnnt_speech.recognition.results import Labels, no_labels
from jax_rnnt_speech.recognition.search import GREEDY, NEVER, next_part
from jax_rnnt_speech.recognition.unheard import Ear
from jax_rnnt_speech.system import as_user_error, programs, refuse_if

BLOCK = 0.1  # seconds of a stream that arrive at once
LONGEST = 200  # labels of the longest word
CONTEXT = 8  # labels before others that may change what those write: a space, or none
WHOLE = "the model sees whole utterances: only one that was trained with --chunk can stream"
PART = "\ufffd"  # the sign that tokenizers write for a part of a character


class Step(NamedTuple):
    """The next features [T, F] of the stream in a slot, of which `count` count; `fresh` marks its first ones."""

    slot: int
    x: np.ndarray
    count: int
    deadline: int  # the one of `search.next_part`
    fresh: bool
    anew: bool  # whether the search begins anew, while the encoder goes on


@programs.announced("a step of streams")
@functools.partial(jax.jit, static_argnums=(0, 10))
def continued(model, params, x, lengths, deadlines, fresh, anew, encoder, decoder, decoding, first=None):
    """Returns (state of the encoder, rows [B], `next_part`) after the next features [B, T, F] of streams.

    `fresh` [B] marks those that begin, `anew` those whose search does. With `first`, all or none begin, where states
    before and after a first step differ.
    """
    network = model.network(params)
    start = network.encoder.initial(1)

    def advanced(x, length, fresh, old):
        before = start if first else old
        if first is None:
            before = jax.tree.map(lambda start, x: jnp.where(fresh, start, x), start, old)
        rows, counts, new = network.encoder.step(x[None], length[None], before)
        new = jax.tree.map(lambda new, old: jnp.where(length > 0, new.astype(old.dtype), old), new, old)
        return rows[0], jnp.where(length > 0, counts[0], 0), new

    rows, counts, encoder = jax.vmap(advanced)(x, lengths, fresh, encoder)  # each stream has its own clock
    decoder = None if decoder is None else decode.reset_streams(decoder, fresh | anew)
    return encoder, counts, next_part(model, network, rows, counts, decoder, deadlines, decoding)


class Slots:
    """A batch of streams. Those without a next step, and slots without a stream, stay as they are.

    One program takes all steps, or two where an encoder's first step and the state before it have other sizes.
    """

    def __init__(self, model, count=1, decoding=GREEDY):
        refuse_if(not model.chunk, WHOLE)
        self.model, self.count, self.decoding, self.free = model, count, decoding, list(range(count))
        self.owns = [None] * count  # the phrases of the recording in each slot, as `search_options.Room` has them
        encoder = model.network(model.params).encoder
        self.sizes = [encoder.frames_of_step(first) for first in (False, True)]
        start = encoder.initial(1)
        first = jnp.zeros((1, self.sizes[True], len(model.mean))), jnp.zeros(1, jnp.int32), start
        after = jax.eval_shape(lambda *x: model.network(model.params).encoder.step(*x)[2], *first)
        self.apart = [x.shape for x in jax.tree.leaves(after)] != [x.shape for x in jax.tree.leaves(start)]
        self.encoder = jax.tree.map(lambda new: jnp.zeros((count, *new.shape), new.dtype), after)
        self.decoder = None
        shapes = jax.eval_shape(lambda *x: continued(model, *x, *self.rest(False)), *self.arguments(False, []))
        self.decoder = decode.reset_streams(shapes[2][2], np.ones(count, bool))

    def stream(self, silence):
        """Returns a Stream in a free slot; so many seconds of silence end an utterance."""
        return Stream(self.model, silence=silence, slots=self)

    def arguments(self, first, steps):
        x = np.zeros((self.count, self.sizes[first], len(self.model.mean)), np.float32)
        (lengths, deadlines), (fresh, anew) = np.zeros((2, self.count), np.int32), np.zeros((2, self.count), bool)
        for slot, heard, *rest in steps:
            x[slot], (lengths[slot], deadlines[slot], fresh[slot], anew[slot]) = heard, rest
        return self.model.params, x, lengths, deadlines, fresh, anew

    def rest(self, first):
        return self.encoder, self.decoder, self.decoding.of(self.owns), first if self.apart else None

    def run(self, steps):
        """Returns (final Labels, others, rows) of steps, at most one of each stream; without steps it compiles."""
        results = {}
        for first in (True, False) if self.apart else (False,):
            chosen = [step for step in steps if not self.apart or step.fresh == first]
            if not chosen and steps:
                continue
            after = continued(self.model, *self.arguments(first, chosen), *self.rest(first))
            self.encoder, rows, (hypotheses, final, self.decoder, _) = after
            hypotheses, final, rows = jax.device_get((hypotheses, final, rows))
            for slot, *_ in chosen:
                labels = Labels.of(hypotheses, slot, hypotheses.counts[slot], self.decoding)
                results[slot] = labels.part(final[slot]), labels.part(final[slot], None), int(rows[slot])
        return [results[step.slot] for step in steps]

    async def step(self, step):
        """Calls `run` for one step; a program with many streams puts a function here that runs theirs together."""
        (result,) = self.run([step])
        return result


class Words:
    """Turns final labels of a recording, one part after the other, into words."""

    def __init__(self, model, silence=0.0, start=0.0, ear=None, decoding=GREEDY):
        self.drop, self.written = decoding.drop_invented, decoding.written
        self.ear, self.invented = ear, []  # words where nobody speaks, since the last events
        self.model, self.waiting, self.rows, self.end, self.start = model, no_labels(), 0, 0, start
        self.searched = 0  # rows before the first one of the search, which may have begun anew
        self.patience = round(silence / model.seconds) or NEVER
        self.last_labels = {i for i, x in enumerate(model.tokens.pieces) if x in ENDS}
        self.before, self.said = [], ""  # labels before those that wait, and the text of words that were taken

    @property
    def deadline(self):
        """The deadline of the next part, for `search.next_part`."""
        return self.rows - self.searched - self.patience

    def begins(self):
        """Returns places of labels before which all words are final. No frame has labels on both sides of a place."""
        labels, frames, tokens, places, size = *self.waiting[:2], self.model.tokens, [], 0
        words = transcripts.words_of(tokens, labels, range(len(labels)), hop=1.0)
        held = self.written.held([x.text for x in words])
        for number, (before, word) in enumerate(itertools.pairwise(words), 1):
            size += len(before.text)
            if number in held:
                continue
            last, first = math.ceil(before.end), int(word.start)
            if first < word.start or frames[first] == frames[last - 1]:
                continue
            if word.text[0] == PART and not tokens.decode(labels[: first + 1]).rstrip(PART)[-1:].isspace():
                continue  # it may become a mark on the character before it
            # Punctuation between them may belong to either.
            places += [i for i in range(last, first + 1) if len("".join(tokens.decode(labels[:i]).split())) == size][:1]
        return places

    def take(self, count, duration=float("inf")):
        """Takes the words of the first waiting labels."""
        some, self.waiting = self.waiting.part(count), self.waiting.part(count, None)
        kept, invented = self.sifted(some, duration)
        self.invented += [x._replace(start=self.start + x.start, end=self.start + x.end) for x in invented]
        some = kept if self.drop else some
        if not some.labels:
            return []
        before, both = (self.model.tokens.decode(x) for x in (self.before, self.before + some.labels))
        self.said += self.written.text(both.removeprefix(before))
        self.before = (self.before + some.labels)[-CONTEXT:]
        heard = some.labels, some.frames, some.confidences, some.durations
        return self.written.words(transcripts.words(self.model, *heard, self.start, duration))

    def sifted(self, labels, duration=float("inf")):
        """Works as `unheard.sifted`."""
        return unheard.sifted(self.model, labels, self.ear, duration) if self.ear else (labels, [])

    def without_ends(self, part):
        return part.chosen([i for i, x in enumerate(part.labels) if x not in self.last_labels])

    def add(self, part, rows, more=False):
        """Returns (words that are final, whether an utterance ends) after final labels, and so many encoder rows.

        With `more`, the rows have labels that are not final.
        """
        self.rows += rows
        ended = any(i in self.last_labels for i in part.labels)
        self.waiting.extend(self.without_ends(part))
        if self.waiting.labels:
            self.end = self.waiting.frames[-1] + max(self.waiting.durations[-1], 1)
        ended |= bool(self.end) and not more and self.rows - self.end >= self.patience
        if ended:
            self.end = 0
            return self.take(len(self.waiting.labels)), True
        places = self.begins()
        if not places and len(self.waiting.labels) >= LONGEST:
            places = [len(self.waiting.labels)]
            while places[0] > 1 and self.model.tokens.decode(self.waiting.labels[: places[0]]).endswith(PART):
                places[0] -= 1
        return self.take(places[-1] if places else 0), False


class Stream:
    """The words of one recording as it arrives. `decoding` is greedy or a beam; `silence` are seconds that end an
    utterance, or 0.

    `feed` and, at the end, `finish` return the words that are final since the call before, as `timing.Interval` with
    seconds from the start. `open` is the text behind them, which may change; `ends` has the seconds of the utterances'
    ends in the last call.

    If it `listens`, speech without words is searched once more, by a stream of its own, and becomes an event `unheard`
    where that finds no words, either. Words of it come before those of later labels, which wait for it.

    A program with many streams gives them the same `slots`, and waits for the results of `hear`.

    `own` are phrases of this recording, as `search_options.Room` has them. Others that become `wanted` later are those
    of the next utterance: the search begins anew with them as soon as no word is open.
    """

    def __init__(self, model, decoding=GREEDY, silence=0.0, slots=None, listens=True, own=None):
        self.silence, self.listens, self.own, self.wanted = silence, listens, own, own
        self.shares, self.step = slots is not None, model.extractor.hop * model.subsampling
        self.slots = slots or Slots(model, 1, decoding)
        self.slot, self.model, self.extractor = self.slots.free.pop(), model, model.extractor
        self.slots.owns[self.slot] = own
        self.ends, self.text = [], ""  # text of the last event's words, with the white space before them
        self.restart()

    def restart(self, start=0.0):
        """Forgets what is open: samples that come now begin an utterance, at so many seconds of the recording."""
        # Emphasised samples from the next frame's first one on, and what came before: samples, their last, frames.
        self.samples, self.total, self.last, self.taken = np.zeros(0, np.float32), 0, 0.0, 0
        self.begun = False  # whether the samples contain those before the recording
        self.ear = Ear(self.extractor.rate) if self.listens else None
        self.words = Words(self.model, self.silence, start, self.ear, self.slots.decoding)
        self.unsure, self.said = no_labels(), ""
        self.missed = []  # [begin, end) of unheard speech since the last events

    def turns(self):
        """Returns True if the search begins anew before the next step, with the phrases that are wanted."""
        if self.own is self.wanted or self.words.end or self.unsure.labels:
            return False
        self.own = self.slots.owns[self.slot] = self.wanted
        self.words.searched = self.words.rows
        return True

    @property
    def time(self):
        """Seconds of the recording that are decoded."""
        decoded = min(self.words.rows * self.model.seconds, self.total / self.extractor.rate)
        return round(self.words.start + decoded, 3)

    @property
    def open(self):
        labels = self.words.waiting.joined(self.unsure)
        labels = self.words.sifted(labels)[0] if self.words.drop else labels
        return self.words.written.text(self.model.tokens.decode(labels.labels).rstrip(PART))

    @property
    def size(self):
        """The frames of the next step."""
        return self.slots.sizes[not self.taken]

    def cut(self, frames):
        """Returns the step of the next frames, padded; drops the samples that no later one has."""
        x = self.model.standardised(self.extractor.spectra(self.samples, frames))
        padded = np.pad(x, ((0, self.size - frames), (0, 0))).astype(np.float32)
        anew = self.turns()  # this moves the deadline
        step = Step(self.slot, padded, frames, self.words.deadline, not self.taken, anew)
        self.samples = self.samples[frames * self.extractor.hop :]
        self.taken += frames
        return step

    def steps(self, samples, end=False):
        """Yields the steps of more samples [S], floats in [-1, 1] or integers. With `end`, they are the last ones."""
        samples = features.scaled(samples)
        if len(samples):
            if self.ear:
                self.ear.add(samples)
            self.samples = np.concatenate([self.samples, self.extractor.emphasized(samples, before=self.last)])
            self.total, self.last = self.total + len(samples), samples[-1]
        before, after = self.extractor.margins
        if not self.begun and (end or len(self.samples) >= before):
            self.samples, self.begun = self.extractor.padded(self.samples, before, 0), True
        while len(self.samples) >= self.extractor.window + (self.size - 1) * self.extractor.hop:
            yield self.cut(self.size)
        if end:
            self.samples = self.extractor.padded(self.samples, 0, after)
            while remaining := self.extractor.count(self.total) - self.taken:
                yield self.cut(min(remaining, self.size))

    async def taking(self, part, unsure, rows):
        """Returns (words that are final, whether an utterance ends) after the step that found these."""
        before = self.words.searched
        part, unsure = (x._replace(frames=[before + y for y in x.frames]) for x in (part, unsure))
        self.unsure = unsure
        seconds = self.model.seconds
        if self.ear:
            for labels in (part, unsure):
                self.ear.wrote(labels, seconds)
            final = part.frames[-1] * seconds if part.labels else -np.inf
            self.ear.take((self.words.rows + rows) * seconds, self.step, final=final)
            part = await self.with_missed(part)
        found = self.words.add(part, rows, bool(unsure.labels))
        if self.ear:
            open_ = self.words.waiting.frames[:1] + unsure.frames[:1]
            self.ear.forget(min([*open_, self.words.rows]) * seconds)
        return found

    async def resting(self, seconds=None):
        """Returns the words that are left at the end of a recording of so many seconds."""
        last, self.unsure = self.unsure, no_labels()
        if self.ear:
            self.ear.take(self.words.rows * self.model.seconds, self.step, end=True)
            last = await self.with_missed(last)
        words, _ = self.words.add(last, 0)
        lasts = self.total / self.extractor.rate if seconds is None else seconds - self.words.start
        return words + self.words.take(LONGEST, lasts)

    async def with_missed(self, part):
        """Returns labels that are to become final, with those of missed speech where they are found."""
        jobs, missed = self.ear.jobs, self.ear.found
        self.ear.jobs, self.ear.found = [], []
        for begin, end, first, samples in jobs:
            before, second = self.words.waiting.joined(part), await self.again(samples)
            labels = unheard.joined(self.model, before, second, first // self.step, begin, end)
            if labels is not None:
                self.words.waiting, part = no_labels(), labels
                missed.remove((begin, end))
        self.missed += missed
        return part

    async def again(self, samples):
        """Returns the labels of samples that are searched by themselves; none if all slots but one are busy."""
        other, labels = self.other(), no_labels()
        if other is None:
            return labels
        try:
            for step in other.steps(samples, end=True):
                part, unsure, _ = await other.slots.step(step)
                labels.extend(part)
            labels.extend(unsure)
        finally:
            other.slots.free.append(other.slot)
        return self.words.without_ends(labels)

    def other(self):
        """Returns another Stream that runs in the same programs, or None where no slot is free for it."""
        if self.shares and len(self.slots.free) < 2:  # the last one is for a recording of its own
            return None
        return Stream(
            self.model, self.slots.decoding, slots=self.slots if self.shares else None, listens=False, own=self.own
        )

    async def hear(self, samples, end=False, seconds=None):
        """Yields (words that are final, whether an utterance ends) for each step of more samples [S].

        With `end`, they are the last ones, of a recording of so many seconds.
        """
        for step in self.steps(samples, end):
            yield await self.taking(*await self.slots.step(step))
        if end:
            yield await self.resting(seconds), False

    def heard(self, samples, end=False):
        """Yields what `hear` does, by steps that run at once."""
        coming = self.hear(samples, end)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield finished(anext(coming))

    def feed(self, samples, end=False):
        """Returns the words that become final by `samples` [S]: floats in [-1, 1], or integers."""
        words, self.ends = [], []
        for some, ended in self.heard(samples, end):
            words += some
            self.ends += [self.words.start + self.words.rows * self.model.seconds] * ended
        return words

    def finish(self):
        return self.feed(np.zeros(0, np.float32), True)

    def events(self, words, ended=False):
        """Yields events for programs: final words, text that may change, the end of an utterance."""
        time, open_ = {"time": self.time}, self.open.strip()
        self.text, self.words.said = self.words.said, ""
        if words:
            yield {"type": "words", "text": self.text.strip(), "words": timed.objects(words)} | time
        missed, self.missed = self.missed, []
        for x in timed.stretches((self.words.start + a, self.words.start + b) for a, b in missed):
            yield {"type": "unheard"} | x | time
        invented, self.words.invented = self.words.invented, []
        if invented:
            yield {"type": "invented", "words": timed.objects(invented)} | time
        if open_ not in ("", self.said):
            yield {"type": "partial", "text": open_} | time
        if ended:
            yield {"type": "endpoint"} | time
        self.said = open_


def finished(waiting):
    """Returns the result of a coroutine of a Stream whose steps run at once, so that it never waits."""
    try:
        waiting.send(None)
    except StopIteration as end:
        return end.value


def blocks_of_file(path, rate):
    """Yields samples of a file as it is read, `BLOCK` seconds or fewer at once."""
    size = int(BLOCK * rate)
    for piece in audio.pieces(path, rate):
        yield from (piece[start : start + size] for start in range(0, len(piece), size))


def blocks_of_microphone(rate):
    """Yields samples from the default microphone, without end."""
    with as_user_error("--microphone", ImportError, OSError):
        import sounddevice
    blocks, size = queue.Queue(), int(BLOCK * rate)
    hear = {"channels": 1, "callback": lambda x, *_: blocks.put(x[:, 0].copy())}
    with (
        as_user_error("--microphone", sounddevice.PortAudioError, ValueError),
        sounddevice.InputStream(rate, size, **hear),
    ):
        while True:
            yield blocks.get()
