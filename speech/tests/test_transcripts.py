"""Words with their times, the forms of transcripts, and forced alignment."""

import contextlib
import hashlib
import html
import io
import itertools
import json
import os
import re
import types
import unicodedata
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import sentencepiece
from praatio import textgrid

from jax_rnnt import decode, timing
from jax_rnnt_speech.data import audio, rows
from jax_rnnt_speech.model import Model
from jax_rnnt_speech.recognition import recognise, search_options, segments, spotter, transcripts
from jax_rnnt_speech.recognition.results import Labels
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.system import outputs
from support import CONVOLUTIONAL, asr, random_model, run, subwords


@pytest.mark.parametrize("text", ["A AB  BA", " A", "B ", "", " ", "BAB"])
def test_words(text):
    """They are those of the text, of characters and of subwords; times and confidence by hand."""
    characters = asr.data.tokens.Characters("AB ")
    config = asr.config.Config.of(tokens="subwords", vocabulary=8)
    subwords = asr.data.tokens.train(config.head, ["A AB BA", "BAB A", "ABBA AB"] * 9)
    for tokens in (characters, subwords):
        labels = [int(x) for x in tokens.encode(text)]
        model = types.SimpleNamespace(tokens=tokens, seconds=0.5)
        frames = 2 * np.arange(len(labels))
        found = transcripts.words(model, labels, frames, 0.5 + 0.01 * frames, start=10.0)
        assert [x.text for x in found] == text.split()
        if tokens is characters:
            first = {i for i, x in enumerate(text) if x != " " and (not i or text[i - 1] == " ")}
            last = {i for i, x in enumerate(text) if x != " " and text[i + 1 : i + 2] in ("", " ")}
            assert [x.start for x in found] == [10.0 + i for i in sorted(first)]
            assert [x.end for x in found] == [10.5 + i for i in sorted(last)]
            assert [x.confidence for x in found] == [round(0.5 + 0.02 * i, 4) for i in sorted(first)]


LINES = [
    "good morning everyone, she is here",
    "morning (of the) good is señor",
    "今日は良い天気です。iPhone を買った 一緒に",
]
VOCABULARIES = {
    "bytes": {"vocab_size": 340, "byte_fallback": True},
    "no space at the beginning": {"vocab_size": 340, "byte_fallback": True, "add_dummy_prefix": False},
    "controls": {"vocab_size": 90, "pad_id": 3, "control_symbols": ["<|en|>"], "user_defined_symbols": ["[laugh]"]},
    "unigram": {"vocab_size": 45, "model_type": "unigram"},
    "spaces at ends": {"vocab_size": 80, "treat_whitespace_as_suffix": True},
    "several words": {"vocab_size": 110, "split_by_whitespace": False},
}


def rejoined(words):
    return "".join("".join(x.text for x in words).split())


@pytest.mark.parametrize("name", VOCABULARIES)
def test_one_spelling(name):
    """Words, captions, files and segments of random labels are what sentencepiece decodes, and so are labels alone."""
    tokens, rng = subwords(LINES, **VOCABULARIES[name]), np.random.default_rng(0)
    decode = sentencepiece.SentencePieceProcessor(model_proto=tokens.model).decode
    model, size = types.SimpleNamespace(tokens=tokens, seconds=0.1), len(tokens.pieces)
    printed = [i for i in range(size) if not decode([5, i]).isprintable()]
    for _ in range(30):
        labels = [int(x) for x in rng.integers(0, size, rng.integers(1, 60)) if x not in printed]
        if rng.random() < 0.5:
            labels = [1, *tokens.tokenizer.encode(" ".join(rng.permutation([*LINES[0].split(), "señor", "今日は"]))), 2]
        text = decode(labels)
        assert tokens.decode(labels) == text
        x = asr.recognition.results.Result(
            "a", text, labels, [*range(len(labels))], [], [0.5] * len(labels), [1] * len(labels), 9.0
        )
        x = transcripts.transcript(model, rows.Entry("a", Path("a"), ""), x)
        if not any(y.isalnum() for y in text):
            continue
        assert rejoined(x.words) == "".join(text.split()) and all(y.text.split() == [y.text] for y in x.words)
        if not any(unicodedata.east_asian_width(y) == "W" or unicodedata.category(y)[0] == "P" for y in text):
            assert " ".join(y.text for y in x.words) == " ".join(text.split())
        shown = transcripts.captions(x.words, x.duration, x.space, x.text)
        assert "".join(y.text for y in shown).replace("\n", "").replace(" ", "") == "".join(text.split())
        lines = [y.text for y in transcripts.segments(x)]
        place = 0
        for line in lines:  # with the white space of the text
            place = " ".join(text.split()).index(line, place) + len(line)
    table = [x or "" for x in tokens.labels]
    labels = tokens.tokenizer.encode(LINES[1])
    spelled = "".join(table[i] for i in labels).encode("utf-8", "surrogateescape").decode()
    assert spelled.replace("▁", " ").strip() == decode(labels).strip()
    assert all(table[i] == "" for i in range(size) if tokens.tokenizer.is_control(i))


