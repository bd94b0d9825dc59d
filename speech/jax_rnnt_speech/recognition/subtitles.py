"""Captions (words that are shown together) and their files, SubRip (SRT) and WebVTT."""

import itertools
import math
import re
import unicodedata
from typing import NamedTuple

from jax_rnnt import timing
from jax_rnnt_speech.recognition import timed

MILLISECONDS = 1000  # units of a second, in which captions have their times
# SubRip has no escapes: signs that players read as markup (<i>, {\an8}, \N) are written in full-width forms. FFmpeg
# takes "< b >" for bold type too, and libass hides whatever is in braces; a sign that nothing closes is text to all of
# them.
MARKUP = [
    (re.compile("<.*>|<[/A-Za-z]", re.DOTALL), str.maketrans("<>", "＜＞")),
    (re.compile(r"\{.*\}", re.DOTALL), str.maketrans("{}", "｛｝")),
    (re.compile(r"\\[Nnh]"), str.maketrans("\\", "＼")),
]
LEAST = 0.002  # seconds from one caption to the next, however short words are: they differ when they are rounded


def lay_out(words, text=None, *, space=" ", line_length=42, lines=2, gap=1.0, shortest=1.0, longest=7.0):
    """Returns the captions of a recording, as Intervals whose texts have line breaks.

    A caption takes words until the next one finds no room, comes `gap` seconds after the one before, or would end
    `longest` seconds after the first one began. It is shown from its first word to the end of its last one, or for
    `shortest` seconds so that it can be read, but never beyond the next caption. A longer word is cut.

    A line has `line_length` columns: 42 Latin characters, or 21 of East Asia, which are twice as wide. Lines end at
    spaces. In scripts without spaces they end behind punctuation in their latter half, or else behind any word; none
    begins with a closing bracket, a small kana or the like. `text` is what the words spell, with its white space, as
    that in "Bonjour !". Where it lacks a word, `space` is written before it, but not next to characters of scripts
    without spaces.
    """
    timed.in_units(words, timed.SECOND, "words", "word")
    rows = []  # the pieces of each line
    for piece in pieces_of(words, text, space, line_length, gap):
        row = rows[-1] if rows else []
        if not row or piece.start - row[-1].end >= gap or piece.end - row[0].start > longest:
            rows.append([piece])
        elif columns(joined([*row, piece])) <= line_length:
            row.append(piece)
        else:
            cut = kept(row, piece, line_length)
            rows[-1], behind = row[:cut], row[cut:]
            fits = behind and columns(joined([*behind, piece])) <= line_length
            rows += [[*behind, piece]] if fits else [x for x in (behind, [piece]) if x]
    shown = []  # the lines of each caption
    for row in rows:
        last = shown[-1] if shown else []
        more = last and len(last) < lines and row[0].start - last[-1][-1].end < gap
        if more and row[-1].end - last[0][0].start <= longest:
            last.append(row)
        else:
            shown.append([row])
    starts = [*itertools.accumulate((x[0][0].start for x in shown), lambda before, x: max(x, before + LEAST))]
    found = []
    for these, start, after in zip(shown, starts, [*starts[1:], math.inf]):
        end = min(max(these[-1][-1].end, start + max(shortest, LEAST)), start + longest, after)
        found.append(timing.Interval(start, end, "\n".join(map(joined, these))))
    return found


class Piece(NamedTuple):
    """A word of a caption, or a part of a long one."""

    start: float
    end: float
    text: str
    before: str  # the white space before it, unless it begins a line


def joined(row: list[Piece]) -> str:
    return row[0].text + "".join(x.before + x.text for x in row[1:])


def kept(row: list[Piece], following: Piece, line_length: int) -> int:
    """Returns how many pieces of a full line stay there: without spaces to end it, it ends at punctuation."""
    if following.before:
        return len(row)
    good = (i for i, x in enumerate(row) if x.before or unicodedata.category(row[i - 1].text[-1])[0] == "P")
    return max((i for i in good if i and columns(joined(row[:i])) >= line_length / 2), default=len(row))


