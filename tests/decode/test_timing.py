"""Are words where they were said, with their punctuation and confidences, and do files give back what was written?"""

import io
import itertools
import json
import math
import re
import unicodedata

import jax.numpy as jnp
import numpy as np
import pytest

from jax_rnnt import timing
from jax_rnnt.timing import Interval

UNIT = {"hop": 1.0}


def said(texts, mark="▁", frames=None, **options):
    """(text, start, end) of words of labels with these texts, one a frame."""
    frames = range(len(texts)) if frames is None else frames
    found = timing.words([*range(len(texts))], [*frames], texts, mark=mark, **UNIT | options)
    return [(x.text, x.start, x.end) for x in found]


# -------------------------------------------------------------------------------------------------------- spellings


def test_marks():
    """Written by hand: where words begin and end, one frame a label."""
    assert said(["▁he", "l", "lo", "▁wor", "ld"]) == [("hello", 0, 3), ("world", 3, 5)]
    assert said(["lo", "▁", "wor", "▁▁x"]) == [("lo", 0, 1), ("wor", 2, 3), ("x", 3, 4)]  # begins within a word
    assert said(["hel", "##lo", "wor", "##ld"], "##") == [("hello", 0, 2), ("world", 2, 4)]
    assert said(["##lo", "a"], "##") == [("lo", 0, 1), ("a", 1, 2)]
    assert said(["hel@@", "l@@", "o", "wor@@"], "@@") == [("hello", 0, 3), ("wor", 3, 4)]
    assert said([*" hi  yo "], " ") == [("hi", 1, 3), ("yo", 5, 7)]
    assert said(["a", "|", "b"], "|") == [("a", 0, 1), ("b", 2, 3)]
    assert said(["▁你", "好", " ", "は", "ก", "\u0e34"], None) == [
        ("你", 0, 1),
        ("好", 1, 2),
        ("は", 3, 4),
        ("ก\u0e34", 4, 6),  # a vowel sign belongs to its consonant
    ]
    assert said(["▁a", None, "", "b"]) == [("ab", 0, 4)]
    assert said(["▁a", "n▁of▁the", "m"]) == [("an", 0, 1 + 1 / 3), ("of", 1 + 1 / 3, 1 + 2 / 3), ("them", 1 + 2 / 3, 3)]
    assert said([]) == said(["▁", None]) == []


def test_punctuation():
    """It takes no time. Without a word of its own it joins the word before, and an opening bracket the next one."""
    assert said(["▁well", ",", "▁yes", ".", "..."]) == [("well,", 0, 1), ("yes....", 2, 3)]
    assert said(['▁"', "so", '"', "▁–", "▁so"]) == [('"so"–', 1, 2), ("so", 4, 5)]
    assert said([*"don't, dogs' "], " ") == [("don't,", 0, 5), ("dogs'", 7, 11)]
    assert said(["(", "a", ")", "¿", "b", "?"], "##") == [("(a)¿", 1, 2), ("b?", 4, 5)]
    assert said(["(", ".", "a", "«", "!"], "##") == [("(.a«!", 2, 3)]
    assert said(["「", "好", "」", "。"], None) == [("「好」。", 1, 2)]
    assert said(["▁50", "%", "▁％", "▁&"]) == [("50%", 0, 2), ("％", 2, 3), ("&", 3, 4)]  # these are spoken
    assert said(["▁.", "▁!"]) == []


def test_scripts_without_spaces():
    """By hand: a label is a word, and so is a word of another script, however many labels spell it."""
    texts = lambda *x: [word for word, *_ in said(x)]
    assert texts("▁今日", "は", "▁i", "Phone", "▁", "を", "買", "った", "。") == [
        "今日",
        "は",
        "iPhone",
        "を",
        "買",
        "った。",
    ]
    assert said([*"天は「iP3。」"]) == [("天", 0, 1), ("は", 1, 2), ("「iP3。」", 3, 6)]
    assert texts(*"3月，Tシャツ") == ["3", "月，", "T", "シ", "ャ", "ツ"]
    # A vowel sign, a stacked consonant, a voicing mark and a joined emoji belong to the character before them.
    assert texts(*"น้ำ", *"ខ្មែ", *"ｶﾞ", *"天👩\u200d👧") == ["น้ำ", "ខ្មែ", "ｶﾞ", "天", "👩\u200d👧"]
    assert texts(*"한국", *"어로", "▁नि", "स्त") == ["한국어로", "निस्त"]


