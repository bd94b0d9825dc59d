"""Words with their times, and the forms of transcripts."""

import contextlib
import html
import itertools
import json
import os
import re
import types
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from praatio import textgrid

from jax_rnnt import timing
from jax_rnnt_speech import system
from jax_rnnt_speech.data import rows
from jax_rnnt_speech.recognition import transcripts
from jax_rnnt_speech.system import outputs
from support import CONVOLUTIONAL, asr, random_model, subwords


@pytest.mark.parametrize("text", ["A AB  BA", " A", "B ", "", " ", "BAB"])
def test_words(text):
    """They are those of the text, of characters and of subwords; times and confidence by hand."""
    characters = asr.data.tokens.Characters("AB ")
    config = asr.config.Config.from_options(tokens="subwords", vocabulary=8)
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
    words = (tmp_path / "o.ctm").read_text().splitlines()
    assert len({x.split()[0] for x in words}) == len((tmp_path / "o.text").read_text().splitlines()) == len(stems)
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
    """Spoken text is no markup. Truth: readers of these formats, after their descriptions; NFKC joins both forms."""
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


def labels_of_textgrid(file):
    return " ".join(x.label for x in textgrid.openTextgrid(str(file), False).getTier("words").entries)


def words_of_ctm(data):
    """The words of each recording, one after the other."""
    rows = itertools.groupby(data.splitlines(), lambda x: x.split()[0])
    return [" ".join(x.split()[4] for x in some) for _, some in rows]


READ = {  # texts of a file
    "text": lambda file: [x.split("\t")[1] for x in file.read_text().splitlines()],
    "json": lambda file: [x["text"] for x in json.loads(file.read_text())],
    "jsonl": lambda file: [json.loads(x)["text"] for x in file.read_text().splitlines()],
    "ctm": lambda file: words_of_ctm(file.read_text()),
    "srt": lambda file: re.findall(r"--> [\d:,]+\n(.*)", file.read_text()),
    "vtt": lambda file: re.findall(r"--> [\d:.]+\n(.*)", file.read_text()),
    "textgrid": lambda file: [labels_of_textgrid(file)],
}
SAID = {0: ("so be", 2.0), 1: ("it is", 0.0), 2: ("a --> b <c>", 0.0)}  # of entries: texts, and when they begin
MARKED = {"srt": "a → b ＜c＞", "vtt": "a --&gt; b &lt;c&gt;", "textgrid": "a --> b <c>"}
WRITTEN = [*Entries.parts, Entries.whole]


def spoken(i):
    """The Transcript of an entry, with four words a second."""
    text, start = SAID[i]
    words = enumerate(text.split())
    words = [timing.Interval(start + k / 4, start + k / 4 + 0.2, x) for k, x in words]
    return transcripts.Transcript(text, 2.0, words)


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("signal", [KeyboardInterrupt, system.Terminated])
def test_what_was_written_stays(form, signal, tmp_path):
    """At each moment the files hold what came, whole; also where the last one is no more written."""
    folder, parse = form in transcripts.SUFFIXES, READ[form]
    args = transcripts.Output(form, tmp_path / form)
    first = args.output / f"a{transcripts.SUFFIXES[form]}" if folder else args.output
    message = f"^interrupted: 3 of 3 recordings .* {args.output}"
    ends = pytest.raises(KeyboardInterrupt, match=message)
    with ends as ended, transcripts.writer(args, WRITTEN) as write:
        assert not args.output.exists()
        write(2, spoken(2))
        write(0, spoken(0))
        assert form != "srt" or parse(first) == ["so be"]
        write(1, spoken(1))
        assert form != "ctm" or parse(first) == ["a --> b ＜c＞", "it is so be"]
        raise signal
    assert ended.type is signal  # which decides the status
    if folder:
        (other,) = (x for x in args.output.iterdir() if x != first)
        assert parse(other) == [MARKED[form]]
        assert " ".join(parse(first)) == "it is so be"
        assert not list(args.output.glob(".*"))
    else:
        texts = [text for text, _ in SAID.values()]  # in the order of the entries
        assert parse(first) == (["a --> b ＜c＞", "it is so be"] if form == "ctm" else texts)


def test_a_segment_without_a_transcript(tmp_path):
    """It holds back no other."""
    args = transcripts.Output("ctm", tmp_path / "late")
    with transcripts.writer(args, WRITTEN) as write:
        write(0, spoken(0))
        assert not args.output.exists()
        write(1, None)
        assert READ["ctm"](args.output) == ["so be"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (Path("/dev/full"), "^/dev/full cannot be written: .*No space left"),
        (None, "^the standard output cannot be written: No space left"),
    ],
)
def test_outputs_without_room(output, message):
    with Path("/dev/full").open("w") as screen, contextlib.suppress(OSError):  # it cannot be closed either
        refused = pytest.raises(system.UserError, match=message)
        writer = transcripts.writer(transcripts.Output("jsonl", output), WRITTEN)
        with contextlib.redirect_stdout(screen), refused, writer as write:
            write(0, spoken(0))
        screen.close()


def test_a_standard_output_that_is_closed():
    with contextlib.redirect_stdout(None), pytest.raises(system.UserError, match="output is closed: name --output"):
        transcripts.Output("jsonl").checked([])


def test_half_a_line(tmp_path):
    """Of a piece for which there is no room, nothing stays."""
    grown = outputs.Growing(tmp_path / "grown")
    grown.write("whole\n")
    raw = grown.file

    def write(data):  # three bytes at once, of nine
        if raw.tell() > 8:
            raise OSError(28, "No space left on device")
        return raw.write(data[:3])

    grown.file = types.SimpleNamespace(write=write, truncate=raw.truncate, seek=raw.seek)
    with pytest.raises(system.UserError, match=r"grown cannot be written: .*No space"):
        grown.write("a second line\n")
    raw.close()
    assert (tmp_path / "grown").read_text() == "whole\n"
