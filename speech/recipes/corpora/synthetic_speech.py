"""Makes a corpus of synthetic speech: real sentences, many voices, rates and noises, in the layout of LibriSpeech.

    apt-get install espeak-ng fortunes
    python speech/recipes/corpora/synthetic_speech.py FOLDER

Sentences and voices of valid and test, which are espeak-ng's, are in no other split. The same seed and texts give the
same corpus.
"""

import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from jax_rnnt_speech.cli import Parser
from jax_rnnt_speech.config.options import number, seed, sequence
from jax_rnnt_speech.data import audio, corpora, texts
from jax_rnnt_speech.data.utterances import Report
from jax_rnnt_speech.system import UserError, outputs

RATE, FORTUNES = 16000, Path("/usr/share/games/fortunes")
ACCENTS = "en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbcwmd", "en-029"
TIMBRES = "", "+m1", "+m2", "+m3", "+m4", "+m5", "+m6", "+m7", "+f1", "+f2", "+f3", "+f4", "+f5"
HELD_OUT = {"valid": ("+m3", "+f2"), "test": ("+m6", "+f4")}  # timbres of a split that others lack
# Voices of other synthesisers, each of one speaker: range of the factor of the pitch.
OTHERS = {"hibari": (0.85, 1.12), "rms": (0.9, 1.2), "slt": (0.85, 1.12), "awb": (0.9, 1.2)}
SHARES = {"train": 1.0, "valid": 0.05, "test": 0.05}  # hours, for each of --hours
WORDS = range(4, 21)  # of a sentence from fortunes
CHAPTER = 40  # utterances
shares = sequence(
    lambda text: (text.partition("=")[0], float(text.partition("=")[2])),
    lambda x: {name for name, _ in x} <= {"espeak", *OTHERS} and all(0 < y < np.inf for _, y in x) and x,
    "VOICE=SHARE,...",
    f"shares of espeak, {', '.join(OTHERS)} such as espeak=0.3,slt=0.7",
)


class Line(NamedTuple):
    speaker: int
    voice: str  # of espeak-ng, or one of OTHERS
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
            words = re.sub(r"[^a-z' ]+", " ", sentence.lower()).split()
            if re.fullmatch(r"[\"'(]?[A-Z][A-Za-z',;: -]+[.!?]", sentence) and len(words) in WORDS:
                drawn[" ".join(words)] = None
    return list(drawn)


def read_texts(paths):
    """Sentences of files as they are, or of Debian's fortunes. Those in capitals are lowered, or would be spelt."""
    if paths:
        report, plain = Report(), texts.normalizer("basic")
        found = [corpora.sentences_of(path, lambda x: x if plain(x) else "", report) for path in paths]
        lines = [" ".join(words) for words in itertools.chain.from_iterable(found)]
        lines = [x.lower() if x.isupper() else x for x in lines]
        print(*(f"text: {x}\n" for x in report.lines()), sep="", end="", file=sys.stderr)
        return lines
    paths = [x for x in sorted(FORTUNES.glob("*")) if not x.suffix]
    if not paths:
        raise UserError(f"{FORTUNES} is missing: apt-get install fortunes, or give --text FILE...")
    return [x for path in paths for x in sentences(path.read_text(errors="replace"))]


def voices(split):
    """(number, voice) of the speakers of a split."""
    others = {timbre for timbres in HELD_OUT.values() for timbre in timbres}
    chosen = HELD_OUT.get(split) or [timbre for timbre in TIMBRES if timbre not in others]
    for i, (accent, timbre) in enumerate(itertools.product(ACCENTS, TIMBRES)):
        if timbre in chosen:
            yield 100 + i, accent + timbre


def plan(texts, rng, args):
    """Lines of each split, more than are needed."""
    texts, (more,) = list(dict.fromkeys(texts)), rng.spawn(1)
    names, weights = zip(*args.voices)
    order, total, start, lines = rng.permutation(len(texts)), sum(SHARES.values()), 0, {}
    for split, part in reversed(SHARES.items()):
        end = len(texts) if split == "train" else start + int(len(texts) * part / total)
        speakers, lines[split] = list(voices(split)), []
        for i, name in zip(order[start:end], more.choice(names, end - start, p=np.divide(weights, sum(weights)))):
            speaker = speakers[rng.integers(len(speakers))]
            if name in OTHERS and split == "train":
                speaker = [*OTHERS].index(name), str(name)
            speed, pitch, ratio = rng.integers(130, 220), rng.integers(35, 66), rng.uniform(args.noise, 40)
            more.random(2)  # of two options that are no more: the same seed still gives the same corpus
            lines[split].append(Line(*speaker, texts[i], int(speed), int(pitch), ratio))
        start = end
    return lines


@functools.cache
def hibari():
    return importlib.import_module("hibari").Hibari(threads=1)


