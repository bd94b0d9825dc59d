"""Versions of recordings for training: at other speeds, in noise, at other levels.

Version 0 is the recording itself. Each further speed is a version, and with noise or gain every speed is there again. A
version depends on the seed, the utterance and its number alone, so it can be kept on disk.
"""

import functools
from pathlib import Path

import numpy as np

from jax_rnnt_speech.data import audio, cache, lists, names
from jax_rnnt_speech.system import refuse_if

NOISE_SECONDS = 60  # of a file of noise, at most


class Versions:
    def __init__(self, config):
        self.options, self.seed, self.rate = config.data, config.run.seed, config.features.rate
        self.speeds = [1.0, *(x for x in config.data.speeds if x != 1)]
        self.changed = bool(config.data.noise or config.data.gain)
        self.count = len(self.speeds) * (1 + self.changed)
        self.noises = noises_of(config.data.noise) if config.data.noise else []

    def key(self):
        """Returns everything that decides the versions, as JSON."""
        options, noises = self.options, [cache.stamp(x) for x in self.noises]
        more = [self.seed, noises, options.snr, options.gain]
        return [self.speeds, self.count, *(more if self.changed else [])]

    def size(self, samples, version):
        """Returns how many samples a version of `samples` samples has."""
        speed = self.speeds[version % len(self.speeds)]
        return samples if speed == 1 else audio.resampled_size(samples, round(self.rate * speed), self.rate)

    def applied(self, samples, version, utterance):
        """Returns the version of samples float32 [S] of an utterance, given by its number or by several numbers."""
        speed = self.speeds[version % len(self.speeds)]
        if speed != 1:
            samples = audio.resampled(samples, round(self.rate * speed), self.rate)
        if version < len(self.speeds) or not len(samples):
            return samples
        rng = np.random.default_rng((self.seed, *np.atleast_1d(utterance).tolist(), version))
        if self.noises:
            samples = samples + self.noise(rng, samples)
        return samples * np.float32(10 ** (rng.uniform(-1, 1) * self.options.gain / 20))

    def noise(self, rng, samples):
        """Returns noise from a random place of a random file, at a random ratio to the samples."""
        noise = noise_samples(self.noises[rng.integers(len(self.noises))], self.rate)
        start = rng.integers(len(noise))
        noise = np.take(noise, np.arange(start, start + len(samples)), mode="wrap")
        ratio = 10 ** (rng.uniform(*self.options.snr) / 10)
        power, speech = (np.square(x, dtype=np.float64).mean() for x in (noise, samples))
        return (noise * np.sqrt(speech / ratio / max(power, 1e-12))).astype(np.float32)


def noises_of(folder):
    refuse_if(not Path(folder).is_dir(), f"--noise {folder} is no folder of audio files")
    files = [x for x in lists.below(folder) if x.suffix.lower() in names.SUFFIXES]
    refuse_if(not files, f"--noise {folder} has no audio files")
    return files


@functools.lru_cache(256)
def noise_samples(path, rate):
    samples = audio.read(path, rate, 0.0, None)[: NOISE_SECONDS * rate]
    refuse_if(not samples.any(), f"--noise: {path} is silent")
    return samples