TODAY = "今".encode()
TOKENS = [" ", "a", "b", " of the", ",", "今", "日は", " x", b"\xc3", b"\xa9", *(TODAY[i : i + 1] for i in range(3))]
TOKENS += [b"", TODAY[2:] + b"a", b" " + TODAY[:1], "\u0301", "ก", "\u0e34"]
TOKENS = [x.encode() if isinstance(x, str) else x for x in TOKENS]


def tokenizer(strict):
    """A `decode` of tokens of bytes. `strict`: a run of them that is no UTF-8 is lost as a whole (ByteFallback)."""
    seen = []

    def decode(labels):
        seen.append(len(labels))
        if not strict:
            return b"".join(TOKENS[i] for i in labels).decode(errors="replace").removeprefix(" ")
        runs = itertools.groupby((TOKENS[i] for i in labels), lambda x: len(x) == 1 and x > b"\x80")
        joined = [b"".join(run) for _, run in runs]
        texts = [x.decode(errors="replace") for x in joined]
        return "".join("\ufffd" * len(x) if "\ufffd" in text else text for x, text in zip(joined, texts)).removeprefix(
            " "
        )

    return decode, seen


@pytest.mark.parametrize("strict", [False, True])
def test_words_are_what_a_tokenizer_decodes(strict):
    """Random labels, whose pieces are parts of characters or several words: the words are those of the text, in order,
    and every frame whose label is heard is within one."""
    rng, (decode, seen) = np.random.default_rng(0), tokenizer(strict)
    for n in [1, 2, 3, 5, 40] * 20:
        labels = rng.integers(0, len(TOKENS), n).tolist()
        if rng.random() < 0.3:
            labels = [10, 11, 12] * n
        text = decode(labels)
        found = timing.words(labels, np.arange(len(labels)), decode, **UNIT)
        if any(x not in ", \u0301" for x in text):
            assert "".join("".join(x.text for x in found).split()) == "".join(text.split())
        assert all(0 <= x.start < x.end <= len(labels) for x in found)
        assert all(a.end <= b.start for a, b in itertools.pairwise(found))
        letters = [i for i, x in enumerate(labels) if x in (1, 2, 3, 5, 6, 7)]
        covered = [any(x.start < i + 1 and i < x.end for x in found) for i in letters]
        assert all(covered) or not found
    assert said(["a"], frames=[0]) and timing.words([], [], decode, **UNIT) == []
    # "é" of two labels lasts from the first one to the second one's end.
    spelled = [1, 0, 8, 9, 13, 2]
    assert [x[:3] for x in timing.words(spelled, range(6), decode, **UNIT)] == [(0, 1, "a"), (2, 6, "éb")]
    assert [x.text for x in timing.words([1, 8], range(2), decode, **UNIT)] == ["a\ufffd"]
    many = [10, 11, 12, 7, 1] * 1000
    seen.clear()
    found = timing.words(many, np.arange(len(many)), decode, **UNIT)
    assert len(found) == 2000 and sum(seen) < 50 * len(many)  # labels that it decoded: no square


