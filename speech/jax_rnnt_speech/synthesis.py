"""Makes a corpus of synthetic speech: real sentences, many voices, rates and noises, in the layout of LibriSpeech.

    apt-get install espeak-ng fortunes
    rnnt-speech corpus FOLDER

Sentences and voices of valid and test are in no other split. The same seed and texts give the same corpus.
"""

import itertools
import re
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from jax_rnnt_speech import audio
from jax_rnnt_speech.config import UserError, number, reason, seed

RATE, FORTUNES = 16000, Path("/usr/share/games/fortunes")
ACCENTS = "en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbcwmd", "en-029"
TIMBRES = "", "+m1", "+m2", "+m3", "+m4", "+m5", "+m6", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5"
HELD_OUT = {"valid": ("+m3", "+f2"), "test": ("+m6", "+f4")}  # timbres of a split that others lack
SHARES = {"train": 1.0, "valid": 0.05, "test": 0.05}  # hours, for each of --hours
WORDS = range(4, 21)
CHAPTER = 40  # utterances


class Line(NamedTuple):
    speaker: int
    voice: str
    text: str
    speed: int  # words a minute
    pitch: int
    ratio: float  # of speech and noise, dB


def sentences(text):
    """Sentences of plain words, each once: those of paragraphs, which empty lines or % lines part."""
    drawn = {}
    for paragraph in re.split(r"\n%?\s*\n|\n%", text):
        paragraph = re.sub(r"\b[QA]: ", "", paragraph)  # riddles
        for sentence in re.split(r"(?<=[.!?])[\"')]*\s+", " ".join(paragraph.split())):
            words = re.sub(r"[^A-Z' ]+", " ", sentence.upper()).split()
            if re.fullmatch(r"[\"'(]?[A-Z][A-Za-z',;: -]+[.!?]", sentence) and len(words) in WORDS:
                drawn[" ".join(words)] = None
    return list(drawn)


def read_texts(paths):
    if not paths:
        paths = [x for x in sorted(FORTUNES.glob("*")) if not x.suffix]
        if not paths:
            raise UserError(f"{FORTUNES} is missing: apt-get install fortunes, or give --text FILE...")
    try:
        return [x for path in paths for x in sentences(path.read_text(errors="replace"))]
    except OSError as error:
        raise UserError(f"--text {error.filename} is not readable: {reason(error)}") from None


def voices(split):
    """(number, voice) of the speakers of a split."""
    others = {timbre for timbres in HELD_OUT.values() for timbre in timbres}
    chosen = HELD_OUT.get(split) or [timbre for timbre in TIMBRES if timbre not in others]
    for i, (accent, timbre) in enumerate(itertools.product(ACCENTS, TIMBRES)):
        if timbre in chosen:
            yield 100 + i, accent + timbre


def plan(texts, rng, noise):
    """Lines of each split, more than are needed."""
    texts = list(dict.fromkeys(texts))
    order, total, start, lines = rng.permutation(len(texts)), sum(SHARES.values()), 0, {}
    for split, share in reversed(SHARES.items()):
        end = len(texts) if split == "train" else start + int(len(texts) * share / total)
        speakers, lines[split] = list(voices(split)), []
        for i in order[start:end]:
            speaker = speakers[rng.integers(len(speakers))]
            speed, pitch = rng.integers(130, 220), rng.integers(35, 66)
            lines[split].append(Line(*speaker, texts[i], int(speed), int(pitch), rng.uniform(noise, 40)))
        start = end
    return lines


def speak(line, seed):
    """Samples of a line, with noise."""
    command = ["espeak-ng", "-v", line.voice, "-s", str(line.speed), "-p", str(line.pitch), "--stdout", "--stdin"]
    # Lower case: capitals may be spelt.
    done = subprocess.run(command, input=line.text.lower().encode(), capture_output=True)
    if len(done.stdout) <= 44:  # the header of a WAV
        raise UserError(f"espeak-ng has no voice {line.voice}: {done.stderr.decode().strip()}")
    samples = audio.read(audio.Memory(done.stdout, line.voice), RATE)
    rng = np.random.default_rng(seed)
    power = np.mean(samples**2) / 10 ** (line.ratio / 10)
    color = rng.uniform(0, 0.95)  # of the noise: white, or with more low frequencies
    noise = rng.normal(0, 1, len(samples) + 1)
    noise = (noise[1:] + color * noise[:-1]) * (power / (1 + color**2)) ** 0.5
    samples = samples + noise
    return (samples * min(1, 0.98 / np.abs(samples).max())).astype(np.float32)


def write_split(folder, lines, hours, seed, bar):
    """Writes lines until they last so many hours. Returns the seconds and the number of utterances."""
    seconds, counts, written = 0.0, {}, 0
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(lines), 64):
            part = lines[start : start + 64]
            spoken = pool.map(speak, part, ((seed, len(folder.name), start + i) for i in range(len(part))))
            for line, samples in zip(part, spoken):
                count = counts[line.speaker] = counts.get(line.speaker, -1) + 1
                chapter = f"{line.speaker}-{1 + count // CHAPTER}"
                place = folder / chapter.replace("-", "/")
                place.mkdir(parents=True, exist_ok=True)
                name = f"{chapter}-{count % CHAPTER:04}"
                audio.write(place / f"{name}.flac", samples, RATE)
                with (place / f"{chapter}.trans.txt").open("a") as file:
                    file.write(f"{name} {line.text}\n")
                length = len(samples) / RATE
                bar.update(min(length, 3600 * hours - seconds))  # the last one may be longer than is left
                seconds, written = seconds + length, written + 1
                if seconds >= 3600 * hours:
                    return seconds, written
    raise UserError(f"the texts last {seconds / 3600:.2f} of {hours:g} hours of {folder.name}: give more by --text")


def make(args):
    if not shutil.which("espeak-ng"):
        raise UserError("espeak-ng is missing: apt-get install espeak-ng")
    if args.folder.exists() and any(args.folder.iterdir()):
        raise UserError(f"{args.folder} is not empty")
    lines = plan(read_texts(args.text), np.random.default_rng(args.seed), args.noise)
    total = 3600 * args.hours * sum(SHARES.values())
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=args.folder.parent) as scratch,  # a corpus is there as a whole, or not at all
        tqdm(total=round(total) + 1, unit="s", unit_scale=True, mininterval=5) as bar,
    ):
        corpus = Path(scratch, "corpus")
        for split, share in SHARES.items():
            seconds, count = write_split(corpus / split, lines[split], share * args.hours, args.seed, bar)
            tqdm.write(f"{split}: {count} utterances, {seconds / 3600:.2f} hours, {len(list(voices(split)))} voices")
        corpus.replace(args.folder)
    return 0


def add_command(commands):
    parser = commands.add_parser("corpus", help="make a corpus of synthetic speech")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="to write: train, valid and test")
    parser.add_argument("--hours", type=number(float, 1e-4), default=3.0, help="of speech for training (%(default)s)")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="to speak; default: Debian's fortunes")
    help = "lowest ratio of speech to noise (%(default)s)"
    parser.add_argument("--noise", type=number(float, -20, 40), default=10, metavar="DB", help=help)
    parser.add_argument("--seed", type=seed, default=0, help="(%(default)s)")
    parser.set_defaults(run=make)
