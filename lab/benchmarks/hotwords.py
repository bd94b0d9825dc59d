"""The tables of docs/speech/phrases.md: what lists of phrases find, and what they write that nobody said.

    pip install hibari-tts
    rnnt-speech train --config read-speech --train TRAIN --valid VALID --init WHISPER --workdir RUN
    python lab/benchmarks/hotwords.py --model RUN --train TRAIN VALID

Every row is one setting of the search, in `SETTINGS`, and has these columns:

* found, false, WER: with a list of 50 words of VALID that TRAIN lacks, drawn from those of eight letters or more. A
  place where one is said counts as found if the transcript of its utterance has the word; false ones are further
  ones.
* names, again, for others: with a list of ten names, in synthetic sentences, of which some hesitate and repeat
  words. How many are found, how many are written once more, and how many are written for words that sound like them.
* silence: with both lists, 60 phrases, the words over 30 s each of silence, noise, tones and music, and over pauses
  between utterances.
* not said, WER +: with lists of 1, 5, 50 and 500 names and words that VALID lacks, and that sound like none of its
  words. How many are written, and by how many points the WER rises.
* alike: with a list of 50 words that VALID lacks, each a few letters from one that it has. How many are written.

What the same search writes without phrases does not count as written. VALID is a part of LibriSpeech (Panayotov et al.
2015, CC BY 4.0); all other sounds are made here.
"""

import argparse
import collections
import functools
import hashlib
import json
import re
import tempfile
from pathlib import Path

import numpy as np
from rapidfuzz import process
from rapidfuzz.distance import Levenshtein

from jax_rnnt import decode
from jax_rnnt_speech import models
from jax_rnnt_speech.data import audio, corpora, features, texts
from jax_rnnt_speech.recognition import activity, errors, recognise, results, windows
from jax_rnnt_speech.recognition.search_options import Searching, decoding_of

LETTERS, WORDS, PLACES = 8, 50, 56  # of words to find: where some draw of so many has so many places, it is taken
# Options of `Searching`; the weight of the list, where it is not the usual one; and whose `rule` that is.
SETTINGS = [{"beam": beam, "phrase_depth": depth} for beam in (0, 4, 8) for depth in (0.0, 1.0, 3.0)]
SETTINGS += [{"beam": beam, "weight": 10.0} for beam in (0, 8)]
OFF = {"rule": "no guard", "phrase_guard": "off"}
SETTINGS += [OFF | {"beam": 0, "weight": 0.05, "phrase_depth": 3.0}]
SETTINGS += [OFF | {"beam": 8, "weight": weight, "phrase_depth": depth} for weight, depth in ((1.0, 0.0), (0.25, 3.0))]
# The usual scores of NeMo's phrase boosting (`context_score`, `depth_scaling`) and of icefall's `--context-score`.
SETTINGS += [OFF | {"rule": "NeMo's", "beam": beam, "weight": 1.0, "phrase_depth": 1.0} for beam in (0, 4)]
SETTINGS += [OFF | {"rule": "icefall's", "beam": 4, "weight": 2.0}]
SETTINGS += [{"rule": "second head", "beam": beam, "phrases_by": "ctc"} for beam in (0, 8)]
ALIKE = 50
ROOM = 8192  # labels of the largest list: with room for it, searches with other lists compile nothing
# Names, each with what sounds like it and is not it.
NAMES = {
    "maria": ("marieke", "mario", "the area"),
    "cate lynn": ("kaitlyn", "kate linden", "catalan"),
    "nestor": ("nester", "investor", "esther"),
    "erin": ("aaron", "karen", "airing"),
    "hadley": ("hardly", "badly", "headley"),
    "parker": ("barker", "park her", "marker"),
    "stella": ("stellar", "cellar", "ella"),
    "eleanor lake": ("ellen or lake", "eleanor blake", "a linear lake"),
    "baxter": ("backs to", "factor", "bagster"),
    "morrison": ("more is on", "garrison", "morris"),
}
SENTENCES = "we asked {} to come back", "the letter of {} came this morning", "i saw {} in the garden"
HESITANT = (
    "well, we we asked, um, {}, uh, to to come back",
    "the the letter of, uh, {}, i think, came came this morning",
)
SPEEDS = 0.9, 1.1
OTHERS = """\
abigail thornbury|aldous|anneliese|bartholomew|beatrix kowalski|benedikt|caoimhe|cassius|dagmar|
delphine okafor|desmond|eluned|esperanza|fatima|fyodor|giselle hartmann|gwendolyn|hjalmar|ignatius|
imogen fairchild|ingeborg|jacinta|joaquin|kasimir|keziah|lavinia prescott|leopold|magdalena|mahmoud|mirabel|
mnemosyne|narayan|octavia|perpetua|quentin|rosalind vasquez|svetlana|thaddeus|ulrike|wilhelmina"""


