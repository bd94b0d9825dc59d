"""Turns labels into words: the labels that spell each word, its time, and its confidence."""

import itertools
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords
from jax_rnnt.timing._intervals import Interval, emitted, seconds_of
from jax_rnnt.timing._spelling import any_dense, decoded, is_spoken, units

OF_A_WORD: dict[str, Callable] = {"min": np.min, "mean": np.mean, "product": np.prod}


@keywords
def words(
    labels: npt.ArrayLike,
    frames: npt.ArrayLike,
    vocabulary: Any,
    *,
    hop: float,
    subsampling: int = 1,
    offset: float = 0.0,
    end: float | None = None,
    durations: npt.ArrayLike | None = None,
    confidences: npt.ArrayLike | None = None,
    mark: str | None = "▁",
    how: Literal["min", "mean", "product"] = "min",
) -> list[Interval]:
    """Returns the words of an utterance, with their times and confidences.

    L labels. A word begins where its first label does and ends with its last one, as `intervals` has them. Punctuation
    belongs to the text of a word, but takes no time and has no part in its confidence: a comma moves no end. The same
    holds for labels without text, such as a space. Punctuation that has no word of its own joins the word before it;
    opening brackets and quotes join the next one. An utterance of punctuation alone has no words. Words that one frame
    emits share it, so words are never empty, never overlap, and neighbours meet in equal numbers.

    Parameters
    ----------
    labels : Array, integer [L]
        Labels of one utterance, as in `Hypotheses`: -1 is padding at the end, where the other arrays are not read
        either.
    frames : Array, integer [L]
        The encoder frame of each label, in order.
    vocabulary : sequence of str or None, or callable
        The text of each class; None or an empty one: no text. Or a tokenizer, or its method `decode`, a function of a
        list of labels that returns their text: words are those of the whole text then, whatever pieces spell them,
        parts of characters included.
    hop, subsampling, offset
        As in `frames_to_seconds`.
    end : float, optional
        The second in which the recording ends, and with it a word whose last frame reaches beyond. A word that begins
        there or later keeps its times: the last frame of an encoder may be padding.
    durations : Array, integer [L], optional
        As in `intervals`.
    confidences : Array, floating [L], optional
        One for each label, 0 or more: `Hypotheses.label_confidences`, or exp of `label_log_probs`. Above 1 (rounding)
        counts as 1.
    mark : str, default "▁"
        The mark of words' beginnings in texts of classes. "##": labels that begin with it continue a word (WordPiece).
        "@@": labels that end with it are continued by the next one (BPE). Any other text, as SentencePiece's "▁" or a
        space: it separates words. None: every label is a word, and a "▁" is left out; of a tokenizer, too.
    how : {"min", "mean", "product"}
        How the confidences of its labels make that of a word, as in `metrics.word_confidence`.

    Returns
    -------
    list of Interval
        `confidence` is None without `confidences`.

    Raises
    ------
    TypeError, ValueError
        An argument has another shape or type, or `how` is another word. Labels outside of the vocabulary, or -1 before
        a label. Frames that are negative or go back, confidences below 0 or NaN.

    Examples
    --------
    >>> from jax_rnnt.timing import words
    >>> vocabulary = ["▁good", "▁mor", "ning", ",", None]
    >>> labels, frames, confidences = [0, 3, 1, 2, -1], [2, 5, 8, 9, -1], [0.9, 0.4, 0.8, 0.5, 0.0]
    >>> for word in words(labels, frames, vocabulary, hop=0.25, confidences=confidences):
    ...     print(*word)
    0.5 0.75 good, 0.9
    2.0 2.5 morning 0.5
    """
    labels = np.asarray(_checks.integral("labels", labels))
    if labels.ndim != 1:
        raise _checks.bad_value(f"labels must have shape [L], those of one utterance, got {labels.shape}.")
    if mark is not None and (not isinstance(mark, str) or not mark):
        raise _checks.bad_type(f"mark must be None or a str with a character or more, got {mark!r}.")
    _checks.choice("how", how, tuple(OF_A_WORD))
    end = math.inf if end is None else float(_checks.number("end", end))
    count = int(np.argmin(np.append(labels, -1) >= 0))
    text, spans, every = _text(labels, count, vocabulary, mark)
    arrays = (("frames", frames), ("durations", durations), ("confidences", confidences))
    frames, durations, confidences = (_of_labels(name, x, len(labels), count) for name, x in arrays)
    emits, reads = emitted(frames, durations, count, "[L], one of each label")
    if confidences is not None:
        confidences = checked_confidences(confidences)
    units_of_text = _with_punctuation(_units(text, spans, every))
    places = np.array([place for unit in units_of_text for place in unit.spoken], int)
    times = iter(seconds_of(emits[places], reads[places], (hop, subsampling, offset)))
    found = []
    for unit in units_of_text:
        sure = None if confidences is None else float(OF_A_WORD[how](confidences[unit.spoken]))
        own = [*itertools.islice(times, len(unit.spoken))]
        start, last = own[0][0], own[-1][1]
        found.append(Interval(start, min(last, end) if start < end else last, unit.text, sure))
    return found


