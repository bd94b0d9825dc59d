"""The corpora that recipes make: digits, synthetic speech."""

import importlib
import itertools
import pathlib
import shutil
import time
import types

import numpy as np
import pytest
import scipy.io.wavfile

from jax_rnnt_speech.config import Config
from jax_rnnt_speech.data import audio, corpora
from jax_rnnt_speech.system import UserError

FOLDER = pathlib.Path(__file__).parents[1]
HANDWRITTEN, SPOKEN = (f"{FOLDER}/corpora/digits.py:{name}" for name in ("handwritten", "spoken"))
THINGS = "captain", "river", "teacher", "yellow house", "silver spoon", "young dog", "guitar", "letter"


@pytest.fixture
def synthetic_speech(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("corpora.synthetic_speech")


def test_spoken_digits(tmp_path, refused):
    """Lines are recordings of one speaker, one after another, as their texts say; held-out ones have their own.

    A digit is known by its length, which 15% more or less leave apart from others, and a speaker by the sign.
    """
    lengths, signs = (100 * 1.5 ** np.arange(10)).astype(int), {"ann": 1, "bob": -1}
    (tmp_path / "recordings").mkdir()
    for digit, (name, sign), index in itertools.product(range(10), signs.items(), (4, 5)):
        part = digit % 2 == 0 if index == 4 else digit % 2 == 1  # even ones are held out
        if part:
            samples = np.pad(np.full(lengths[digit], sign * 0.5, np.float32), (0, 20))  # a pause may be of no length
            scipy.io.wavfile.write(tmp_path / f"recordings/{digit}_{name}_{index}.wav", 8000, samples)
    (tmp_path / "recordings/1_bob_9.wav").write_bytes(b"RIFF, not really")
    config = Config.from_options(rate=8000, mels=6, max_seconds=2.0)
    for split, digits in (("train", {*"13579"}), ("valid", {*"02468"})):
        corpus = corpora.open_corpus(f"{SPOKEN}:{tmp_path}", config, split)
        assert [*corpus.report.names.values()] == [["1_bob_9.wav"]] * (split == "train")
        assert set().union(*(x.text for x in corpus.utterances)) == digits
        assert {x.speaker for x in corpus.utterances} == {*signs}
        for i in range(40):
            x, heard = corpus.utterances[i], corpus.samples(i, np.random.default_rng(i))
            loud = np.flatnonzero(np.diff(np.abs(np.pad(heard, 1)) > 0.15)).reshape(-1, 2)
            found = [int(np.abs(np.log(lengths / (end - start))).argmin()) for start, end in loud]
            assert x.text == "".join(map(str, found)) and 1 <= len(found) <= 7
            assert all(np.sign(heard[start]) == signs[x.speaker] for start, _ in loud)
            assert len(heard) / 8000 < 2.1 and 0 < len(corpus.load(i, np.random.default_rng(i))) <= x.frames
    command = ["train", "--workdir", tmp_path / "run", "--train", f"{SPOKEN}:{tmp_path / 'none'}"]
    refused(command, "none has no {digit}_{speaker}_{index}.wav with an index of 5 and up")
    message = "digits.py:handwritten: a corpus that a function makes goes with no other"
    refused(["train", "--train", HANDWRITTEN, tmp_path, "--valid", tmp_path], message)
    refused(["check", HANDWRITTEN], message)
    corpus = corpora.open_corpus(HANDWRITTEN, config, "valid")
    with pytest.raises(UserError, match="its corpus has no samples, which a test listens to"):
        corpora.tested([HANDWRITTEN], config)
    assert len(corpus.utterances) == 500 and corpus.load(0, np.random.default_rng(0)).shape[1] == corpus.features


def test_sentences(tmp_path, monkeypatch, refused, synthetic_speech):
    text = 'It was a dark\nand stormy night. "Who\'s there?" Nobody saw 3 men.\n%\nQ: Is this a joke?\nShort one.\n'
    assert synthetic_speech.sentences(text) == ["it was a dark and stormy night", "is this a joke"]
    (tmp_path / "a.txt").write_text("IT IS HOT\nThe BBC said so.\n")
    assert synthetic_speech.read_texts([tmp_path / "a.txt"]) == ["it is hot", "The BBC said so."]
    texts, shares = [f"sentence {i}" for i in range(3000)], synthetic_speech.shares("espeak=1,slt=3")
    args = types.SimpleNamespace(voices=shares, noise=10)
    lines = synthetic_speech.plan(texts, np.random.default_rng(0), args)
    assert sorted(x.text for part in lines.values() for x in part) == sorted(texts)
    for one in lines:
        for other in set(lines) - {one}:
            assert not {x.voice for x in lines[one]} & {x.voice for x in lines[other]}
    assert abs(np.mean([x.voice == "slt" for x in lines["train"]]) - 0.75) < 0.03

    def without(voices, message):
        refused([tmp_path / "speech", "--voices", voices], message, main=synthetic_speech.main)

    without("espeak=1,joe=2", "--voices: expected shares of espeak, hibari")
    monkeypatch.setattr(synthetic_speech.shutil, "which", lambda name: name != "flite")
    monkeypatch.setattr(synthetic_speech.importlib.util, "find_spec", lambda name: None)
    without("slt=1", "flite is missing: apt-get install flite")
    without("hibari=1", "hibari is missing: pip install hibari-tts")


def test_corpora_of_stubs(tmp_path, monkeypatch, refused, said, synthetic_speech):
    """One model of hibari for all threads, other noise in each split, silent sentences are named; seeds count."""
    models, tone = [], np.sin(np.arange(1600) / 5)

    def slow(**options):
        time.sleep(0.1)
        models.append(options)

    def spoken(line, rng):
        if line.voice == "hibari":
            synthetic_speech.hibari()
        return tone * (line.text not in silent)

    monkeypatch.setattr(synthetic_speech, "check", lambda voices: None)
    monkeypatch.setattr(synthetic_speech, "spoken", spoken)
    monkeypatch.setattr(synthetic_speech.importlib, "import_module", lambda name: types.SimpleNamespace(Hibari=slow))
    synthetic_speech.hibari.cache_clear()
    (tmp_path / "a.txt").write_text("".join(f"number {'x' * i}\n" for i in range(1, 200)))

    def made(name, *more):
        command = [tmp_path / name, "--hours", "0.0005", "--text", tmp_path / "a.txt", *more]
        out, files = said(command, main=synthetic_speech.main).out, sorted((tmp_path / name).rglob("*.flac"))
        return {x.relative_to(tmp_path / name): audio.read(x, 16000) for x in files}, out

    silent = ()
    first, out = made("one", "--voices", "hibari=1")
    assert len(models) == 1 and "left out" not in out and len(first) == 18 + 2 * 1
    again, _ = made("two", "--voices", "hibari=1")
    assert all(np.array_equal(first[name], again[name]) for name in first) and first.keys() == again.keys()
    noises = [x - tone * (x @ tone) / (tone @ tone) for x in first.values()]
    apart = np.abs(np.corrcoef(noises) - np.eye(len(noises)))
    assert apart.max() < 0.2
    expected = "--noise: expected a number of -20 or more and less than 40, got 41"
    refused([tmp_path / "no", "--noise", "41"], expected, main=synthetic_speech.main)
    lines = [x for path in (tmp_path / "one/train").rglob("*.txt") for x in path.read_text().lower().splitlines()]
    silent = {x.partition(" ")[2] for x in lines[:2]}
    left, out = made("silent", "--voices", "hibari=1")
    assert "train: left out, silent: 2 (hibari: " in out and all(f"hibari: {x}" in out for x in silent)
    lines = [x for path in (tmp_path / "silent").rglob("*.txt") for x in path.read_text().lower().splitlines()]
    assert len(left) == len(lines) == len(first) and not silent & {x.partition(" ")[2] for x in lines}


@pytest.mark.skipif(not shutil.which("espeak-ng"), reason="espeak-ng is missing")
def test_made_up_speech(tmp_path, refused, said, synthetic_speech):
    """Three folders of recordings with their texts, which are complete."""
    speech = tmp_path / "speech"
    (tmp_path / "sentences.txt").write_text("".join(f"The {x} saw a {y}.\n" for x in THINGS for y in THINGS))
    command = [speech, "--hours", 0.005, "--text", tmp_path / "sentences.txt"]
    assert "train: " in said(command, main=synthetic_speech.main).out
    (stretch,) = audio.stretches(next((speech / "train").rglob("*.flac")))
    assert (stretch.rate, stretch.channels) == (16000, 1)
    assert "left out" not in said(["check", *(speech / name for name in ("train", "valid", "test"))]).out
    refused([speech], "is not empty", main=synthetic_speech.main)
