"""Commands that write texts: `transcribe` with phrases and segments, `convert` for it, and `align`."""

import hashlib
import json
import re
import types

import chex
import jax
import numpy as np
import pytest
from praatio import textgrid

from jax_rnnt import decode, timing
from jax_rnnt_speech.data import audio, rows
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.recognition import recognise, search_options, segments, spotter, transcripts
from jax_rnnt_speech.recognition.results import Labels
from jax_rnnt_speech.recognition.search import Decoding
from support import CONVOLUTIONAL, asr, random_model, run


def test_where_phrases_begin():
    """Behind the space of a vocabulary of characters; anywhere if words begin in several ways, or without spaces."""
    tokens = asr.data.tokens.Characters
    assert search_options.space_of(tokens("AB C")) == 2
    assert search_options.space_of(tokens("AB")) is search_options.space_of(tokens("A 漢")) is None
    pieces = types.SimpleNamespace(separator="▁", labels=["▁", "▁a", "b", None])
    assert search_options.space_of(pieces) is None


def test_large_weights(capsys):
    """What one label earns, by hand: 4 (1 + 2) nats are above 10, 4 (1 + 1) are not."""
    for depth, said in ((2.0, "a label earns 12 nats"), (1.0, "")):
        options = search_options.Searching(phrase_depth=depth)
        assert search_options.guarded([([0], 1.0), ([1], 4.0)], options)
        assert said in (err := capsys.readouterr().err) and bool(said) == bool(err)


@pytest.mark.slow
def test_phrases(corpus, trained, tmp_path, capsys, said, monkeypatch):
    """A file's texts are spelled as the model spells them, with their weights; a large one decides what is heard."""
    file = tmp_path / "phrases.txt"
    file.write_text("AB  a\t2\nC\t1e3\n\nx Ω\nB\n")
    config = asr.config.Config()
    model = types.SimpleNamespace(tokens=asr.data.tokens.Characters("ABC a"), config=config, blank=5)
    for beam, usual in ((0, 2.5), (4, 1.0)):
        args = search_options.Searching(phrases=file, beam=beam)
        found = search_options.decoding_of(args, model).fusion
        err = capsys.readouterr().err
        assert f"--phrases {file}, line 4: the model's vocabulary cannot spell 'x Ω'" in err
        assert "--phrases: a label earns 1000 nats" in err
        ways = [[0, 1, 3, 4], [0, 1, 3, 0], [2], [1]]  # "AB A", too
        expected = ((decode.Phrases(ways, [2.0, 2.0, 1e3, usual], classes=6, before=3), 1.0),)
        chex.assert_trees_all_equal(jax.tree.leaves(found), jax.tree.leaves(expected))
    file.write_text("AC\t2\n")
    deep = search_options.decoding_of(search_options.Searching(phrases=file, phrase_depth=0.5), model).fusion[0][0]
    _, state = deep.step(deep.initial(1), np.array([deep.start]))
    scores, _ = deep.step(state, np.array([0]))
    np.testing.assert_allclose(scores[0, 2], 2 * 1.5 + np.log(2), rtol=1e-6)
    file.write_text("C\t1e39\n")
    with pytest.raises(asr.system.UserError, match=r"--phrases .*weights must be known, and at most 1e\+30"):
        search_options.decoding_of(args, model)
    audio = next(corpus.rglob("*.flac"))
    file.write_text("C\t1e3\n")
    off = "--phrase-guard", "off"
    monkeypatch.setattr(search_options, "space_of", lambda tokens: None)  # phrases count anywhere
    command = ["transcribe", "--model", trained[0], "--format", "jsonl", "--confidence", "gibbs", audio, *off]
    x = json.loads(said([*command, "--phrases", file, "--checkpoint", "last"]).out)
    assert set(x["text"]) == {"C"} and len(x["words"]) == 1 and 0 <= x["words"][0]["confidence"] <= 1
    (tmp_path / "m.jsonl").write_text(json.dumps({"audio": str(audio), "text": "A B"}))
    x = json.loads(said(["test", "--model", trained[0], tmp_path / "m.jsonl", "--json", "--phrases", file, *off]).out)
    assert (x["insertions"], x["deletions"], x["substitutions"]) == (0, 1, 1)
    for text, message in (
        ("A\tmuch\n", "line 1: expected TEXT, or TEXT, a tab and a number, got 'A\\tmuch'"),
        ("\t1\n", "line 1: expected TEXT"),
        ("A\tnan\n", "line 1: expected TEXT"),
        ("Ω\n", "has no phrase that the model's vocabulary can spell"),
    ):
        file.write_text(text)
        assert message in said([*command, "--phrases", file], 2).err.splitlines()[-1]


