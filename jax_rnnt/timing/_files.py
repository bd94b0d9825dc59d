"""Files of intervals: CTM (NIST), TextGrid (Praat), and what `json` writes; the checks of all writers."""

import decimal
import math
import os
import pathlib
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from typing import IO, Any

from jax_rnnt import _checks
from jax_rnnt._extras import needed_by
from jax_rnnt._keywords import keywords
from jax_rnnt.timing._intervals import Interval

SECOND = 1_000_000  # microseconds, in which files have their times
LEAST = {SECOND: "a microsecond", 1000: "a millisecond"}
# What a text must be, by its form.
FORMS = {
    "line": "be without line breaks, control characters, byte order marks and lone surrogates",
    "word": "be without line breaks, control characters, byte order marks and lone surrogates, and not empty",
    "lines": "be lines that are not empty, without control characters, byte order marks and lone surrogates",
    "column": "be without white space and not empty",
}


def put(file, text: str) -> None:
    """Writes a text into a file, or into that of a path."""
    if hasattr(file, "write"):
        file.write(text)
    else:
        pathlib.Path(file).write_text(text, encoding="utf-8")


@keywords
def write_ctm(
    file: str | os.PathLike[str] | IO[str], utterances: Mapping[str, Sequence[Interval]], channel: str = "1"
) -> None:
    """Writes a CTM file: a line ``utterance channel start duration text confidence`` for each interval, in seconds.

    The last column is missing where the confidence is None. Numbers have six decimals. Start and end are rounded, so an
    interval that begins where another one ends does so in the file too: its start is the other's start plus duration,
    digit by digit.

    Parameters
    ----------
    file : path or text file
        A path is overwritten, in UTF-8.
    utterances : mapping of str to sequence of Interval
        Names of recordings, and what was said in them.
    channel : str, default "1"
        Of all recordings.

    Raises
    ------
    TypeError
        `utterances` is no mapping of names to intervals.
    ValueError
        A time is negative or not finite, an interval is shorter than a microsecond or begins before the end of the one
        before it, a confidence is not in [0, 1]. A name or text is empty, holds white space, which separates the
        columns, or control characters; the name of a recording begins with ";;", as comments do. No file is written.

    Examples
    --------
    ::

        timing.write_ctm("test.ctm", {"george-7": timing.intervals(frames, words, hop=0.0125, subsampling=4)})
    """
    function = "write_ctm"
    _check_text(function, "channel", channel, "column")
    lines = []
    for name, spoken in _checked_mapping(function, "utterances", utterances, form="column").items():
        if name.startswith(";;"):
            raise ValueError(f"{function}: names of utterances must not begin with ';;', as comments do, got {name!r}.")
        for start, end, text, sure in spoken:
            last = "" if sure is None else f" {sure:.6f}"
            lines.append(f"{name} {channel} {start / SECOND:.6f} {(end - start) / SECOND:.6f} {text}{last}\n")
    put(file, "".join(lines))


