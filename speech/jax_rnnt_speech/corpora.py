"""Corpora of recordings: what a manifest or a folder lists, and what of it can be used.

A corpus has `utterances`, `load(i, rng)`, the number of `features` of a frame, and `hop`, the seconds between frames.
`digits` has others, made up at random.
"""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import soundfile

from jax_rnnt_speech import features
from jax_rnnt_speech.config import UserError
from jax_rnnt_speech.digits import Handwritten, Spoken
from jax_rnnt_speech.utterances import Report, Utterance


def entry(audio, text, duration):
    """(audio, text, seconds or None); raises for anything else."""
    text = "" if text is None else text
    if not (isinstance(audio, str) and audio and isinstance(text, str)) or isinstance(duration, bool):
        raise TypeError
    (audio + text).encode()  # no half of a surrogate pair
    if duration in (None, ""):
        return audio, text, None
    if not 0 < float(duration) < math.inf:
        raise ValueError
    return audio, text, float(duration)


def lines_of(path):
    """(number, line) of a text's lines that are not empty. Other characters that Unicode counts as ends are none."""
    for i, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            yield i, line


def from_json_lines(path):
    """An `entry` of each line, or the name of a line that has none."""
    for i, line in lines_of(path):
        try:
            x = json.loads(line)
            yield entry(x["audio"], x["text"], x.get("duration"))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            yield f"{path.name} line {i}"


def from_tsv(path):
    """The same of a table with the columns audio, text and perhaps duration, named in its first line."""
    rows = ((i, line.split("\t")) for i, line in lines_of(path))
    _, names = next(rows, (1, []))
    if not {"audio", "text"} <= set(names):
        raise UserError(f"{path} must begin with the line audio<TAB>text<TAB>duration, got {names}")
    for i, row in rows:
        try:
            x = dict(zip(names, row))
            yield entry(x["audio"], x["text"], x.get("duration"))
        except (ValueError, KeyError, TypeError):
            yield f"{path.name} line {i}"


def from_folder(path):
    """The same of a folder as LibriSpeech has it: lines NAME TEXT in *.trans.txt, beside NAME.flac."""
    files = sorted(path.rglob("*.trans.txt"))
    if not files:
        raise UserError(f"{path} holds no *.trans.txt, as a folder of LibriSpeech would")
    for file in files:
        for i, line in lines_of(file):
            name, _, text = line.partition(" ")
            try:
                yield entry(str((file.parent / f"{name}.flac").relative_to(path)), text, None)
            except ValueError:
                yield f"{file.name} line {i}"


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
    except features.BAD:
        return None


class Recordings:
    """The usable utterances of a manifest or folder; the rest is in `report`."""

    def __init__(self, path, config):
        self.config, self.report, path = config, Report(), Path(path)
        folder, lines = entries(path)
        self.features, self.hop, self.device = config.mels, config.hop / 1000, config.mel_on == "device"
        for line in lines:
            if isinstance(line, str):
                self.report.add("not audio, text and duration", line)
        lines = [x for x in lines if not isinstance(x, str)]
        with ThreadPoolExecutor(16) as pool:
            headers = list(pool.map(lambda x: header(folder / x[0]), lines))
        checked = [self.check(*x, info) for x, info in zip(lines, headers)]
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
        except features.BAD:
            samples = None
        if samples is None or features.count(self.config, len(samples)) != self.utterances[i].frames:
            return self.report.add("missing or bad audio", self.utterances[i].name, again=False)
        return samples if self.device else features.log_mel(self.config, samples)


def absolute(name):
    """The same corpus from any folder."""
    kind, _, folder = name.rpartition(":")
    place = Path(folder if kind == "spoken-digits" else name)
    if name in ("", "handwritten-digits") or not place.exists():
        return name
    return f"spoken-digits:{place.resolve()}" if kind == "spoken-digits" else str(place.resolve())


def open_corpus(name, config, split):
    """The corpus that --train or --valid names."""
    if name == "handwritten-digits":
        return Handwritten(split)
    kind, _, folder = name.partition(":")
    if kind == "spoken-digits" and folder:
        return Spoken(folder, config, split)
    return Recordings(name, config)
