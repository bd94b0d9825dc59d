"""Frames to seconds, and alignments to files: CTM (NIST) and TextGrid (Praat). All of it runs on the host."""

from __future__ import annotations

import os
import pathlib
import typing
from collections.abc import Mapping, Sequence

import numpy as np

from jax_rnnt import _checks
from jax_rnnt._extras import needed_by

__all__ = ["Interval", "frames_to_seconds", "intervals", "write_ctm", "write_textgrid"]


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


def frames_to_seconds(frames, *, hop: float, reduction: int = 1, offset: float = 0.0) -> np.ndarray:
    """The second in which an encoder frame begins: ``offset + frame * reduction * hop``.

    Parameters
    ----------
    frames : Array, integer or floating [...]
        Frames of the encoder: those of `align`, of a decoder, or the means of `emission_frames`.
    hop : float
        Seconds from one input frame to the next.
    reduction : int, default 1
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
    >>> frames_to_seconds([0, 2, 7], hop=0.01, reduction=4).round(3).tolist()
    [0.0, 0.08, 0.28]
    """
    return _seconds("frames_to_seconds", frames, hop, reduction, offset)


def _seconds(function, frames, hop, reduction, offset):
    hop, offset = (float(_checks.scalar(function, n, x)) for n, x in (("hop", hop), ("offset", offset)))
    if not 0 < hop < np.inf:
        raise ValueError(f"{function}: hop must be a positive number of seconds, got {hop}.")
    _checks.positive(function, "reduction", reduction)
    frames = _checks.array(function, "frames", frames)
    if not np.issubdtype(frames.dtype, np.number):
        raise TypeError(f"{function}: frames must be numbers, got {frames.dtype}.")
    frames = np.asarray(frames, np.float64)
    return offset + np.where(frames < 0, np.nan, frames) * (reduction * hop)


def intervals(
    frames,
    texts: Sequence[str],
    *,
    hop: float,
    reduction: int = 1,
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
    hop, reduction, offset
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
    seconds = _seconds(function, np.reshape(bounds, (count, 2)), hop, reduction, offset)
    return [Interval(start, end, text) for (start, end), text in zip(seconds.tolist(), texts)]


def write_ctm(file: str | os.PathLike, utterances: Mapping[str, Sequence[Interval]], channel: str = "1") -> None:
    """Writes a CTM file: a line ``utterance channel start duration text`` for each interval, in seconds.

    Parameters
    ----------
    file : path
        It is overwritten.
    utterances : mapping of str to sequence of Interval
        Names of recordings, and what was said in them.
    channel : str, default "1"
        Of all recordings.

    Raises
    ------
    ValueError
        A name or text is empty or holds white space, which separates the columns.

    Examples
    --------
    ::

        timing.write_ctm("test.ctm", {"george-7": timing.intervals(frames, words, hop=0.0125, reduction=4)})
    """
    lines = []
    for name, spoken in utterances.items():
        for start, end, text in spoken:
            for argument, word in (("channel", channel), ("utterances", name), ("utterances", text)):
                if len(word.split()) != 1 or word != word.strip():
                    expected = "names and texts without white space, which are not empty"
                    raise ValueError(f"write_ctm: {argument} must hold {expected}, got {word!r}.")
            lines.append(f"{name} {channel} {start:.3f} {end - start:.3f} {text}\n")
    pathlib.Path(file).write_text("".join(lines), encoding="utf-8")


def write_textgrid(file: str | os.PathLike, tiers: Mapping[str, Sequence[Interval]], duration: float) -> None:
    """Writes a TextGrid of one recording, for Praat and other annotation tools. praatio makes it.

    Parameters
    ----------
    file : path
        It is overwritten.
    tiers : mapping of str to sequence of Interval
        Names of tiers, and their intervals: labels and words, or one tier a model. Gaps become empty intervals.
    duration : float
        Length of the recording in seconds. It ends the last interval, whose frame may reach beyond the recording.

    Raises
    ------
    ValueError
        There is no tier, or an interval begins outside [0, duration), is empty or overlaps with the one before.

    Examples
    --------
    ::

        timing.write_textgrid("george-7.TextGrid", {"labels": timing.intervals(frames, words, hop=0.01)}, duration=2.5)
    """
    with needed_by("write_textgrid", "metrics"):
        from praatio import textgrid
    if not tiers:
        raise ValueError("write_textgrid: tiers must hold one tier at least, got {}.")
    grid = textgrid.Textgrid()
    for name, spoken in tiers.items():
        before, entries = 0.0, []
        for interval in spoken:
            start, end, text = interval
            if not before <= start < min(end, duration):
                expected = f"in order, not empty and begin in [0, {duration})"
                raise ValueError(f"write_textgrid: intervals of tier {name!r} must be {expected}, got {interval}.")
            entries.append((start, min(end, duration), text))
            before = end
        grid.addTier(textgrid.IntervalTier(name, entries, 0, duration))
    grid.save(os.fspath(file), format="long_textgrid", includeBlankSpaces=True, reportingMode="error")