def spoken(line, rng):
    """Samples of a line without noise. Voices of OTHERS are as loud as can be."""
    if line.voice == "hibari":
        samples, rate = hibari()(line.text, rng.uniform(0.8, 1.25), int(rng.integers(2**32))), 24000
    else:
        stretch = f"duration_stretch={rng.uniform(0.85, 1.2):.2f}"
        command = [*f"flite -voice {line.voice} --setf {stretch} -o /dev/stdout -t".split(), line.text]
        if line.voice not in OTHERS:
            command = f"espeak-ng -v {line.voice} -s {line.speed} -p {line.pitch} --stdout --stdin".split()
        done = subprocess.run(command, input=line.text.encode(), capture_output=True)
        if len(done.stdout) <= 44:  # the header of a WAV
            raise UserError(f"{command[0]} has no voice {line.voice}: {done.stderr.decode().strip()}")
        samples, rate = audio.read(audio.Memory(done.stdout, line.voice), RATE), RATE
    if line.voice not in OTHERS or not samples.any():
        return samples
    samples = audio.resampled(samples, 100 * round(rate * rng.uniform(*OTHERS[line.voice]) / 100), RATE)
    return samples / np.abs(samples).max()


def speak(line, seed):
    """Samples of a line, with noise; None: its voice is silent."""
    rng = np.random.default_rng(seed)
    samples = spoken(line, rng.spawn(1)[0])
    if not samples.any():
        return None
    power = np.mean(samples**2) / 10 ** (line.ratio / 10)
    color = rng.uniform(0, 0.95)  # of the noise: white, or with more low frequencies
    noise = rng.normal(0, 1, len(samples) + 1)
    noise = (noise[1:] + color * noise[:-1]) * (power / (1 + color**2)) ** 0.5
    samples = samples + noise
    return (samples * min(1, 0.98 / np.abs(samples).max())).astype(np.float32)


def write_split(folder, lines, hours, seed, bar):
    """Writes lines until they last so many hours. Returns the seconds, the lines, and a report of silent ones."""
    seconds, counts, written, report, plain = 0.0, {}, [], Report(), texts.normalizer("basic")
    split = [*SHARES].index(folder.name)
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(lines), 64):
            part = lines[start : start + 64]
            spoken = pool.map(speak, part, ((seed, split, start + i) for i in range(len(part))))
            for line, samples in zip(part, spoken):
                if samples is None:
                    report.add("silent", f"{line.voice}: {line.text}")
                    continue
                count = counts[line.speaker] = counts.get(line.speaker, -1) + 1
                chapter = f"{line.speaker}-{1 + count // CHAPTER}"
                place = folder / chapter.replace("-", "/")
                place.mkdir(parents=True, exist_ok=True)
                name = f"{chapter}-{count % CHAPTER:04}"
                audio.write(place / f"{name}.flac", samples, RATE)
                with (place / f"{chapter}.trans.txt").open("a") as file:
                    file.write(f"{name} {plain(line.text).upper()}\n")
                length = len(samples) / RATE
                bar.update(min(length, 3600 * hours - seconds))  # the last one may be longer than is left
                seconds += length
                written.append(line)
                if seconds >= 3600 * hours:
                    return seconds, written, report
    need = f"the texts last {seconds / 3600:.2f} of {hours:g} hours of {folder.name}: give more by --text"
    raise UserError(need + report.summary())


def check(voices):
    """Raises where a synthesiser is missing."""
    names = {name for name, _ in voices}
    for there, needed, name, install in (
        (shutil.which("espeak-ng"), True, "espeak-ng", "apt-get install espeak-ng"),
        (shutil.which("flite"), names - {"espeak", "hibari"}, "flite", "apt-get install flite"),
        (importlib.util.find_spec("hibari"), "hibari" in names, "hibari", "pip install hibari-tts"),
    ):
        if needed and not there:
            raise UserError(f"{name} is missing: {install}")


def make(args):
    check(args.voices)
    if args.folder.exists() and any(args.folder.iterdir()):
        raise UserError(f"{args.folder} is not empty")
    lines, left = plan(read_texts(args.text), np.random.default_rng(args.seed), args), []
    if any(name == "hibari" for name, _ in args.voices):
        hibari()  # once, before several threads want it
    total = 3600 * args.hours * sum(SHARES.values())
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        outputs.whole(args.folder) as corpus,
        tqdm(total=round(total) + 1, unit="s", unit_scale=True, mininterval=5) as bar,
    ):
        for split, part in SHARES.items():
            seconds, written, report = write_split(corpus / split, lines[split], part * args.hours, args.seed, bar)
            voices = len({x.voice for x in written})
            tqdm.write(f"{split}: {len(written)} utterances, {seconds / 3600:.2f} hours, {voices} voices")
            left += (f"{split}: {x}\n" for x in report.lines())
    print(*left, sep="", end="")
    return 0


def main(arguments=None):
    parser = Parser(prog="synthetic_speech.py", description="Makes a corpus of synthetic speech.")
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="folder that is written, with train, valid and test in it"
    )
    parser.add_argument(
        "--hours", type=number(float, 1e-4), default=3.0, help="hours of speech for training (%(default)s)"
    )
    help = "what is spoken: .txt files with a sentence on each line, or corpora; default: Debian's fortunes"
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help=help)
    help = f"shares of utterances for training; voices: espeak (default), {', '.join(OTHERS)}"
    parser.add_argument("--voices", type=shares, default=[("espeak", 1.0)], metavar=shares.metavar, help=help)
    help = "lowest ratio of speech to noise (%(default)s)"
    parser.add_argument("--noise", type=number(float, -20, 40), default=10, metavar="DB", help=help)
    parser.add_argument("--seed", type=seed, default=0, help="seed of all that is drawn (%(default)s)")
    parser.set_defaults(run=make)
    parser.perform(arguments)


if __name__ == "__main__":
    main()