def _text(labels, count: int, vocabulary, mark: str | None):
    """Returns (text of the labels before the padding, its spans, whether every label is a word)."""
    if isinstance(vocabulary, Mapping):
        raise _checks.bad_type("vocabulary must be a sequence, the text of each class, got a mapping.")
    decode: Any = getattr(vocabulary, "decode", vocabulary if callable(vocabulary) else None)
    names = vocabulary if isinstance(vocabulary, Sequence) else None if decode else list(vocabulary)
    limit = math.inf if names is None else len(names)
    if np.any(labels[:count] >= limit) or np.any(labels[count:] != -1):
        expected = f"in [0, {limit}), the classes of vocabulary, and -1 at the end alone"
        raise _checks.bad_value(f"labels must be {expected}, got {labels.tolist()}.")
    chosen = labels[:count].tolist()
    wrong = [] if names is None else [names[x] for x in chosen if not isinstance(names[x], str | None)]
    if wrong:
        raise _checks.bad_type(f"vocabulary must hold str or None, got {wrong[0]!r}.")
    every = mark is None and not (names and any_dense(x for x in names if x))
    if decode or names is None:
        return *decoded(decode, chosen), every
    return *_spelled([names[label] or "" for label in chosen], mark), every


def _of_labels(name: str, x, size: int, count: int):
    """Returns the part of an array [L] before the padding; None stays."""
    if x is None:
        return None
    x = np.asarray(_checks.array(name, x))
    if x.shape != (size,):
        raise _checks.bad_value(f"{name} must have shape [L] = {(size,)}, as labels, got {x.shape}.")
    if name == "confidences":
        if str(x.dtype) not in _checks.FLOATS:
            raise _checks.bad_type(f"confidences must have a floating dtype, got {x.dtype}.")
        return x[:count]
    return x[:count] if x.size else x.astype(int)  # NumPy makes floats of an empty list


def checked_confidences(x) -> np.ndarray:
    """Returns confidences of labels in float64, at most 1."""
    if not np.all(x >= 0):
        expected = "0 or more, as Hypotheses.label_confidences or exp of log-probabilities are"
        raise _checks.bad_value(f"confidences must be {expected}, got {x[~(x >= 0)][0]}.")
    return np.minimum(x.astype(np.float64), 1)


def _spelled(texts: list[str], mark: str | None) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text of some labels of a table, with a space before each word, and its spans."""
    pieces = []
    for text in texts:
        text = text if mark == " " else text.strip()
        if mark is None:
            text = text.replace("▁", "")
        elif mark == "##":
            text = text.removeprefix(mark) if text.startswith(mark) or not text else f" {text}"
        elif mark == "@@":
            text = text.removesuffix(mark) if text.endswith(mark) or not text else f"{text} "
        else:
            text = text.replace(mark, " ")
        pieces.append(text)
    ends = [*itertools.accumulate(map(len, pieces), initial=0)]
    return "".join(pieces), [*itertools.pairwise(ends)]


class _Unit(NamedTuple):
    """A word, or punctuation next to it."""

    text: str
    spoken: list[int]  # places of the labels that spell more than its punctuation


def _units(text: str, spans, every: bool) -> list[_Unit]:
    found, place = [], 0
    for begin, end in units(text, {x[1] for x in spans}, every):
        while place < len(spans) and spans[place][1] <= begin:
            place += 1
        spoken, i = [], place
        while i < len(spans) and spans[i][0] < end:
            if is_spoken(text[max(begin, spans[i][0]) : min(end, spans[i][1])]):
                spoken.append(i)
            i += 1
        found.append(_Unit(text[begin:end], spoken))
    return found


def _with_punctuation(found: list[_Unit]) -> list[_Unit]:
    """Returns the words that are spoken; punctuation between them has joined one of its neighbours."""
    words: list[_Unit] = []
    waiting = ""
    for text, spoken in found:
        if spoken:
            words.append(_Unit(waiting + text, spoken))
            waiting = ""
        elif waiting or not words or unicodedata.category(text[0]) in ("Ps", "Pi"):
            waiting += text
        else:
            words[-1] = _Unit(words[-1].text + text, words[-1].spoken)
    if words:
        words[-1] = _Unit(words[-1].text + waiting, words[-1].spoken)
    return words
