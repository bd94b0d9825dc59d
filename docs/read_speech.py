"""Makes what a model of read English needs besides recordings: texts, and synthetic speech.

    apt-get install dict-gcide bible-kjv flite espeak-ng && pip install hibari-tts
    python docs/read_speech.py text sentences.txt definitions.txt
    python docs/read_speech.py speech FOLDER HOURS

Sentences are the quotations of GCIDE, Webster's dictionary of 1913, and the King James Bible; definitions are its other
text. Both in lower case without punctuation, a line each. Synthetic speech has four quotations for each verse, by five
synthesisers at several speeds and pitches, half of it in noise.
"""

import gzip
import json
import re
import subprocess
import sys
import tempfile
import unicodedata
from fractions import Fraction
from pathlib import Path

import numpy as np

RATE = 16000
SHARES = {"hibari": 0.46, "rms": 0.17, "slt": 0.14, "awb": 0.13, "espeak": 0.10}  # the middle three are flite's
ACCENTS = "en-us", "en-gb", "en-us+m3", "en-us+f2", "en-gb+m7", "en-us+f4", "en-gb-scotland"


def gcide():
    with gzip.open("/usr/share/dictd/gcide.dict.dz", "rt", errors="replace") as file:
        return file.read()


def quotations():
    """Indented lines that end with --Author, without unreadable characters."""
    for block in re.findall(r"(?:^ {9,}(?!\[)\S.*\n)+", gcide(), re.M):
        found = re.match(r"(.*?)\s+--\s*[A-Z(]", " ".join(block.split()))
        if found and not re.search(r"[?{}\[\]=<>0-9]", found[1].rstrip("?")) and 3 <= len(found[1].split()) <= 60:
            yield found[1]


def definitions():
    """Sentences of entries, without their heads, notes in brackets and numbers."""
    for block in re.split(r"\n\s*\n", gcide()):
        text = re.sub(r"^\S.*?\\[^\\]*\\[^\[]*?(\[[^\]]*\])?\s\s", "", " ".join(block.split("\n")))
        text = re.sub(r"\[[^\]]*\]|\([^)]*\)|--\s*[A-Z][\w. ]*|[{}]|Syn:|\d+\.|\\[^\\]*\\", " ", text)
        if not re.search(r"[?<>=*`]", text):
            yield from re.split(r"[.?!]+[\"')\]]*\s|;\s|--", text + " ")


def verses():
    bible = subprocess.run(["bible", "-f", "Gen1:1-Rev22:21"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return [x.partition(" ")[2] for x in bible.stdout.splitlines()]


def plain(text):
    text = "".join(x for x in unicodedata.normalize("NFKD", text) if not unicodedata.combining(x)).lower()
    text = re.sub(r"[^a-z' ]+", " ", text.replace("’", "'").replace("‘", "'"))
    return " ".join(re.sub(r"(?<![a-z])'|'(?![a-z])", " ", text).split())


def speak(voice, text, rng, scratch, hibari):
    """Samples at `RATE`."""
    from scipy.signal import resample_poly

    from jax_rnnt_speech import audio

    if voice == "hibari":
        samples, rate = hibari(text, speed=rng.uniform(0.8, 1.25)), 24000
    else:
        spoken, written = f"{scratch}/a.txt", f"{scratch}/a.wav"
        Path(spoken).write_text(text)
        if voice == "espeak":
            speed, height = str(rng.integers(130, 186)), str(rng.integers(25, 71))
            command = ["espeak-ng", "-v", rng.choice(ACCENTS), "-s", speed, "-p", height, "-f", spoken, "-w", written]
        else:
            stretch = f"duration_stretch={rng.uniform(0.85, 1.2):.2f}"
            command = ["flite", "-voice", voice, "--setf", stretch, "-f", spoken, "-o", written]
        subprocess.run(command, check=True, capture_output=True)
        samples, rate = audio.read(written, RATE), RATE
    pitch = rng.uniform(0.85, 1.12) if voice in ("hibari", "slt") else rng.uniform(0.9, 1.2)  # of women's voices, lower
    ratio = Fraction(RATE / (rate * pitch)).limit_denominator(200)
    samples = resample_poly(np.asarray(samples, np.float32), ratio.numerator, ratio.denominator)
    samples *= 10 ** rng.uniform(-1, -0.05) / np.abs(samples).max()
    if rng.random() < 0.5:
        noise = np.convolve(rng.normal(size=len(samples)), np.ones(rng.choice([1, 2, 4])), "same")
        samples += noise * (np.mean(samples**2) / np.mean(noise**2)) ** 0.5 * 10 ** (-rng.uniform(12, 35) / 20)
    return np.clip(samples, -1, 1)


def speech(folder, hours, seed=0):
    from hibari import Hibari

    from jax_rnnt_speech import audio

    texts = [[x for x in part if 4 <= len(x.split()) <= 40] for part in (list(quotations()), verses())]
    rng, hibari, seconds = np.random.default_rng(seed), Hibari(threads=1), 0.0
    folder.mkdir(parents=True)
    with (folder / "manifest.jsonl").open("w") as manifest, tempfile.TemporaryDirectory() as scratch:
        while seconds < 3600 * hours:
            drawn = texts[rng.random() < 0.2]
            text, voice = drawn[rng.integers(len(drawn))], rng.choice(list(SHARES), p=list(SHARES.values()))
            text = re.sub(r"\b([A-Z])([A-Z]+)\b", lambda x: x[1] + x[2].lower(), text)  # capitals would be spelt
            samples = speak(voice, text, rng, scratch, hibari)
            if len(samples) < 28 * RATE:
                name = f"{manifest.tell():09}.wav"
                audio.write(folder / name, samples, RATE)
                manifest.write(json.dumps({"audio_filepath": name, "text": plain(text)}) + "\n")
                seconds += len(samples) / RATE


def write(path, sentences):
    lines = map(plain, sentences)
    Path(path).write_text("".join(f"{x}\n" for x in lines if len(x.split()) > 2))


match sys.argv[1:]:
    case ["text", sentences, others]:
        write(sentences, [*quotations(), *verses()])
        write(others, definitions())
    case ["speech", folder, hours]:
        speech(Path(folder), float(hours))
    case _:
        sys.exit(__doc__)
