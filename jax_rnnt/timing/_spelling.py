"""Finds what each label adds to a text, and where words may begin in it, also in scripts that write no spaces.

A text comes with spans: [begin, end) of what each label adds to it. Labels that together make a character have it in
common, so spans may overlap by a character.
"""

import functools
import itertools
import unicodedata
from collections.abc import Callable, Iterable

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords

AT_ONCE = 16  # labels whose spans are computed together, with as many on both sides of them
# Scripts that write no spaces between words, by the beginnings of Unicode's names of their characters.
DENSE = ("CJK", "KANGXI", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "HALFWIDTH KATAKANA", "BOPOMOFO", "YI SYLLABLE",
         "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "TAI ", "NEW TAI")  # fmt: skip
SIGNS = "\u0e33\u0eb3\uff9e\uff9f🏻🏼🏽🏾🏿"  # no marks to Unicode's categories, but part of the character before
STACKERS = "\u200d\u1039\u17d2\u1a60"  # signs that join the character behind them: ZWJ, and signs that stack consonants
SPOKEN = "%‰&@#§*/\\"  # punctuation to Unicode, words to a speaker


def decoded(decode: Callable[[list[int]], str], labels: list[int]) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text that a tokenizer makes of labels, and its spans.

    A label adds the part of the text that all labels have in common with the labels up to it, but not with the labels
    before it. The text of labels depends on few labels before them, so it is enough to decode from there, and the time
    is linear. Where that spells something that the text lacks, more labels before are decoded, in the end all.
    """
    text, place, begin = _text(decode, labels), 0, 0
    spans: list[tuple[int, int]] = []
    whole = {0}  # places of labels that do not write the rest of a character
    while begin < len(labels):
        end, around = min(begin + AT_ONCE, len(labels)), AT_ONCE
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
    """Returns how many characters the beginnings of two texts have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _text(decode, labels) -> str:
    text = decode(labels) if labels else ""
    if not isinstance(text, str):
        raise _checks.bad_type(f"decode of vocabulary must return a str, got {text!r}.")
    return text


@keywords
@functools.lru_cache(2**16)
def is_dense(character: str) -> bool:
    """Tells if a character belongs to a script that writes no spaces between words, or to its punctuation.

    Those are the scripts of Chinese, Japanese, Thai, Lao, Khmer, Burmese and Tibetan.

    Parameters
    ----------
    character : str
        One character.

    Returns
    -------
    bool

    Examples
    --------
    >>> from jax_rnnt.timing import is_dense
    >>> [is_dense(x) for x in "今。a가"]
    [True, True, False, False]
    """
    kind = unicodedata.category(character)[0]
    if kind == "P":
        return (
            unicodedata.east_asian_width(character) in "WF" and unicodedata.normalize("NFKC", character) not in SPOKEN
        )
    return (kind in "LM" or character == "〇") and unicodedata.name(character, "").startswith(DENSE)


def any_dense(texts: Iterable[str]) -> bool:
    return any(is_dense(x) for text in texts if not text.isascii() for x in text)


@keywords
def joins(before: str, after: str) -> bool:
    """Tells if two neighbours are one character to a reader, so that no line may end between them.

    These are Unicode's extended grapheme clusters, but for Hangul's single letters and for scripts that write spaces,
    in which words are whole anyway.

    Parameters
    ----------
    before, after : str
        One character each.

    Returns
    -------
    bool

    Examples
    --------
    >>> from jax_rnnt.timing import joins
    >>> joins("e", "\u0301"), joins("か", "な")
    (True, False)
    """
    kind = unicodedata.category(after)
    return kind[0] == "M" or kind == "Cf" or after in SIGNS or before in STACKERS


def units(text: str, edges: set[int], every: bool) -> list[list[int]]:
    """Returns [begin, end) of the parts of a text that are words, or punctuation next to them, in order.

    White space separates them. In a script without spaces, labels do, which end at `edges`, and other scripts and
    punctuation begin a part. With `every`, labels do in all scripts.
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


def is_spoken(text: str) -> bool:
    """Returns True if a text holds more than punctuation."""
    return any(unicodedata.category(x)[0] != "P" or x in SPOKEN for x in unicodedata.normalize("NFKC", text))
