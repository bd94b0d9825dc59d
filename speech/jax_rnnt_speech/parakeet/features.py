"""Log-mel features as the feature extractors of Parakeet and Nemotron make them, in NumPy.

N samples of a recording, S frames (N / hop_length), M mel bins.
"""

import dataclasses
import functools

import numpy as np

from jax_rnnt_speech.audio import scaled

GUARD = 2.0**-24  # added to the power before the logarithm


@dataclasses.dataclass(frozen=True)
class LogMel:
    """Fields have the names and defaults of preprocessor_config.json; only `normalize` is another one."""

    feature_size: int = 80
    sampling_rate: int = 16000
    hop_length: int = 160
    n_fft: int = 512
    win_length: int = 400
    preemphasis: float | None = 0.97
    normalize: bool = True  # each bin of a recording to mean 0 and deviation 1: Parakeet, not Nemotron

    def __call__(self, recordings):
        """Features float32 [B, S, M] and their lengths [B] of recordings [N], with zeros after each."""
        recorded = [self.frames(x) for x in recordings]
        lengths = np.array([len(x) for x in recorded], np.int32)
        features = np.zeros((len(recorded), lengths.max(initial=1), self.feature_size), np.float32)
        for row, x in zip(features, recorded):
            row[: len(x)] = x
        return features, lengths

    def frames(self, recording):
        """[S, M] of one recording [N]: integers of any width, or floats in [-1, 1]."""
        recording = scaled(recording)
        if recording.ndim != 1:
            raise ValueError(f"LogMel: a recording must have shape [samples], got {recording.shape}.")
        return self._normalized(self._spectrum(recording)[: len(recording) // self.hop_length])

    def chunk(self, recording, first, count):
        """[count, M]: `count` frames of a stream from `first` on, out of a recording [N], zeros after its end.

        They are those of the whole recording; samples after n_fft / 2 beyond the last frame are never read. Only
        for models that do not normalise.
        """
        if self.normalize:
            raise ValueError("LogMel.chunk: normalize needs the whole recording.")
        begin, end = first * self.hop_length - self.n_fft // 2 - 1, (first + count) * self.hop_length + self.n_fft // 2
        skip = max(begin, 0)
        part = scaled(recording[skip:end])
        part = np.pad(self._emphasized(part), (skip - begin, end - skip - len(part)))[1:]
        valid = len(recording) // self.hop_length - first
        return np.where(np.arange(count)[:, None] < valid, self._log_mel(part)[:count], np.float32(0))

    def _emphasized(self, recording):
        if self.preemphasis is None:
            return recording
        return np.concatenate([recording[:1], recording[1:] - np.float32(self.preemphasis) * recording[:-1]])

    def _spectrum(self, recording):
        return self._log_mel(np.pad(self._emphasized(recording), self.n_fft // 2))

    def _log_mel(self, samples):
        """Of windows that begin every hop_length samples."""
        windows = np.lib.stride_tricks.sliding_window_view(samples, self.n_fft)[:: self.hop_length]
        margin = (self.n_fft - self.win_length) // 2
        window = np.pad(np.hanning(self.win_length), (margin, self.n_fft - self.win_length - margin))
        power = np.abs(np.fft.rfft(windows * window.astype(np.float32))) ** 2
        return np.log(power @ self._filters + GUARD).astype(np.float32)

    def _normalized(self, x):
        if not self.normalize or not len(x):
            return x
        return (x - x.mean(0)) / (x.std(0, ddof=min(len(x) - 1, 1)) + np.float32(1e-5))

    @functools.cached_property
    def _filters(self):
        """[n_fft / 2 + 1, M]: triangles of area 1 between points that are evenly spaced on Slaney's mel scale.

        The scale is linear up to 1 kHz, with 15 mel there, and logarithmic above, with 27 mel for a factor of 6.4.
        """
        top = self.sampling_rate / 2
        highest = 15 + 27 * np.log(top / 1000) / np.log(6.4) if top > 1000 else 15 * top / 1000
        mel = np.linspace(0, highest, self.feature_size + 2)
        hertz = np.where(mel < 15, mel * 1000 / 15, 1000 * 6.4 ** ((mel - 15) / 27))
        low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
        bins = np.linspace(0, top, self.n_fft // 2 + 1)[:, None]
        triangles = np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle))
        return (np.maximum(triangles, 0) * 2 / (high - low)).astype(np.float32)
