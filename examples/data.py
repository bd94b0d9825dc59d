"""Strings of digits to train on: handwritten (scikit-learn's scans) or spoken (a folder of recordings).

Both classes have the same attributes and the same method `batch(rng, size, split)`, a pure function of the random
generator, so that batch number n of a run can be made again without making those before it.
"""

import dataclasses
import re
import wave
from pathlib import Path

import numpy as np
from scipy.fft import rfft
from scipy.ndimage import map_coordinates

BLANK = 10  # class d is digit d
CLASSES = 11


class DataError(Exception):
    """What is wrong with the user's data, in one line."""


def pad(items, length, dtype):
    """Arrays [n_i, ...] -> [len(items), length, ...], zeros after each, and the lengths."""
    padded = np.zeros((len(items), length, *np.shape(items[0])[1:]), dtype)
    for row, item in zip(padded, items):
        row[: len(item)] = item
    return padded, np.array([len(item) for item in items], np.int32)


def collate(features, labels, max_frames, max_labels):
    """Lists of utterances to what a training step takes."""
    features, feature_lengths = pad(features, max_frames, np.float32)
    targets, target_lengths = pad(labels, max_labels, np.int32)
    return dict(
        features=features, feature_lengths=feature_lengths, targets=targets, target_lengths=target_lengths
    )


class HandwrittenDigits:
    """Lines of 3 to 7 digits, each scan slanted, stretched and shifted at random. A frame is a column of pixels."""

    name = "handwritten-digits"
    height, max_width, max_gap = 12, 10, 4
    min_labels, max_labels = 3, 7
    features = height
    max_frames = max_labels * (max_width + max_gap) + max_gap
    model = dict(width=96, strides=(2, 1), blocks=4)
    steps, batch_size, learning_rate = 1200, 64, 3e-3

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
        widths = rng.integers(7, self.max_width + 1, len(chosen))
        glyphs = self.draw(rng, scans[chosen], widths)
        lines, labels = [], []
        for row in np.split(np.arange(len(chosen)), np.cumsum(counts)[:-1]):
            gaps = rng.integers(1, self.max_gap + 1, size=len(row) + 1)
            starts = np.cumsum(gaps[:-1]) + np.cumsum(widths[row]) - widths[row]
            line = np.zeros((gaps.sum() + widths[row].sum(), self.height))
            for i, start in zip(row, starts):
                line[start : start + widths[i]] = glyphs[i, : widths[i]]
            lines.append(line + rng.normal(0, 0.06, line.shape))
            labels.append(digits[chosen[row]])
        return collate(lines, labels, self.max_frames, self.max_labels)

    def draw(self, rng, scans, widths):
        """Scans [n, 8, 8] -> glyphs [n, max_width, height] by one random affine map each, columns first."""
        column, row = np.mgrid[: self.max_width, : self.height].astype(np.float32)
        scale, shift, slant = rng.normal((1, 0, 0), (0.08, 0.4, 0.07), (len(scans), 3)).T[..., None, None]
        y = (row - (self.height - 1) / 2 - shift) / scale + 3.5
        x = (column + 0.5) * 8 / widths[:, None, None] - 0.5 + slant * (y - 3.5)
        index = np.broadcast_to(np.arange(len(scans))[:, None, None], x.shape)
        return map_coordinates(scans, [index, y, x], order=1)


class SpokenDigits: pass
