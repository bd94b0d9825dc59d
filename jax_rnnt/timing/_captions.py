"""Words to captions, and captions to SubRip (SRT) and WebVTT files."""

import itertools
import math
import os
import re
import unicodedata
from collections.abc import Sequence
from typing import IO, NamedTuple

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords
from jax_rnnt.timing._files import checked_intervals, put
from jax_rnnt.timing._intervals import Interval
from jax_rnnt.timing._spelling import begins_line, columns, is_dense, joins

MILLISECONDS = 1000  # of a second, in which captions have their times
# SubRip has no escapes: what players read as markup (<i>, {\an8}, \N) is written in full-width forms. FFmpeg takes
# "< b >" for bold type too, and libass hides whatever is in braces; a sign that nothing closes is text to all of them.
MARKUP = [
    (re.compile("<.*>|<[/A-Za-z]", re.DOTALL), str.maketrans("<>", "＜＞")),
    (re.compile(r"\{.*\}", re.DOTALL), str.maketrans("{}", "｛｝")),
    (re.compile(r"\\[Nnh]"), str.maketrans("\\", "＼")),
]
LEAST = 0.002  # seconds from one caption to the next, however short words are: they differ when they are rounded


@keywords
def captions(
    words: Sequence[Interval],
    *,
    line_length: int = 42,
    lines: int = 2,
    gap: float = 1.0,
    shortest: float = 1.0,
    longest: float = 7.0,
    space: str = " ",
    text: str | None = None,
) -> list[Interval]:
    """The captions of a recording: words that are shown together.

    A caption takes words until the next one finds no room, comes after a silence, or would end too late. It is shown
    from its first word to the end of its last one, or longer so that it can be read, but never beyond the next caption.
    Lines end at spaces. In scripts without spaces they end behind punctuation in their latter half, or else behind any
    word; none begins with a closing bracket, a small kana or the like.

    Parameters
    ----------
    words : sequence of Interval
        In order, as `timing.words` gives them.
    line_length : int, default 42
        The most columns of a line: 42 Latin characters, or 21 of East Asia, which are twice as wide. A longer word is
        cut.
    lines : int, default 2
        The most lines of a caption.
    gap : float, default 1.0
        Seconds between two words that end a caption.
    shortest : float, default 1.0
        The least seconds that a caption is shown, if the next one leaves it so much time.
    longest : float, default 7.0
        The most seconds that a caption is shown; a longer word is cut.
    space : str, default " "
        Between words of a line where `text` does not say it, but not beside characters of scripts without spaces.
    text : str, optional
        What the words spell, with its white space, as that in "Bonjour !".

    Returns
    -------
    list of Interval
        Line breaks separate the lines of a text.

    Raises
    ------
    TypeError, ValueError
        An option is out of range, or words are not what `write_srt` could write: a text is empty, for example.

    Examples
    --------
    >>> from jax_rnnt.timing import Interval, captions
    >>> words = [Interval(0.0, 0.5, "good"), Interval(0.5, 1.5, "morning,"), Interval(2.0, 2.5, "everyone")]
    >>> for caption in captions(words, line_length=13, lines=1):
    ...     print(caption)
    Interval(start=0.0, end=1.5, text='good morning,', confidence=None)
    Interval(start=2.0, end=3.0, text='everyone', confidence=None)
    """
    function = "captions"
    line_length, lines = (_checks.positive(function, *x) for x in (("line_length", line_length), ("lines", lines)))
    seconds = {"gap": gap, "shortest": shortest, "longest": longest}
    gap, shortest, longest = (float(_checks.scalar(function, name, x)) for name, x in seconds.items())
    for name, x in (("gap", gap), ("shortest", shortest), ("longest", longest)):
        if not 0 <= x < math.inf:
            raise ValueError(f"{function}: {name} must be 0 or more and finite, got {x}.")
    if longest < max(shortest, 1 / MILLISECONDS):
        expected = f"a millisecond or more, and no less than shortest, {shortest}"
        raise ValueError(f"{function}: longest must be {expected}, got {longest}.")
    if not isinstance(space, str):
        raise TypeError(f"{function}: space must be a str, got {space!r}.")
    if not isinstance(text, str | None):
        raise TypeError(f"{function}: text must be a str or None, got {text!r}.")
    checked_intervals(function, "words", "words", words, form="word")

    rows: list[list[_Piece]] = []  # the pieces of each line
    for piece in _pieces(words, text, space, line_length, gap):
        row = rows[-1] if rows else []
        if not row or piece.start - row[-1].end >= gap or piece.end - row[0].start > longest:
            rows.append([piece])
        elif columns(_joined([*row, piece])) <= line_length:
            row.append(piece)
        else:
            cut = _cut(row, piece, line_length)
            rows[-1], behind = row[:cut], row[cut:]
            fits = behind and columns(_joined([*behind, piece])) <= line_length
            rows += [[*behind, piece]] if fits else [x for x in (behind, [piece]) if x]
    shown: list[list[list[_Piece]]] = []  # the lines of each caption
    for row in rows:
        last = shown[-1] if shown else []
        room = last and len(last) < lines and row[0].start - last[-1][-1].end < gap
        if room and row[-1].end - last[0][0].start <= longest:
            last.append(row)
        else:
            shown.append([row])
    starts = [*itertools.accumulate((x[0][0].start for x in shown), lambda before, x: max(x, before + LEAST))]
    found = []
    for these, start, after in zip(shown, starts, [*starts[1:], math.inf]):
        end = min(max(these[-1][-1].end, start + max(shortest, LEAST)), start + longest, after)
        found.append(Interval(start, end, "\n".join(map(_joined, these))))
    return found


