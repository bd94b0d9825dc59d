"""Error rates of decoded labels, on the host. The edit distance is rapidfuzz's, that of jiwer too."""

from __future__ import annotations

import typing

import numpy as np

from jax_rnnt import _checks
from jax_rnnt._extras import needed_by

with needed_by("jax_rnnt.metrics", "metrics"):
    from rapidfuzz.distance import Levenshtein

__all__ = ["LabelErrors", "label_errors"]


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
    labels, counts = _sequences("labels", labels, "counts", counts)
    targets, target_lengths = _sequences("targets", targets, "target_lengths", target_lengths)
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


def _sequences(name, labels, name_of_lengths, lengths):
    """Labels [..., L] and their numbers [...], as NumPy arrays."""
    labels, lengths = (_checks.array("label_errors", n, x) for n, x in ((name, labels), (name_of_lengths, lengths)))
    labels, lengths = np.asarray(labels), np.asarray(lengths)
    for n, x in ((name, labels), (name_of_lengths, lengths)):
        if not np.issubdtype(x.dtype, np.integer):
            raise TypeError(f"label_errors: {n} must have an integer dtype, got {x.dtype}.")
    if labels.shape[:-1] != lengths.shape or labels.ndim < 1:
        expected = f"shape [...] = {labels.shape[:-1]} of {name} [..., L]"
        raise ValueError(f"label_errors: {name_of_lengths} must have {expected}, got {lengths.shape}.")
    if lengths.size and (lengths.min() < 0 or lengths.max() > labels.shape[-1]):
        expected = f"lie in [0, {labels.shape[-1]}], the labels that {name} holds"
        raise ValueError(f"label_errors: {name_of_lengths} must {expected}, got {lengths.tolist()}.")
    return labels, lengths