def test_commas_move_nothing():
    """Punctuation and spaces anywhere among the labels change no time of any word, whatever frames they share."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        letters = [*rng.choice(["▁a", "▁b", "c", "d"], rng.integers(1, 12))]
        frames = np.sort(rng.integers(0, 12, len(letters))).tolist()
        longs = rng.integers(0, 4, len(letters)).tolist()
        plain = said(letters, frames=frames, durations=longs)
        texts, many, durations = [], [], []
        for letter, frame, long, following in zip(letters, frames, longs, [*frames[1:], 20]):
            texts, many, durations = [*texts, letter], [*many, frame], [*durations, long]
            for _ in range(rng.integers(0, 3)):
                texts.append(str(rng.choice([",", ".", "?"])))
                many.append(int(rng.integers(many[-1], following + 1)))
                durations.append(int(rng.integers(0, 9)))
        found = said(texts, frames=many, durations=durations)
        assert [x[1:] for x in found] == [x[1:] for x in plain]
        assert [re.sub(r"[,.?]", "", x[0]) for x in found] == [x[0] for x in plain]
        assert all(start < end for _, start, end in found)
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(found))


def test_one_frame_and_durations():
    """Words of one frame share it; a label of a TDT lasts as many frames as it reads, up to the next label."""
    assert said(["▁a", "b", ",", "▁c", " ", "d"], frames=[3] * 6) == [("ab,", 3, 3.5), ("cd", 3.5, 4)]
    durations = [4, 0, 2, 1]
    assert said(["▁a", "▁b", "c", "."], frames=[0, 4, 4, 6], durations=durations) == [("a", 0, 4), ("bc.", 4, 6)]
    assert said(["▁a", "▁b"], frames=[0, 3], durations=[5, 1]) == [("a", 0, 3), ("b", 3, 4)]
    texts, frames = ["▁a", "▁b", "c"], [0, 3, 4]
    assert said(texts, frames=frames, durations=[1, 1, 4], end=5.5) == [("a", 0, 1), ("bc", 3, 5.5)]
    assert said(texts, frames=frames, end=9) == said(texts, frames=frames)
    assert said(texts, frames=frames, end=3) == [("a", 0, 1), ("bc", 3, 5)]  # the last frame is padding
    shifted = timing.words([0], [5], ["▁a"], hop=0.01, subsampling=8, offset=100.0)
    np.testing.assert_allclose(shifted[0][:2], [100.4, 100.48])


@pytest.mark.parametrize(("how", "expected"), [("min", [0.5, 0.25]), ("mean", [0.75, 0.25]), ("product", [0.5, 0.25])])
def test_confidences(how, expected):
    """Of the labels that are heard; padding is not read."""
    labels, sure = [0, 1, 4, 2, 3, -1, -1], np.array([1.00001, 0.5, 0.1, 0.0, 0.25, np.nan, -7], np.float32)
    frames, vocabulary = [0, 1, 2, 3, 4, -1, -1], ["▁a", "b", "▁", "c", ","]
    found = timing.words(labels, frames, vocabulary, confidences=jnp.asarray(sure), how=how, **UNIT)
    assert [x.text for x in found] == ["ab,", "c"] and [x.confidence for x in found] == expected
    assert timing.words(labels, frames, vocabulary, **UNIT)[0].confidence is None


BAD_WORDS = [
    ({"labels": [[0]]}, r"labels must have shape \[L\].*got \(1, 1\)"),
    ({"labels": [0.5, 1]}, "labels must have an integer dtype"),
    ({"labels": [0, 9]}, r"labels must be in \[0, 3\).*got \[0, 9\]"),
    ({"labels": [-1, 0]}, r"labels must be in .* -1 at the end alone, got \[-1, 0\]"),
    ({"labels": [0, -2]}, r"labels .*-1 at the end alone, got \[0, -2\]"),
    ({"vocabulary": {"▁a": 0, "b": 1}}, "vocabulary must be a sequence, .* got a mapping"),
    ({"vocabulary": ["▁a", 7]}, "vocabulary must hold str or None, got 7"),
    ({"vocabulary": lambda labels: labels}, r"decode of vocabulary must return a str, got \[0, 1\]"),
    ({"frames": [1, 0]}, r"frames must be 0 or more and never go back, without padding, got \[1, 0\]"),
    ({"frames": [1]}, r"frames must have shape \[L\] = \(2,\), as labels, got \(1,\)"),
    ({"durations": [1.5, 1.0]}, "durations must have an integer dtype"),
    ({"confidences": [-0.1, 0.5]}, r"confidences must be 0 or more, .*exp of log-prob.*got -0.1"),
    ({"confidences": [math.nan, 0.5]}, "confidences must be 0 or more"),
    ({"confidences": [1, 1]}, "confidences must have a floating dtype"),
    ({"mark": ""}, "mark must be None or a str .* got ''"),
    ({"mark": 3}, "mark must be None or a str .* got 3"),
    ({"how": "max"}, "how must be .*got 'max'"),
    ({"end": math.nan}, "end must be a number, got nan"),
    ({"end": "1"}, "end must be a real number"),
    ({"hop": 0}, "hop must be a positive number"),
]


@pytest.mark.parametrize(("change", "message"), BAD_WORDS)
def test_bad_words(change, message):
    good = {"labels": [0, 1], "frames": [0, 1], "vocabulary": ["▁a", "b", "c"], **UNIT}
    with pytest.raises((TypeError, ValueError), match=f"words: {message}"):
        timing.words(**good | change)


# ---------------------------------------------------------------------------------------------------------- captions

TALK = [
    Interval(0.0, 0.5, "so"),
    Interval(0.5, 0.7, "this,"),
    Interval(0.7, 1.1, "then"),
    Interval(1.1, 1.2, "that"),
    Interval(3.0, 3.1, "yes"),
    Interval(3.5, 14.0, "no-o-o-o-o-o"),
    Interval(14.0, 14.04, "end"),
]


def test_captions():
    """By hand: lines of 10 characters, two of them, silences, and the least and most time on the screen."""
    found = timing.captions(TALK, line_length=10, lines=2)
    assert found == [
        Interval(0.0, 1.2, "so this,\nthen that"),
        Interval(3.0, 3.5, "yes"),
        Interval(3.5, 10.5, "no-o-o-o-"),  # longer than a line, and said for 10.5 s
        Interval(3.5 + 10.5 * 9 / 12, 14.04, "o-o end"),
    ]
    assert timing.captions(TALK[:4], line_length=7, lines=1, space="", shortest=0) == [
        Interval(0.0, 0.7, "sothis,"),
        Interval(0.7, 1.1, "then"),
        Interval(1.1, 1.2, "that"),
    ]
    together = timing.captions(TALK[:5], gap=2.0)
    assert together == [Interval(0.0, 3.1, "so this, then that yes")]
    assert [x.text for x in timing.captions(TALK[:4], longest=1.1, shortest=0)] == ["so this, then", "that"]
    assert timing.captions([]) == []


def test_limits_of_captions():
    """Any words: all of them once and in order, no line or time too long, and captions that never overlap."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        edges = np.cumsum(rng.uniform(0.01, 1.5, 40))
        words = [Interval(*x, "x" * int(rng.integers(1, 14))) for x in zip(edges[::2], edges[1::2])]
        length, lines, longest = (int(rng.integers(*x)) for x in ((14, 40), (1, 4), (2, 8)))
        found = timing.captions(words, line_length=length, lines=lines, longest=longest)
        assert " ".join(x.text.replace("\n", " ") for x in found) == " ".join(x.text for x in words)
        assert all(len(line) <= length for x in found for line in x.text.split("\n"))
        assert all(x.text.count("\n") < lines and 0 < x.end - x.start <= longest + 1e-9 for x in found)
        assert all(a.end <= b.start for a, b in itertools.pairwise(found))


