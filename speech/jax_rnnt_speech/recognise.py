"""Texts of audio files, or of audio as it arrives, from a checkpoint."""

import queue

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import decode
from jax_rnnt_speech import audio, devices, features, runs
from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.recogniser import Recogniser

ROUND = 256  # files are padded to multiples of so many frames, for few programs
BLOCK = 0.1  # seconds of a stream that arrive at once


def load(workdir, platform=None):
    """(recogniser, parameters) of the last checkpoint of a folder."""
    devices.select(platform, 1)
    run = runs.open_run(workdir)
    recogniser = Recogniser.from_setup(run.setup())
    if recogniser.config.train == "handwritten-digits":
        raise UserError(f"{workdir} holds a model of images, which hears nothing")
    (params,) = run.restore(params=recogniser.params)
    run.close()
    return recogniser, params


def make_transcriber(recogniser, params, how):
    """Function of samples: their text."""

    @jax.jit
    def search(params, x, lengths, how):
        model = recogniser.model(params)
        hypotheses = recogniser.search(model, *model.encode(x, lengths), how)
        return hypotheses.labels, hypotheses.counts

    def transcribe(samples):
        frames = features.count(recogniser.config, len(samples))
        if not frames:
            return ""
        x = (features.log_mel(recogniser.config, samples) - recogniser.mean) / recogniser.deviation
        padded = np.pad(x, ((0, -frames % ROUND), (0, 0)))[None]
        labels, counts = search(params, padded, np.array([frames], np.int32), how)
        return recogniser.text(labels[0], counts[0])

    return transcribe


class Stream:
    """Text of samples as they arrive: what `feed` and, at the end, `finish` return continues what came before."""

    def __init__(self, recogniser, params):
        if not recogniser.config.chunk:
            raise UserError("the model sees whole utterances: only one that was trained with --chunk can stream")
        self.recogniser, self.params, self.labels, self.said = recogniser, params, [], ""
        self.size = recogniser.config.chunk * recogniser.subsampling  # frames of a chunk
        self.samples = np.zeros(0, np.float32)
        model = recogniser.model(params)
        silence = self.chunk(np.zeros((0, len(recogniser.mean))))
        shapes = jax.eval_shape(self.advance, params, *silence, model.initial(1), None)
        self.state = model.initial(1), decode.reset_streams(shapes[1], np.ones(1, bool))
        self.step = jax.jit(self.advance)

    def advance(self, params, x, lengths, encoder, decoder):
        model = self.recogniser.model(params)
        rows, lengths, encoder = model.step(x, lengths, encoder)
        hypotheses = self.recogniser.search(model, rows, lengths, state=decoder)
        return encoder, hypotheses.state, hypotheses.labels, hypotheses.counts

    def chunk(self, x):
        """Features padded to a chunk, and how many they are."""
        return jnp.float32(np.pad(x, ((0, self.size - len(x)), (0, 0))))[None], jnp.array([len(x)], jnp.int32)

    def take(self, frames):
        """Decodes the next frames, and drops the samples that no later one has."""
        config, hop = self.recogniser.config, features.sizes(self.recogniser.config)
        x = features.log_mel(config, self.samples[: hop[0] + (frames - 1) * hop[1]])
        self.samples = self.samples[frames * hop[1] :]
        x = (x - self.recogniser.mean) / self.recogniser.deviation
        *state, labels, counts = self.step(self.params, *self.chunk(x), *self.state)
        self.state = state
        self.labels += np.asarray(labels[0, : int(counts[0])]).tolist()

    def news(self):
        """What is to be printed. The text only grows at its end, but for pieces of a character."""
        text = self.recogniser.tokens.decode(self.labels)
        new, self.said = text[len(self.said) :], text
        return new

    def feed(self, samples):
        self.samples = np.concatenate([self.samples, samples])
        while features.count(self.recogniser.config, len(self.samples)) >= self.size:
            self.take(self.size)
        return self.news()

    def finish(self):
        if remaining := features.count(self.recogniser.config, len(self.samples)):
            self.take(remaining)
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
