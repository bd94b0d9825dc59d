"""Corpora of recordings: what a manifest or a folder lists, and what of it can be used.

A corpus has `utterances`, `load(i, rng)`, the number of `features` of a frame, and `hop`, the seconds between frames.
`digits` has others, made up at random.
"""

import csv
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import soundfile

from asr import features
from asr.config import UserError
from asr.digits import Handwritten, Spoken
from asr.utterances import Report, Utterance


def from_json_lines(path):
    """(audio, text, duration or None) of each line, or the number of a line that has no such thing."""
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            if line.strip():
                x = json.loads(line)
                yield str(x["audio"]), str(x["text"]), float(x["duration"]) if x.get("duration") else None
        except (ValueError, KeyError, TypeError, AttributeError):
            yield i


def from_tsv(path):
    """The same of a table with the columns audio, text and perhaps duration, named in its first line."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = next(rows, [])
        if not {"audio", "text"} <= set(names):
            raise UserError(f"{path} must begin with the line audio<TAB>text<TAB>duration, got {names}")
        for i, row in enumerate(rows, 2):
            x = dict(zip(names, row))
            try:
                if row:
                    yield x["audio"], x["text"], float(x["duration"]) if x.get("duration") else None
            except (ValueError, KeyError):
                yield i


def from_folder(path):
    """The same of a folder as LibriSpeech has it: lines NAME TEXT in *.trans.txt, beside NAME.flac."""
    files = sorted(path.rglob("*.trans.txt"))
    if not files:
        raise UserError(f"{path} holds no *.trans.txt, as a folder of LibriSpeech would")
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.strip():
                name, _, text = line.partition(" ")
                yield str((file.parent / f"{name}.flac").relative_to(path)), text, None


def entries(path):
    """(folder that names of audio files start from, what one of the readers above finds)."""
    try:
        if path.is_dir():
            return path, list(from_folder(path))
        if path.suffix == ".tsv":
            return path.parent, list(from_tsv(path))
        if path.suffix in (".json", ".jsonl"):
            return path.parent, list(from_json_lines(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable: {error}") from None
    reason = "is neither a folder nor a manifest (.jsonl, .json or .tsv)" if path.exists() else "does not exist"
    raise UserError(f"{path} {reason}")


def header(path):
    """What the header of an audio file says, or None if it is missing or bad."""
    try:
        return soundfile.info(str(path))
    except (soundfile.SoundFileError, OSError):
        return None


class Recordings:
    """The usable utterances of a manifest or folder; the rest is in `report`."""

    def __init__(self, path, config):
        self.config, self.report, path = config, Report(), Path(path)
        folder, found = entries(path)
        self.features, self.hop, self.device = config.mels, config.hop / 1000, config.mel_on == "device"
        for line in found:
            if isinstance(line, int):
                self.report.add("not audio, text and duration", f"{path.name} line {line}")
        found = [x for x in found if not isinstance(x, int)]
        with ThreadPoolExecutor(16) as pool:
            headers = list(pool.map(lambda x: header(folder / x[0]), found))
        checked = [self.check(*x, info) for x, info in zip(found, headers)]
        self.paths = [folder / x.name for x in checked if x]
        self.utterances = [x for x in checked if x]
        if not self.utterances:
            raise UserError(f"{path} has no usable utterance" + "".join(f"; {x}" for x in self.report.lines()))

    def check(self, name, text, duration, info):
        """An Utterance, or None where the report has it."""
        text = " ".join((text.lower() if self.config.lower else text).split())
        if info is None:
            return self.report.add("missing or bad audio", name)
        if duration is not None and abs(duration - info.duration) > 0.1 + 0.05 * info.duration:
            return self.report.add("duration differs from the manifest's", name)
        if not text:
            return self.report.add("empty transcript", name)
        if info.duration > self.config.max_seconds:
            return self.report.add(f"longer than {self.config.max_seconds:g} s", name)
        frames = features.count(self.config, features.resampled_size(info.frames, info.samplerate, self.config.rate))
        if frames < 1:
            return self.report.add("shorter than a frame", name)
        return Utterance(name, frames, text)

    def load(self, i, rng):
        """Features [T, F] of an utterance, or its samples [S] where the device makes them; None: its audio is bad."""
        try:
            samples = features.read(self.paths[i], self.config.rate)
        except (soundfile.SoundFileError, OSError):
            samples = None
        if samples is None or features.count(self.config, len(samples)) != self.utterances[i].frames:
            return self.report.add("missing or bad audio", self.utterances[i].name)
        return samples if self.device else features.log_mel(self.config, samples)


def open_corpus(name, config, split):
    """The corpus that --train or --valid names."""
    if name == "handwritten-digits":
        return Handwritten(split)
    kind, _, folder = name.partition(":")
    if kind == "spoken-digits" and folder:
        return Spoken(folder, config, split)
    return Recordings(name, config)
