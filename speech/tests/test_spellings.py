"""Phrases in several spellings and cases: what is preferred, and what is written."""

import numpy as np
import pytest

from jax_rnnt import timing
from jax_rnnt_speech.data import rows, tokens
from jax_rnnt_speech.recognition import search_options, streams, transcripts, windows
from jax_rnnt_speech.recognition.search import Decoding
from jax_rnnt_speech.recognition.spellings import Written
from support import CONVOLUTIONAL, asr, configuration, labels_of, random_model

UPPER_AND_LOWER = "abcxABCX |"


def spelled(path, line, alphabet=UPPER_AND_LOWER, exact=False, **options):
    path.write_text(line)
    model = random_model(**CONVOLUTIONAL)
    model.tokens, model.config = tokens.Characters(alphabet), configuration(**options)
    found = search_options.spelled(path, model, 0.25, exact)
    return model, {(model.tokens.decode(labels), weight) for _, labels, weight in found}


@pytest.mark.parametrize(
    ("line", "options", "expected"),
    [
        ("ab Cx", {}, "ab Cx/AB CX/ab cx/Ab Cx/Ab Cx"),
        ("ab Cx", {"exact": True}, "ab Cx"),
        ("bac", {"alphabet": "abc"}, "bac"),
        ("ABC", {"alphabet": "abc"}, "abc"),  # no capitals: written as the vocabulary can
        ("AbC", {"alphabet": "abc ABC", "lower": True}, "abc"),  # as the training wrote its texts
        ("c | ab|X", {"exact": True}, "c/ab|X"),  # a bar within a word is a character
        (r"a \| b", {"exact": True}, "a | b"),
        (r"a | \| | b", {"exact": True}, "a/|/b"),
        ("|a || b", {"exact": True}, "|a || b"),
        ("ab|ß", {"alphabet": "ab|ß", "exact": True}, "ab|ß"),
    ],
)
@pytest.mark.parametrize("weight", ["", "\t2"])
def test_spellings_of_a_file(line, options, expected, weight, tmp_path):
    """All spellings and cases that the vocabulary has are phrases of the same weight."""
    _, found = spelled(tmp_path / "p.txt", f"{line}{weight}\n", **options)
    assert found == {(x, 2.0 if weight else 0.25) for x in expected.split("/")}


def test_cases_in_the_room_of_a_request():
    """All phrases come before other cases of the first one, which have what is left of 100 labels."""
    model = random_model(**CONVOLUTIONAL)
    model.tokens, model.config = tokens.Characters(UPPER_AND_LOWER), configuration()
    for texts, exact, expected, lacking in (
        (["ab", "ß"], False, {"ab", "AB", "Ab"}, ["ß"]), (["ab"], True, {"ab"}, []),
        (["x" * 60, "bc"], False, {"x" * 60, "bc", "BC", "Bc"}, []), (["x" * 98, "bc"], False, {"x" * 98, "bc"}, []),
        (["x" * 60, "b" * 41], False, {"x" * 60}, ["b" * 41]),
        (["a" * 40, "b" * 30], False, {"a" * 40, "b" * 30, "B" * 30}, []),
    ):  # fmt: skip
        own, left_out = search_options.Room(model, [], 1, 0.5, 0.0, exact).own(texts)
        assert {(model.tokens.decode(labels), weight) for labels, weight in own.phrases} == {(x, 0.5) for x in expected}
        assert left_out == lacking


@pytest.mark.parametrize("line", ["a | ", "| a", "a | | b\t3", " |"])
def test_a_spelling_that_is_missing(line, tmp_path):
    wrong = "line 2: expected" if line == " |" else r"line 2: expected a spelling on both sides of each \|, got"
    with pytest.raises(asr.system.UserError, match=wrong):
        spelled(tmp_path / "p.txt", f"a\n{line}\n")


def test_spellings_that_cannot_be_spelled(tmp_path, capsys):
    """They are named, with their lines, and what is written may be one of them."""
    model, found = spelled(tmp_path / "p.txt", "c\n3 | a b | qq\n", alphabet="abc ")
    assert found == {("c", 0.25), ("a b", 0.25)}
    assert [x.rpartition("line ")[2] for x in capsys.readouterr().err.splitlines()] == [
        f"2: the model's vocabulary cannot spell '{x}'" for x in ("3", "qq")
    ]
    assert search_options.written(tmp_path / "p.txt", model).text("c A b c") == "c 3 c"


