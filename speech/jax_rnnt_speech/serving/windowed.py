"""Streams of a server by windows. Each has a search of its own, and one thread runs the windows of all."""

import functools

import numpy as np

from jax_rnnt_speech.recognition.live import Windowed
from jax_rnnt_speech.serving.together import Together


class Places:
    """Serves as `streams.Slots`, for encoders without a chunk. `sizes` are arguments of `Windowed`, such as `chunk`."""

    def __init__(self, model, count, decoding, sizes):
        self.count, self.free = count, [0] * count
        self.made = functools.partial(Windowed, model, decoding, **sizes)
        self.together = Together(lambda jobs: [slots.run([step])[0] for slots, step in jobs], 1)
        first = self.made()
        self.said = first.said_sizes
        for step in first.steps(np.zeros(first.extractor.rate, np.float32), end=True):
            first.slots.run([step])  # this compiles

    def stream(self, silence):
        """Returns a Stream, which takes a place; so many seconds of silence end an utterance."""
        stream = self.made(silence=silence)
        self.free.pop()
        stream.slots.elsewhere = self.together
        return stream
