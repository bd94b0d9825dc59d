"""Strings of 3 to 7 digits as corpora, drawn anew each time: handwritten (scikit-learn's scans) or spoken.

rnnt-speech train --config speech/recipes/corpora/handwritten_digits.json
rnnt-speech train --config speech/recipes/corpora/spoken_digits.json \
    --train speech/recipes/corpora/digits.py:spoken:FOLDER
"""

import re
from pathlib import Path

import numpy as np

from jax_rnnt_speech.data import audio, features
from jax_rnnt_speech.data.utterances import Report, Utterance
from jax_rnnt_speech.system import UserError

LINES = {"train": 40000, "valid": 500}
HEIGHT, MAX_WIDTH, MAX_GAP = 12, 10, 4  # pixels of a handwritten line
PAUSE, SLOWEST, FASTEST = 0.25, 0.85, 1.15  # seconds before a spoken digit, its speed


def draw_text(rng):
    return "".join(map(str, rng.integers(10, size=rng.integers(3, 8))))


class Handwritten:
    """Lines of scans, each slanted, stretched and shifted at random. A frame is a column of pixels."""

    features, hop, further = HEIGHT, 1.0, ()  # pictures count frames

    def __init__(self, split):
        from sklearn.datasets import load_digits  # slow to import

        scans, digits = load_digits(return_X_y=True)
        scans = scans.reshape(-1, 8, 8) / 16
        chosen = (np.arange(len(scans)) % 6 == 0) == (split == "valid")  # 300 scans that training never sees
        self.scans = [scans[chosen & (digits == digit)] for digit in range(10)]
        rng, self.report = np.random.default_rng(len(split)), Report()
        texts = [draw_text(rng) for _ in range(LINES[split])]
        widest = MAX_WIDTH + MAX_GAP
        self.utterances = [Utterance(f"line-{i}", widest * len(x) + MAX_GAP, x) for i, x in enumerate(texts)]

    def load(self, i, rng):
        return self.draw(i, rng)[0]

    def draw(self, i, rng):
        """A line [T, HEIGHT], and the first and last column of each digit, [U, 2]."""
        digits = list(map(int, self.utterances[i].text))
        scans = np.stack([self.scans[digit][rng.integers(len(self.scans[digit]))] for digit in digits])
        widths, gaps = rng.integers(8, MAX_WIDTH + 1, len(digits)), rng.integers(1, MAX_GAP + 1, len(digits) + 1)
        starts = np.cumsum(gaps[:-1] + widths) - widths
        line = np.zeros((gaps.sum() + widths.sum(), HEIGHT), np.float32)
        for glyph, start, width in zip(drawn(rng, scans, widths), starts, widths):
            line[start : start + width] = glyph[:width]
        line += rng.normal(0, 0.05, line.shape).astype(np.float32)
        return line, np.stack([starts, starts + widths - 1], 1)


def drawn(rng, scans, widths):
    """Scans [n, 8, 8] -> glyphs [n, MAX_WIDTH, HEIGHT], each by a random affine map."""
    column, row = np.mgrid[:MAX_WIDTH, :HEIGHT].astype(np.float32)
    scale, shift, slant = rng.normal(0, 1, (3, len(scans), 1, 1)) * np.reshape((0.05, 0.25, 0.05), (3, 1, 1, 1))
    y = 3.5 - (row - (HEIGHT - 1) / 2 - shift) / (1 + scale)  # features run upwards, as in a spectrum
    x = (column + 0.5) * 8 / widths[:, None, None] - 0.5 + slant * (y - 3.5)
    index = np.broadcast_to(np.arange(len(scans))[:, None, None], x.shape)
    from scipy.ndimage import map_coordinates  # slow to import

    return map_coordinates(scans, [index, y, x], order=1)


class Spoken:
    """Recordings of one speaker, joined with random pauses, in training at random speeds.

    `folder`, or its subfolder `recordings`, holds {digit}_{speaker}_{index}.wav. As in the Free Spoken Digit Dataset,
    indices 0 to 4 are for testing.
    """

    def __init__(self, folder, config, split):
        self.config, self.features, self.hop = config, config.features.mels, config.features.hop / 1000
        self.extractor, self.further = features.extractor(config), ()
        self.train, self.report, speakers = split == "train", Report(), {}
        for path in sorted([*Path(folder).glob("*.wav"), *Path(folder).glob("recordings/*.wav")]):
            if (match := re.fullmatch(r"(\d)_(.+)_(\d+)\.wav", path.name)) and (int(match[3]) < 5) != self.train:
                try:
                    samples = audio.read(path, config.features.rate)
                except audio.AudioError as error:
                    self.report.add(error.reason, path.name)
                    continue
                speakers.setdefault(match[2], []).append((match[1], samples, match[2]))
        if not speakers:
            indices = "5 and up" if self.train else "0 to 4"
            raise UserError(f"{folder} has no {{digit}}_{{speaker}}_{{index}}.wav with an index of {indices}")
        rng, self.speakers = np.random.default_rng(len(split)), list(speakers.values())
        self.lines = [self.choose(rng) for _ in range(LINES[split])]
        self.utterances = []
        for i, line in enumerate(self.lines):
            frames = self.extractor.count(sum(map(self.longest, line)) + self.extractor.window)
            self.utterances.append(Utterance(f"line-{i}", frames, "".join(x[0] for x in line), line[0][2]))

    def longest(self, recording):
        """Samples that a recording takes at most."""
        return int(len(recording[1]) / (SLOWEST if self.train else 1) + PAUSE * self.config.features.rate) + 1

    def choose(self, rng):
        """Recordings of a line. What would make it too long is left out."""
        speaker, room, line = self.speakers[rng.integers(len(self.speakers))], self.config.data.max_seconds, []
        for i in rng.integers(len(speaker), size=rng.integers(3, 8)):
            room -= self.longest(speaker[i]) / self.config.features.rate
            if room > 0:
                line.append(speaker[i])
        return line or speaker[:1]

    def samples(self, i, rng):
        """Samples [S] of a line."""
        pieces = []
        for _, samples, _ in self.lines[i]:
            if self.train:
                place = np.arange(0, len(samples) - 1, rng.uniform(SLOWEST, FASTEST))
                samples = np.interp(place, np.arange(len(samples)), samples) * rng.uniform(0.5, 1.5)
            pieces += [np.zeros(rng.integers(PAUSE * self.config.features.rate)), samples]
        audio = np.concatenate([*pieces, np.zeros(self.extractor.window)])
        noise = rng.uniform(-4, -2) if self.train else -3  # power of ten
        return (audio + rng.normal(0, 10**noise, audio.shape)).astype(np.float32)

    def load(self, i, rng):
        return self.extractor(self.samples(i, rng))


def handwritten(config, split):
    """--train speech/recipes/corpora/digits.py:handwritten."""
    return Handwritten(split)


def spoken(config, split, folder):
    """--train speech/recipes/corpora/digits.py:spoken:FOLDER."""
    return Spoken(folder, config, split)