def test_tokenizers_of_hugging_face():
    """As above, of byte-level and other tokenizers."""
    tokenizers = pytest.importorskip("tokenizers")
    models, trainers = tokenizers.models, tokenizers.trainers
    pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    kinds = (
        (models.BPE(), trainers.BpeTrainer, pre.ByteLevel(add_prefix_space=False), decoders.ByteLevel(),
         {"initial_alphabet": pre.ByteLevel.alphabet(), "special_tokens": ["<|en|>"]}),
        (models.BPE(unk_token="<unk>"), trainers.BpeTrainer, pre.Metaspace(), decoders.Metaspace(),
         {"special_tokens": ["<unk>"]}),
        (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer, pre.BertPreTokenizer(), decoders.WordPiece(),
         {"special_tokens": ["[UNK]"]}),
        (models.BPE(end_of_word_suffix="</w>"), trainers.BpeTrainer, pre.Whitespace(), decoders.BPEDecoder(),
         {"end_of_word_suffix": "</w>"}),
    )  # fmt: skip
    for model, trainer, splits, decoder, options in kinds:
        tokenizer, rng = tokenizers.Tokenizer(model), np.random.default_rng(0)
        tokenizer.pre_tokenizer, tokenizer.decoder = splits, decoder
        tokenizer.train_from_iterator(LINES * 20, trainer(vocab_size=330, show_progress=False, **options))
        tokens = asr.data.tokens.Pretrained(tokenizer.to_str(), tokenizer.get_vocab_size())
        assert tokens.separates
        for _ in range(20):
            labels = rng.integers(0, len(tokens.pieces), 30).tolist()
            words, text = transcripts.words_of(tokens, labels, range(30), hop=0.1), tokenizer.decode(labels)
            plain = "".join(x for x in text if not x.isspace() and unicodedata.category(x) != "Cc")
            assert rejoined(words) == plain == "".join(tokens.decode(labels).split())


def test_words_end_with_their_recording():
    """No word reaches beyond it, also where a frame begins at its end; words of one frame share what is left of it."""
    model = types.SimpleNamespace(tokens=asr.data.tokens.Characters("AB "), seconds=0.5)
    for labels, frames, durations, length, expected in (
        ([0], [3], [4], 3.1, [("A", 1.5, 3.1)]),
        ([0, 2, 1], [3, 3, 3], None, 1.7, [("A", 1.5, 1.6), ("B", 1.6, 1.7)]),
        ([0, 2, 1], [1, 4, 4], None, 2.0, [("A", 0.5, 1.0), ("B", 1.5, 2.0)]),  # frame 4 begins at the end
        ([0, 2, 1], [0, 4, 4], None, 2.005, [("A", 0.0, 0.5), ("B", 1.5, 2.0)]),
        ([0], [2], None, 0.0, [("A", 0.0, 0.0)]),
    ):
        found = transcripts.words(model, labels, frames, durations=durations, duration=length)
        for x, (text, start, end) in zip(found, expected, strict=True):
            assert x.text == text and x[:2] == pytest.approx((start, end)), (frames, x)


class Entries:
    """Of two files: a whole one, and one with three segments of which two overlap."""

    whole = rows.Entry("t/my talk.wav", Path("t/my talk.wav"), "")
    parts = tuple(rows.Entry(f"m/a.wav from {x:g} s", Path("m/a.wav"), "", x, y) for x, y in ((2, 4), (0, 2)))
    over = rows.Entry("m/a.wav from 3 s", Path("m/a.wav"), "", 3.0, 5.0)


