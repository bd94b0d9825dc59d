"""Frames to seconds, and alignments to files: CTM (NIST) and TextGrid (Praat). All of it runs on the host."""

import math
import os
import pathlib
import typing
import unicodedata
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _renamed
from jax_rnnt._extras import needed_by

__all__ = ["Interval", "frames_to_seconds", "intervals", "write_ctm", "write_textgrid"]

SECOND = 1_000_000  # microseconds, in which files have their times


class Interval(typing.NamedTuple):
    """A stretch of time with a text.

    Parameters
    ----------
    start, end : float
        Seconds.
    text : str
        A label, word or other unit.

    Examples
    --------
    >>> from jax_rnnt.timing import Interval
    >>> Interval(0.25, 0.5, "seven").end
    0.5
    """

    start: float
    end: float
    text: str


@_renamed.argument(reduction="subsampling")
def frames_to_seconds(frames, *, hop: float, subsampling: int = 1, offset: float = 0.0) -> np.ndarray:
    """The second in which an encoder frame begins: ``offset + frame * subsampling * hop``.

    Parameters
    ----------
    frames : Array, integer or floating [...]
        Frames of the encoder: those of `align`, of a decoder, or the means of `label_frames`.
    hop : float
        Seconds from one input frame to the next.
    subsampling : int, default 1
        Input frames for each encoder frame.
    offset : float, default 0.0
        Seconds before frame 0.

    Returns
    -------
    ndarray, float64 [...]
        NaN for a frame below 0, which is padding or no path.

    Raises
    ------
    TypeError, ValueError
        A number is not what is expected.

    Examples
    --------
    >>> from jax_rnnt.timing import frames_to_seconds
    >>> frames_to_seconds([0, 2, 7], hop=0.01, subsampling=4).round(3).tolist()
    [0.0, 0.08, 0.28]
    """
    return _seconds("frames_to_seconds", frames, hop, subsampling, offset)


