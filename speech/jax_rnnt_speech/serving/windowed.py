"""Streams of a server whose encoder hears windows: each has a search of its own, and all run in one thread."""

import functools

import numpy as np

from jax_rnnt_speech.recognition.live import Windowed
from jax_rnnt_speech.serving.together import Together


class Places:
    """Places for so many streams, in the place of `streams.Slots`. `sizes`: those of `Windowed` that are named."""

    def __init__(self, model, count, decoding, sizes):
        self.count, self.free = count, [0] * count
        self.made = functools.partial(Windowed, model, decoding, **sizes)
        self.together = Together(lambda jobs: [slots.run([step])[0] for slots, step in jobs], 1)
        first = self.made()
        self.said = first.said_sizes
        for step in first.steps(np.zeros(first.extractor.rate, np.float32), end=True):
            first.slots.run([step])  # compiles

    def stream(self, silence):
        """A Stream in one of the places; seconds of silence end an utterance."""
        stream = self.made(silence=silence)
        self.free.pop()
        stream.slots.elsewhere = self.together
        return stream
