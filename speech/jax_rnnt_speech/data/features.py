"""Log-mel spectra of samples, on the host with NumPy or on the device with JAX, by the same function.

--features chooses one of four: ours, that of NeMo's models, Whisper's, and those that sherpa-onnx computes.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

from jax_rnnt_speech.system import UserError

LOUDEST = 10  # times full scale, which is 1: samples beyond it have another scale, or are no sound


def scaled(samples):
    """Returns samples float32 in [-1, 1] from integers of any width, or from floats that are so already."""
    samples = np.asarray(samples)
    kind = samples.dtype.kind
    if kind in "iu":
        half = 2.0 ** (8 * samples.dtype.itemsize - 1)
        return ((samples - (half if kind == "u" else 0)) / half).astype(np.float32)
    if kind != "f":
        raise ValueError(f"samples must be integers or floats, got {samples.dtype}")
    if samples.size and not np.isfinite(samples).all():
        raise ValueError("samples that are NaN or infinite")
    if samples.size and np.abs(samples).max() > LOUDEST:
        raise ValueError(f"samples far beyond full scale: floats must be in [-1, 1], and {LOUDEST} is the limit")
    return samples.astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Extractor:
    """Turns samples [..., S] into frames [..., T, mels]."""

    rate: int = 16000  # samples a second
    mels: int = 80
    window: int = 400  # samples in a frame
    hop: int = 160  # samples from frame to frame
    size: int = 512  # size of the Fourier transform
    centred: str = ""  # how the samples go on before the first window and after the last: "constant", "reflect"
    periodic: bool = False  # whether the window begins with its 0 and does not end with it
    preemphasis: float = 0.0
    slaney: bool = False  # mel scale of Slaney with filters of area 1, else of HTK with filters of height 1
    floor: float = 1e-6  # added to a filter's power, that of noise 60 dB below full scale
    normalize: str = "corpus"  # over the corpus, by a model; or "recording", "whisper"
    tail: int = 0  # samples of silence after the recording

    @property
    def margins(self):
        """The samples before its place that a frame sees, and after it."""
        return (self.window // 2 if self.centred else 0,) * 2

    def padded(self, samples, before, after):
        """Returns samples at the beginning or the end of a stream, with silence before or after them."""
        return np.pad(samples, (before, after))

    def count(self, samples):
        """Returns the frames of a number of samples."""
        return max(self.frames(samples), 0) if samples else 0

    def counts(self, lengths, xp):
        """Returns the frames of an array of numbers of samples."""
        return xp.where(lengths > 0, xp.maximum(self.frames(lengths), 0), 0)

    def frames(self, samples):
        """Returns the frames of at least one sample; 0 or less means none."""
        samples = samples + self.tail
        return samples // self.hop if self.centred else 1 + (samples - self.window) // self.hop

    def __call__(self, samples, xp=np, lengths=None):
        """Turns samples [..., S], floats or integers, into float32 [..., T, mels]; `xp` is numpy or jax.numpy.

        With `lengths` [...] of JAX, so many samples of each recording count, and `self.counts` of its frames.
        """
        samples = scaled(samples) if xp is np else samples
        frames, width = self.count(samples.shape[-1]), [(0, 0)] * (samples.ndim - 1)
        if not frames:
            return xp.zeros((*samples.shape[:-1], 0, self.mels), np.float32)
        samples = self.emphasized(samples, xp)
        if lengths is not None:
            samples = xp.where(xp.arange(samples.shape[-1]) < lengths[..., None], samples, 0)
        samples = xp.pad(samples, [*width, (0, self.tail)])
        if self.centred:
            mode = self.centred if samples.shape[-1] > self.margins[0] else "constant"  # too short to be reflected
            samples = xp.pad(samples, [*width, self.margins], mode=mode)
        here = True if lengths is None else (xp.arange(frames) < self.counts(lengths, xp)[..., None])[..., None]
        return self.normalized(self.spectra(samples, frames, xp), xp, here)

    def emphasized(self, samples, xp=np, before=0.0):
        """Raises high frequencies; `before` is the sample before the first one."""
        if not self.preemphasis:
            return samples
        before = xp.concatenate([xp.full_like(samples[..., :1], before), samples[..., :-1]], -1)
        return samples - np.float32(self.preemphasis) * before

    def spectra(self, samples, frames, xp=np):
        """Returns the spectra of the first windows."""
        window = np.hanning(self.window + self.periodic)[: self.window].astype(np.float32)
        parts = samples[..., self.hop * np.arange(frames)[:, None] + np.arange(self.window)] * window
        power = powers(parts, self.size, xp) @ self.filters
        if self.normalize == "whisper":
            return xp.log10(xp.maximum(power, np.float32(self.floor)))
        return xp.log(power + np.float32(self.floor))

    def normalized(self, x, xp, here=True):
        """Normalises features; `here` tells which frames count."""
        more = {"keepdims": True, "where": here}
        if self.normalize == "whisper":
            return (xp.maximum(x, x.max((-2, -1), initial=-np.inf, **more) - 8) + 4) / 4
        if self.normalize == "recording":
            deviation = xp.nan_to_num(x.std(-2, ddof=min(x.shape[-2] - 1, 1), **more))  # 0 for one frame among more
            return (x - x.mean(-2, **more)) / (deviation + np.float32(1e-5))
        return x

    @functools.cached_property
    def filters(self):
        """Triangles [size / 2 + 1, mels] between points that are evenly spaced on a mel scale."""
        top = self.rate / 2
        if self.slaney:
            corners = slaney_corners(top, self.mels)
        else:
            corners = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + top / 700), self.mels + 2) / 2595) - 1)
        return triangles(np.linspace(0, top, self.size // 2 + 1), corners, self.slaney)


def powers(parts, size, xp):
    """Returns the powers [..., size / 2 + 1] of the frequencies of windows [..., W]."""
    rfft = xp.fft.rfft
    if xp is np:
        from scipy.fft import rfft  # over twice as fast as NumPy's, and slow to import

    spectrum = rfft(parts, size)
    return xp.square(spectrum.real) + xp.square(spectrum.imag)


def triangles(places, corners, area):
    """Returns filters [N, mels] at places [N] between corners [mels + 2], of area 1, or of height 1 and never empty."""
    places, low, middle, high = places[:, None], corners[:-2], corners[1:-1], corners[2:]
    filters = np.maximum(np.minimum((places - low) / (middle - low), (high - places) / (high - middle)), 0)
    if not filters.any(0).all() and not area:
        raise UserError(f"--mels {len(low)}: filters are narrower than a frequency: take fewer")
    return (filters * (2 / (high - low) if area else 1)).astype(np.float32)


def slaney_corners(top, mels):
    """Returns frequencies [mels + 2] from 0 to the top, which are evenly spaced on Slaney's mel scale.

    It is linear up to 1 kHz, with 15 mel there, and logarithmic above, with 27 mel for a factor of 6.4.
    """
    highest = 15 + 27 * np.log(top / 1000) / np.log(6.4) if top > 1000 else 15 * top / 1000
    mel = np.linspace(0, highest, mels + 2)
    return np.where(mel < 15, mel * 1000 / 15, 1000 * 6.4 ** ((mel - 15) / 27))


PRESETS = {
    "log-mel": {},
    "nemo": dict(centred="constant", preemphasis=0.97, slaney=True, floor=2.0**-24, normalize="recording"),
    # This is half a second of the silence that fills Whisper's 30 seconds; without it, rows differ by a seventh.
    "whisper": dict(centred="reflect", periodic=True, slaney=True, floor=1e-10, normalize="whisper", tail=8000),
}


def mirrored(samples, before, after, xp=np, lengths=None):
    """Returns samples [..., S] with some more at both ends, the edge sample twice; `lengths` [...] of them count."""
    places = xp.arange(-before, samples.shape[-1] + after)
    size = xp.asarray(samples.shape[-1:] if lengths is None else xp.maximum(lengths, 1)[..., None])
    places = places % (2 * size)
    places = xp.minimum(places, 2 * size - 1 - places)
    places = xp.broadcast_to(places, (*samples.shape[:-1], places.shape[-1]))
    return xp.take_along_axis(samples, places, -1)


@dataclasses.dataclass(frozen=True)
class Sherpa:
    """The spectra that sherpa-onnx computes for the models that it runs, which none of its settings can change.

    They are those of kaldi-native-fbank: frames are centred on the middle of each hop, and samples go on behind both
    ends of a recording as in a mirror. Each frame is emphasised by itself. For NeMo's models it keeps its mean, and the
    filters are Slaney's. For others the mean is subtracted, and the filters are triangles on the mel scale. The methods
    are those of Extractor.
    """

    rate: int
    mels: int
    nemo: bool  # whether the model has NeMo's form

    normalize = "corpus"  # over the corpus, by a model
    tail = 0

    @property
    def hop(self):
        return self.rate // 100  # kaldi-native-fbank rounds both down

    @property
    def window(self):
        return self.rate // 40

    @property
    def size(self):
        """The size of the Fourier transform."""
        return 1 << (self.window - 1).bit_length()

    @property
    def margins(self):
        """The samples before the recording that its first frame sees, and after it that its last one does, at most."""
        return self.window // 2 - self.hop // 2, self.window - self.window // 2

    def count(self, samples):
        """Returns the frames of a number of samples."""
        return (samples + self.hop // 2) // self.hop

    def counts(self, lengths, xp):
        """Returns the frames of an array of numbers of samples."""
        return self.count(lengths)

    def padded(self, samples, before, after):
        """Returns samples at the beginning or the end of a stream, and before or after them their mirror image."""
        return mirrored(samples, before, after) if len(samples) else samples

    def emphasized(self, samples, xp=np, before=0.0):
        """Returns the samples unchanged, as each frame is emphasised by itself."""
        return samples

    def __call__(self, samples, xp=np, lengths=None):
        """Works as `Extractor` does."""
        samples = scaled(samples) if xp is np else samples
        if not (frames := self.count(samples.shape[-1])):
            return xp.zeros((*samples.shape[:-1], 0, self.mels), np.float32)
        return self.spectra(mirrored(samples, *self.margins, xp, lengths), frames, xp)

    def spectra(self, samples, frames, xp=np):
        """Returns the spectra of the first windows."""
        parts = samples[..., self.hop * np.arange(frames)[:, None] + np.arange(self.window)]
        if not self.nemo:
            parts = parts - parts.mean(-1, keepdims=True)
        parts = parts - np.float32(0.97) * xp.concatenate([parts[..., :1], parts[..., :-1]], -1)
        window = (np.hanning(self.window) ** 0.85).astype(np.float32)
        power = powers(parts * window, self.size, xp) @ self.filters
        return xp.log(xp.maximum(power, np.float32(2.0**-23)))

    @functools.cached_property
    def filters(self):
        """Triangles [size / 2 + 1, mels] between points that are evenly spaced on a mel scale."""
        top, frequencies = self.rate / 2 - 400, np.linspace(0, self.rate / 2, self.size // 2 + 1)
        if self.nemo:
            return triangles(frequencies, slaney_corners(top, self.mels), area=True)
        corners = np.linspace(*np.log1p(np.array([20, top]) / 700), self.mels + 2)
        return triangles(np.log1p(frequencies / 700), corners, area=False)


def extractor(config):
    """Returns the object that makes the features of a `config.Config`."""
    if config.features.kind == "sherpa-onnx":
        return Sherpa(config.features.rate, config.features.mels, config.nemo_form)
    return preset(config.features, bool(config.encoder.step))


@functools.lru_cache
def preset(options, streams):
    """Returns the Extractor of a `config.Features`; `streams` is for recordings that are never whole."""
    window, hop = round(options.rate * options.window / 1000), max(1, round(options.rate * options.hop / 1000))
    fields = PRESETS[options.kind]
    size = window if options.kind == "whisper" else 2 ** math.ceil(math.log2(window))
    if options.kind == "nemo" and streams:
        fields = fields | {"normalize": "corpus"}  # Nemotron's features are not normalised
    return Extractor(options.rate, options.mels, window, hop, size, **fields)


def draw_spans(config, rng, frames, features):
    """Draws SpecAugment (Park et al. 2019): starts and ends int32 [masks, 2] over time, then features, of each copy."""
    copies, time_masks, options = *config.masks, config.data
    longest = [(frames, int(options.time_mask * frames))] * time_masks
    longest += [(features, min(options.mel_mask, features))] * options.mel_masks
    longest *= copies
    spans = np.zeros((len(longest), 2), np.int32)
    for span, (size, limit) in zip(spans, longest):
        length = rng.integers(limit + 1)
        span[:] = rng.integers(size - length + 1) + np.array([0, length])
    return spans


def hide(x, lengths, spans, time_masks):
    """Masks spans [B, masks, 2] of features [B, T, F] of lengths [B] with the mean of what is kept of an utterance."""
    places = (np.arange(size) for size in x.shape[1:])
    parts = spans[:, :time_masks], spans[:, time_masks:]
    frames, mels = (((i >= y[..., :1]) & (i < y[..., 1:])).any(1) for i, y in zip(places, parts))
    hidden = frames[:, :, None] | mels[:, None]
    kept = ~hidden & (np.arange(x.shape[1]) < lengths[:, None])[..., None]
    total, count = (jnp.where(kept, y, 0).sum((1, 2), keepdims=True) for y in (x, 1))
    return jnp.where(hidden, total / jnp.maximum(count, 1), x)
