"""Strings of digits as training data: handwritten (scikit-learn's scans) or spoken (a folder of recordings).

Both classes have the same attributes and the same method `batch(rng, size, split)`. It is a pure function of the random
generator, so a resumed run can make batch n without those before it.
"""

import re
import wave
from pathlib import Path

import numpy as np
from scipy.fft import rfft
from scipy.ndimage import map_coordinates

CLASSES = 11  # class d is digit d; the last class is the blank


class DataError(Exception):
    """A problem with the user's data, in one line."""


def pad(items, length, dtype):
    """Arrays [n_i, ...] -> [len(items), length, ...], zeros after each, and the lengths."""
    padded = np.zeros((len(items), length, *np.shape(items[0])[1:]), dtype)
    for row, item in zip(padded, items):
        row[: len(item)] = item
    return padded, np.array([len(item) for item in items], np.int32)


def collate(features, labels, max_frames, max_labels):
    """Lists of utterances -> the arrays of a training step."""
    features, feature_lengths = pad(features, max_frames, np.float32)
    targets, target_lengths = pad(labels, max_labels, np.int32)
    return dict(features=features, feature_lengths=feature_lengths, targets=targets, target_lengths=target_lengths)


class HandwrittenDigits:
    """Lines of 3 to 7 digits, each scan slanted, stretched and shifted at random. A frame is a column of pixels."""

    name = "handwritten-digits"
    height, max_width, max_gap = 12, 10, 4
    min_labels, max_labels = 3, 7
    features = height
    max_frames = max_labels * (max_width + max_gap) + max_gap
    width, strides, channels = 96, ((2, 1), (1, 2)), (32, 32)  # of the encoder
    steps, batch_size, learning_rate = 2500, 16, 4e-3

    def __init__(self):
        from sklearn.datasets import load_digits  # slow to import

        scans, digits = load_digits(return_X_y=True)
        scans = scans.reshape(-1, 8, 8) / 16
        test = np.arange(len(scans)) % 6 == 0  # 300 scans that training never sees
        self.splits = {"train": (scans[~test], digits[~test]), "test": (scans[test], digits[test])}

    def batch(self, rng, size, split):
        scans, digits = self.splits[split]
        counts = rng.integers(self.min_labels, self.max_labels + 1, size)
        chosen = rng.integers(len(scans), size=counts.sum())
        widths = rng.integers(8, self.max_width + 1, len(chosen))
        glyphs = self.draw(rng, scans[chosen], widths)
        lines, labels = [], []
        for row in np.split(np.arange(len(chosen)), np.cumsum(counts)[:-1]):
            gaps = rng.integers(1, self.max_gap + 1, size=len(row) + 1)
            starts = np.cumsum(gaps[:-1]) + np.cumsum(widths[row]) - widths[row]
            line = np.zeros((gaps.sum() + widths[row].sum(), self.height))
            for i, start in zip(row, starts):
                line[start : start + widths[i]] = glyphs[i, : widths[i]]
            lines.append(line + rng.normal(0, 0.05, line.shape))
            labels.append(digits[chosen[row]])
        return collate(lines, labels, self.max_frames, self.max_labels)

    def draw(self, rng, scans, widths):
        """Scans [n, 8, 8] -> glyphs [n, max_width, height], each by a random affine map."""
        column, row = np.mgrid[: self.max_width, : self.height].astype(np.float32)
        scale, shift, slant = rng.normal(0, 1, (3, len(scans), 1, 1)) * np.reshape((0.05, 0.25, 0.05), (3, 1, 1, 1))
        y = 3.5 - (row - (self.height - 1) / 2 - shift) / (1 + scale)  # features run upwards, as in a spectrum
        x = (column + 0.5) * 8 / widths[:, None, None] - 0.5 + slant * (y - 3.5)
        index = np.broadcast_to(np.arange(len(scans))[:, None, None], x.shape)
        return map_coordinates(scans, [index, y, x], order=1)


