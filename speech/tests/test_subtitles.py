"""Words with times as captions and as files of SubRip, WebVTT, CTM, Praat and JSON: do they hold what was said?"""

import decimal
import itertools
import json
import math
import re
import unicodedata

import numpy as np
import pytest
from praatio import textgrid

from jax_rnnt import timing
from jax_rnnt.timing import Interval
from jax_rnnt_speech.recognition import subtitles, timed

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
    found = subtitles.lay_out(TALK, line_length=10, lines=2)
    assert found == [
        Interval(0.0, 1.2, "so this,\nthen that"),
        Interval(3.0, 3.5, "yes"),
        Interval(3.5, 10.5, "no-o-o-o-"),  # longer than a line, and said for 10.5 s
        Interval(3.5 + 10.5 * 9 / 12, 14.04, "o-o end"),
    ]
    assert subtitles.lay_out(TALK[:4], line_length=7, lines=1, space="", shortest=0) == [
        Interval(0.0, 0.7, "sothis,"),
        Interval(0.7, 1.1, "then"),
        Interval(1.1, 1.2, "that"),
    ]
    together = subtitles.lay_out(TALK[:5], gap=2.0)
    assert together == [Interval(0.0, 3.1, "so this, then that yes")]
    assert [x.text for x in subtitles.lay_out(TALK[:4], longest=1.1, shortest=0)] == ["so this, then", "that"]
    assert subtitles.lay_out([]) == []