def test_names():
    """Of the file, or of each segment where they overlap; equal ones are told apart."""
    names = lambda *x: list(transcripts.names_of(x, lambda name: name.replace(" ", "_")).values())
    fault = rows.Fault("bad", "line 1")
    assert names(Entries.whole, fault, *Entries.parts) == ["my_talk", "a", "a"]
    assert names(*Entries.parts, Entries.over) == ["a_from_2_s", "a_from_0_s", "a_from_3_s"]
    assert names(Entries.whole, Entries.whole) == ["my_talk", "my_talk_2"]
    other = Entries.whole._replace(audio=Path("u/my_talk.wav"), name="u/my_talk.wav")
    assert names(Entries.whole, other) == ["t_my_talk.wav", "u_my_talk.wav"]


def test_any_name(tmp_path):
    """Of 255 bytes, no UTF-8, a comment, a space: each has its file or rows, and JSON names the very file."""
    stems = ["長" * 83, "x" * 251, ";;c", " ", os.fsdecode(b"\xe9"), "a\nb"]
    entries = [rows.Entry(x, tmp_path / f"{x}.wav", "") for x in stems]
    said = lambda i: transcripts.Transcript("A", 0.0 if i else 2.0, [timing.Interval(0.0, 1.0, "A")][i:])  # or nothing
    for form in transcripts.FORMATS:
        (tmp_path / form).mkdir(exist_ok=form in transcripts.SUFFIXES)
        output = tmp_path / form if form in transcripts.SUFFIXES else tmp_path / f"o.{form}"
        with transcripts.writer(transcripts.Output(form, output), entries) as write:
            for i, _ in enumerate(entries):
                write(i, said(i if form == "textgrid" else 0))
        if form in transcripts.SUFFIXES:
            files = [*output.iterdir()]
            assert len(files) == len(stems) and max(len(os.fsencode(x.name)) for x in files) <= 255
            assert {x.name for x in files} >= {f" {transcripts.SUFFIXES[form]}"}
    rows = (tmp_path / "o.ctm").read_text().splitlines()
    assert len({x.split()[0] for x in rows}) == len((tmp_path / "o.text").read_text().splitlines()) == len(stems)
    for whole in (
        json.loads((tmp_path / "o.json").read_text()),
        map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines()),
    ):
        assert [x["file"] for x in whole] == [str(x.audio) for x in entries]


def test_files(tmp_path):
    """CTM, captions and TextGrid of words by hand; segments of a file are joined in their order."""
    I = timing.Interval
    found = [([I(2.5, 3.0, "late", 0.5)], 0), ([I(0.25, 0.5, "so", 0.75), I(0.5, 1.0, "be", 1.0)], 1)]

    def write(form, output, entries=Entries.parts, found=found, space=" "):
        args = transcripts.Output(form, tmp_path / output)
        with transcripts.writer(args, entries) as each:
            for words, i, *text in found:
                each(i, transcripts.Transcript(*text or [""], 2.0, words, space=space))
        return (tmp_path / output).read_text() if (tmp_path / output).is_file() else ""

    rows = "a 1 0.250000 0.250000 so 0.750000\na 1 0.500000 0.500000 be 1.000000\na 1 2.500000 0.500000 late 0.500000\n"
    assert write("ctm", "o.ctm") == rows
    srt = "1\n00:00:00,250 --> 00:00:01,250\nso be\n\n2\n00:00:02,500 --> 00:00:03,500\nlate\n"
    assert write("srt", "o.SRT") == srt
    assert write("srt", "o.SRT", space="") == srt.replace("so be", "sobe")
    write("srt", "captions", [*Entries.parts, Entries.whole], [*found, ([I(1.5, 1.75, "good")], 2)])
    assert (tmp_path / "captions/a.srt").read_text() == srt
    assert (tmp_path / "captions/my talk.srt").read_text().endswith("00:00:01,500 --> 00:00:02,000\ngood\n")
    assert write("vtt", "o.vtt") == "WEBVTT\n\n" + srt.replace(",", ".").replace("1\n0", "0").replace("2\n0", "0")
    write("textgrid", "o.TextGrid")
    grid = textgrid.openTextgrid(str(tmp_path / "o.TextGrid"), includeEmptyIntervals=False)
    assert grid.maxTimestamp == 4 and [x.label for x in grid.getTier("words").entries] == ["so", "be", "late"]
    overlap = [*found, ([I(3.0, 3.5, "and")], 2)]
    assert "a_from_3_s 1 3.000000 0.500000 and\n" in write("ctm", "o.ctm", [*Entries.parts, Entries.over], overlap)
    with pytest.raises(asr.system.UserError, match=r"o.srt is the file of one recording, got 3: name a folder"):
        write("srt", "o.srt", [*Entries.parts, Entries.over])
    one = [I(0.25, 0.5, "今日"), I(0.5, 1.0, "は"), I(1.0, 1.5, "A")]
    japanese = [(one, 1, "今日は A"), ([I(2.6, 2.7, "B")], 0, "B")]
    write("vtt", "o.vtt", found=japanese)
    assert (tmp_path / "o.vtt").read_text().split("\n")[3] == "今日は A"