class SpokenDigits:
    """3 to 7 recordings of one speaker, joined with random pauses. A frame is a log-mel spectrum; a second has 80.

    `folder`, or its subfolder `recordings`, holds {digit}_{speaker}_{index}.wav: 8 kHz, mono, 16 bit. As in the
    Free Spoken Digit Dataset, indices 0 to 4 are for testing.
    """

    name = "spoken-digits"
    rate, window, hop, features = 8000, 200, 100, 32
    min_labels, max_labels, max_seconds = 3, 7, 4
    max_frames = max_seconds * rate // hop
    width, strides, channels = 128, ((2, 2), (2, 2)), (16, 32)  # of the encoder
    steps, batch_size, learning_rate = 2400, 16, 4e-3

    def __init__(self, folder):
        self.splits = {"train": {}, "test": {}}  # {speaker: [(digit, samples), ...]}
        self.filters = self.mel_filters()
        folder = Path(folder)
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder")
        paths = sorted([*folder.glob("*.wav"), *folder.glob("recordings/*.wav")])
        for path in paths:
            if match := re.fullmatch(r"(\d)_(.+)_(\d+)\.wav", path.name):
                digit, speaker, index = match.groups()
                split = self.splits["test" if int(index) < 5 else "train"]
                split.setdefault(speaker, []).append((int(digit), self.read(path)))
        for split, indices in (("train", "5 and up"), ("test", "0 to 4")):
            if not self.splits[split]:
                name = "{digit}_{speaker}_{index}.wav"
                raise DataError(f"{folder} has no recordings to {split} on: {name} with an index of {indices}")

    def read(self, path):
        """Samples in [-1, 1)."""
        try:
            with wave.open(str(path)) as file:
                found = file.getnchannels(), 8 * file.getsampwidth(), file.getframerate()
                count, content = file.getnframes(), file.readframes(file.getnframes())
        except (OSError, EOFError, wave.Error) as error:
            raise DataError(f"{path} is not a readable WAV file: {error or 'it ends early'}") from None
        if found != (1, 16, self.rate):
            raise DataError("{} has {} channel(s), {} bit, {} Hz; it takes 1, 16, {}".format(path, *found, self.rate))
        if len(content) != 2 * count or not 0 < count < self.max_seconds * self.rate:
            raise DataError(f"{path} is empty, cut off or longer than {self.max_seconds} seconds")
        return np.frombuffer(content, "<i2").astype(np.float32) / 2**15

    def batch(self, rng, size, split):
        speakers = list(self.splits[split].values())
        joined = [self.join(rng, speakers[i], split == "train") for i in rng.integers(len(speakers), size=size)]
        audio, labels = zip(*joined)
        features = [self.log_mel(x) for x in audio]
        if split == "train":
            for x in features:
                mask(rng, x, 12)
                mask(rng, x.T, 8)
        return collate(features, labels, self.max_frames, self.max_labels)

    def join(self, rng, recordings, augment):
        """An utterance (samples, digits) over faint noise. Digits that would make it too long are left out."""
        pieces, digits, room = [], [], self.max_seconds * self.rate - self.window
        for _ in range(rng.integers(self.min_labels, self.max_labels + 1)):
            digit, samples = recordings[rng.integers(len(recordings))]
            if augment:
                speed = rng.uniform(0.85, 1.15)
                samples = np.interp(np.arange(0, len(samples) - 1, speed), np.arange(len(samples)), samples)
                samples = samples * rng.uniform(0.5, 1.5)
            pause = np.zeros(rng.integers(0.25 * self.rate))
            if len(samples) + len(pause) > room:
                break
            room -= len(samples) + len(pause)
            pieces += [pause, samples]
            digits.append(digit)
        audio = np.concatenate([*pieces, np.zeros(self.window)])
        noise = rng.uniform(-4, -2) if augment else -3  # power of ten
        return audio + rng.normal(0, 10**noise, audio.shape), digits

    def log_mel(self, audio):
        """Samples -> [T, features], every feature with mean 0 and deviation 1 over the utterance."""
        frames = np.lib.stride_tricks.sliding_window_view(audio.astype(np.float32), self.window)[:: self.hop]
        power = np.abs(rfft(frames * np.hanning(self.window).astype(np.float32), 256)) ** 2
        x = np.log(power @ self.filters + 1e-5)
        return (x - x.mean(0)) / (x.std(0) + 1e-3)

    def mel_filters(self):
        """Triangles [129 frequencies, features], evenly spaced on the mel scale."""
        top = 2595 * np.log10(1 + self.rate / 2 / 700)
        corners = 700 * (10 ** (np.linspace(0, top, self.features + 2) / 2595) - 1)
        low, middle, high = corners[:-2], corners[1:-1], corners[2:]
        frequency = np.linspace(0, self.rate / 2, 129)[:, None]
        rise, fall = (frequency - low) / (middle - low), (high - frequency) / (high - middle)
        return np.maximum(0, np.minimum(rise, fall)).astype(np.float32)


def mask(rng, x, longest):
    """Silences a random stretch of rows in place (SpecAugment, Park et al. 2019)."""
    length = rng.integers(longest + 1)
    start = rng.integers(max(1, len(x) - length))
    x[start : start + length] = 0