class _Piece(NamedTuple):
    """A word of a caption, or a part of a long one."""

    start: float
    end: float
    text: str
    before: str  # the white space before it, unless it begins a line


def _joined(row: list[_Piece]) -> str:
    return row[0].text + "".join(x.before + x.text for x in row[1:])


def _cut(row: list[_Piece], following: _Piece, line_length: int) -> int:
    """How many pieces of a full line stay there: no space says where it may end, so punctuation does."""
    if following.before:
        return len(row)
    good = (i for i, x in enumerate(row) if x.before or unicodedata.category(row[i - 1].text[-1])[0] == "P")
    return max((i for i in good if i and columns(_joined(row[:i])) >= line_length / 2), default=len(row))


def _pieces(words, text: str | None, space: str, line_length: int, gap: float):
    """The words as they are written, those together that no line may part, and long ones in parts."""
    found: list[_Piece] = []
    for piece in _written(words, text, space):
        before = found[-1] if found else None
        together = before and not piece.before and piece.start - before.end < gap
        if before and together and not begins_line(before.text[-1], piece.text[0]):
            piece = _Piece(before.start, piece.end, before.text + piece.text, before.before)
            found.pop()
        found.append(piece)
    for piece in found:
        while columns(piece.text) > line_length and (size := _room(piece.text, line_length)) < len(piece.text):
            middle = piece.start + (piece.end - piece.start) * size / len(piece.text)
            part, rest = piece.text[:size], piece.text[size:]
            yield _Piece(piece.start, middle, part.rstrip(), piece.before)
            piece = _Piece(middle, piece.end, rest.lstrip(), " " if part[-1].isspace() or rest[0].isspace() else "")
        yield piece


def _room(text: str, line_length: int) -> int:
    """Characters of a long text that a line takes: it ends behind a space or punctuation, or where it may."""
    widths = [*itertools.accumulate(map(columns, text))]
    most = max(1, sum(x <= line_length for x in widths))
    places = [i for i in range(1, min(most + 1, len(text))) if not joins(text[i - 1], text[i])]
    allowed = [i for i in places if text[i - 1].isspace() or begins_line(text[i - 1], text[i])]
    good = [i for i in allowed if text[i - 1].isspace() or unicodedata.category(text[i - 1])[0] == "P"]
    good = [i for i in good if widths[i - 1] >= line_length / 2]
    return max(good or allowed or places or [most])


def _written(words, text: str | None, space: str):
    """Each word as the text has it, with the white space before it."""
    place, last = 0, None
    for start, end, word, *_ in words:
        found = None if text is None else _found(text, place, word)
        if text is None or found is None:
            dense = last is not None and (is_dense(last[-1]) or is_dense(word[0]))
            yield _Piece(start, end, word, "" if last is None or dense else space)
        else:
            begin, stop = found
            yield _Piece(start, end, " ".join(text[begin:stop].split()), " " if begin > place else "")
            place = stop
        last = word


def _found(text: str, place: int, word: str) -> tuple[int, int] | None:
    """[begin, end) of a word that comes next in a text, whatever white space is in it; None: another one does."""
    while text[place : place + 1].isspace():
        place += 1
    begin = place
    for x in word:
        while text[place : place + 1].isspace():
            place += 1
        if text[place : place + 1] != x:
            return None
        place += 1
    return begin, place


@keywords
def write_srt(file: str | os.PathLike[str] | IO[str], captions: Sequence[Interval]) -> None:
    """Writes the captions of one recording as SubRip (SRT), for video players. `captions` makes them from words.

    Times are rounded to milliseconds. Texts are no markup: where players could read one as such, for example "<i>" or
    "{\\an8}", its signs have their full-width forms, from which Unicode's form NFKC makes the usual ones.

    Parameters
    ----------
    file : path or text file
        A path is overwritten, in UTF-8.
    captions : sequence of Interval
        In order, without overlap. A text may have several lines.

    Raises
    ------
    TypeError, ValueError
        As `write_ctm` for times; an interval is shorter than a millisecond. A text holds an empty line, control
        characters or "-->". No file is written.

    Examples
    --------
    ::

        timing.write_srt("lecture.srt", timing.captions(timing.words(labels, frames, vocabulary, hop=0.08)))
    """
    cues: list[str] = []
    for start, end, text, _ in checked_intervals("write_srt", "captions", "captions", captions, MILLISECONDS, "lines"):
        if "-->" in text:
            raise ValueError(f"write_srt: texts of captions must be without '-->', as times have it, got {text!r}.")
        for markup, forms in MARKUP:
            text = text.translate(forms) if markup.search(text) else text
        cues.append(f"{len(cues) + 1}\n{_time(start, ',')} --> {_time(end, ',')}\n{text}\n")
    put(file, "\n".join(cues))


@keywords
def write_vtt(file: str | os.PathLike[str] | IO[str], captions: Sequence[Interval]) -> None:
    """Writes the captions of one recording as WebVTT, for browsers. As `write_srt`, but texts may hold "-->".

    Parameters
    ----------
    file, captions
        As for `write_srt`.

    Raises
    ------
    TypeError, ValueError
        As `write_srt`, but "-->" is text.

    Examples
    --------
    ::

        timing.write_vtt("lecture.vtt", timing.captions(timing.words(labels, frames, vocabulary, hop=0.08)))
    """
    cues = ["WEBVTT\n"]
    for start, end, text, _ in checked_intervals("write_vtt", "captions", "captions", captions, MILLISECONDS, "lines"):
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        cues.append(f"{_time(start, '.')} --> {_time(end, '.')}\n{text}\n")
    put(file, "\n".join(cues))


def _time(milliseconds: int, point: str) -> str:
    seconds, fraction = divmod(milliseconds, MILLISECONDS)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{point}{fraction:03d}"