def width(text):
    """Columns, by Unicode's tables."""
    return sum(
        0 if unicodedata.category(x) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(x) in "WF")
        for x in text
    )


def test_captions_without_spaces():
    """By hand: 21 characters a line, ends at punctuation, and no line that begins with a small kana or a mark."""
    text = "今日はとても良い天気なので、朝早くから公園まで歩いて行きました。そして友達と一緒に映画を見ました"
    words = [Interval(i / 5, (i + 1) / 5, x) for i, x in enumerate(text)]
    words = [x for x in words if x.text not in "、。"]
    lines = lambda text, **options: [x.text.split("\n") for x in timing.captions(said(text), text=text, **options)]

    def said(text):
        return timing.words(range(len(text)), range(len(text)), list(text), mark=" ", hop=0.2)

    assert lines(text) == [
        ["今日はとても良い天気なので、", "朝早くから公園まで歩いて行きました。"],
        ["そして友達と一緒に映画を見ました"],
    ]
    assert lines("スーパーマーケット", line_length=6, lines=1) == [["スー"], ["パー"], ["マー"], ["ケット"]]
    assert lines("今日は iPhone を 買った Bonjour !", line_length=14) == [["今日は iPhone", "を 買った"], ["Bonjour !"]]
    whole = timing.captions([Interval(0, 9, "スーパーマーケット")], line_length=6, lines=1)
    assert [x.text for x in whole] == ["スー", "パー", "マー", "ケット"] and [x.start for x in whole] == [0, 2, 4, 6]
    assert lines("「あ」「い」", line_length=8, lines=1) == [["「あ」"], ["「い」"]]
    assert lines("xyz —", line_length=4) == [["xyz", "—"]]  # no line begins with a space
    narrow = timing.captions([Interval(0, 2, "中文")], line_length=1)  # of which no line has room for a character
    assert [x.text for x in narrow] == ["中\n文"]
    plain = [Interval(i, i + 0.5, x) for i, x in enumerate(["今日", "は", "iPhone", "and", "you"])]
    assert timing.captions(plain)[0].text == "今日はiPhone and you"  # without a text