def cached(function):
    """The function, which is called once for the same arrays: all searches have the same features and rows."""
    known = {}

    def run(*arguments):
        key = hashlib.sha256(b"".join(x.tobytes() for x in arguments if isinstance(x, np.ndarray))).digest()
        if key not in known:
            known[key] = function(*arguments)
        return known[key]

    return run


def listened(add):
    """`Detector.add`, which listens once to the same recording; a recording is one piece here."""

    @cached
    def heard(detector, samples):
        add(detector, samples)
        return tuple(detector.probabilities), tuple(detector.levels), detector.spoken

    def run(detector, samples):
        probabilities, levels, detector.spoken = heard(detector, samples)
        detector.probabilities, detector.levels = [*probabilities], [*levels]

    return run


def long_ones(words):
    return sorted(x for x in words if len(x) >= LETTERS)


def drawn(lines, heard):
    """The first draw of `WORDS` words that lines have in `PLACES` places, or else the first one."""
    counts = collections.Counter(word for line in lines for word in line.split())
    rare = [x for x in long_ones(counts) if x not in heard] or sorted(counts)
    draws = [[*np.random.default_rng(seed).permutation(rare)[:WORDS]] for seed in range(1000)]
    return next((x for x in draws if sum(counts[word] for word in x) == PLACES), draws[0])