@keywords
def read_ctm(file: str | os.PathLike[str], channel: str | None = None) -> dict[str, list[Interval]]:
    """Reads a CTM file, as `write_ctm`, SCTK and Kaldi write it.

    An interval ends at its start plus duration, by decimal arithmetic: those that meet in the file meet here. Comments
    (";;") and empty lines are skipped, and so is what follows the confidence in a line. What a writer refuses is an
    error here too, except what other programs write: an interval may be empty, and may overlap the next one.

    Parameters
    ----------
    file : path
        In UTF-8.
    channel : str, optional
        Which lines to read. Default: all, and no recording may have several channels.

    Returns
    -------
    dict of str to list of Interval
        Names of recordings, and what was said in them, in the order of the file. The confidence is None where the
        column is missing or "NA".

    Raises
    ------
    ValueError
        A line lacks columns, or start or duration are not finite numbers of 0 or more. A word of a recording begins
        before the one above it, a confidence is not in [0, 1], a name or text holds control characters. A recording has
        several channels. The file is not in UTF-8.

    Examples
    --------
    >>> import pathlib, tempfile
    >>> from jax_rnnt.timing import read_ctm
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "test.ctm"
    >>> size = file.write_text("a 1 0.1 0.2 good 0.9\\na 1 0.3 0.4 morning\\n")
    >>> for word in read_ctm(file)["a"]:
    ...     print(*word)
    0.1 0.3 good 0.9
    0.3 0.7 morning None
    """
    try:
        text = pathlib.Path(file).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"read_ctm: {os.fspath(file)} must be in UTF-8: {error}.") from None
    found: dict[str, list[Interval]] = {}
    channels: dict[str, str] = {}
    for i, line in enumerate(text.split("\n"), 1):
        columns = line.split()
        if not columns or columns[0].startswith(";;"):
            continue
        where = f"read_ctm: {os.fspath(file)}, line {i}"
        if len(columns) < 5:
            names = "recording, channel, start, duration, text"
            raise ValueError(f"{where}: expected 5 columns or more ({names}), got {line.strip()!r}.")
        name, here, start, duration, word = columns[:5]
        if channel not in (None, here):
            continue
        if channels.setdefault(name, here) != here:
            expected = f"one channel of {name!r}, or the one to read as channel="
            raise ValueError(f"{where}: expected {expected}, got {channels[name]!r} and {here!r}.")
        begin, length = (_decimal(where, what, x) for what, x in (("a start", start), ("a duration", duration)))
        sure = None if columns[5:6] in ([], ["NA"]) else float(_decimal(where, "a confidence", columns[5]))
        _check_text(where, "the name of a recording", name, "column")
        found.setdefault(name, []).append(Interval(float(begin), float(begin + length), word, sure))
        checked_intervals(where, "a recording", name, found[name][-2:], form="column", least=0)
    return found


def _decimal(where: str, what: str, text: str) -> decimal.Decimal:
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        number = decimal.Decimal("NaN")
    if not number.is_finite() or not 0 <= float(number) < math.inf:
        raise ValueError(f"{where}: expected {what} that is a finite number, 0 or more, got {text!r}.")
    return number


@keywords
def to_json(words: Sequence[Interval]) -> list[dict[str, Any]]:
    """Words as `json.dump` takes them: ``{"word", "start", "end", "confidence"}`` each.

    Times are rounded to microseconds.

    Parameters
    ----------
    words : sequence of Interval
        Of one recording, in order.

    Returns
    -------
    list of dict
        The confidence is None where it is not known.

    Raises
    ------
    TypeError, ValueError
        As `write_ctm`, but texts may hold spaces.

    Examples
    --------
    >>> from jax_rnnt.timing import Interval, to_json
    >>> to_json([Interval(0.25, 0.5, "seven", 0.875)])
    [{'word': 'seven', 'start': 0.25, 'end': 0.5, 'confidence': 0.875}]
    """
    checked = checked_intervals("to_json", "words", "words", words)
    return [
        {"word": text, "start": start / SECOND, "end": end / SECOND, "confidence": sure}
        for start, end, text, sure in checked
    ]


@keywords
def write_textgrid(
    file: str | os.PathLike[str] | IO[str], tiers: Mapping[str, Sequence[Interval]], seconds: float
) -> None:
    """Writes a TextGrid of one recording, for Praat and other annotation tools, with praatio.

    Times are rounded to microseconds. White space at the ends of a text is left out, and so are confidences, for which
    the format has no place.

    Parameters
    ----------
    file : path or text file
        A path is overwritten, in UTF-8.
    tiers : mapping of str to sequence of Interval
        Names of tiers, and their intervals: labels and words, or one tier a model. Gaps become empty intervals.
    seconds : float
        Length of the recording in seconds. It ends the last interval, whose frame may reach beyond the recording.

    Raises
    ------
    TypeError
        `tiers` is no mapping of names to intervals.
    ValueError
        There is no tier, or `seconds` is not positive and finite. A time is negative or not finite, an interval has
        less than a microsecond within the recording or begins before the end of the one before it. A name or text holds
        line breaks or other control characters; a name is empty. No file is written.

    Examples
    --------
    ::

        timing.write_textgrid("george-7.TextGrid", {"labels": timing.intervals(frames, words, hop=0.01)}, seconds=2.5)
    """
    function = "write_textgrid"
    with needed_by(function, "metrics"):
        from praatio import textgrid
    seconds = float(_checks.scalar(function, "seconds", seconds))
    if not 0 < seconds < math.inf:
        raise ValueError(f"{function}: seconds must be positive and finite, got {seconds}.")
    checked = _checked_mapping(function, "tiers", tiers, limit=seconds)
    if not checked:
        raise ValueError(f"{function}: tiers must hold one tier at least, got {{}}.")
    grid = textgrid.Textgrid()
    for name, spoken in checked.items():
        if not name.strip():
            raise ValueError(f"{function}: names of tiers must not be empty, got {name!r}.")
        entries = [(start / SECOND, min(end / SECOND, seconds), text) for start, end, text, _ in spoken]
        grid.addTier(textgrid.IntervalTier(name, entries, 0, seconds))
    with tempfile.TemporaryDirectory() as folder:  # praatio writes into paths alone
        path = pathlib.Path(folder) / "grid"
        grid.save(os.fspath(path), format="long_textgrid", includeBlankSpaces=True, reportingMode="error")
        put(file, path.read_text(encoding="utf-8"))


