"""What each label adds to a text, and where words may begin in it: also in scripts that write no spaces.

A text comes with spans: [begin, end) of what each label adds to it. Labels that make a character together have it in
common, so spans may overlap by a character.
"""

import functools
import itertools
import unicodedata
from collections.abc import Callable, Iterable

WINDOW = 16  # labels whose spans are found at once, with as many on both sides of them
# Scripts that write no spaces between words, as Unicode's names of their characters begin.
DENSE = ("CJK", "KANGXI", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "YI SYLLABLE",
         "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "TAI ", "NEW TAI")  # fmt: skip
SIGNS = "\u0e33\u0eb3\uff9e\uff9f🏻🏼🏽🏾🏿"  # no marks to Unicode's categories, but part of the character before
STACKERS = "\u200d\u1039\u17d2\u1a60"  # what joins the character behind it: ZWJ, and signs that stack consonants
SPOKEN = "%‰&@#§*/\\"  # punctuation to Unicode, words to a speaker


def decoded(decode: Callable[[list[int]], str], labels: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """The text that a tokenizer makes of labels, and its spans.

    A label adds what the text of all labels has in common with that of the labels up to it, and not with that of those
    before it. What labels write depends on few labels before them, so it is enough to decode from there, and the time
    is linear. Where that spells what the text has not, more labels before are decoded, at last all.
    """
    text, place, begin = _text(decode, labels), 0, 0
    spans: list[tuple[int, int]] = []
    whole = {0}  # where labels begin that write no rest of a character
    while begin < len(labels):
        end, around = min(begin + WINDOW, len(labels)), WINDOW
        while True:
            first = max(0, begin - around)
            while first not in whole:
                first -= 1
            texts = [_text(decode, labels[first:i]) for i in range(begin, end + 1)]
            start = spans[first][0] if first else 0
            if first and texts[-1][:1] != " " == text[start : start + 1]:  # decoders leave out a space at the beginning
                start += 1
            common = [start + _common(x, text[start : start + len(x)]) for x in texts]
            ends = [*itertools.accumulate([place, *common], max)][1:]
            if not first or (common[0] == place and (end < len(labels) or ends[-1] == len(text))):
                break
            around *= 4
        if end == len(labels):
            ends[-1] = len(text)
        for i, (a, b) in enumerate(itertools.pairwise(ends)):
            parts = len(texts[i + 1]) > b - start  # it ends with a part of a character, which later labels complete
            spans.append((a, min(b + (parts and texts[i + 1] != texts[i]), len(text))))
            if not parts:
                whole.add(begin + i + 1)
        stop = end if end == len(labels) else max(whole.intersection(range(begin + 1, end + 1)), default=end)
        del spans[stop:]
        place, begin = ends[stop - begin], stop
    return text, spans


def _common(a: str, b: str) -> int:
    """How many characters the beginnings of two texts have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


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
        return (
            unicodedata.east_asian_width(character) in "WF" and unicodedata.normalize("NFKC", character) not in SPOKEN
        )
    return (kind in "LM" or character == "〇") and unicodedata.name(character, "").startswith(DENSE)


def any_dense(texts: Iterable[str]) -> bool:
    return any(is_dense(x) for text in texts if not text.isascii() for x in text)


def joins(before: str, after: str) -> bool:
    """Whether two neighbours are one character to a reader: Unicode's extended grapheme clusters, but for scripts with
    spaces, whose words are whole anyway, and Hangul's single letters."""
    kind = unicodedata.category(after)
    return kind[0] == "M" or kind == "Cf" or after in SIGNS or before in STACKERS


def units(text: str, edges: set[int], every: bool) -> list[list[int]]:
    """[begin, end) of the parts of a text that are words, or punctuation beside them, in order.

    White space separates them. In a script without spaces labels do, which end at `edges`, and other scripts and
    punctuation begin a part. `every`: labels do in all scripts.
    """
    found: list[list[int]] = []
    for i, x in enumerate(text):
        if x.isspace():
            continue
        before = text[i - 1] if i else " "
        if before.isspace():
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
            found.append([i, i])
        found[-1][1] = i + 1
    return found


def begins_line(before: str, after: str) -> bool:
    """Whether a line may begin between two characters, where no space is: not with a small kana or what repeats or
    lengthens the one before, nor with punctuation unless it opens, nor behind what opens (Japan's JIS X 4051)."""
    kinds = unicodedata.category(before), unicodedata.category(after)
    sign = unicodedata.name(after, "")
    follows = any(x in sign for x in ("KANA LETTER SMALL", "PROLONGED SOUND", "ITERATION MARK"))
    closing = kinds[1][0] == "P" and kinds[1] not in ("Ps", "Pi")
    return not (joins(before, after) or follows or closing or kinds[0] in ("Ps", "Pi"))


def columns(text: str) -> int:
    """How wide it is: a character of East Asia takes two columns, a mark on another one none."""
    kinds = ((unicodedata.category(x), x) for x in text)
    return sum(0 if kind in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(x) in "WF") for kind, x in kinds)


def is_heard(text: str) -> bool:
    """Whether it holds more than punctuation."""
    return any(unicodedata.category(x)[0] != "P" or x in SPOKEN for x in unicodedata.normalize("NFKC", text))
