"""Turns frames into seconds, and labels into the stretches of time in which they are emitted."""

import math
import typing
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords


class Interval(typing.NamedTuple):
    """A stretch of time with a text.

    Parameters
    ----------
    start, end : float
        Seconds.
    text : str
        A label, word or other unit.
    confidence : float, optional
        From 0 to 1; None: not known.

    Examples
    --------
    >>> from jax_rnnt.timing import Interval
    >>> Interval(0.25, 0.5, "seven").end
    0.5
    """

    start: float
    end: float
    text: str
    confidence: float | None = None


@keywords
def frames_to_seconds(frames: npt.ArrayLike, *, hop: float, subsampling: int = 1, offset: float = 0.0) -> np.ndarray:
    """Returns the second in which an encoder frame begins: ``offset + frame * subsampling * hop``.

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
    return _seconds(frames, hop, subsampling, offset)


def _seconds(frames, hop, subsampling, offset):
    hop, offset = (float(_checks.scalar(n, x)) for n, x in (("hop", hop), ("offset", offset)))
    if not 0 < hop < np.inf:
        raise _checks.bad_value(f"hop must be a positive number of seconds, got {hop}.")
    if not math.isfinite(offset):
        raise _checks.bad_value(f"offset must be a finite number of seconds, got {offset}.")
    _checks.positive("subsampling", subsampling)
    frames = _checks.array("frames", frames)
    if not any(jnp.issubdtype(frames.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise _checks.bad_type(f"frames must be real numbers, got {frames.dtype}.")
    frames = np.asarray(frames, np.float64)
    return offset + np.where(frames < 0, np.nan, frames) * (subsampling * hop)


@keywords
def intervals(
    frames: npt.ArrayLike,
    texts: Sequence[str],
    *,
    hop: float,
    subsampling: int = 1,
    offset: float = 0.0,
    durations: npt.ArrayLike | None = None,
) -> list[Interval]:
    """Returns the stretches of time of an utterance's labels.

    U labels. A transducer says when it emits a label, but not how long the label is: a label gets its frame, or the
    frames that it reads (`durations`). Labels of one frame share it in equal parts. So no interval is empty or overlaps
    another.

    Parameters
    ----------
    frames : Array, integer [U]
        The encoder frame of each label, in order, without padding.
    texts : sequence of str [U]
        The name of each label.
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
    ...     print(*interval[:3])
    0.25 0.375 a
    0.375 0.5 b
    1.0 1.25 c
    """
    frames, durations = emitted(frames, durations, len(texts), "[U], U = len(texts)")
    times = seconds_of(frames, durations, (hop, subsampling, offset))
    return [Interval(start, end, text) for (start, end), text in zip(times, texts)]


def emitted(frames, durations, count: int, dimensions: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns (frames, durations) of `count` labels as checked NumPy arrays; without durations, a label reads one."""
    frames = np.asarray(_checks.integers("frames", frames, (count,), dimensions))
    if np.any(frames < 0) or np.any(np.diff(frames) < 0):
        raise _checks.bad_value(f"frames must be 0 or more and never go back, without padding, got {frames.tolist()}.")
    if durations is None:
        durations = np.ones(count, np.int32)
    return frames, np.asarray(_checks.integers("durations", durations, (count,), dimensions))


def seconds_of(frames, durations, clock) -> list:
    """Returns [start, end] of labels, in seconds; `clock` is (hop, subsampling, offset)."""
    if not len(frames):
        return []
    values, places, counts = np.unique(frames, return_index=True, return_counts=True)
    lasts = np.minimum(values + np.maximum(np.maximum.reduceat(durations, places), 1), [*values[1:], np.inf])
    first, length, count = (np.repeat(x, counts)[:, None] for x in (values, lasts - values, counts))
    share = np.arange(len(frames))[:, None] - np.repeat(places, counts)[:, None] + [0, 1]
    return _seconds(first + length * share / count, *clock).tolist()
