"""Speech for which a search wrote nothing: found where the test put it, heard once more, and never where there is none.

Words where nobody speaks: those that the test put there, and no others.

golden/speech.flac is 3.2 s of LibriSpeech (1272-128104-0000, CC BY 4.0); activity.npz are the probabilities that
onnxruntime found in it with silero_vad_16k_op15.onnx of silero-vad 6.2.3.
"""

import array
import asyncio
import json
import pathlib
import types

import numpy as np
import pytest

from jax_rnnt_speech.data import audio, rows
from jax_rnnt_speech.recognition import activity, recognise, streams, transcripts, unheard, windows
from jax_rnnt_speech.recognition.live import Windowed, Windows
from jax_rnnt_speech.recognition.results import no_labels
from jax_rnnt_speech.recognition.search import Decoding
from support import CONVOLUTIONAL, arrays, asr, labels_of, random_model, subwords

GOLDEN = pathlib.Path(__file__).parent / "golden"
RATE = 8000


def test_detector():
    """The probabilities of the original, however the samples are cut; forgetting changes nothing."""
    samples, expected = audio.read(GOLDEN / "speech.flac", 16000), arrays(GOLDEN / "activity.npz")["probabilities"]
    whole, parts = activity.Detector(16000), activity.Detector(16000)
    whole.add(samples)
    np.testing.assert_allclose(whole.probabilities, expected, atol=0.01)
    for x in np.split(samples, [100, 5000, 5001, 30000]):
        parts.add(x)
    np.testing.assert_allclose(parts.probabilities, whole.probabilities, atol=1e-5)
    whole.forget(1.0)
    assert len(whole.probabilities) == len(expected) - 31 and whole.speech()[0][0] == 31 * activity.SECONDS
    # From 0.5 on, until four chunks, 0.128 s, are below 0.35.
    parts.first, parts.probabilities = 0, [0, 0.49, 0.5, 0.4, 0.2, 0.2, 0.2, 0.36, 0.3, 0.3, 0.3, 0.3, 0.4, 0.9]
    np.testing.assert_allclose(np.array(parts.speech()) / activity.SECONDS, [(2, 8), (13, 14)])


def test_gaps():
    """Speech counts from 1 s on, half a second apart from labels; what may go on waits; long speech has parts."""
    for speech, spans, until, expected in (
        ([(1, 3)], [], 9, [(1, 3)]), ([(1, 1.9)], [], 9, []), ([(1, 3)], [(1.2, 1.4), (2.2, 2.4)], 9, []),
        ([(1, 1.6), (2, 2.6)], [], 9, [(1, 2.6)]), ([(1, 1.6), (3, 3.6)], [], 9, []), ([(1, 3)], [], 3.2, []),
        ([(1, 9)], [(4, 4.5)], 99, [(1, 3.5), (5, 9)]), ([(0, 45)], [], 99, [(0, 20), (20, 40), (40, 45)]),
    ):  # fmt: skip
        assert unheard.gaps(speech, spans, until)[0] == expected, (speech, spans, until)
    assert unheard.gaps([(1, 3)], [(3.6, 3.7)], 3.8, 3.6)[0] == [(1, 3)] and not unheard.gaps([(1, 3)], [], 3.8)[0]
    assert unheard.gaps([(1, 3)], [], 3.2)[1] == 1 and unheard.gaps([], [], 3.2)[1] == pytest.approx(2.7)


def speech():
    return audio.read(GOLDEN / "speech.flac", RATE)