def test_phrases_of_a_ctc_head(tmp_path, monkeypatch, refused, said):
    """They take the place of the words on their frames; what the search has, too, stays, and so do other words."""
    model = random_model(**CONVOLUTIONAL, chunk=0, ctc=0.3)
    spell = lambda text: [model.tokens.pieces.index(x) for x in text]
    known = Labels(spell("AB C AAB"), [1, 2, 3, 10, 11, 20, 21, 22], *([x] * 8 for x in (-0.1, 0.9, 1)))
    for text, start, end, expected in (
        ("CC", 9, 11, "AB CC AAB"), ("CC", 0, 11, "CC AAB"), ("BB", 14, 16, "AB C BB AAB"),
        ("BB", 30, 31, "AB C AAB BB"), ("AA", 20, 22, "AB C AAB"), ("C", 10, 11, "AB C AAB"),
        ("B C", 19, 23, "AB C B C"),
    ):  # fmt: skip
        chosen = spotter.Spotter((tuple(spell(text)),), (2.0,))
        found = chosen.put(model, known, [decode.FoundPhrase(0, start, end, 2.0 * len(text) - 0.5)])
        assert model.tokens.decode(found.labels) == expected and found.frames == sorted(found.frames)
        if expected.count(text) > "AB C AAB".count(text):
            np.testing.assert_allclose(min(found.log_probs), -0.5 / len(text))
    deep = spotter.Spotter(((0, 1, 2),), (2.0,), 0.5)
    assert deep.earned(0) == pytest.approx(2 + 3 + np.log(2) + 3 + np.log(3))
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    samples = np.random.default_rng(5).normal(0, 0.2, 8000).astype(np.float32)
    heard, plain = (next(recognise.transcribe(model, [("", samples)], Decoding(ctc=x))).text for x in (True, False))
    word = next(x for x in heard.split() if x not in plain)
    audio.write(tmp_path / "a.flac", samples, 8000)
    (tmp_path / "p.txt").write_text(f"{word}\n")
    command = ["transcribe", "--model", tmp_path, tmp_path / "a.flac", "--phrases", tmp_path / "p.txt"]
    assert word in said([*command, "--phrases-by", "ctc"]).out.split("\t")[1].split()
    model = random_model(**CONVOLUTIONAL, chunk=0)
    refused([*command, "--phrases-by", "ctc"], "needs a model with a head for CTC")


@pytest.fixture
def manifest(corpus, tmp_path):
    """(two files, a manifest of the first one and of a segment of the second)."""
    files = sorted(corpus.rglob("*.flac"))[:2]
    lines = {"audio": str(files[0]), "text": "A"}, {"audio": str(files[1]), "text": "A", "offset": 0.2}
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return files, tmp_path / "m.jsonl"