def parsed_srt(data):
    """Texts of cues as players show them: no number, no times, no markup of HTML or SSA."""
    cues = [x.split("\n", 2) for x in data.strip().split("\n\n")]
    assert all(int(number) == i and times.count("-->") == 1 for i, (number, times, _) in enumerate(cues, 1))
    return [re.sub(r"<[^>]*>|\{[^}]*\}", "", text.replace("\\N", "\n").replace("\\h", " ")) for *_, text in cues]


def parsed_ctm(data):
    """Words of rows, without comments and without the marks of alternatives, after NIST's description."""
    rows = [x.split() for x in data.splitlines() if not x.startswith(";;")]
    assert all(len(x) in (5, 6) for x in rows)
    return [x[4] for x in rows if not re.fullmatch(r"<.*>", x[4])]


def parsed_textgrid(data):
    """Texts of intervals, after Praat's manual: a quote within a text is doubled."""
    return [x.replace('""', '"') for x in re.findall(r'text = "((?:[^"]|"")*)" *\n', data) if x]


@pytest.mark.parametrize(
    "text",
    [
        "<i>so</i>",
        "{\\an8}so",
        "{b}",
        "so\\Nbe",
        "-->",
        "so-->be",
        "<",
        ";;so",
        'so "be"',
        '"',
        "<ALT_BEGIN>",
        "<v Ann>",
        "&lt;",
    ],
)
def test_marks_of_formats(text, tmp_path):
    """What is said is no markup. Truth: readers of these formats, after their descriptions; NFKC joins both forms."""
    words = [timing.Interval(i / 4, (i + 1) / 4, x) for i, x in enumerate(text.split())]
    readers = {
        "srt": lambda data: " ".join(parsed_srt(data)).replace("→", "-->"),
        "vtt": lambda data: html.unescape(re.sub("<[^>]*>", "", data.split("\n")[3])),
        "ctm": lambda data: " ".join(parsed_ctm(data)).replace("_;", ";;"),
        "textgrid": lambda data: " ".join(parsed_textgrid(data)),
        "text": lambda data: data.split("\t")[1].rstrip("\n"),
        "json": lambda data: json.loads(data)[0]["text"],
    }
    for form, read in readers.items():
        for speaker in "", "Ann <b>":
            path = tmp_path / f"{form}{transcripts.SUFFIXES.get(form, '')}"
            with transcripts.writer(transcripts.Output(form, path), [Entries.whole]) as write:
                write(0, transcripts.Transcript(text, 2.0, words, speaker=speaker))
            data = path.read_text()
            if speaker and form in ("ctm", "textgrid"):  # which have columns or tiers of them
                continue
            found = unicodedata.normalize("NFKC", read(data))
            named = speaker and form in ("srt", "text")
            assert found == (f"{speaker}: {text}" if named else text), (form, data)


def test_texts_are_lines(tmp_path):
    """A text is one line behind a tab, also where a vocabulary writes line breaks; a CTM's word is one column.

    White space at its ends is none of it, whichever labels a model writes there.
    """
    assert random_model(**CONVOLUTIONAL).text(np.array([3, 0, 3, 1, 3, 2]), 5) == "A B"
    with transcripts.writer(transcripts.Output("text", tmp_path / "o"), [Entries.whole]) as write:
        write(0, transcripts.Transcript("so\nbe\u2028it", 2.0, []))
    assert (tmp_path / "o").read_text() == "t/my talk.wav\tso be it\n"
    with transcripts.writer(transcripts.Output("ctm", tmp_path / "c"), [Entries.whole]) as write:
        write(0, transcripts.Transcript("", 2.0, [timing.Interval(0.0, 1.0, "so\u00a0be")]))
    assert parsed_ctm((tmp_path / "c").read_text()) == ["so_be"]


