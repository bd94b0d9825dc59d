"""Error rates of decoded labels and confidences of words, on the host. The edit distance is rapidfuzz's, as jiwer's."""

import typing

import numpy as np

from jax_rnnt import _checks
from jax_rnnt._extras import needed_by
from jax_rnnt.timing._words import OF_A_WORD

with needed_by("jax_rnnt.metrics", "metrics"):
    from rapidfuzz.distance import Levenshtein

__all__ = ["LabelErrors", "label_errors", "word_confidence"]


class LabelErrors(typing.NamedTuple):
    """Edits that turn hypotheses into targets, from `label_errors`.

    Parameters
    ----------
    substitutions, deletions, insertions : ndarray, int32 [...]
        Labels replaced, missing and superfluous in each hypothesis.

    Examples
    --------
    >>> from jax_rnnt.metrics import LabelErrors
    >>> LabelErrors(1, 2, 0).total
    3
    """

    substitutions: np.ndarray
    deletions: np.ndarray
    insertions: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """The edit distance (Levenshtein), int32 [...]: `errors` of a minimum word error rate loss."""
        return self.substitutions + self.deletions + self.insertions


def label_errors(labels, counts, targets, target_lengths) -> LabelErrors:
    """The fewest edits between hypotheses and targets.

    L and U labels at most; `...` is any number of batch dimensions, the same for hypotheses and targets. A dimension of
    1 is broadcast: labels [B, N, L] and targets [B, 1, U] are N hypotheses of each utterance. The error rate of a
    test set is the sum of `total` over the sum of `target_lengths`. For words of texts take jiwer, which normalises
    them too.

    Parameters
    ----------
    labels : Array, integer [..., L]
        Hypotheses.
    counts : Array, integer [...]
        Labels of each hypothesis; later ones are not read.
    targets : Array, integer [..., U]
        Reference labels.
    target_lengths : Array, integer [...]
        Labels of each target; later ones are not read.

    Returns
    -------
    LabelErrors

    Raises
    ------
    TypeError, ValueError
        An argument is no array of integers, has another shape or number of batch dimensions, or counts more labels than
        there are.

    Examples
    --------
    >>> import numpy as np
    >>> from jax_rnnt.metrics import label_errors
    >>> targets, target_lengths = np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1])
    >>> errors = label_errors(np.array([[1, 3, 0], [4, 4, 5]]), np.array([2, 3]), targets, target_lengths)
    >>> errors.total.tolist(), float(errors.total.sum() / target_lengths.sum())
    ([1, 2], 0.75)
    """
    labels, counts = _sequences("label_errors", "labels", labels, "counts", counts)
    targets, target_lengths = _sequences("label_errors", "targets", targets, "target_lengths", target_lengths)
    if counts.ndim != target_lengths.ndim:  # NumPy would pair dimensions from the last one on: N with B
        expected = f"{counts.ndim} batch dimensions like labels {labels.shape}, with 1 for those that targets lack"
        way = "targets[:, None] and target_lengths[:, None] for N hypotheses of each utterance"
        raise ValueError(f"label_errors: targets must have {expected} ({way}), got {targets.shape}.")
    try:
        shape = np.broadcast_shapes(counts.shape, target_lengths.shape)
    except ValueError:
        expected = f"batch dimensions that broadcast with those of labels, {counts.shape}"
        raise ValueError(f"label_errors: targets must have {expected}, got {target_lengths.shape}.") from None
    labels, targets = (np.broadcast_to(x, (*shape, x.shape[-1])) for x in (labels, targets))
    counts, target_lengths = np.broadcast_to(counts, shape), np.broadcast_to(target_lengths, shape)
    edits = np.zeros((3, *shape), np.int32)
    for index in np.ndindex(*shape):
        hypothesis, target = labels[index][: counts[index]], targets[index][: target_lengths[index]]
        tags = [edit.tag for edit in Levenshtein.editops(target.tolist(), hypothesis.tolist())]
        edits[(slice(None), *index)] = [tags.count(tag) for tag in ("replace", "delete", "insert")]
    return LabelErrors(*edits)