def test_forms(corpus, trained, manifest, tmp_path, said):
    """Every form has the text; segments have the times of their file; what is bad is named, and the rest written."""
    files, listed = manifest
    command = ["transcribe", "--model", trained[0], "--beam", 3]
    missing = corpus / "missing.flac"
    texts = dict(line.split("\t") for line in said([*command, *files, missing], 1).out.splitlines())
    out, error = said([*command, "--format", "json", "--nbest", 2, *files, missing], 1)
    objects = json.loads(out)
    assert f"{missing}: no such file" in error and [x["file"] for x in objects] == list(map(str, files))
    for x in objects:
        assert list(x) == ["file", "text", "duration", "words", "nbest"] and x["text"] == texts[x["file"]]
        assert " ".join(word["word"] for word in x["words"]) == " ".join(x["text"].split())
        assert all(0 <= y["start"] < y["end"] <= x["duration"] and 0 < y["confidence"] <= 1 for y in x["words"])
        assert x["nbest"][0]["text"] == x["text"] and len(x["nbest"]) == 2
        assert x["nbest"][0]["score"] >= x["nbest"][1]["score"]
    assert "heard" not in said([*command, "--format", "jsonl", "--output", tmp_path / "o.jsonl", listed]).err  # no bar
    whole, part = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert "nbest" not in whole and whole == {name: x for name, x in objects[0].items() if name != "nbest"}
    assert part["start"] == 0.2 and part["duration"] < 0.3
    assert all(0.2 <= x["start"] < x["end"] <= 0.2 + part["duration"] for x in part["words"])
    heard = next(x for x in files if texts[str(x)])
    begins = {"srt": "1\n00:00:0", "vtt": "WEBVTT\n\n", "ctm": f"{heard.stem} 1 ", "textgrid": "File type"}
    for form, begin in begins.items():
        assert said([*command, "--format", form, heard]).out.startswith(begin)
    out, error = said([*command, files[0], tmp_path / "none.jsonl"], 1)
    assert out == f"{files[0]}\t{texts[str(files[0])]}\n" and f"{tmp_path}/none.jsonl: does not exist" in error
    error = said(["transcribe", "--model", trained[0], "--format", "json", missing], 2).err
    assert error.splitlines()[-1] == "rnnt-speech: no recording could be used"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("{1} --format ctm", "--format ctm of 2 recordings needs --output, a file"),
        ("{m} --format vtt --model {t}/n", "--format vtt of 3 recordings needs --output, a folder"),
        ("{1} --format srt --output {t}/o.srt --model {t}/n", "of one recording, got 2"),
        ("--format srt --output {m}", "m.jsonl must be a folder"),
        ("--nbest 2", "--nbest needs --beam"),
        ("--nbest 3 --beam 2 --format json", "--nbest 3: --beam 2 has fewer hypotheses"),
        ("--output {t}", "--output {t} must be a file"),
        ("--output {t}/n/o.txt", "n is no folder"),
        ("--output {0}", "is one of the files that are read"),
        ("--phrases {t}/n", "n is no file"),
        ("--format html", "argument --format: invalid choice: 'html'"),
        ("--model {t}/n", "n is no folder"),
        ("--model {t}", "has no checkpoint: neither checkpoints/ of a run"),
    ],
)
def test_options_that_fit_nothing(trained, manifest, tmp_path, refused, more, message):
    """One line says what is wrong, and what is read stays. {0} and {1} are files, {m} a manifest and {t} a folder."""
    files, listed = manifest
    places = {"m": listed, "t": tmp_path}
    more = [x.format(*files, **places) for x in more.split()]
    model = [] if "--model" in more else ["--model", trained[0]]
    refused(["transcribe", files[0], *more, *model], message.format(**places))
    assert files[0].stat().st_size


def test_the_column_of_a_run(corpus, trained, manifest, tmp_path, refused, monkeypatch):
    """It counts where a table has it; one that a person names must be there."""
    model, command = asr.models.open_model(trained[0]), ["transcribe", "--model", trained[0], "--beam", 3]
    model.config = model.config.replace(audio_column="clip")
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    (tmp_path / "m.tsv").write_text(f"path\tclip\nmissing\t{manifest[0][0]}\n")
    for table in (tmp_path / "m.tsv", corpus / "all.jsonl"):
        run([*command, table])
    refused([*command, tmp_path / "m.tsv", "--audio-column", "file"], "must have the column file in its first line", 2)


