"""Words to captions, and captions to SubRip (SRT) and WebVTT files."""

import math
import os
import pathlib
from collections.abc import Sequence
from typing import IO

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords
from jax_rnnt.timing._files import checked_intervals
from jax_rnnt.timing._intervals import Interval

MILLISECONDS = 1000  # of a second, in which captions have their times


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
) -> list[Interval]:
    """The captions of a recording: words that are shown together.

    A caption takes words until the next one finds no room, comes after a silence, or would end too late. It is shown
    from its first word to the end of its last one, or longer so that it can be read, but never beyond the next caption.

    Parameters
    ----------
    words : sequence of Interval
        In order, as `timing.words` gives them.
    line_length : int, default 42
        The most characters of a line. A longer word has a line to itself.
    lines : int, default 2
        The most lines of a caption.
    gap : float, default 1.0
        Seconds between two words that end a caption.
    shortest : float, default 1.0
        The least seconds that a caption is shown, if the next one leaves it so much time.
    longest : float, default 7.0
        The most seconds that a caption is shown; a longer word is cut.
    space : str, default " "
        Between words of a line; "" for languages without spaces.

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
    checked_intervals(function, "words", "words", words, form="word")

    shown: list[list[Interval]] = []
    for word in words:
        texts = [x[2] for x in shown[-1]] if shown else []
        fits = shown and len(_wrapped([*texts, word[2]], line_length, space)) <= lines
        if fits and word[0] - shown[-1][-1][1] < gap and word[1] - shown[-1][0][0] <= longest:
            shown[-1].append(word)
        else:
            shown.append([word])
    found = []
    for these, after in zip(shown, [*shown[1:], None]):
        start, end = these[0][0], max(these[-1][1], these[0][0] + shortest)
        end = min(end, start + longest, math.inf if after is None else after[0][0])
        found.append(Interval(start, end, "\n".join(_wrapped([x[2] for x in these], line_length, space))))
    return found


def _wrapped(texts: list[str], line_length: int, space: str) -> list[str]:
    """Lines with as many of the texts as there is room for."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + len(space) + len(text) <= line_length:
            lines[-1] += space + text
        else:
            lines.append(text)
    return lines


@keywords
def write_srt(file: str | os.PathLike[str] | IO[str], captions: Sequence[Interval]) -> None:
    """Writes the captions of one recording as SubRip (SRT), for video players. `captions` makes them from words.

    Times are rounded to milliseconds.

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
    for start, end, text in _checked("write_srt", captions):
        if "-->" in text:
            raise ValueError(f"write_srt: texts of captions must be without '-->', as times have it, got {text!r}.")
        cues.append(f"{len(cues) + 1}\n{_time(start, ',')} --> {_time(end, ',')}\n{text}\n")
    _put(file, cues)


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
    for start, end, text in _checked("write_vtt", captions):
        text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        cues.append(f"{_time(start, '.')} --> {_time(end, '.')}\n{text}\n")
    _put(file, cues)


def _put(file, cues: list[str]) -> None:
    text = "\n".join(cues)
    if hasattr(file, "write"):
        file.write(text)
    else:
        pathlib.Path(file).write_text(text, encoding="utf-8")


def _checked(function: str, captions):
    """(start, end, text) of captions, in milliseconds."""
    for start, end, text, _ in checked_intervals(function, "captions", "captions", captions, MILLISECONDS, "lines"):
        yield start, end, text


def _time(milliseconds: int, point: str) -> str:
    seconds, fraction = divmod(milliseconds, MILLISECONDS)
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{point}{fraction:03d}"