@pytest.mark.parametrize(
    "characters",
    [[*"今日はきゃー。、「」a "], ["ก", "กิ", "น้ำ", " "], [*"abcdefgh"], ["👩\u200d👧", "👍🏽", "e\u0301", " ", "-"]],
)
def test_captions_of_any_text(characters):
    """Random texts, words and limits: lines within their columns, the text as it is, and no character cut in two."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        text = "x" + "".join(rng.choice(characters, rng.integers(1, 200)))
        labels = np.sort(rng.integers(0, 5 * len(text), len(text)))
        found = timing.words(range(len(text)), labels, [*text], mark=None if rng.random() < 0.5 else " ", hop=0.05)
        if rng.random() < 0.3:
            found = [Interval(0.5, 0.9, text.replace(" ", ""))]
        length, lines = int(rng.integers(4, 40)), int(rng.integers(1, 3))
        shown = timing.captions(found, text=text, line_length=length, lines=lines)
        rows = [x for caption in shown for x in caption.text.split("\n")]
        assert all(width(x) <= length for x in rows) and all(x.text.count("\n") < lines for x in shown)
        assert "".join("".join(rows).split()) == "".join(text.split())
        assert all(re.fullmatch("|".join(characters).join(["(?:x|", ")*"]), x) for x in rows)
        assert all(x.end - x.start > 0.001 for x in shown) and all(
            a.end <= b.start for a, b in itertools.pairwise(shown)
        )
        timing.write_srt(io.StringIO(), shown)
    words = [Interval(i * 1e-6, (i + 1) * 1e-6, "x" * 40) for i in range(20)]
    timing.write_vtt(io.StringIO(), timing.captions(words))  # however short they are


SRT = """1
00:00:01,000 --> 00:00:02,235
a ＜b＞
c & d

2
00:00:02,235 --> 27:46:40,000
e
"""
VTT = """WEBVTT

00:00:01.000 --> 00:00:02.235
a &lt;b&gt;
c &amp; d