def test_turns():
    """Segments of a speaker that overlap are one, those that touch are two; channels count from 1, or are letters."""
    turns = [segments.Segment("a", "1", *x) for x in ((0, 1, "A"), (1, 2, "A"), (1.5, 3, "A"), (2, 4, "B"))]
    assert [x[2:] for x in segments.joined(turns, 0)] == [(0, 1, "A"), (1, 3, "A"), (2, 4, "B")]
    assert [x[2:4] for x in segments.joined(turns[:2], 0.5)] == [(0, 2)]
    for line, expected in (  # names with spaces, which the form has no columns for
        ("a 1 0 2 <NA> <NA> A <NA> <NA>", ("a", "1", 0, 2, "A")), ("a 1 1 2 <NA> <NA> A", ("a", "1", 1, 3, "A")),
        ("my talk 1 1 2 <NA> <NA> A 0.5 <NA>", ("my talk", "1", 1, 3, "A")),
        ("a 2 1 2 <NA> <NA> Speaker 1 <NA> <NA>", ("a", "2", 1, 3, "Speaker 1")),
        ("my  talk 1 1 2 <NA> <NA> Dr. A B <NA> <NA>", ("my talk", "1", 1, 3, "Dr. A B")),
        ("a 1 1 2 x y 7 0.5", ("a", "1", 1, 3, "7")), ("a 1 1 2 <NA> <NA> <NA> <NA> <NA>", ("a", "1", 1, 3, "")),
    ):  # fmt: skip
        assert segments.segment_of_rttm(f"SPEAKER {line}") == expected
    for end in (None, "x", 10**400):
        with pytest.raises(rows.LineError, match="its times are no numbers"):
            segments.segment_of_json({"uri": "a", "start": 0, "end": end})
    numbers = {"1": 0, "2": 1, "12": 11, "A": 0, "b": 1, "0": None, "-1": None, "<NA>": None}
    assert {x: segments.number_of(x) for x in numbers} == numbers


def test_channels_of_segments(tmp_path, monkeypatch):
    """Each channel is decoded once, whoever speaks when; no text of those that overlap is lost in any form."""
    samples = np.random.default_rng(0).normal(0, 0.1, (2, 8000))
    audio.write(tmp_path / "my talk.wav", samples, 8000)
    lines = [f"SPEAKER my_talk {1 + i % 2} {i / 10} 0.2 <NA> <NA> {who}" for i, who in enumerate(["<NA>", "words"] * 4)]
    (tmp_path / "a.rttm").write_text("\n".join(lines))
    entries = segments.entries(tmp_path / "a.rttm", [rows.Entry("", tmp_path / "my talk.wav", "")])
    blocks, read = audio.blocks, []
    monkeypatch.setattr(audio, "blocks", lambda path: read.append(path) or blocks(path))
    for (_, found), x in zip(segments.loaded(entries, 8000), entries, strict=True):
        i = round(x.start * 10)
        np.testing.assert_allclose(found, samples[i % 2, 800 * i : 800 * i + 1600], atol=1e-4)
    assert len(read) == 2
    word = lambda i: [timing.Interval(i / 10, i / 10 + 0.2, f"w{i}")]
    parts = [(i / 10, transcripts.Transcript("", 0.2, word(i), speaker=["", "words"][i % 2])) for i in range(8)]
    assert [[x.text for x in y] for y in transcripts.tiers(parts).values()] == [
        ["w0", "w2", "w4", "w6"], ["w1", "w3", "w5", "w7"]
    ]  # fmt: skip
    parts = [(start, x._replace(speaker="")) for start, x in parts[:2]]
    assert transcripts.tiers(parts) == {"words": word(0), "words 2": word(1)}
    for form, shown in (("srt", transcripts.Files), ("ctm", transcripts.Rows)):
        to = transcripts.Output(form, tmp_path / f"o.{form}")
        writer = shown(to, entries, dict.fromkeys(range(8), "a"))
        for i in range(8):
            writer.add(i, transcripts.Transcript(f"w{i}", 0.2, word(i)))
        writer.close()
    assert re.findall(r"w\d", (tmp_path / "o.srt").read_text()) == [f"w{i}" for i in range(8)]
    assert [x.split()[1] for x in (tmp_path / "o.ctm").read_text().splitlines()] == ["1", "2"] * 4


TURNS = [("Ann <&>", 0.25, 1.0), ("Bo", 0.75, 1.5), ("Ann <&>", 2.0, 2.75)]  # a part of the second is also Ann's