def test_what_was_written_stays(tmp_path, monkeypatch):
    """In every format: at each moment the files hold what came, whole; also where the last one is no more written."""
    I, entries = timing.Interval, [*Entries.parts, Entries.whole]
    said = {0: ("so be", 2.0), 1: ("it is", 0.0), 2: ("a --> b <c>", 0.0)}
    done = {
        i: transcripts.Transcript(
            text, 2.0, [I(start + k / 4, start + k / 4 + 0.2, x) for k, x in enumerate(text.split())]
        )
        for i, (text, start) in said.items()
    }
    read = {
        "text": lambda file: [x.split("\t")[1] for x in file.read_text().splitlines()],
        "json": lambda file: [x["text"] for x in json.loads(file.read_text())],
        "jsonl": lambda file: [json.loads(x)["text"] for x in file.read_text().splitlines()],
        "ctm": lambda file: [
            " ".join(x.split()[4] for x in rows)
            for _, rows in itertools.groupby(file.read_text().splitlines(), lambda x: x.split()[0])
        ],
        "srt": lambda file: re.findall(r"--> [\d:,]+\n(.*)", file.read_text()),
        "vtt": lambda file: re.findall(r"--> [\d:.]+\n(.*)", file.read_text()),
        "textgrid": lambda file: [
            " ".join(x.label for x in textgrid.openTextgrid(str(file), False).getTier("words").entries)
        ],
    }
    for form, parse in read.items():
        folder = form in transcripts.SUFFIXES
        args = transcripts.Output(form, tmp_path / form)
        first = args.output / f"a{transcripts.SUFFIXES[form]}" if folder else args.output
        interrupted = pytest.raises(KeyboardInterrupt, match=f"^interrupted: 3 of 3 recordings .* {args.output}")
        with interrupted, transcripts.writer(args, entries) as write:
            assert not args.output.exists()
            write(2, done[2])
            write(0, done[0])
            assert form != "srt" or parse(first) == ["so be"]
            write(1, done[1])
            assert form != "ctm" or parse(first) == ["a --> b ＜c＞", "it is so be"]
            raise KeyboardInterrupt
        if folder:
            (other,) = (x for x in args.output.iterdir() if x != first)
            texts = {"srt": "a → b ＜c＞", "vtt": "a --&gt; b &lt;c&gt;", "textgrid": "a --> b <c>"}
            assert parse(other) == [texts[form]]
            assert " ".join(parse(first)) == "it is so be"
            assert not list(args.output.glob(".*"))
        else:
            texts = [said[i][0] for i in range(3)]  # in the order of the entries
            assert parse(first) == (["a --> b ＜c＞", "it is so be"] if form == "ctm" else texts)
    args = transcripts.Output("ctm", tmp_path / "late")
    with transcripts.writer(args, entries) as write:  # a segment without a transcript holds back no other
        write(0, done[0])
        assert not args.output.exists()
        write(1, None)
        assert read["ctm"](args.output) == ["so be"]
    full = transcripts.Output("jsonl", Path("/dev/full"))
    no_room = pytest.raises(asr.system.UserError, match=r"^/dev/full cannot be written: .*No space left")
    with no_room, transcripts.writer(full, entries) as write:
        write(0, done[0])
    full = transcripts.Output("jsonl")
    no_room = pytest.raises(asr.system.UserError, match=r"^the standard output cannot be written: No space left")
    with Path("/dev/full").open("w") as screen, contextlib.suppress(OSError):  # it cannot be closed either
        with contextlib.redirect_stdout(screen), no_room, transcripts.writer(full, entries) as write:
            write(0, done[0])
        screen.close()
    with contextlib.redirect_stdout(None), pytest.raises(asr.system.UserError, match="output is closed: name --output"):
        full.checked([])
    grown = outputs.Growing(tmp_path / "grown")
    grown.write("whole\n")
    raw = grown.file

    def write(data):  # three bytes at once, of nine
        if raw.tell() > 8:
            raise OSError(28, "No space left on device")
        return raw.write(data[:3])

    grown.file = types.SimpleNamespace(write=write, truncate=raw.truncate, seek=raw.seek)
    with pytest.raises(asr.system.UserError, match=r"grown cannot be written: .*No space"):
        grown.write("a second line\n")
    raw.close()
    assert (tmp_path / "grown").read_text() == "whole\n"