00:00:02.235 --> 27:46:40.000
e
"""


def test_captions_in_files(tmp_path):
    """By hand; neighbours meet in milliseconds."""
    captions = [Interval(1.0, 2.23451, "a <b>\nc & d"), Interval(2.23451, 1e5, "e")]
    timing.write_srt(tmp_path / "x.srt", captions)
    timing.write_vtt(tmp_path / "x.vtt", captions)
    for write, text in ((timing.write_srt, SRT), (timing.write_vtt, VTT)):
        write(memory := io.StringIO(), captions)
        assert memory.getvalue() == text
    assert (tmp_path / "x.srt").read_text() == SRT
    assert (tmp_path / "x.vtt").read_text() == VTT
    timing.write_vtt(tmp_path / "x.vtt", [Interval(0, 1, "a --> b")])
    assert "a --&gt; b" in (tmp_path / "x.vtt").read_text()
    timing.write_srt(tmp_path / "x.srt", [])
    assert (tmp_path / "x.srt").read_text() == ""
    # What FFmpeg's decoder of SubRip and libass take for markup, and what they show as it is.
    texts = {"a < b": "a < b", "x > y <": "x > y <", "{ a": "{ a", "C:\\x": "C:\\x", "} {": "} {", "a <3": "a <3"}
    texts |= {
        "a < b > c": "a ＜ b ＞ c",
        "{\\an8}a": "｛\\an8｝a",
        "a <b": "a ＜b",
        "a\\Nb \\h": "a＼Nb ＼h",
        "<\n>": "＜\n＞",
    }
    for text, wanted in texts.items():
        timing.write_srt(memory := io.StringIO(), [Interval(0, 1, text)])
        assert memory.getvalue().split("\n", 2)[2] == f"{wanted}\n"


# --------------------------------------------------------------------------------------------------------------- CTM


def test_ctm_and_back(tmp_path):
    """What is read is what was written, in microseconds; neighbours meet in equal numbers, and once more the same."""
    rng = np.random.default_rng(0)
    edges = np.cumsum(rng.uniform(1e-3, 0.2, 300))
    chain = [Interval(*x, "wörd", float(c)) for x, c in zip(itertools.pairwise(edges), rng.random(299))]
    given = {"a": chain, "b": [Interval(0.1, 0.3, "x"), Interval(0.3, 0.7, "y", 1.0)], "none": []}
    timing.write_ctm(tmp_path / "x.ctm", given)
    found = timing.read_ctm(tmp_path / "x.ctm")
    assert [*found] == ["a", "b"] and found["b"] == given["b"]
    assert [x.text for x in found["a"]] == ["wörd"] * 299
    for field in ("start", "end", "confidence"):
        values = ([getattr(x, field) for x in words] for words in (found["a"], chain))
        np.testing.assert_allclose(*values, rtol=0, atol=5.01e-7)
    assert all(x.end == y.start for x, y in itertools.pairwise(found["a"]))
    timing.write_ctm(tmp_path / "y.ctm", found)
    assert (tmp_path / "y.ctm").read_bytes() == (tmp_path / "x.ctm").read_bytes()


OTHERS = """;; by another program
7654 A 11.34 0.2 YES -6.763E-1
7654 A 12 0.36 YOU NA lex spk1