@pytest.fixture
def turns(tmp_path, monkeypatch, said):
    """(the Result of each of the `TURNS`, a function that writes them in a form by a file of segments, the command)."""
    model, samples = random_model(**CONVOLUTIONAL), np.random.default_rng(5).normal(0, 0.2, 24000).clip(-1, 1)
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    audio.write(tmp_path / "a.flac", samples, 8000)
    heard = audio.read(tmp_path / "a.flac", 8000)
    cut = [(str(i), heard[int(8000 * a) : int(8000 * b)]) for i, (_, a, b) in enumerate(TURNS)]
    alone = list(recognise.transcribe(model, cut))
    assert len({x.text for x in alone}) == 3
    listed = [{"speaker": who, "start": a, "end": b} for who, a, b in TURNS]
    (tmp_path / "a.json").write_text(json.dumps({"output": {"diarization": listed}}))
    command = ["transcribe", "--model", tmp_path, tmp_path / "a.flac", "--segments"]

    def wrote(form, file="a.json", status=0):
        return said([*command, tmp_path / file, "--format", form], status)

    return alone, wrote, command


def test_segments_of_speakers(turns):
    """Each is transcribed as if it were a recording, overlaps too; every form names its speaker."""
    alone, wrote, _ = turns
    objects = json.loads(wrote("json").out)
    assert [(x["speaker"], x["start"], x["text"]) for x in objects] == [(*x[:2], y.text) for x, y in zip(TURNS, alone)]
    for x, (_, start, end) in zip(objects, TURNS):
        assert x["duration"] == end - start and all(start <= y["start"] < y["end"] <= end for y in x["words"])
    words = [(x["speaker"], y["word"], y["start"]) for x in objects for y in x["words"]]
    names = {"srt": ("Ann ＜&＞: ", "Bo: "), "vtt": ("<v Ann &lt;&amp;&gt;>", "<v Bo>")}
    for form, (ann, bo) in names.items():
        cues = wrote(form).out.removeprefix("WEBVTT\n\n").removesuffix("\n").split("\n\n")
        lines = [x.split("\n")[form == "srt" :] for x in cues]
        for name, who in ((ann, "Ann <&>"), (bo, "Bo")):
            text = " ".join(" ".join(x[1:])[len(name) :] for x in lines if x[1].startswith(name))
            assert "".join(text.split()) == "".join(word for speaker, word, _ in words if speaker == who)
        begins = [x[0][:12] for x in lines]
        assert begins == sorted(begins) and all(x[1].startswith((ann, bo)) for x in lines)
    rows = [x.split() for x in wrote("ctm").out.splitlines()]
    assert [(x[7].replace("_", " "), x[4], float(x[2])) for x in rows] == words and {x[6] for x in rows} == {"lex"}
    grid = wrote("textgrid").out
    assert [x.split('"')[1] for x in grid.splitlines() if "name = " in x] == ["Ann <&>", "Bo"]


def test_a_sign_within_a_persian_word():
    assert transcripts.ctm_word("می\u200cخواهم") == "می\u200cخواهم"


def test_segments_that_are_bad(turns, tmp_path, refused):
    """They are named, and the others used: RTTM and CTM."""
    alone, wrote, command = turns
    rttm = ["SPKR-INFO a 1 <NA> <NA> <NA> unknown Bo <NA>"]
    spoken = "a 1 0.75 0.5", "a 1 1.0 0.5", "a 1 0 -1", "a 1 0.8 0.1", "b 1 0 1"
    rttm += [f"SPEAKER {x} <NA> <NA> Bo" + " <NA>" * (i % 3) for i, x in enumerate(spoken)]
    (tmp_path / "a.rttm").write_text("\n".join(rttm))
    out, error = wrote("text", "a.rttm", 1)
    assert out.split("\t")[1] == f"Bo: {alone[1].text}\n"
    assert "SPKR-INFO are not used: 1" in error and "a.rttm, line 4: it must end after it begins" in error
    assert "b: no recording has this name" in error
    (tmp_path / "a.ctm").write_text("a 1 0.75 0.3 so 0.9 lex Bo\na 1 1.25 0.25 be 0.9 lex Bo\na 1 9 1 it NA lex Bo\n")
    out, error = wrote("text", "a.ctm", 1)
    assert out.split("\t")[1] == f"Bo: {alone[1].text}\n" and "a segment beyond the end of its file" in error
    (tmp_path / "b.rttm").write_text(rttm[-1])
    messages = {"b.rttm": "has no segment of", "none.rttm": "is no file", "a.flac": "must end in .rttm"}
    for file, message in messages.items():
        refused([*command, tmp_path / file], message)


