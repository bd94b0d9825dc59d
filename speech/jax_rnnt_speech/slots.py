"""Streams that come and go in one batch of fixed size, and the words of each as soon as they are final."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import decode, timing
from jax_rnnt_speech import transcripts
from jax_rnnt_speech.recogniser import GREEDY

ROOM = 2000  # labels of a stream that are kept, where nobody pauses


class Step(NamedTuple):
    """The next features [T, F] of the stream in a slot, of which `count` count; `fresh`: its first ones."""

    slot: int
    x: np.ndarray
    count: int
    fresh: bool


class Slots:
    """A batch of streams. Those without a next step, and slots without a stream, stay as they are.

    Each size of a step is compiled once: one, or two where a model's first step is shorter.
    """

    def __init__(self, recogniser, count, how=GREEDY):
        self.recogniser, self.count, self.how = recogniser, count, how
        self.free = list(range(count))
        encoder = recogniser.model(recogniser.params).encoder
        self.start, self.sizes = encoder.initial(1), {encoder.frames_of_step(first) for first in (True, False)}
        self.encoder = jax.tree.map(lambda x: jnp.stack([x] * count), self.start)
        shapes = jax.eval_shape(self.step, *self.arguments(min(self.sizes), []), self.encoder, None)[1]
        self.decoder = decode.reset_streams(shapes.state, np.ones(count, bool))

    @functools.partial(jax.jit, static_argnums=0)
    def step(self, params, x, lengths, fresh, encoder, decoder):
        """(state of the encoder, hypotheses [B] with that of the search) after the next features [B, T, F]."""
        model = self.recogniser.model(params)

        def advanced(x, length, fresh, before):
            before = jax.tree.map(lambda first, x: jnp.where(fresh, first, x), self.start, before)
            rows, counts, after = model.encoder.step(x[None], length[None], before)
            after = jax.tree.map(lambda new, old: jnp.where(length > 0, new.astype(old.dtype), old), after, before)
            return rows[0], jnp.where(length > 0, counts[0], 0), after

        rows, counts, encoder = jax.vmap(advanced)(x, lengths, fresh, encoder)  # each stream has its own clock
        decoder = None if decoder is None else decode.reset_streams(decoder, fresh)
        return encoder, self.recogniser.search(model, rows, counts, self.how, state=decoder)

    def arguments(self, size, steps):
        x = np.zeros((self.count, size, len(self.recogniser.mean)), np.float32)
        lengths, fresh = np.zeros(self.count, np.int32), np.zeros(self.count, bool)
        for step in steps:
            x[step.slot], lengths[step.slot], fresh[step.slot] = step.x, step.count, step.fresh
        return self.recogniser.params, x, lengths, fresh

    def run(self, steps):
        """What was found in some steps, at most one of each stream: (label, frame, duration, confidence) of each label."""
        results = {}
        for size in self.sizes:
            chosen = [step for step in steps if len(step.x) == size]
            if chosen or not steps:  # without steps, programs are compiled
                self.encoder, found = self.step(*self.arguments(size, chosen), self.encoder, self.decoder)
                self.decoder, sure = found.state, found.label_confidences
                sure = jnp.exp(found.label_log_probs) if sure is None else sure
                arrays = jax.device_get((found.labels, found.frames, found.durations, sure, found.counts))
                *arrays, counts = arrays
                for step in chosen:
                    rows = (x[step.slot, : counts[step.slot]].tolist() for x in arrays)
                    results[step.slot] = list(zip(*rows))
        return [results[step.slot] for step in steps]


class Words:
    """Words of a stream: final ones as soon as the next one begins, or after `silence` seconds without a label."""

    def __init__(self, recogniser, silence):
        self.recogniser, self.silence = recogniser, silence
        begins = recogniser.tokens.separator
        self.begins = [bool(x) and x.startswith(begins) for x in recogniser.tokens.labels()]
        self.heard, self.final, self.said = [], 0, 0  # labels since an endpoint; of them and their words, those that are sent

    def of(self, heard, seconds=float("inf")):
        labels, frames, durations, sure = zip(*heard) if heard else ((),) * 4
        return transcripts.words(self.recogniser, labels, frames, sure, durations, duration=seconds)

    def event(self, kind, first, last, words):
        text = self.recogniser.tokens.decode([x[0] for x in self.heard[first:last]]).strip()
        return {"type": kind, "text": text, "words": timing.to_json(words)}

    def news(self, found, seconds, end=False):
        """Events after the labels that were found; the stream has lasted so many seconds, and perhaps ends."""
        self.heard += found
        if not self.heard:
            return []
        last = (self.heard[-1][1] + max(self.heard[-1][2], 1)) * self.recogniser.seconds
        over = seconds - last >= self.silence
        if not (found or over or end):
            return []
        count = len(self.heard)
        begins = [i for i in range(self.final, count) if self.begins[self.heard[i][0]]]
        final = count if end or over or count > ROOM else max(begins, default=self.final)
        words, events = self.of(self.heard, seconds if end else float("inf")), []
        said = len(words) if final == count else len(self.of(self.heard[:final]))
        if said > self.said:
            events.append(self.event("words", self.final, final, words[self.said : said]))
            self.final, self.said = final, said
        if said < len(words):
            events.append(self.event("partial", final, count, words[said:]))
        if over and not end:
            events.append({"type": "endpoint", "time": round(last, 3)})
        if final == count:
            self.heard, self.final, self.said = [], 0, 0
        return events