# ------------------------------------------------------------------------------------------------- what can be written


def _checked_mapping(function: str, argument: str, spoken, *, form: str = "line", limit: float = math.inf):
    """`checked_intervals` of each name, which is a text of this form too."""
    if not isinstance(spoken, Mapping):
        raise TypeError(f"{function}: {argument} must be a mapping of names to intervals, got {spoken!r}.")
    for name in spoken:
        _check_text(function, f"names of {argument}", name, form)
    return {name: checked_intervals(function, argument, name, x, SECOND, form, limit) for name, x in spoken.items()}


def checked_intervals(
    function: str,
    argument: str,
    name: str,
    entries,
    unit: int = SECOND,
    form: str = "line",
    limit: float = math.inf,
    least: int = 1,
) -> list[tuple[int, int, str, float | None]]:
    """Intervals of one recording as (start, end, text, confidence), times in whole units: what every writer checks.

    Times are rounded first and compared then, so what is right here is right in the file. `unit`: how many a second
    has. `form`: a key of `FORMS`. `limit`: seconds before which an interval must begin. `least`: units of an interval;
    with 0, as readers have it, it may also overlap the next one.
    """
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence):
        raise TypeError(f"{function}: {argument} must hold a sequence of intervals, got {entries!r}.")
    checked: list[tuple[int, int, str, float | None]] = []
    before = 0
    for interval in entries:
        if isinstance(interval, str) or not isinstance(interval, Sequence) or len(interval) not in (3, 4):
            expected = "intervals (start, end, text) or (start, end, text, confidence)"
            raise TypeError(f"{function}: {argument} must hold {expected}, got {interval!r}.")
        times, text, sure = interval[:2], interval[2], interval[3] if len(interval) == 4 else None
        _check_text(function, f"texts of {argument}", text, form)
        edges = [unit * float(_checks.scalar(function, f"times of {argument}", x)) for x in times]
        start, end = map(round, edges) if all(map(math.isfinite, edges)) else (-1, -1)
        if not (before <= start < unit * limit - 0.5 and start + least <= end):
            room = f" without overlap, {LEAST[unit]} long or more," if least else ""
            rule = f"be finite, in order{room} and begin in [0, {limit})"
            raise ValueError(f"{function}: intervals of {name!r} must {rule}, got {interval!r}.")
        if sure is not None:
            sure = float(_checks.scalar(function, f"confidences of {argument}", sure))
            if not 0 <= sure <= 1:
                raise ValueError(f"{function}: confidences of {name!r} must be in [0, 1] or None, got {interval!r}.")
        checked.append((start, end, text, sure))
        before = end if least else start
    return checked


def _check_text(function: str, what: str, text, form: str) -> None:
    """Raises if a line of a file, lines or a column of it cannot hold this text."""
    if not isinstance(text, str):
        raise TypeError(f"{function}: {what} must be str, got {text!r}.")
    lines = text.split("\n") if form == "lines" else [text]
    if any(unicodedata.category(x) in ("Cc", "Cs", "Zl", "Zp") or x == "\ufeff" for line in lines for x in line):
        raise ValueError(f"{function}: {what} must {FORMS['line' if form == 'column' else form]}, got {text!r}.")
    empty = form in ("word", "lines") and not all(map(str.strip, lines))
    if empty or (form == "column" and text.split() != [text]):
        raise ValueError(f"{function}: {what} must {FORMS[form]}, got {text!r}.")
