"""What each label adds to a text, and where words may begin in it: also in scripts that write no spaces.

A text comes with spans: [begin, end) of what each label adds to it. Labels that make a character together have it in
common, so spans may overlap by a character.
"""

import functools
import itertools
import os
import unicodedata
from collections.abc import Callable, Iterable

WINDOW = 16  # labels whose spans are found at once, with as many on both sides of them
# Scripts that write no spaces between words, as Unicode's names of their characters begin.
DENSE = ("CJK", "KANGXI", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "YI SYLLABLE",
         "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "TAI ", "NEW TAI")  # fmt: skip
SIGNS = "\u0e33\u0eb3\uff9e\uff9f"  # letters to Unicode's categories, but part of the character before
STACKERS = "\u200d\u1039\u17d2\u1a60"  # what joins the character behind it: ZWJ, and signs that stack consonants
SPOKEN = "%‰&@#§*/\\"  # punctuation to Unicode, words to a speaker


def decoded(decode: Callable[[list[int]], str], labels: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text that a tokenizer makes of labels, and its spans.

    A label adds what the text of all labels has in common with that of the labels up to it, and not with that of those
    before it. What follows a label many labels later does not change what it adds, so windows of labels suffice and the
    time is linear; a window that spells what the text has not grows, at last to all labels.
    """
    text, spans, place = _text(decode, labels), [], 0
    for begin in range(0, len(labels), WINDOW):
        end, around = min(begin + WINDOW, len(labels)), WINDOW
        while True:
            first, last = max(0, begin - around), min(len(labels), end + around)
            everything = (first, last) == (0, len(labels))
            window = text if everything else _text(decode, labels[first:last])
            texts = [_text(decode, labels[first:i]) for i in range(begin, end + 1)]
            known = [*itertools.accumulate((len(os.path.commonprefix([x, window])) for x in texts), max)]
            if end == len(labels):
                known[-1] = len(window)
            offset = 0 if everything else place - known[0]
            ends = [max(place, offset + x) for x in known]
            found = text[ends[0] : ends[-1]] == window[known[0] : known[-1]]
            if everything or (found and (end < len(labels) or ends[-1] == len(text))):
                break
            around *= 4
        for (a, b), x, (before, after) in zip(itertools.pairwise(ends), known[1:], itertools.pairwise(texts)):
            part = after != before and len(after) > x  # of the next character, which this label does not complete
            spans.append((a, min(b + part, len(text))))
        place = ends[-1]
    return text, spans


def _text(decode, labels) -> str:
    text = decode(labels) if labels else ""
    if not isinstance(text, str):
        raise TypeError(f"words: decode of vocabulary must return a str, got {text!r}.")
    return text


@functools.lru_cache(2**16)
def is_dense(character: str) -> bool:
    """Whether it is of a script that writes no spaces, or its punctuation."""
    kind = unicodedata.category(character)[0]
    if kind == "P":
        return unicodedata.east_asian_width(character) in "WF" and unicodedata.normalize("NFKC", character) not in SPOKEN
    return (kind in "LM" or character == "〇") and unicodedata.name(character, "").startswith(DENSE)


def any_dense(texts: Iterable[str]) -> bool:
    return any(is_dense(x) for text in texts if not text.isascii() for x in text)


def joins(before: str, after: str) -> bool:
    """Whether two neighbours are one character to a reader: Unicode's extended grapheme clusters, but for scripts with
    spaces, whose words are whole anyway, and Hangul's single letters."""
    return unicodedata.category(after)[0] == "M" or after in SIGNS or after == "\u200d" or before in STACKERS


def units(text: str, edges: set[int], every: bool) -> list[tuple[int, int]]:
    """[begin, end) of the parts of a text that are words, or punctuation beside them, in order.

    White space separates them. In a script without spaces labels do, which end at `edges`, and other scripts and
    punctuation begin a part. `every`: labels do in all scripts.
    """
    found, begin = [], None
    for i, x in enumerate(text):
        if x.isspace():
            begin = None
            continue
        before = text[i - 1]
        if begin is None:
            apart = True
        elif joins(before, x):
            apart = False
        elif every:
            apart = i in edges
        else:
            dense = is_dense(before), is_dense(x)
            punctuation = "P" in (unicodedata.category(before)[0], unicodedata.category(x)[0])
            apart = any(dense) and (not all(dense) or punctuation or i in edges)
        if apart:
            begin = i
            found.append([i, i])
        found[-1][1] = i + 1
    return found


def is_heard(text: str) -> bool:
    """Whether it holds more than punctuation."""
    return any(unicodedata.category(x)[0] != "P" or x in SPOKEN for x in unicodedata.normalize("NFKC", text))