def unsaid(lines, heard, spells):
    """(phrases that nobody says in the lines, those of them that sound like words of the lines).

    They are names and words that were heard. Random letters follow, for a model that spells few of them.
    """
    rng, words = np.random.default_rng(0), {word for line in lines for word in line.split()}
    letters = sorted({*"".join(words)} - {"'"})
    random = ["".join(rng.choice(letters, n)) for n in rng.integers(3, 9, 4000)]
    names = [" ".join(x.split()) for x in OTHERS.split("|")]
    found = [], []  # far, near
    for x in dict.fromkeys([*rng.permutation(names), *rng.permutation(long_ones(heard)), *random]):
        if len(x) > 2 and not any(part in words for part in x.split()) and spells(x):
            near = process.extractOne(x, words, scorer=Levenshtein.distance, score_cutoff=len(x) // 3)
            found[near is not None].append(str(x))
    return found[0], found[1][:ALIKE]


def sounds(rate, rng, utterances):
    """Yields ([samples], the seconds [begin, end) in which nobody speaks)."""
    t = np.arange(30 * rate) / rate
    yield np.zeros(len(t)), 0, 30
    for level in (-60, -40, -20):  # dB, of full scale
        yield 10 ** (level / 20) * rng.normal(size=len(t)), 0, 30
    yield sum(0.1 / k * np.sin(2 * np.pi * 50 * k * t) for k in (1, 2, 3, 5)), 0, 30
    yield 0.2 * np.sin(2 * np.pi * 50 * np.cumsum((0.45 * rate / 50) ** (t / 30)) / rate), 0, 30
    yield music(t, rate, rng), 0, 30
    for level, first, second in zip((0, 10**-2.5), utterances, utterances[1:]):
        begin = len(first) / rate
        yield np.concatenate([first, level * rng.normal(size=10 * rate), second]), begin + 0.5, begin + 10


def music(t, rate, rng):
    """Four chords, one each half second, of decaying tones, over drums."""
    roots = np.array([[262, 330, 392], [220, 262, 330], [175, 220, 262], [196, 247, 294]])
    beat, since = (t * 2).astype(int), t % 0.5
    tones = sum(np.sin(2 * np.pi * k * roots[beat % 4, i] * t) / k for i in range(3) for k in (1, 2, 3))
    kick = np.sin(2 * np.pi * 60 * since) * np.exp(-20 * since)
    snare = rng.normal(size=len(t)) * np.exp(-30 * since) * (beat % 2)
    return 0.05 * tones * np.exp(-3 * since) + 0.3 * kick + 0.1 * snare


def spoken(rate):
    """[(samples, the name that is said or sounds like what is, whether it is said)]"""
    import hibari  # with NAMES alone

    speaks = hibari.Hibari(threads=1)
    said = [(x.format(name), name, True) for name in NAMES for x in (*SENTENCES, *HESITANT)]
    said += [(x.format(other), name, False) for name in NAMES for x, other in zip(SENTENCES, NAMES[name])]
    sounds = [
        audio.resampled(speaks(text, speed, 0), hibari.SAMPLE_RATE, rate) for speed in SPEEDS for text, *_ in said
    ]
    return [(x, *more) for x, (_, *more) in zip(sounds, said * len(SPEEDS))]


def of_phrases(phrases, text):
    """How often a text has phrases as whole words."""
    counts = {x: len(re.findall(rf"(?<!\S){re.escape(x)}(?!\S)", text)) for x in phrases}
    return collections.Counter({x: count for x, count in counts.items() if count})


class Bench:
    """The recordings, the phrases, and what searches make of them."""

    def __init__(self, options):
        self.model, self.sizes = models.open_model(options.model), options.sizes
        rng, rate, config = np.random.default_rng(0), self.model.extractor.rate, self.model.config
        train = corpora.open_corpus(options.train, config, "train")
        heard = {word for x in train.utterances for word in x.text.split()}
        valid = corpora.open_corpus(options.valid, config, "valid")
        self.texts = [x.text for x in valid.utterances]
        self.valid = [features.scaled(valid.samples(i, rng)) for i in range(len(self.texts))]
        self.words = drawn(self.texts, heard)
        self.said = [of_phrases(self.words, text) for text in self.texts]
        normalize = texts.normalizer(config.texts.normalize, config.texts.lower)
        self.unsaid, self.alike = unsaid(self.texts, heard, lambda text: self.model.tokens.encode(normalize(text)))
        self.names = [x for x in NAMES if self.model.tokens.encode(x)]
        self.spoken = spoken(rate) if self.names else []
        short = sorted((x for x in self.valid if len(x) > rate), key=len)[:3]
        self.sounds = [(np.float32(samples), *span) for samples, *span in sounds(rate, rng, short)]

    def transcribed(self, setting, phrases, recordings):
        """The Results of recordings."""
        given = {name: x for name, x in setting.items() if name not in ("rule", "weight")}
        weight = f"\t{setting['weight']}" if "weight" in setting else ""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "phrases.txt"
            file.write_text("".join(f"{phrase}{weight}\n" for phrase in phrases))
            decoding = decoding_of(Searching(**given, phrases=file if phrases else None), self.model)
        return [*recognise.transcribe(self.model, [(f"{i}", x) for i, x in enumerate(recordings)], decoding)]

    def searched(self, setting, words, names):
        """(texts of VALID, texts of sentences with names, words over silence) with these phrases."""
        valid = [x.text for x in self.transcribed(setting, words, self.valid)]
        sentences = [x.text for x in self.transcribed(setting, names, [x[0] for x in self.spoken])]
        over = self.transcribed(setting, [*words, *names], [x[0] for x in self.sounds])
        return valid, sentences, [self.within(x, *span) for x, (_, *span) in zip(over, self.sounds)]

    def within(self, result, begin, end):
        """The words that end in these seconds."""
        found = []
        for first, last in results.words_of(self.model.tokens, result.labels):
            if begin <= result.frames[last - 1] * self.model.seconds < end:
                found += self.model.text(result.labels[first:last], last - first).split()
        return found

    def rate(self, found):
        return errors.summed([errors.counted(a.split(), b.split()) for a, b in zip(self.texts, found)]).rate

    def columns(self, plain, found):
        """The columns of what `searched` gave; `plain` is what it gave without phrases."""
        written = [of_phrases(self.words, x) for x in found[0]]
        right = sum((a & b).total() for a, b in zip(self.said, written))
        names = again = alike = 0
        for (_, name, said), text, before in zip(self.spoken, found[1], plain[1]):
            count, usual = of_phrases([name], text).total(), of_phrases([name], before).total()
            names += said and count > 0
            again += said and max(0, count - max(1, usual))
            alike += not said and count > usual
        edits = [errors.counted(a, b) for a, b in zip(plain[2], found[2])]
        said = sum(x[2] for x in self.spoken)
        return {
            f"found, of {sum(x.total() for x in self.said)}": right,
            "false": sum(x.total() for x in written) - right,
            "WER, %": f"{self.rate(found[0]):.1f}",
            f"names, of {said}": names,
            "again": again,
            f"for others, of {len(self.spoken) - said}": alike,
            "silence": sum(x.insertions + x.substitutions for x in edits),
        }

    def unsaid_columns(self, setting, plain):
        """The columns of lists of which VALID says nothing; `plain` is what was found in it without phrases."""
        counts, rises = [], []
        for phrases in (*(self.unsaid[:size] for size in self.sizes), self.alike):
            found = [x.text for x in self.transcribed(setting, phrases, self.valid)]
            counts.append(sum(max(0, a.count(x) - b.count(x)) for a, b in zip(found, plain) for x in phrases))
            rises.append(f"{self.rate(found) - self.rate(plain):.1f}")
        return {"not said": "/".join(map(str, counts[:-1])), "WER +": "/".join(rises[:-1]), "alike": counts[-1]}

    def rows(self, settings):
        """Yields the columns of settings, behind those of the same searches without phrases."""
        plain = {x["beam"]: self.searched({"beam": x["beam"]}, (), ()) for x in settings}
        for beam, found in plain.items():
            columns = {"search": beam or "greedy", "rule": "none", "weight": "", "depth": ""}
            columns |= self.columns(found, found) | {"not said": "", "WER +": "", "alike": ""}
            yield columns | {"silence": f"({sum(map(len, found[2]))})"}
        for x in settings:
            columns = {"search": x["beam"] or "greedy", "rule": x.get("rule", "ours")}
            columns |= {"weight": x.get("weight", "usual"), "depth": x.get("phrase_depth", 0)}
            columns |= self.columns(plain[x["beam"]], self.searched(x, self.words, self.names))
            yield columns | self.unsaid_columns(x, plain[x["beam"]][0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("valid", help="recordings to transcribe, with texts")
    parser.add_argument("--train", required=True, help="those that the model has heard")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--settings", type=json.loads, default=SETTINGS, help="JSON, in the place of those of the file")
    parser.add_argument("--sizes", type=json.loads, default=[1, 5, 50, 500], help="of lists of which nothing is said")
    options = parser.parse_args()
    windows.window, activity.Detector.add = cached(windows.window), listened(activity.Detector.add)
    features.Extractor.__call__ = cached(features.Extractor.__call__)
    decode.Phrases.__init__ = functools.partialmethod(decode.Phrases.__init__, size=ROOM)
    bench = Bench(options)
    print(f"{len(bench.texts)} utterances; said: {', '.join(sorted(bench.words))}\n")
    print(f"Not said: {', '.join(bench.unsaid[:50])}\n\nAlike: {', '.join(bench.alike)}\n")
    spots, heads = "ctc" in bench.model.shapes and not bench.model.chunk, ()
    for columns in bench.rows([x for x in options.settings if spots or x.get("phrases_by") != "ctc"]):
        if not heads:
            heads = columns
            print(f"| {' | '.join(heads)} |\n|--:|---|{'--:|' * (len(heads) - 2)}")
        print(f"| {' | '.join(map(str, columns.values()))} |", flush=True)


if __name__ == "__main__":
    main()