2345 B 0.1 .2 HI 0.5
7654 A 12.34 0.00 CAN'T 0.5
"""


def test_ctm_of_others(tmp_path):
    """Comments, empty lines, further columns, overlapping and empty words; the channel, and what is no number."""
    path = tmp_path / "x.ctm"
    path.write_text(OTHERS.replace("-6.763E-1", "6.763E-1"), encoding="utf-8-sig")
    assert timing.read_ctm(path) == {
        "7654": [
            Interval(11.34, 11.54, "YES", 0.6763),
            Interval(12.0, 12.36, "YOU"),
            Interval(12.34, 12.34, "CAN'T", 0.5),
        ],
        "2345": [Interval(0.1, 0.3, "HI", 0.5)],
    }
    assert [*timing.read_ctm(path, channel="B")] == ["2345"]
    bad = {
        OTHERS: "line 2: expected a confidence that is a finite number, 0 or more, got '-6.763E-1'",
        "a 1 0 1": r"line 1: expected 5 columns or more \(.*\), got 'a 1 0 1'",
        "\na 1 * * <ALT_BEGIN>": r"line 2: expected a start .* got '\*'",
        "a 1 nan 1 x": "expected a start .* got 'nan'",
        "a 1 sNaN 1 x": "expected a start .* got 'sNaN'",
        "a 1 0 1e999 x": "expected a duration .* got '1e999'",
        "a 1 0 -1 x": "expected a duration .* got '-1'",
        "a 1 0 1 x inf": "expected a confidence .* got 'inf'",
        "a 1 0 1 x 1.1": r"line 1: confidences of 'a' must be in \[0, 1\]",
        "a 1 1 1 x\nb 1 0 1 y\na 1 0 1 y": "line 3: intervals of 'a' must be .*in order",
        "a 1 0 1 x\x07": "line 1: texts of a recording must be without .*control characters",
        "a\x07 1 0 1 x": "line 1: the name of a recording must be without .*control characters",
        "a 1 0 1 x\na 2 0 1 y": "line 2: expected one channel of 'a', or .* channel=, got '1' and '2'",
    }
    for text, message in bad.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"read_ctm: .*x\.ctm, {'.*' if message[0] == 'e' else ''}{message}"):
            timing.read_ctm(path)
    path.write_bytes(b"a 1 0 1 \xff")
    with pytest.raises(ValueError, match=r"read_ctm: .*x\.ctm must be in UTF-8"):
        timing.read_ctm(path)


def test_json():
    words = [Interval(1 / 3, 2 / 3, "a b", np.float32(0.5)), Interval(2 / 3, 1, "c")]
    read = json.loads(json.dumps(timing.to_json(words), allow_nan=False))
    assert read == [
        {"word": "a b", "start": 0.333333, "end": 0.666667, "confidence": 0.5},
        {"word": "c", "start": 0.666667, "end": 1.0, "confidence": None},
    ]


# ------------------------------------------------------------------------------------------------------- bad input


WRITERS = {
    "write_ctm": lambda path, x: timing.write_ctm(path, {"x": x}),
    "write_textgrid": lambda path, x: timing.write_textgrid(path, {"x": x}, 99.0),
    "write_srt": timing.write_srt,
    "write_vtt": timing.write_vtt,
    "captions": lambda path, x: timing.captions(x),
    "to_json": lambda path, x: timing.to_json(x),
}
BAD_TIMES = [  # of intervals in order
    [(-0.1, 0.5)],
    [(math.nan, 0.5)],
    [(0.0, math.nan)],
    [(0.0, math.inf)],
    [(0.5, 0.4)],
    [(0.5, 0.5)],
    [(0.5, 0.5 + 4e-7)],
    [(0.0, 0.5), (0.499, 0.6)],
    [(0.5, 0.6), (0.1, 0.2)],
]
NO_INTERVALS = "abc", 7, {"a": []}, [(0, 1)], ["abc"], [(0, 1, "x", 1, 2)], [(0, 1, 7)], [("0", 1, "x")]
NO_LINE = ["a\n", "a\u2028b", "\t", "a\x00", "\ud800", "\ufeffa", "\x85"]
NO_COLUMN = ["", "a b", " a", "a\u00a0b"]


@pytest.mark.parametrize("name", WRITERS)
def test_one_check_of_all_writers(name, tmp_path):
    """All refuse the same times, confidences and texts, and no file is written."""
    pytest.importorskip("praatio")
    write, path = WRITERS[name], tmp_path / "file"
    for times in BAD_TIMES:
        with pytest.raises(ValueError, match=rf"^{name}: intervals .*must be finite, .*, got Interval\("):
            write(path, [Interval(*x, "x") for x in times])
    for more in (("x", math.nan), ("x", -0.1), ("x", 1.1), ("x\r",), ("x\u2028y",), ("\ud800",)):
        with pytest.raises(ValueError, match=rf"^{name}: "):
            write(path, [Interval(0, 1, *more)])
    for bad in NO_INTERVALS:
        with pytest.raises(TypeError, match=rf"^{name}: "):
            write(path, bad)
    assert not path.exists()
    write(path, [(0, 1, "x"), Interval(np.float32(1), jnp.float32(2), "y", np.float64(0.5))])


@pytest.mark.parametrize("name", ["write_ctm", "write_textgrid"])
def test_names_and_texts(name, tmp_path):
    """Of recordings and tiers, which are in the message; also where others are good."""
    pytest.importorskip("praatio")
    path, one = tmp_path / "file", Interval(0, 1, "x")
    write = timing.write_ctm if name == "write_ctm" else lambda path, x: timing.write_textgrid(path, x, seconds=9.0)
    with pytest.raises(ValueError, match=f"{name}: intervals of 'bad' must be finite"):
        write(path, {"good": [one], "bad": [Interval(1, 1, "x")]})
    for text in [*NO_LINE, *(NO_COLUMN if name == "write_ctm" else [])]:
        for what, spoken in (("names", {text: []}), ("texts", {"a": [one._replace(text=text)]})):
            with pytest.raises(ValueError, match=f"{name}: {what} of .* without .*, got {re.escape(repr(text))}"):
                write(path, spoken)
    for spoken in ([], {1: []}):
        with pytest.raises(TypeError, match=f"{name}: "):
            write(path, spoken)
    assert not path.exists()


BAD_CALLS = [
    (lambda path: timing.write_srt(path, [Interval(0, 1, "a --> b")]), "write_srt: texts .*without '-->'"),
    (lambda path: timing.write_srt(path, [Interval(0, 1, "a\n\nb")]), "write_srt: texts .*lines that are not"),
    (lambda path: timing.write_vtt(path, [Interval(0, 1, "")]), "write_vtt: texts .*lines that are not empty"),
    (lambda path: timing.write_vtt(path, [Interval(0, 4e-4, "a")]), "write_vtt: intervals .*a millisecond long"),
    (lambda path: timing.captions([(0, 1, " ")]), "captions: texts of words must be .*not empty, got ' '"),
    (lambda path: timing.captions(TALK, line_length=0), "captions: line_length must be 1 or more, got 0"),
    (lambda path: timing.captions(TALK, lines=1.5), "captions: lines must be an integer"),
    (lambda path: timing.captions(TALK, gap=math.nan), "captions: gap must be 0 or more and finite, got nan"),
    (lambda path: timing.captions(TALK, longest=0.5), "captions: longest must be .*no less than shortest, 1.0"),
    (lambda path: timing.captions(TALK, longest=0, shortest=0), "captions: longest must be a millisecond or more"),
    (lambda path: timing.captions(TALK, space=None), "captions: space must be a str, got None"),
    (lambda path: timing.frames_to_seconds([1], hop=0), "frames_to_seconds: hop must be a positive .*got 0"),
    (lambda path: timing.frames_to_seconds([1], hop=10**400), "hop must be a number that a float holds"),
    (lambda path: timing.frames_to_seconds([1], hop=1, subsampling=0), "subsampling must be 1 or more, got 0"),
    (lambda path: timing.frames_to_seconds([1], hop=1, offset=-math.inf), "offset must be a finite .*got -inf"),
    (lambda path: timing.intervals([1], "a", hop=1, offset=math.nan), "intervals: offset must be a finite .*got nan"),
    (lambda path: timing.frames_to_seconds(["x"], hop=1), "frames must be real numbers"),
    (lambda path: timing.frames_to_seconds([1j], hop=1), "frames must be real numbers, got complex128"),
    (lambda path: timing.intervals([1, -1], "ab", hop=1), r"frames must be 0 or more .*got \[1, -1\]"),
    (lambda path: timing.intervals([2, 1], "ab", hop=1), "never go back"),
    (lambda path: timing.intervals([2, 1], "a", hop=1), r"frames must have shape .*\(1,\), got \(2,\)"),
    (lambda path: timing.intervals([2], "a", hop=1, durations=[1.5]), "durations must have an integer dtype"),
    (lambda path: timing.write_ctm(path, {}, "1 "), "channel must be without white space and not empty, got '1 '"),
    (lambda path: timing.write_ctm(path, {";;u": []}), "names of utterances must not begin with ';;'.* got ';;u'"),
    (lambda path: timing.write_textgrid(path, {}, 1.0), "tiers must hold one"),
    (lambda path: timing.write_textgrid(path, {"a": [Interval(1, 2, "x")]}, 1.0), r"'a'.*\[0, 1.0\)"),
    (lambda path: timing.write_textgrid(path, {"a": []}, math.nan), "seconds must be positive and finite, got nan"),
    (lambda path: timing.write_textgrid(path, {"a": []}, 0), "seconds must be positive and finite, got 0"),
]


def test_bad_calls(tmp_path):
    pytest.importorskip("praatio")
    for call, message in BAD_CALLS:
        with pytest.raises((TypeError, ValueError), match=message):
            call(tmp_path / "file")
    assert not (tmp_path / "file").exists()
