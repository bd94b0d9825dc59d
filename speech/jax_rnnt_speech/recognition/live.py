"""Words of a recording as it arrives, by an encoder that sees whole windows: left, chunk and right, as in NeMo.

Each window is a chunk with what comes before and after it. Labels of the chunk are final, as one search goes on from
chunk to chunk, and so are frames beyond it that a label of TDT reads. Those of the right part are open: the next window
contains them again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import decode
from jax_rnnt_speech.data import features
from jax_rnnt_speech.model.encoders import contexts
from jax_rnnt_speech.recognition.results import Labels
from jax_rnnt_speech.recognition.search import GREEDY
from jax_rnnt_speech.recognition.streams import Slots, Stream
from jax_rnnt_speech.recognition.windows import before_all, encoded, taken
from jax_rnnt_speech.system import UserError, refuse_if

MOST = 3600  # seconds of a window: each is in memory as a whole


class Window(NamedTuple):
    """Features [T, F] of a window, rows before its chunk, and rows of the chunk; None for all that follow.

    With `anew`, the search begins anew.
    """

    x: np.ndarray
    first: int
    count: int | None
    anew: bool = False


class Windows:
    """Searches windows one after the other in programs of one size, in place of `streams.Slots`."""

    def __init__(self, model, decoding, frames, context=None):
        self.model, self.decoding, self.frames, self.context, self.state = model, decoding, frames, context, None
        self.free, self.owns = [0], [None]
        self.elsewhere = None  # a coroutine function of (self, step), which runs steps in a thread

    def run(self, steps):
        """Returns (Labels that are final, others, rows) of a window."""
        ((x, first, count, anew),) = steps
        if anew:
            self.forget()
        context = self.context and self.context._replace(before=-first % self.context.chunk)
        rows, lengths = encoded(self.model, [(x, first)], self.frames, context)
        there = int(lengths[0])
        count = there if count is None else min(count, there)
        hypotheses, final = self.search(rows, count, keep=True)
        labels = Labels.of(hypotheses, 0, hypotheses.counts[0], self.decoding)
        final_labels, unsure = labels.part(final[0]), labels.part(final[0], None)
        if count < there:
            hypotheses, _ = self.search(jnp.roll(rows, -count, 1), there - count)
            unsure = Labels.of(hypotheses, 0, hypotheses.counts[0], self.decoding)
        return [(final_labels, unsure, count)]

    async def step(self, step):
        """Calls `run` for one step, here or elsewhere."""
        return await (self.elsewhere((self, step)) if self.elsewhere else Slots.step(self, step))

    def forget(self):
        """Lets the search begin anew."""
        if self.state is not None:
            self.state = decode.reset_streams(self.state, np.ones(1, bool))

    def search(self, rows, count, keep=False):
        """Returns (Hypotheses, number of final labels) of the first rows after the state; `keep` moves it there."""
        counts, decoding = np.array([count], np.int32), self.decoding.of(self.owns)
        if self.state is None:
            self.state = before_all(self.model, rows, counts, decoding)
        hypotheses, final, state, _ = taken(self.model, self.model.params, rows, counts, self.state, decoding)
        if keep:
            self.state = state
        return jax.device_get((hypotheses, final))


class Windowed(Stream):
    """`Stream` for an encoder without a chunk of its own. `left`, `chunk` and `right` are seconds.

    A word is final `right` seconds after its chunk. A model that was trained in several contexts hears in the one
    whose chunk and right are nearest to these; its windows hold `left` seconds, by default those that the attention of
    a frame sees. Another model hears a recording that is no longer than chunk and right as `transcribe` does.
    """

    def __init__(self, model, decoding=GREEDY, silence=0.0, left=None, chunk=2.0, right=2.0, listens=True):
        refuse_if(model.chunk, "--left, --chunk and --right are for models that see whole utterances: this one streams")
        if not round(chunk / model.seconds):
            raise UserError(f"--chunk {chunk:g}: the model has a row in {model.seconds:g} s, which is the least chunk")
        context = None
        if model.config.encoder.draws:
            context = contexts.nearest(model.config.encoder, *(x / model.seconds for x in (chunk, right)))
            chunk, right = (x * model.seconds for x in (context.chunk, context.right))
        if left is None:
            longest = model.config.data.max_seconds  # of the training: beyond it, no frame saw anything
            left = 10.0 if context is None else min(context.left * model.seconds, longest)
        self.rows = {name: round(x / model.seconds) for name, x in (("left", left), ("chunk", chunk), ("right", right))}
        if left + chunk + right > (most := min(model.longest, MOST)):
            raise UserError(f"--left, --chunk and --right: the model hears {most:g} s at most")
        self.sizes = {"left": left, "chunk": chunk, "right": right}
        extractor, self.tail = model.extractor, 0  # samples after a window that its last frame needs
        if context is not None:
            self.tail = max(extractor.margins[1], extractor.window - extractor.hop)
        frames = extractor.count(sum(self.rows.values()) * extractor.hop * model.subsampling + self.tail)
        super().__init__(model, decoding, silence, slots=Windows(model, decoding, frames, context), listens=listens)

    def restart(self, start=0.0):
        """Restarts as `Stream.restart` does."""
        super().restart(start)
        self.samples, self.row, self.begin = np.zeros(0, np.float32), 0, 0  # rows done, and rows before the samples
        self.slots.forget()

    def steps(self, samples, end=False):
        """Yields the Windows of more samples [S], floats in [-1, 1] or integers; with `end`, they are the last ones."""
        samples = features.scaled(samples)
        self.samples, self.total = np.concatenate([self.samples, samples]), self.total + len(samples)
        if self.ear:
            self.ear.add(samples)
        chunk, size = self.rows["chunk"], self.rows["chunk"] + self.rows["right"]
        # There are more samples than the window has; the last window takes all that is left.
        while len(self.samples) > (stop := (self.row - self.begin + size) * self.step + self.tail):
            x = self.model.features(self.samples[:stop])[: (stop - self.tail) // self.extractor.hop]
            yield Window(x, self.row - self.begin, chunk, self.turns())
            self.row += chunk
            begin = max(0, self.row - self.rows["left"])
            self.samples, self.begin = self.samples[(begin - self.begin) * self.step :], begin
        if end and self.model.extractor.count(len(self.samples)):
            yield Window(self.model.features(self.samples), self.row - self.begin, None, self.turns())

    def other(self):
        """Returns what `Stream.other` does."""
        other = Windowed(self.model, self.slots.decoding, **self.sizes, listens=False)
        other.slots.owns, other.slots.elsewhere = self.slots.owns, self.slots.elsewhere
        return other

    @property
    def said_sizes(self):
        """Describes the sizes of its windows in words."""
        parts = ", ".join(f"{name} {x:.3g} s" for name, x in self.sizes.items())
        return parts + (", the nearest context in which the model was trained" if self.slots.context else "")