def pieces_of(words, text: str | None, space: str, line_length: int, gap: float):
    """Returns the words as they are written, joined where no line may part them, and long ones in parts."""
    found: list[Piece] = []
    for piece in written(words, text, space):
        before = found[-1] if found else None
        together = before and not piece.before and piece.start - before.end < gap
        if before and together and not begins_line(before.text[-1], piece.text[0]):
            piece = Piece(before.start, piece.end, before.text + piece.text, before.before)
            found.pop()
        found.append(piece)
    for piece in found:
        while columns(piece.text) > line_length and (size := room(piece.text, line_length)) < len(piece.text):
            middle = piece.start + (piece.end - piece.start) * size / len(piece.text)
            part, rest = piece.text[:size], piece.text[size:]
            yield Piece(piece.start, middle, part.rstrip(), piece.before)
            piece = Piece(middle, piece.end, rest.lstrip(), " " if part[-1].isspace() or rest[0].isspace() else "")
        yield piece


def room(text: str, line_length: int) -> int:
    """Returns the characters of a long text that fit a line: it ends behind a space or punctuation, or where it may."""
    widths = [*itertools.accumulate(map(columns, text))]
    most = max(1, sum(x <= line_length for x in widths))
    places = [i for i in range(1, min(most + 1, len(text))) if not timing.joins(text[i - 1], text[i])]
    allowed = [i for i in places if text[i - 1].isspace() or begins_line(text[i - 1], text[i])]
    good = [i for i in allowed if text[i - 1].isspace() or unicodedata.category(text[i - 1])[0] == "P"]
    good = [i for i in good if widths[i - 1] >= line_length / 2]
    return max(good or allowed or places or [most])


def written(words, text: str | None, space: str):
    """Yields each word as the text has it, with the white space before it."""
    place, last = 0, None
    for start, end, word, *_ in words:
        found = None if text is None else place_of(text, place, word)
        if text is None or found is None:
            dense = last is not None and (timing.is_dense(last[-1]) or timing.is_dense(word[0]))
            yield Piece(start, end, word, "" if last is None or dense else space)
        else:
            begin, stop = found
            yield Piece(start, end, " ".join(text[begin:stop].split()), " " if begin > place else "")
            place = stop
        last = word


def place_of(text: str, place: int, word: str) -> tuple[int, int] | None:
    """Returns [begin, end) of a word that comes next in a text, across white space; None if another word does."""
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


def begins_line(before: str, after: str) -> bool:
    """Returns True if a line may begin between two characters without a space.

    It may not begin with a small kana or a sign that repeats or lengthens the one before, nor with punctuation unless
    it opens, nor behind an opening sign (Japan's JIS X 4051).
    """
    kinds = unicodedata.category(before), unicodedata.category(after)
    sign = unicodedata.name(after, "")
    follows = any(x in sign for x in ("KANA LETTER SMALL", "PROLONGED SOUND", "ITERATION MARK"))
    closing = kinds[1][0] == "P" and kinds[1] not in ("Ps", "Pi")
    return not (timing.joins(before, after) or follows or closing or kinds[0] in ("Ps", "Pi"))


def columns(text: str) -> int:
    """Returns how wide it is: a character of East Asia takes two columns, a mark on another one none."""
    kinds = ((unicodedata.category(x), x) for x in text)
    return sum(0 if kind in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(x) in "WF") for kind, x in kinds)


# --------------------------------------------------------------------------------------------------------------- files


def srt(captions):
    """Returns the text of a SubRip file, for video players. Times are rounded to milliseconds.

    Texts are no markup: where players could read one as such, for example "<i>" or "{\\an8}", its signs are written in
    their full-width forms, which Unicode's form NFKC turns into the usual ones.
    """
    cues = []
    for start, end, text, _ in timed.in_units(captions, MILLISECONDS, "captions", "lines"):
        if "-->" in text:
            raise ValueError(f"texts of captions must be without '-->', as times have it, got {text!r}")
        for markup, forms in MARKUP:
            text = text.translate(forms) if markup.search(text) else text
        cues.append(f"{len(cues) + 1}\n{clock(start, ',')} --> {clock(end, ',')}\n{text}\n")
    return "\n".join(cues)


def vtt(captions):
    """Returns the text of a WebVTT file, for browsers. Texts may hold "-->"."""
    cues = ["WEBVTT\n"]
    for start, end, text, _ in timed.in_units(captions, MILLISECONDS, "captions", "lines"):
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        cues.append(f"{clock(start, '.')} --> {clock(end, '.')}\n{text}\n")
    return "\n".join(cues)


def clock(milliseconds, point):
    seconds, fraction = divmod(milliseconds, MILLISECONDS)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{point}{fraction:03d}"