def music(seconds):
    """Chords of decaying tones over a drum of noise."""
    rng, found = np.random.default_rng(0), np.zeros(int(seconds * RATE), np.float32)
    for i, chord in enumerate([(262, 330, 392), (220, 262, 330), (175, 220, 262), (196, 247, 294)] * int(seconds / 2)):
        t = np.arange(RATE // 2) / RATE
        tones = sum(np.sin(2 * np.pi * f * k * t) / k for f in chord for k in (1, 2, 3))
        drum = 0.05 * rng.normal(size=len(t)) * np.exp(-20 * t)
        found[i * RATE // 2 :][: len(t)] += tones * np.exp(-3 * t) / 12 + drum
    return found


def near(spans, truth):
    assert len(spans) == len(truth), (spans, truth)
    np.testing.assert_allclose(spans, truth, atol=0.3)


@pytest.fixture(scope="module")
def deaf():
    """(model, taken): a function in the place of `windows.taken` that finds nothing in windows of so many rows."""
    model, taken = random_model(**CONVOLUTIONAL, chunk=0), windows.taken

    def missing(least):
        def found(model, params, rows, lengths, *more):
            hypotheses, final, *rest = taken(model, params, rows, lengths, *more)
            heard = lengths < least  # also where shapes alone are traced
            return hypotheses._replace(counts=hypotheses.counts * heard), final * heard, *rest

        return found

    return model, missing


@pytest.mark.parametrize("silence", [0.2, pytest.param(30.0, marks=pytest.mark.slow)])
def test_speech_behind_silence(deaf, silence, monkeypatch):
    """A model that misses it says so; one that hears it from another cut writes what it finds there."""
    model, missing = deaf
    noise = np.random.default_rng(0).normal(0, 1e-4, int((silence + 4.5) * RATE)).astype(np.float32)
    begin = int(silence * RATE)
    noise[begin : begin + len(speech())] += speech()
    truth = [(silence, silence + 3.2)]
    monkeypatch.setattr(windows, "taken", missing(0))
    (lost,) = recognise.transcribe(model, [("", noise)])
    near(lost.unheard, truth)
    assert not lost.labels
    monkeypatch.setattr(windows, "taken", missing(4.2 / model.seconds))
    (found,) = recognise.transcribe(model, [("", noise)])
    assert not found.unheard and found.text.strip()
    times = np.array(found.frames) * model.seconds
    assert (times > silence - 0.5).all() and (times < silence + 3.8).all() and (np.diff(times) >= 0).all()


@pytest.mark.slow
def test_no_false_alarms(deaf, monkeypatch):
    """Neither noise nor music is speech, at any loudness; nor is speech that has its labels."""
    model, missing = deaf
    rng, sounds = np.random.default_rng(1), [music(12), 0.1 * music(12)]
    sounds += [(level * rng.normal(size=12 * RATE)).astype(np.float32) for level in (0.001, 0.03, 0.3)]
    slow = np.cumsum(rng.normal(size=12 * RATE))
    sounds.append((0.3 * (slow - np.convolve(slow, np.ones(999) / 999, "same")) / 30).clip(-1, 1).astype(np.float32))
    monkeypatch.setattr(windows, "taken", missing(0))
    assert [x.unheard for x in recognise.transcribe(model, enumerate(sounds))] == [()] * len(sounds)
    monkeypatch.undo()
    (whole,) = recognise.transcribe(model, [("", speech())])
    assert whole.unheard == () and len(whole.labels) > 10


def test_speech_without_labels():
    """It is the same, wherever samples and labels come in pieces.

    So it is where labels come before their speech is decided, as open ones do. What is decided takes no memory.
    """
    samples = np.concatenate([np.zeros(2 * RATE, np.float32), *[speech()] * 8, np.zeros(RATE, np.float32)])
    seconds = 0.04
    everywhere = [*range(50, 690, 10)]  # labels of 0.4 s, without those between 11.2 and 15.2 s, and half a second more
    missing = [x for x in everywhere if not 275 <= x < 375]
    for piece, ahead in ((0.3, 0.0), (0.3, 2.0), (4.0, 0.0), (40.0, 0.0)):
        for frames, truth in ((everywhere, []), (missing, [(11.7, 14.7)])):
            ear, known, found = unheard.Ear(RATE), 0, []
            for begin in np.arange(0, len(samples) / RATE, piece):
                ear.forget(begin)
                ear.add(samples[round(begin * RATE) : round((begin + piece) * RATE)])
                until = min(begin + piece, len(samples) / RATE)
                some = [x for x in frames if known <= x * seconds < until + ahead]
                ear.wrote(labels_of([0] * len(some), some, duration=10), seconds)
                known = until
                found += ear.check(until)
                held = len(ear.samples) / RATE, len(ear.detector.probabilities) * activity.SECONDS, len(ear.spans)
                assert piece > 1 or (np.array(held) < (9, 9, 20)).all(), held
            found += ear.check(known, end=True)
            near(found, truth)


def test_what_is_heard_again(monkeypatch):
    """Samples from 0.4 s before the speech to 0.4 s behind it, from a row of the encoder on, 10 minutes at most."""
    ear, samples = unheard.Ear(RATE), np.arange(4 * RATE, dtype=np.float32)
    for begin, first in ((0, 5000), (5001, 5500)):
        ear.samples, ear.begin = samples[begin:], begin
        found = ear.cut(1.0, 2.0, 500)
        assert found[0] == first
        np.testing.assert_array_equal(found[1], samples[first:19200])
    monkeypatch.setattr(ear, "check", lambda *_: iter([(0.5, 1.0), (1.5, 2.0), (2.5, 3.0)]))
    monkeypatch.setattr(unheard, "MOST", 0.7)
    ear.take(4.0, 500)
    assert len(ear.found) == 3 and [x[:2] for x in ear.jobs] == [(0.5, 1.0), (1.5, 2.0)]


def test_second_texts():
    """They count if a word is sure, and never cut one in two; spaces that are labels of their own are added."""
    model = random_model(**CONVOLUTIONAL)
    labels = lambda text, frames: labels_of(["ABC ".index(x) for x in text], frames)
    second, seconds = labels("CC C", [5, 6, 7, 8]), model.seconds
    for first, sure, text in (
        ("", 0.9, "CC C"), ("A|B", 0.9, None), ("A |B", 0.9, "A CC C B"), ("A| B", 0.9, "A CC C B"),
        ("A |B", 0.4, None), ("A|", 0.9, "A CC C"), ("|B", 0.9, "CC C B"),
    ):  # fmt: skip
        before, _, after = first.partition("|")
        known = labels(before + after, [*range(len(before)), *range(40, 40 + len(after))])
        other = second._replace(log_probs=[float(np.log(sure))] * 4)
        found = unheard.joined(model, known, other, 10, 12 * seconds, 20 * seconds)
        assert (found and model.tokens.decode(found.labels)) == text, first
        if found:
            assert all(len(x) == len(found.labels) for x in found) and found.frames == sorted(found.frames)
            assert found.labels.count(2) == 3 and 15 in found.frames
    unsure = second._replace(log_probs=np.log([0.9, 0.4, 0.9, 0.4]).tolist())  # a label of each word
    assert unheard.joined(model, labels("", []), unsure, 10, 12 * seconds, 20 * seconds) is None
    across = unheard.joined(model, labels("", []), second, 10, 16.9 * seconds, 20 * seconds)
    assert model.tokens.decode(across.labels) == "CC C"  # the middle of a word decides


def test_what_commands_say(deaf, tmp_path, monkeypatch, said):
    """In JSON and in a line for people; times count from the start of the file."""
    model, missing = deaf
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    monkeypatch.setattr(windows, "taken", missing(0))
    samples = np.concatenate([np.zeros(RATE, np.float32), speech()])
    audio.write(tmp_path / "a.flac", samples, RATE)
    (tmp_path / "m.jsonl").write_text(json.dumps({"audio": "a.flac", "offset": 0.5, "text": ""}))
    for source in ("a.flac", "m.jsonl"):
        out, error = said(["transcribe", "--model", tmp_path, tmp_path / source, "--format", "json"])
        ((spans,),) = [[[tuple(y.values()) for y in x["unheard"]] for x in json.loads(out)]]
        near(spans, [(1.0, 4.2)])
        assert "speech without words: 1.0 to 4." in error or "speech without words: 0.9 to 4." in error


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_streams(deaf, whole, monkeypatch):
    """They hear missed speech once more: its words come in their place. Where that finds none, an event says so."""
    model = deaf[0] if whole else random_model(**CONVOLUTIONAL, max_symbols=1)
    pauses = [np.zeros(int(x * RATE), np.float32) for x in (1, 0.4, 2)]
    samples = np.concatenate([pauses[0], speech(), pauses[1], speech(), pauses[2]])
    silent = lambda run: lambda self, steps: [(no_labels(), no_labels(), rows) for *_, rows in run(self, steps)]

    def without(part, rows):
        return part.chosen([i for i, x in enumerate(part.frames) if x >= rows])

    def live(slots=None):
        """A stream that hears nothing until 4.6 s."""
        made = Windowed(model, chunk=0.5, right=0.5) if whole else streams.Stream(model, slots=slots)
        run, begin = made.slots.run, 4.6 / model.seconds

        def found(steps):
            own = whole or steps[0].slot == made.slot
            return [(without(x, begin), without(y, begin), n) for x, y, n in run(steps)] if own else run(steps)

        made.slots.run = found
        return made

    def events(live):
        return [y for x in live.heard(samples, end=True) for y in live.events(*x)]

    async def served(live):
        """As `serve` has it, which waits for its steps."""
        live.slots.step = lambda step: asyncio.to_thread(lambda: live.slots.run([step])[0])
        return [y async for x in live.hear(samples, end=True) for y in live.events(*x)]

    for slots in (None, None if whole else streams.Slots(model, 3)):
        stream = live(slots)
        found = asyncio.run(served(stream)) if slots else events(stream)
        words = [word for x in found if x["type"] == "words" for word in x["words"]]
        times = np.array([x["start"] for x in words])
        assert (np.diff(times) >= 0).all() and (times < 0.5).sum() == 0 and (times > 4.59).sum() > 2
        assert ((times > 0.5) & (times < 4.59)).sum() > 2 and not [x for x in found if x["type"] == "unheard"]
        assert slots is None or len(stream.slots.free) == 2
    if whole:  # as a recording of its own, also by a beam, whose last labels are open until the end
        (alone,) = recognise.transcribe(model, [("", speech())], Decoding(2))
        found = streams.finished(Windowed(model, Decoding(2), chunk=0.5, right=0.5).again(speech()))
        assert found.labels[:100] == alone.labels[:100] and found.frames[-1] >= alone.frames[-1] - 1
    lost = lambda stream: [(x["start"], x["end"]) for x in events(stream) if x["type"] == "unheard"]
    if not whole:
        near(lost(live(streams.Slots(model, 2))), [(1.0, 4.2)])  # the last slot is for another recording
    for kind in (streams.Slots, Windows):
        monkeypatch.setattr(kind, "run", silent(kind.run))
    near(lost(live()), [(1.0, 7.8)])


def ear_of(seconds, speech, quiet, levels):
    """An Ear that has heard probabilities of 0.9 where there is speech."""
    ear, times = unheard.Ear(16000), np.arange(int(seconds / activity.SECONDS)) * activity.SECONDS
    spoken = np.any([times < 0, *((a <= times) & (times < b) for a, b in speech)], 0)
    found = np.where(spoken, 0.9, quiet), levels[: len(times)]
    ear.detector.probabilities, ear.detector.levels = (array.array("f", x) for x in found)
    ear.detector.spoken = spoken.sum()
    return ear


def test_where_nobody_speaks():
    """All of a word, from 0.5 s before it to 0.3 s behind it, must be quiet; less than half a second tells nothing.

    Where the detector has heard a voice for less than a second, the loudness must be steady, too.
    """
    loud, tones = np.full(312, 0.1), np.where(np.arange(312) % 8 < 4, 0.1, 0.01)
    model, voice = types.SimpleNamespace(tokens=asr.data.tokens.Characters("A"), seconds=0.01), [(3, 5)]
    for seconds, speech, quiet, levels, word, told in (
        (10, voice, 0.09, loud, (0, 0.2), True), (10, voice, 0.09, loud, (2.3, 2.6), True),
        (10, voice, 0.09, loud, (2.5, 2.8), False), (10, voice, 0.09, loud, (2, 6), False),
        (10, voice, 0.09, loud, (3.5, 3.9), False), (10, voice, 0.09, loud, (5.4, 5.6), False),
        (10, voice, 0.09, loud, (5.6, 5.7), True), (10, voice, 0.09, loud, (9.98, 10), True),
        (10, voice, 0.11, loud, (7, 7.2), False), (10, voice, 0.09, tones, (7, 7.2), True),
        (10, [(3, 3.5)], 0.09, tones, (7, 7.2), False), (10, [], 0.09, tones, (7, 7.2), False),
        (10, [], 0.09, loud, (7, 7.2), True), (10, [], 0.09, 0.001 * tones, (7, 7.2), True),
        (0.6, [], 0.09, loud, (0, 0.1), True), (0.4, [], 0.09, loud, (0, 0.1), False),
        (0.02, [], 0.09, loud, (0, 0.02), False),
    ):  # fmt: skip
        ear, (first, last) = ear_of(seconds, speech, quiet, levels), (round(100 * x) for x in word)
        kept, invented = unheard.sifted(model, labels_of([0], [first], duration=last - first), ear, seconds)
        assert kept.labels == [0] * (not told), (seconds, speech, word)
        np.testing.assert_allclose([y for x in invented for y in x[:2]], word * told)


def test_dropped_words():
    """A word takes its punctuation and the space before it along, and all bytes of its characters."""
    characters = asr.data.tokens.Characters("ABC,. ")
    pieces = subwords(["AB AB", "今日は良い 天気です。"], vocab_size=290, byte_fallback=True)
    for tokens, text, wrong, expected in (
        (characters, "A, BC A.", {0}, "BC A."), (characters, "A, BC A.", {1}, "A, A."),
        (characters, "A, BC A.", {2}, "A, BC"), (characters, "A, BC A.", {0, 1, 2}, ""),
        (pieces, "AB ñ AB", {1}, "AB AB"), (pieces, "AB ñ AB", {0, 2}, "ñ"), (pieces, "AB ñ AB", set(), "AB ñ AB"),
    ):  # fmt: skip
        labels, model = tokens.encode(text), types.SimpleNamespace(tokens=tokens, seconds=1.0)
        ear = unheard.Ear(16000)
        words = transcripts.words(model, labels, [*range(len(labels))])
        ear.detector.sure = lambda begin, end, gone=[words[i].start - 0.5 for i in wrong]: begin in gone
        kept, invented = unheard.sifted(model, labels_of(labels, [*range(len(labels))]), ear)
        assert tokens.decode(kept.labels).strip() == expected and len(invented) == len(wrong), (text, wrong)


def test_invented_words(tmp_path, monkeypatch, said):
    """Those in zeros around speech, and none else, are named in JSON, streams and a line; or they are left out."""
    model = random_model(**CONVOLUTIONAL, max_symbols=1)
    model.tokens = asr.data.tokens.Characters("甲乙丙丁")  # every label is a word
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    samples = np.concatenate([np.zeros(3 * RATE, np.float32), speech(), np.zeros(25 * RATE, np.float32)])
    audio.write(tmp_path / "a.flac", samples, RATE)
    entry = rows.Entry("a", tmp_path / "a.flac", "", start=5.0)
    (result,) = recognise.transcribe(model, [("", samples)])
    found = transcripts.transcript(model, entry, result).object(entry)
    words, invented = found["words"], found["invented"]
    assert "".join(x["word"] for x in words) == found["text"] and len(result.invented) == len(invented)
    for word in words:
        begin, end = word["start"] - 5, word["end"] - 5
        if end < 3 - 0.6 or begin > 6.2 + 0.8:
            assert word in invented
        if end > 3 and begin < 6.2:
            assert word not in invented
    left = [x for x in words if x not in invented]
    assert min(len(left), len(invented)) > 20
    monkeypatch.setattr(windows, "WINDOW", 1.0)  # so that there are texts of parts
    texts, pieces = [], iter(np.split(samples, 40))
    watch = lambda _, x: texts.append(model.text(x.labels, len(x.labels))) or True
    (result,) = recognise.transcribe(model, [("", pieces)], Decoding(drop_invented=True), watch)
    assert result.text == texts[-1] == "".join(x["word"] for x in left)
    assert all(result.text.startswith(x) for x in texts) and len({*texts}) > 2
    assert transcripts.transcript(model, entry, result).object(entry) == found | {"text": result.text, "words": left}
    arguments = ["--model", tmp_path, tmp_path / "a.flac", "--drop-invented"]
    out, error = said(["transcribe", *arguments])
    assert out == f"{tmp_path / 'a.flac'}\t{result.text}\n"
    assert f"a.flac: words where nobody speaks, left out: {len(invented)}, 0.0 to 2." in error
    events = [json.loads(x) for x in said(["stream", *arguments, "--json"])[0].splitlines()]
    live = {kind: [y for x in events if x["type"] == kind for y in x["words"]] for kind in ("words", "invented")}
    placed = lambda some, first: [(x["word"], round(x["start"] - first, 2)) for x in some]
    assert sorted(placed(live["words"] + live["invented"], 0), key=lambda x: x[1]) == placed(words, 5)
    # A stream knows the past alone: at first too little, and nothing of speech that is about to begin.
    same = lambda some: [x for x in some if 0.5 <= x[1] < 2.5 or x[1] >= 3]
    assert same(placed(live["words"], 0)) == same(placed(left, 5))
    assert same(placed(live["invented"], 0)) == same(placed(invented, 5))
    assert "".join(x["text"] for x in events if x["type"] == "words") == "".join(x["word"] for x in live["words"])