def test_limits_of_captions():
    """Any words: all of them once and in order, no line or time too long, and captions that never overlap."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        edges = np.cumsum(rng.uniform(0.01, 1.5, 40))
        words = [Interval(*x, "x" * int(rng.integers(1, 14))) for x in zip(edges[::2], edges[1::2])]
        length, lines, longest = (int(rng.integers(*x)) for x in ((14, 40), (1, 4), (2, 8)))
        found = subtitles.lay_out(words, line_length=length, lines=lines, longest=longest)
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
    lines = lambda text, **options: [x.text.split("\n") for x in subtitles.lay_out(said(text), text, **options)]

    def said(text):
        return timing.words(range(len(text)), range(len(text)), list(text), mark=" ", hop=0.2)

    assert lines(text) == [
        ["今日はとても良い天気なので、", "朝早くから公園まで歩いて行きました。"],
        ["そして友達と一緒に映画を見ました"],
    ]
    assert lines("スーパーマーケット", line_length=6, lines=1) == [["スー"], ["パー"], ["マー"], ["ケット"]]
    assert lines("今日は iPhone を 買った Bonjour !", line_length=14) == [["今日は iPhone", "を 買った"], ["Bonjour !"]]
    whole = subtitles.lay_out([Interval(0, 9, "スーパーマーケット")], line_length=6, lines=1)
    assert [x.text for x in whole] == ["スー", "パー", "マー", "ケット"] and [x.start for x in whole] == [0, 2, 4, 6]
    assert lines("「あ」「い」", line_length=8, lines=1) == [["「あ」"], ["「い」"]]
    assert lines("xyz —", line_length=4) == [["xyz", "—"]]  # no line begins with a space
    narrow = subtitles.lay_out([Interval(0, 2, "中文")], line_length=1)  # of which no line has room for a character
    assert [x.text for x in narrow] == ["中\n文"]
    plain = [Interval(i, i + 0.5, x) for i, x in enumerate(["今日", "は", "iPhone", "and", "you"])]
    assert subtitles.lay_out(plain)[0].text == "今日はiPhone and you"  # without a text


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
        shown = subtitles.lay_out(found, text, line_length=length, lines=lines)
        rows = [x for caption in shown for x in caption.text.split("\n")]
        assert all(width(x) <= length for x in rows) and all(x.text.count("\n") < lines for x in shown)
        assert "".join("".join(rows).split()) == "".join(text.split())
        assert all(re.fullmatch("|".join(characters).join(["(?:x|", ")*"]), x) for x in rows)
        assert all(x.end - x.start > 0.001 for x in shown) and all(
            a.end <= b.start for a, b in itertools.pairwise(shown)
        )
        subtitles.srt(shown)
    words = [Interval(i * 1e-6, (i + 1) * 1e-6, "x" * 40) for i in range(20)]
    subtitles.vtt(subtitles.lay_out(words))  # however short they are


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


def test_files_of_captions():
    """By hand; neighbours meet in milliseconds."""
    captions = [Interval(1.0, 2.23451, "a <b>\nc & d"), Interval(2.23451, 1e5, "e")]
    assert subtitles.srt(captions) == SRT and subtitles.vtt(captions) == VTT and subtitles.srt([]) == ""
    assert "a --&gt; b" in subtitles.vtt([Interval(0, 1, "a --> b")])
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
        assert subtitles.srt([Interval(0, 1, text)]).split("\n", 2)[2] == f"{wanted}\n"


def grid_of(text, tmp_path):
    (tmp_path / "x.TextGrid").write_text(text)
    return textgrid.openTextgrid(str(tmp_path / "x.TextGrid"), includeEmptyIntervals=False)


def test_ctm_and_textgrid(tmp_path):
    """By hand; the end of a recording ends its last word in a TextGrid."""
    spoken = [Interval(0.04, 0.08, "two"), Interval(0.16, 0.2, 'o"ne', 0.5)]
    rows = ["first A 0.040000 0.040000 two\n", 'first A 0.160000 0.040000 o"ne 0.500000\n']
    assert timed.ctm("first", spoken, "A") == "".join(rows)
    assert timed.ctm("silent", []) == ""
    grid = grid_of(timed.textgrid({"labels": spoken, "none": []}, 0.19), tmp_path)
    assert grid.tierNames == ("labels", "none") and grid.maxTimestamp == 0.19
    assert [tuple(x) for x in grid.getTier("labels").entries] == [(0.04, 0.08, "two"), (0.16, 0.19, 'o"ne')]
    assert len(grid.getTier("none").entries) == 0


def test_edges_in_files(tmp_path):
    """In the digits of the files, neighbours meet, nothing is empty, and times are right to half a microsecond."""
    rng = np.random.default_rng(0)
    shared = timing.intervals([7] * 30, ["x"] * 30, hop=0.01)  # of one frame, a third of a millisecond each
    thirds = timing.intervals(np.arange(99) // 3, ["y"] * 99, hop=0.01, subsampling=4, offset=1 / 3)
    edges = np.cumsum(rng.uniform(1e-4, 0.2, 100))
    chain = [Interval(*x, "z") for x in itertools.pairwise(edges)]
    rounded = [Interval(0.1 + 0.2, 0.4, "a"), Interval(0.4, 0.1 + 0.7, "b"), Interval(0.8, 1, "c")]
    spoken = {"shared": shared, "thirds": thirds, "chain": chain, "rounded": rounded}
    grid = grid_of(timed.textgrid(spoken | {';;a "b"': []}, 1 + edges[-1]), tmp_path)
    assert grid.tierNames == (*spoken, ';;a "b"')
    for name, given in spoken.items():
        rows = [line.split() for line in timed.ctm(name, given).splitlines()]
        ctm = [[decimal.Decimal(x) for x in row[2:4]] for row in rows]
        ctm = [(start, start + duration) for start, duration in ctm]
        praat = [(decimal.Decimal(repr(x.start)), decimal.Decimal(repr(x.end))) for x in grid.getTier(name).entries]
        assert ctm == praat and len(ctm) == len(given)
        np.testing.assert_allclose(np.array(ctm, float), [x[:2] for x in given], rtol=0, atol=5.01e-7)
        assert all(start < end for start, end in ctm)
        for one, other, *pair in zip(given, given[1:], ctm, ctm[1:]):
            assert (one.end == pytest.approx(other.start, abs=1e-9)) == (pair[0][1] == pair[1][0])


def test_json():
    words = [Interval(1 / 3, 2 / 3, "a b", np.float32(0.5)), Interval(2 / 3, 1, "c")]
    read = json.loads(json.dumps(timed.objects(words), allow_nan=False))
    assert read == [
        {"word": "a b", "start": 0.333333, "end": 0.666667, "confidence": 0.5},
        {"word": "c", "start": 0.666667, "end": 1.0, "confidence": None},
    ]


# ------------------------------------------------------------------------------------------------------- bad input


WRITERS = {
    "ctm": lambda x: timed.ctm("x", x),
    "textgrid": lambda x: timed.textgrid({"x": x}, 99.0),
    "srt": subtitles.srt,
    "vtt": subtitles.vtt,
    "captions": subtitles.lay_out,
    "json": timed.objects,
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
NO_LINE = ["a\n", "a\u2028b", "\t", "a\x00", "\ud800", "\ufeffa", "\x85"]
NO_COLUMN = ["", "a b", " a", "a\u00a0b"]


@pytest.mark.parametrize("name", WRITERS)
def test_one_check_of_all_writers(name):
    """All refuse the same times, confidences and texts."""
    write = WRITERS[name]
    for times in BAD_TIMES:
        with pytest.raises(ValueError, match=r"must be finite, in order .*, got Interval\("):
            write([Interval(*x, "x") for x in times])
    for more in (("x", math.nan), ("x", -0.1), ("x", 1.1), ("x\r",), ("x\u2028y",), ("\ud800",)):
        with pytest.raises(ValueError, match=r"confidences of .* must be in \[0, 1\]|texts of .* must be"):
            write([Interval(0, 1, *more)])
    write([Interval(0, 1, "x"), Interval(np.float32(1), 2, "y", np.float64(0.5))])


SHORT = Interval(0, 4e-4, "a")  # seconds


def said(text):
    return [Interval(0, 1, text)]


BAD_FILES = [
    *((lambda x=x: timed.ctm(x, []), "names of recordings must", x) for x in NO_LINE + NO_COLUMN),
    *((lambda x=x: timed.ctm("a", said(x)), "texts of words of 'a' must", x) for x in NO_LINE + NO_COLUMN),
    *((lambda x=x: timed.textgrid({x: []}, 9.0), "names of tiers must", x) for x in [*NO_LINE, " "]),
    *((lambda x=x: timed.textgrid({"a": said(x)}, 9.0), "texts of words of 'a' must", x) for x in NO_LINE),
    (lambda: subtitles.srt(said("a --> b")), "texts .*without '-->'", "a --> b"),
    (lambda: subtitles.srt(said("a\n\nb")), "texts .*lines that are not empty", "a\n\nb"),
    (lambda: subtitles.vtt(said("")), "texts .*lines that are not empty", ""),
    (
        lambda: subtitles.vtt([Interval(0, 4e-4, "a")]),
        "captions must .* 1/1,000 s long or more",
        Interval(0, 4e-4, "a"),
    ),
    (lambda: subtitles.lay_out(said(" ")), "texts of words must be .*not empty", " "),
    (lambda: timed.ctm("a", [], "1 "), "channels must be without white space and not empty", "1 "),
    (lambda: timed.ctm(";;u", []), "names of recordings must not begin with ';;'", ";;u"),
    (lambda: timed.textgrid({"a": [Interval(1, 2, "x")]}, 1.0), r"'a' must .*\[0, 1.0\)", Interval(1, 2, "x")),
]


@pytest.mark.parametrize(("write", "message", "got"), BAD_FILES)
def test_what_no_file_can_hold(write, message, got):
    with pytest.raises(ValueError, match=f"{message}.*, got {re.escape(repr(got))}$"):
        write()