@pytest.mark.slow
def test_phrases(corpus, trained, tmp_path, capsys, said):
    """A file's texts are spelled as the model spells them, with their weights; a large one decides what is heard."""
    file = tmp_path / "phrases.txt"
    file.write_text("AB  a\t2\nC\t1e3\n\nx Ω\nB\n")
    config = asr.config.Config()
    model = types.SimpleNamespace(tokens=asr.data.tokens.Characters("ABC a"), config=config, blank=5)
    for beam, usual in ((0, 0.25), (4, 1.0)):
        args = search_options.Searching(phrases=file, beam=beam)
        found = search_options.decoding_of(args, model).fusion
        assert f"--phrases {file}, line 4: the model's vocabulary cannot spell 'x Ω'" in capsys.readouterr().err
        expected = ((decode.Phrases([[0, 1, 3, 4], [2], [1]], [2.0, 1e3, usual], classes=6), 1.0),)
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
    command = ["transcribe", "--model", trained[0], "--format", "jsonl", "--confidence", "gibbs", audio]
    x = json.loads(said([*command, "--phrases", file, "--checkpoint", "last"]).out)
    assert set(x["text"]) == {"C"} and len(x["words"]) == 1 and 0 <= x["words"][0]["confidence"] <= 1
    (tmp_path / "m.jsonl").write_text(json.dumps({"audio": str(audio), "text": "A B"}))
    x = json.loads(said(["test", "--model", trained[0], tmp_path / "m.jsonl", "--json", "--phrases", file]).out)
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