def word_confidence(labels, label_log_probs, counts, word_of_label, how: str = "min") -> list:
    """The confidence of each word of a hypothesis: a number from 0 to 1, made of the probabilities of its labels.

    L labels at most; `...` is any number of batch dimensions. The probabilities are those of a decoder's hypotheses, or
    of given targets: `targets`, `loss.label_log_probs(...)` and `target_lengths`. Labels that belong to one word have
    the same number in `word_of_label`, later words have larger numbers.

    Parameters
    ----------
    labels : Array, integer [..., L]
        Hypotheses.
    label_log_probs : Array, floating [..., L]
        Log-probability of each label, in nats; above 0 (rounding, arcs that are not normalised) counts as 0.
    counts : Array, integer [...]
        Labels of each hypothesis; later ones are not read.
    word_of_label : Array, integer [..., L], or function
        The number of the word that each label belongs to, -1 for a label of no word, such as a space. Numbers may be
        left out. A function makes this array of `labels`, a NumPy array.
    how : {"min", "mean", "product"}
        What a word has of its labels' probabilities: the least, the arithmetic mean, or the product, which is the
        probability of the word and is low for long ones.

    Returns
    -------
    list of float, in a list for each batch dimension
        The words of each hypothesis in order. NaN for a word with a label whose log-probability is NaN.

    Raises
    ------
    TypeError, ValueError
        An argument has another dtype or shape, counts more labels than there are, or is no choice; a number of a word
        is less than one before it.

    Examples
    --------
    Words begin with the pieces of a sentencepiece model that start with its mark:

    >>> import numpy as np
    >>> from jax_rnnt.metrics import word_confidence
    >>> begins = np.array([piece.startswith("▁") for piece in ["<blank>", "▁good", "▁mor", "ning"]])
    >>> words = lambda labels: np.cumsum(begins[labels], -1)
    >>> labels, log_probs, counts = np.array([[1, 2, 3], [1, 0, 0]]), np.log([[0.9, 0.8, 0.5], [0.7, 1, 1]]), [3, 1]
    >>> [[round(x, 3) for x in hypothesis] for hypothesis in word_confidence(labels, log_probs, counts, words)]
    [[0.9, 0.5], [0.7]]

    With characters, spaces belong to no word; here class 2 is the space:

    >>> words = lambda labels: np.where(labels == 2, -1, np.cumsum(labels == 2, -1))
    >>> [round(x, 3) for x in word_confidence([1, 2, 3], log_probs[0], 3, words, how="mean")]
    [0.9, 0.5]
    """
    name = "word_confidence"
    _checks.choice(name, "how", how, tuple(OF_A_WORD))
    labels, counts = _sequences(name, "labels", labels, "counts", counts)
    log_probs = _checks.array(name, "label_log_probs", label_log_probs)
    words = word_of_label(labels) if callable(word_of_label) else word_of_label
    words = _checks.integral(name, "word_of_label", words)
    if str(log_probs.dtype) not in _checks.FLOATS:
        raise TypeError(f"{name}: label_log_probs must have a floating dtype, got {log_probs.dtype}.")
    for argument, x in (("label_log_probs", log_probs), ("word_of_label", words)):
        if x.shape != labels.shape:
            raise ValueError(f"{name}: {argument} must have shape [..., L] = {labels.shape}, got {x.shape}.")

    def of(log_probs, words, count):
        if count.ndim:
            return [of(*hypothesis) for hypothesis in zip(log_probs, words, count, strict=True)]
        used = (np.arange(len(words)) < count) & (words >= 0)
        log_probs, words = log_probs[used], words[used]
        if (words[1:] < words[:-1]).any():
            raise ValueError(f"{name}: word_of_label must never decrease, but for -1, got {words.tolist()}.")
        probabilities = np.exp(np.minimum(log_probs, 0))
        return [float(OF_A_WORD[how](probabilities[words == word])) for word in np.unique(words)]

    return of(np.asarray(log_probs, np.float64), np.asarray(words), counts)


def _sequences(function, name, labels, name_of_lengths, lengths):
    """Labels [..., L] and their numbers [...], as NumPy arrays."""
    both = (name, labels), (name_of_lengths, lengths)
    labels, lengths = (np.asarray(_checks.integral(function, n, x)) for n, x in both)
    if labels.shape[:-1] != lengths.shape or labels.ndim < 1:
        expected = f"shape [...] = {labels.shape[:-1]} of {name} [..., L]"
        raise ValueError(f"{function}: {name_of_lengths} must have {expected}, got {lengths.shape}.")
    if lengths.size and (lengths.min() < 0 or lengths.max() > labels.shape[-1]):
        expected = f"lie in [0, {labels.shape[-1]}], the labels that {name} holds"
        raise ValueError(f"{function}: {name_of_lengths} must {expected}, got {lengths.tolist()}.")
    return labels, lengths
