"""Log-mel spectra of samples, on the host with NumPy or on the device with JAX: the same function."""

import functools
import math

import numpy as np
from scipy.fft import rfft

from jax_rnnt_speech.config import UserError

FLOOR = 1e-6  # added to a filter's power, that of noise 60 dB below full scale


def sizes(config):
    """(window, hop) in samples."""
    return round(config.rate * config.window / 1000), max(1, round(config.rate * config.hop / 1000))


def count(config, samples):
    """Frames of a number of samples; each has a whole window."""
    window, hop = sizes(config)
    return 0 if samples < window else 1 + (samples - window) // hop


@functools.lru_cache
def filters(rate, mels, size):
    """Triangles [frequencies, mels], evenly spaced on the mel scale, for transforms of `size` samples."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    corners = 700 * (10 ** (np.linspace(0, top, mels + 2) / 2595) - 1)
    low, middle, high = corners[:-2], corners[1:-1], corners[2:]
    frequency = np.linspace(0, rate / 2, size // 2 + 1)[:, None]
    rise, fall = (frequency - low) / (middle - low), (high - frequency) / (high - middle)
    made = np.maximum(0, np.minimum(rise, fall)).astype(np.float32)
    if not made.any(0).all():
        raise UserError(f"--mels {mels}: filters are narrower than a frequency: take fewer, or a longer --window")
    return made


def log_mel(config, samples, xp=np):
    """Samples [..., S] -> [..., T, mels]; `xp` is numpy or jax.numpy."""
    window, hop = sizes(config)
    size = 2 ** math.ceil(math.log2(window))
    place = hop * np.arange(count(config, samples.shape[-1]))[:, None] + np.arange(window)
    frames = samples[..., place] * np.hanning(window).astype(np.float32)
    spectrum = rfft(frames, size) if xp is np else xp.fft.rfft(frames, size)
    power = xp.square(spectrum.real) + xp.square(spectrum.imag)
    return xp.log(power @ filters(config.rate, config.mels, size) + FLOOR)


def draw_spans(config, rng, frames, features):
    """SpecAugment (Park et al. 2019): starts and ends int32 [masks, 2] over time, then over features."""
    longest = [(frames, int(config.time_mask * frames))] * config.time_masks
    longest += [(features, min(config.mel_mask, features))] * config.mel_masks
    spans = np.zeros((len(longest), 2), np.int32)
    for span, (size, limit) in zip(spans, longest):
        length = rng.integers(limit + 1)
        span[:] = rng.integers(size - length + 1) + np.array([0, length])
    return spans


def hide(x, spans, time_masks):
    """Features [B, T, F] with zeros, their mean, in the spans [B, masks, 2]."""
    for axis, part in ((1, spans[:, :time_masks]), (2, spans[:, time_masks:])):
        place = np.arange(x.shape[axis])
        hidden = ((place >= part[..., :1]) & (place < part[..., 1:])).any(1)
        x = x * ~(hidden[:, :, None] if axis == 1 else hidden[:, None])
    return x
