"""Labels to words: which labels spell a word, when it is said, and how sure the model is of it."""

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from jax_rnnt import _checks
from jax_rnnt._keywords import keywords
from jax_rnnt.timing._intervals import Interval, emitted, seconds_of

OF_A_WORD: dict[str, Callable] = {"min": np.min, "mean": np.mean, "product": np.prod}
SPOKEN = "%‰&@#§*/\\"  # punctuation to Unicode, words to a speaker


@keywords
def words(
    labels: npt.ArrayLike,
    frames: npt.ArrayLike,
    vocabulary: Sequence[str | None],
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
    """The words of an utterance, with their times and confidences.

    L labels. A word begins where its first label does and ends with its last one, as `intervals` has them. Punctuation
    belongs to the text of a word, but takes no time and has no part in its confidence: a comma moves no end. The same
    holds for labels without text, such as a space. Punctuation that has no word of its own joins the word before it;
    opening brackets and quotes join the next one. An utterance of punctuation alone has no words. Words that one frame
    emits share it, so words are never empty, never overlap, and neighbours meet in equal numbers.

    Parameters
    ----------
    labels : Array, integer [L]
        Of one utterance, as in `Hypotheses`: -1 is padding at the end, where the other arrays are not read either.
    frames : Array, integer [L]
        The encoder frame of each label, in order.
    vocabulary : sequence of str or None
        The text of each class; None or an empty one: no text.
    hop, subsampling, offset
        As in `frames_to_seconds`.
    end : float, optional
        The second in which the recording ends, and with it a word whose last frame reaches beyond. A word that begins
        there or later keeps its times: the last frame of an encoder may be padding.
    durations : Array, integer [L], optional
        As in `intervals`.
    confidences : Array, floating [L], optional
        Of each label, 0 or more: `Hypotheses.label_confidences`, or exp of `label_log_probs`. Above 1 (rounding) counts
        as 1.
    mark : str, default "▁"
        What tells where words begin. "##": labels that begin with it continue the word (WordPiece). "@@": labels
        that end with it are continued by the next one (BPE). Any other text, as SentencePiece's "▁" or a space: labels
        that begin with it begin a word. None: every label is a word, as in languages that write no spaces;
        combining characters continue the word, and a "▁" is left out.
    how : {"min", "mean", "product"}
        How the confidences of its labels make that of a word, as in `metrics.word_confidence`.

    Returns
    -------
    list of Interval
        `confidence` is None without `confidences`.

    Raises
    ------
    TypeError, ValueError
        An argument has another shape or type, or `how` is another word. Labels outside of the vocabulary, -1 before a
        label, or labels with the mark behind their beginning. Frames that are negative or go back, confidences below 0
        or NaN.

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
    function, dimensions = "words", "[L], one of each label"
    labels = np.asarray(_checks.integral(function, "labels", labels))
    if labels.ndim != 1:
        raise ValueError(f"{function}: labels must have shape [L], those of one utterance, got {labels.shape}.")
    if mark is not None and (not isinstance(mark, str) or not mark):
        raise TypeError(f"{function}: mark must be None or a str with a character or more, got {mark!r}.")
    _checks.choice(function, "how", how, tuple(OF_A_WORD))
    end = math.inf if end is None else float(_checks.number(function, "end", end))
    count = int(np.argmin(np.append(labels, -1) >= 0))
    texts = _texts(function, labels, count, vocabulary)
    arrays = (("frames", frames), ("durations", durations), ("confidences", confidences))
    frames, durations, confidences = (_of_labels(function, name, x, len(labels), count) for name, x in arrays)
    first, reads = emitted(function, frames, durations, count, dimensions)
    if confidences is not None:
        confidences = checked_confidences(function, confidences)
    spelled = _with_punctuation(_spelled(function, texts, mark))
    heard = [[place for place, text in word if _is_heard(text)] for word in spelled]
    places = np.array([place for word in heard for place in word], int)
    times = seconds_of(function, first[places], reads[places], (hop, subsampling, offset))
    at = dict(zip(places.tolist(), times))
    found = []
    for word, own in zip(spelled, heard):
        sure = None if confidences is None else float(OF_A_WORD[how](confidences[own]))
        first, last = at[own[0]][0], at[own[-1]][1]
        last = min(last, end) if first < end else last
        found.append(Interval(first, last, "".join(text for _, text in word), sure))
    return found


def _texts(function: str, labels, count: int, vocabulary) -> list[str]:
    """The texts of the labels before the padding."""
    if isinstance(vocabulary, Mapping):
        raise TypeError(f"{function}: vocabulary must be a sequence, the text of each class, got a mapping.")
    names = list(vocabulary)
    if np.any(labels[:count] >= len(names)) or np.any(labels[count:] != -1):
        expected = f"in [0, {len(names)}), the classes of vocabulary, and -1 at the end alone"
        raise ValueError(f"{function}: labels must be {expected}, got {labels.tolist()}.")
    texts = [names[label] for label in labels[:count].tolist()]
    wrong = [x for x in texts if not isinstance(x, str | None)]
    if wrong:
        raise TypeError(f"{function}: vocabulary must hold str or None, got {wrong[0]!r}.")
    return [x or "" for x in texts]


def _of_labels(function: str, name: str, x, size: int, count: int):
    """The part of an array [L] before the padding; None stays."""
    if x is None:
        return None
    x = np.asarray(_checks.array(function, name, x))
    if x.shape != (size,):
        raise ValueError(f"{function}: {name} must have shape [L] = {(size,)}, as labels, got {x.shape}.")
    if name == "confidences":
        if str(x.dtype) not in _checks.FLOATS:
            raise TypeError(f"{function}: confidences must have a floating dtype, got {x.dtype}.")
        return x[:count]
    return x[:count] if x.size else x.astype(int)  # NumPy makes floats of an empty list


def checked_confidences(function: str, x) -> np.ndarray:
    """Confidences of labels in float64, at most 1."""
    if not np.all(x >= 0):
        expected = "0 or more, as Hypotheses.label_confidences or exp of log-probabilities are"
        raise ValueError(f"{function}: confidences must be {expected}, got {x[~(x >= 0)][0]}.")
    return np.minimum(x.astype(np.float64), 1)


def _spelled(function: str, texts: list[str], mark: str | None) -> list[list[tuple[int, str]]]:
    """The labels of each word: their places and what they spell, which is not empty."""
    found: list[list[tuple[int, str]]] = [[]]
    continues = False
    for place, text in enumerate(texts):
        if not text:
            continue
        if mark is None:
            piece = text.replace("▁", "").strip()
            begins = not piece or unicodedata.category(piece[0])[0] != "M"
        elif mark == "##":
            begins, piece = not text.startswith(mark), text.removeprefix(mark)
        elif mark == "@@":
            begins, piece, continues = not continues, text.removesuffix(mark), text.endswith(mark)
        else:
            begins, piece = text.startswith(mark), text
            while piece.startswith(mark):
                piece = piece.removeprefix(mark)
        if mark is not None and mark in piece:
            raise ValueError(f"{function}: labels must have the mark {mark!r} at one end alone, got {text!r}.")
        if begins:
            found.append([])
        if piece.strip():
            found[-1].append((place, piece))
    return [word for word in found if word]


def _with_punctuation(spelled: list[list[tuple[int, str]]]) -> list[list[tuple[int, str]]]:
    """Words that are heard; punctuation between them has joined one of its neighbours."""
    found: list[list[tuple[int, str]]] = []
    waiting: list[tuple[int, str]] = []
    for word in spelled:
        if any(_is_heard(text) for _, text in word):
            found.append(waiting + word)
            waiting = []
        elif waiting or not found or unicodedata.category(word[0][1][0]) in ("Ps", "Pi"):
            waiting = waiting + word
        else:
            found[-1] = found[-1] + word
    if found:
        found[-1] = found[-1] + waiting
    return found


def _is_heard(text: str) -> bool:
    """Whether it holds more than punctuation."""
    return any(unicodedata.category(x)[0] != "P" or x in SPOKEN for x in unicodedata.normalize("NFKC", text))