CATE = [["Cate Lynn", "Kaitlyn", "Catelyn", "Kait Lyn"], ["3M", "three m"], ["C++", "c plus plus"]]
WRITTEN = [
    # heard, written, with / between words
    ("kaitlyn/is/here", "Cate Lynn/is/here"),
    ("I/saw/Catelyn./Then", "I/saw/Cate Lynn./Then"),
    ("(KAIT/LYN),/three/m!", "(Cate/Lynn),/3M!"),  # as many words keep their times
    ("cate/lynn/kaitlyn", "Cate/Lynn/Cate Lynn"),
    ("kaitlyns/kaitlyn's/x-kaitlyn", "kaitlyns/kaitlyn's/x-kaitlyn"),  # other words
    ("kait/and/lyn/three", "kait/and/lyn/three"),
    ("c/plus/plus/c/plus", "C++/c/plus"),
    ("c++", "C++"),
    ("", ""),
]


@pytest.mark.parametrize(("heard", "expected"), WRITTEN)
def test_what_is_written(heard, expected):
    """Texts and words alike; times of words that become one are joined, and the least sure one counts."""
    put, heard, expected = Written(CATE), heard.split("/"), expected.split("/")
    words = [timing.Interval(i, i + 0.5, x, 1 - i / 10) for i, x in enumerate(heard)]
    found = put.words(words)
    assert [x.text for x in found] == expected and put.text(" ".join(heard)) == " ".join(expected)
    assert [x.start for x in found] == sorted({x.start for x in found} & {x.start for x in words})
    assert found[0].start == 0 and found[-1].end == words[-1].end and found[-1].confidence == words[-1].confidence
    assert Written().words(words) == words and not Written() and Written() == put and hash(Written()) == hash(put)


def test_cases_and_scripts():
    assert Written(CATE, exact=True).text("kaitlyn Kaitlyn") == "kaitlyn Cate Lynn"
    assert Written([["Ä. B", "ä b"]], lambda x: x.replace("Ä.", "doctor")).text("a doctor B") == "a Ä. B"
    unspaced = Written([["東京都", "とうきょう"], ["x y", "z"]], separates=False)
    assert unspaced.text("はとうきょうと") == "は東京都と" and unspaced.settled("はとうき") == "は"
    assert Written([["A", "とう"], ["B", "とうきょう"]], separates=False).text("とうきょうとう") == "BA"
    words = [timing.Interval(i, i + 1, x) for i, x in enumerate(["は", "とう", "きょう", "きょうと"])]
    assert [x[:3] for x in unspaced.words(words)] == [(0, 1, "は"), (1, 3, "東京都"), (3, 4, "きょうと")]


def test_spellings_of_a_recording_and_of_streams(monkeypatch):
    """The test finds its labels by itself: the text, N-best texts, words and events have what is to be written.

    A stream holds words back as long as later ones may make a spelling of them, however its labels come.
    """
    model = random_model(**CONVOLUTIONAL, chunk=0)
    spell = lambda text: [model.tokens.pieces.index(x) for x in text]
    put, text = Written([["A Name", "AA", "B CC"], ["Z", "C B A"]]), "B CC AA C B C B A B"
    expected, heard = "A Name A Name C B Z B", labels_of(spell(text), range(0, 2 * len(text), 2))
    monkeypatch.setattr(windows, "hear_once", lambda *_: None)
    recording = windows.Recording("x", np.zeros(8000, np.float32), model, again=True)
    recording.found, recording.nbest = heard, [(text, -1.0), ("B AA", -2.0)]
    windows.hear(model, [recording], Decoding(written=put))
    result = recording.result()._replace(duration=60.0)
    said = transcripts.transcript(model, rows.Entry("x", "x", ""), result, nbest=2)
    assert said.text == expected and [x["text"] for x in said.nbest] == [expected, "B A Name"]
    assert [x.text for x in said.words] == ["A", "Name", "A Name", "C", "B", "Z", "B"]
    assert "A Name A Name C B Z B" in transcripts.captioned(
        "srt", transcripts.captions(said.words, 60.0, " ", said.text)
    )
    for size in (1, 3, len(text)):
        live, words = streams.Words(model, decoding=Decoding(written=put)), []
        for i in range(0, len(text), size):
            words += live.add(heard.part(i, i + size), 2 * size)[0]
            assert live.said.split() == " ".join(x.text for x in words).split()
            assert expected.startswith(live.said.strip())
        words += live.take(len(text))
        assert [x[:3] for x in words] == [x[:3] for x in said.words] and live.said == expected
    assert [put.settled(x) for x in ("B", "B C", "B CC C", "AA C B X A", "AA C B A")] == [
        "", "", "A Name", "A Name C B X", "A Name"]  # fmt: skip
