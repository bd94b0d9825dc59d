"""Are words where they were said, with their punctuation and confidences?"""

import itertools
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jax_rnnt import timing

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


BAD_CALLS = [
    (lambda: timing.frames_to_seconds([1], hop=0), "frames_to_seconds: hop must be a positive .*got 0"),
    (lambda: timing.frames_to_seconds([1], hop=10**400), "hop must be a number that a float holds"),
    (lambda: timing.frames_to_seconds([1], hop=1, subsampling=0), "subsampling must be 1 or more, got 0"),
    (lambda: timing.frames_to_seconds([1], hop=1, offset=-math.inf), "offset must be a finite .*got -inf"),
    (lambda: timing.intervals([1], "a", hop=1, offset=math.nan), "intervals: offset must be a finite .*got nan"),
    (lambda: timing.frames_to_seconds(["x"], hop=1), "frames must be real numbers"),
    (lambda: timing.frames_to_seconds([1j], hop=1), "frames must be real numbers, got complex128"),
    (lambda: timing.intervals([1, -1], "ab", hop=1), r"frames must be 0 or more .*got \[1, -1\]"),
    (lambda: timing.intervals([2, 1], "ab", hop=1), "never go back"),
    (lambda: timing.intervals([2, 1], "a", hop=1), r"frames must have shape .*\(1,\), got \(2,\)"),
    (lambda: timing.intervals([2], "a", hop=1, durations=[1.5]), "durations must have an integer dtype"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS)
def test_bad_calls(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