def test_a_model_to_hand_on(corpus, trained, tmp_path, capsys, refused, monkeypatch, said):
    """`convert` writes float16 with a card; `transcribe` finds it without --model, and says where it would look."""
    card, folder, (audio, *_) = tmp_path / "data.md", tmp_path / "model", sorted(corpus.rglob("*.flac"))
    card.write_text("Licence: none.")
    run(["convert", folder, "--model", trained[0], "--dtype", "float16", "--card", card])
    facts = (folder / "card.md").read_text().splitlines()
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert facts[0] == "Licence: none." and digest in facts[2]
    assert len({x.stat().st_mode for x in folder.iterdir()}) == 1  # who may read one may read all
    first, again = (asr.models.read(x) for x in (trained[0], folder))
    chex.assert_trees_all_equal(jax.tree.map(np.float16, first.params), again.params)
    assert again.config.data.train == "all.jsonl" and str(corpus) not in (folder / "recogniser.json").read_text()
    monkeypatch.setenv("RNNT_SPEECH_MODEL", str(folder))
    capsys.readouterr()
    results = []
    for more in ([], ["--model", folder]):
        results.append(said(["transcribe", audio, *more]).out)
    assert results[0] == results[1]
    opening = asr.models.Opening()  # of a command that says later what it opened
    assert opening.opened().config == again.config and opening.folder == folder
    monkeypatch.setenv("RNNT_SPEECH_MODEL", str(tmp_path / "n"))
    refused(["transcribe", audio], f"--model is missing, and there is no {tmp_path / 'n'}")


def test_align(corpus, trained, tmp_path, capsys, monkeypatch, said):
    """The words of the texts in their order, within their files; texts outside the vocabulary are named."""
    files = sorted(corpus.rglob("*.flac"))[:3]
    texts = ["AB A", "C", "B Ω"]
    manifest = tmp_path / "m.jsonl"
    lines = [{"audio": str(file), "text": text} for file, text in zip(files, texts)]
    lines.append({"audio": str(files[2]), "text": "BA A", "offset": 0.2})
    manifest.write_text("".join(json.dumps(x) + "\n" for x in lines))
    command = ["align", "--model", trained[0], manifest]
    assert "left out, characters outside the vocabulary: 1" in said([*command, "--output", tmp_path / "o.ctm"], 1).err
    rows = [line.split() for line in (tmp_path / "o.ctm").read_text().splitlines()]
    expected = dict(zip((x.stem for x in files), ("AB A", "C", "BA A")))
    for name, text in expected.items():
        mine = [row for row in rows if row[0] == name]
        assert [row[4] for row in mine] == text.split()
        starts = [float(row[2]) for row in mine]
        assert starts == sorted(starts) and starts[0] >= (0.2 if name == files[2].stem else 0)
        assert float(mine[-1][2]) + float(mine[-1][3]) < 0.8
    texts = [json.loads(x)["text"] for x in said([*command, "--format", "jsonl"], 1).out.splitlines()]
    assert texts == ["AB A", "C", "BA A"]  # in their order
    with monkeypatch.context() as patch:
        patch.setattr(Model, "longest", 0.2)
        run([*command, "--max-seconds", 9, "--output", tmp_path / "none.ctm"], 2)
        assert "left out, longer than 0.2 s: " in capsys.readouterr().err
    run([*command, "--format", "textgrid", "--output", tmp_path / "grids"], 1)
    grid = textgrid.openTextgrid(str(tmp_path / f"grids/{files[0].stem}.TextGrid"), includeEmptyIntervals=False)
    assert [x.label for x in grid.getTier("words").entries] == ["AB", "A"]