def _seconds(function, frames, hop, subsampling, offset):
    hop, offset = (float(_checks.scalar(function, n, x)) for n, x in (("hop", hop), ("offset", offset)))
    if not 0 < hop < np.inf:
        raise ValueError(f"{function}: hop must be a positive number of seconds, got {hop}.")
    if not math.isfinite(offset):
        raise ValueError(f"{function}: offset must be a finite number of seconds, got {offset}.")
    _checks.positive(function, "subsampling", subsampling)
    frames = _checks.array(function, "frames", frames)
    if not any(jnp.issubdtype(frames.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise TypeError(f"{function}: frames must be real numbers, got {frames.dtype}.")
    frames = np.asarray(frames, np.float64)
    return offset + np.where(frames < 0, np.nan, frames) * (subsampling * hop)


@_renamed.argument(reduction="subsampling")
def intervals(
    frames,
    texts: Sequence[str],
    *,
    hop: float,
    subsampling: int = 1,
    offset: float = 0.0,
    durations=None,
) -> list[Interval]:
    """The stretches of time of an utterance's labels.

    U labels. A transducer says when a label is emitted, and not how long it is: a label gets its frame, or the frames
    that it reads (`durations`). Labels of one frame share it in equal parts. So intervals neither overlap nor are
    empty.

    Parameters
    ----------
    frames : Array, integer [U]
        The encoder frame of each label, in order, without padding.
    texts : sequence of str [U]
        What each label is called.
    hop, subsampling, offset
        As in `frames_to_seconds`.
    durations : Array, integer [U], optional
        Encoder frames of each label (those of a token-and-duration transducer); less than 1 counts as 1, and the next
        label's frame ends an interval.

    Returns
    -------
    list of Interval

    Raises
    ------
    TypeError, ValueError
        An argument has another shape or type, or frames are negative or go back: padding (-1), or no path.

    Examples
    --------
    >>> from jax_rnnt.timing import intervals
    >>> for interval in intervals([1, 1, 4], ["a", "b", "c"], hop=0.25):
    ...     print(*interval)
    0.25 0.375 a
    0.375 0.5 b
    1.0 1.25 c
    """
    function = "intervals"
    count = len(texts)
    frames = np.asarray(_checks.integers(function, "frames", frames, (count,), "[U], U = len(texts)"))
    if np.any(frames < 0) or np.any(np.diff(frames) < 0):
        expected = "be 0 or more and never go back, without padding"
        raise ValueError(f"{function}: frames must {expected}, got {frames.tolist()}.")
    if durations is None:
        durations = np.ones(count, np.int32)
    durations = np.asarray(_checks.integers(function, "durations", durations, (count,), "[U], U = len(texts)"))
    groups = [np.flatnonzero(frames == frame) for frame in np.unique(frames)]
    ends = [frames[group[0]] for group in groups[1:]] + [np.inf]
    bounds = []
    for group, end in zip(groups, ends):
        first = frames[group[0]]
        last = min(first + max(durations[group].max(), 1), end)
        bounds += [(first + (last - first) * np.array([i, i + 1]) / len(group)) for i in range(len(group))]
    seconds = _seconds(function, np.reshape(bounds, (count, 2)), hop, subsampling, offset)
    return [Interval(start, end, text) for (start, end), text in zip(seconds.tolist(), texts)]


def write_ctm(file: str | os.PathLike, utterances: Mapping[str, Sequence[Interval]], channel: str = "1") -> None:
    """Writes a CTM file: a line ``utterance channel start duration text`` for each interval, in seconds.

    Times have six decimals. Start and end are rounded, so an interval that begins where another one ends does so in the
    file too: its start is the other's start plus duration, digit by digit.

    Parameters
    ----------
    file : path
        It is overwritten, in UTF-8.
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
        before it. A name or text is empty, holds white space, which separates the columns, or control characters; the
        name of a recording begins with ";;", as comments do. No file is written.

    Examples
    --------
    ::

        timing.write_ctm("test.ctm", {"george-7": timing.intervals(frames, words, hop=0.0125, subsampling=4)})
    """
    function = "write_ctm"
    _check_text(function, "channel", channel, column=True)
    lines = []
    for name, spoken in _in_microseconds(function, "utterances", utterances, columns=True).items():
        if name.startswith(";;"):
            raise ValueError(f"{function}: names of utterances must not begin with ';;', as comments do, got {name!r}.")
        for start, end, text in spoken:
            lines.append(f"{name} {channel} {start / SECOND:.6f} {(end - start) / SECOND:.6f} {text}\n")
    pathlib.Path(file).write_text("".join(lines), encoding="utf-8")


@_renamed.argument(duration="seconds")
def write_textgrid(file: str | os.PathLike, tiers: Mapping[str, Sequence[Interval]], seconds: float) -> None:
    """Writes a TextGrid of one recording, for Praat and other annotation tools. praatio makes it.

    Times are rounded to microseconds. White space at the ends of a text is left out.

    Parameters
    ----------
    file : path
        It is overwritten, in UTF-8.
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
    checked = _in_microseconds(function, "tiers", tiers, limit=seconds)
    if not checked:
        raise ValueError(f"{function}: tiers must hold one tier at least, got {{}}.")
    grid = textgrid.Textgrid()
    for name, spoken in checked.items():
        if not name.strip():
            raise ValueError(f"{function}: names of tiers must not be empty, got {name!r}.")
        entries = [(start / SECOND, min(end / SECOND, seconds), text) for start, end, text in spoken]
        grid.addTier(textgrid.IntervalTier(name, entries, 0, seconds))
    grid.save(os.fspath(file), format="long_textgrid", includeBlankSpaces=True, reportingMode="error")


def _in_microseconds(
    function: str,
    argument: str,
    spoken,
    *,
    columns: bool = False,
    limit: float = math.inf,
) -> dict[str, list[tuple[int, int, str]]]:
    """Intervals {name: [(start, end, text)]} in whole microseconds: what every writer checks.

    Times are rounded first and compared then, so what is right here is right in the file. `columns`: names and texts
    are columns of a table. `limit`: seconds before which an interval must begin.
    """
    if not isinstance(spoken, Mapping):
        raise TypeError(f"{function}: {argument} must be a mapping of names to intervals, got {spoken!r}.")
    checked: dict[str, list[tuple[int, int, str]]] = {}
    for name, entries in spoken.items():
        _check_text(function, f"names of {argument}", name, columns)
        checked[name], before = [], 0
        for interval in entries:
            if not isinstance(interval, Sequence) or len(interval) != 3:
                raise TypeError(f"{function}: {argument} must hold intervals (start, end, text), got {interval!r}.")
            *times, text = interval
            _check_text(function, f"texts of {argument}", text, columns)
            edges = [SECOND * float(_checks.scalar(function, f"times of {argument}", x)) for x in times]
            start, end = map(round, edges) if all(map(math.isfinite, edges)) else (-1, -1)
            if not before <= start < min(end, SECOND * limit - 0.5):
                rule = f"be finite, in order without overlap, a microsecond long or more, and begin in [0, {limit})"
                raise ValueError(f"{function}: intervals of {name!r} must {rule}, got {interval!r}.")
            checked[name].append((start, end, text))
            before = end
    return checked


def _check_text(function: str, what: str, text, column: bool) -> None:
    """Raises if a line of a file, or a column of it, cannot hold this text."""
    if not isinstance(text, str):
        raise TypeError(f"{function}: {what} must be str, got {text!r}.")
    if any(unicodedata.category(x) in ("Cc", "Cs", "Zl", "Zp") or x == "\ufeff" for x in text):
        rule = "be without line breaks, control characters, byte order marks and lone surrogates"
        raise ValueError(f"{function}: {what} must {rule}, got {text!r}.")
    if column and text.split() != [text]:
        raise ValueError(f"{function}: {what} must be without white space and not empty, got {text!r}.")