def test_forms(corpus, trained, tmp_path, capsys, refused, monkeypatch, said):
    """Every form has the text; segments have the times of their file; what is bad is named, and the rest written."""
    files = [*sorted(corpus.rglob("*.flac"))[:2], corpus / "missing.flac"]
    manifest = tmp_path / "m.jsonl"
    lines = [{"audio": str(files[0]), "text": "A"}, {"audio": str(files[1]), "text": "A", "offset": 0.2}]
    manifest.write_text("".join(json.dumps(x) + "\n" for x in lines))
    command = ["transcribe", "--model", trained[0], "--beam", 3]
    texts = dict(line.split("\t") for line in said([*command, *files], 1).out.splitlines())
    out, error = said([*command, "--format", "json", "--nbest", 2, *files], 1)
    found = json.loads(out)
    assert f"{corpus}/missing.flac: no such file" in error and [x["file"] for x in found] == list(map(str, files[:2]))
    for x in found:
        assert list(x) == ["file", "text", "duration", "words", "nbest"] and x["text"] == texts[x["file"]]
        assert " ".join(word["word"] for word in x["words"]) == " ".join(x["text"].split())
        assert all(0 <= y["start"] < y["end"] <= x["duration"] and 0 < y["confidence"] <= 1 for y in x["words"])
        assert x["nbest"][0]["text"] == x["text"] and len(x["nbest"]) == 2
        assert x["nbest"][0]["score"] >= x["nbest"][1]["score"]
    for terminal in False, True:  # which alone has a bar
        screen = io.StringIO()
        screen.isatty = lambda terminal=terminal: terminal
        with contextlib.redirect_stderr(screen):
            run([*command, "--format", "jsonl", "--output", tmp_path / "o.jsonl", manifest])
        assert (re.search(r"recordings: +0%\|.*\| 0 of [01] s heard", screen.getvalue()) is not None) == terminal
    whole, part = map(json.loads, (tmp_path / "o.jsonl").read_text().splitlines())
    assert "nbest" not in whole and whole == {name: x for name, x in found[0].items() if name != "nbest"}
    assert part["start"] == 0.2 and part["duration"] < 0.3
    assert all(0.2 <= x["start"] < x["end"] <= 0.2 + part["duration"] for x in part["words"])
    heard = next(x for x in files if texts[str(x)])
    begins = {"srt": "1\n00:00:0", "vtt": "WEBVTT\n\n", "ctm": f"{heard.stem} 1 ", "textgrid": "File type"}
    for form, begin in begins.items():
        assert said([*command, "--format", form, heard]).out.startswith(begin)
    run(["transcribe", "--model", trained[0], "--format", "json", corpus / "missing.flac"], 2)
    assert capsys.readouterr().err.splitlines()[-1] == "rnnt-speech: no recording could be used"
    out, error = said([*command, files[0], tmp_path / "none.jsonl"], 1)
    assert out == f"{files[0]}\t{texts[str(files[0])]}\n" and f"{tmp_path}/none.jsonl: does not exist" in error
    none = "--model", tmp_path / "n"
    for more, message in (
        ([files[1], "--format", "ctm"], "--format ctm of 2 recordings needs --output, a file"),
        ([manifest, "--format", "vtt", *none], "--format vtt of 3 recordings needs --output, a folder"),
        ([files[1], "--format", "srt", "--output", tmp_path / "o.srt", *none], "of one recording, got 2"),
        (["--format", "srt", "--output", tmp_path / "m.jsonl"], "m.jsonl must be a folder"),
        (["--nbest", 2], "--nbest needs --beam"),
        (["--nbest", 3, "--beam", 2, "--format", "json"], "--nbest 3: --beam 2 has fewer hypotheses"),
        (["--output", tmp_path], f"--output {tmp_path} must be a file"),
        (["--output", tmp_path / "n/o.txt"], "n is no folder"),
        (["--output", files[0]], "is one of the files that are read"),
        (["--phrases", tmp_path / "n"], "n is no file"),
        (["--format", "html"], "argument --format: invalid choice: 'html'"),
        (none, "n is no folder"),
        (["--model", tmp_path], "has no checkpoint: neither checkpoints/ of a run"),
    ):
        refused(["transcribe", files[0], *more, *["--model", trained[0]] * ("--model" not in more)], message)
    assert files[0].stat().st_size
    model = asr.models.open_model(trained[0])  # the column of its run counts where a table has it
    model.config = model.config.replace(audio_column="clip")
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    (tmp_path / "m.tsv").write_text(f"path\tclip\nmissing\t{files[0]}\n")
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
        assert segments.of_rttm(f"SPEAKER {line}") == expected
    for end in (None, "x", 10**400):
        with pytest.raises(rows.LineError, match="its times are no numbers"):
            segments.of_json({"uri": "a", "start": 0, "end": end})
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


def test_segments_of_speakers(tmp_path, refused, monkeypatch, said):
    """Each is transcribed as if it were a recording, overlaps too; every form names its speaker."""
    model, samples = random_model(**CONVOLUTIONAL), np.random.default_rng(5).normal(0, 0.2, 24000).clip(-1, 1)
    monkeypatch.setattr(asr.models, "open_model", lambda *_: model)
    audio.write(tmp_path / "a.flac", samples, 8000)
    heard = audio.read(tmp_path / "a.flac", 8000)
    turns = [("Ann <&>", 0.25, 1.0), ("Bo", 0.75, 1.5), ("Ann <&>", 2.0, 2.75)]  # a part of the second is also Ann's
    cut = [(str(i), heard[int(8000 * a) : int(8000 * b)]) for i, (_, a, b) in enumerate(turns)]
    alone = list(recognise.transcribe(model, cut))
    assert len({x.text for x in alone}) == 3
    listed = [{"speaker": who, "start": a, "end": b} for who, a, b in turns]
    (tmp_path / "a.json").write_text(json.dumps({"output": {"diarization": listed}}))
    command = ["transcribe", "--model", tmp_path, tmp_path / "a.flac", "--segments"]

    def wrote(form, file="a.json", status=0):
        return said([*command, tmp_path / file, "--format", form], status)

    found = json.loads(wrote("json").out)
    assert [(x["speaker"], x["start"], x["text"]) for x in found] == [(*x[:2], y.text) for x, y in zip(turns, alone)]
    for x, (_, start, end) in zip(found, turns):
        assert x["duration"] == end - start and all(start <= y["start"] < y["end"] <= end for y in x["words"])
    words = [(x["speaker"], y["word"], y["start"]) for x in found for y in x["words"]]
    assert transcripts.ctm_word("می\u200cخواهم") == "می\u200cخواهم"  # a sign within a Persian word
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
