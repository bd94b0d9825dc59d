"""Error rates of decoded labels and confidences of words, on the host.

The edits come from rapidfuzz, as in jiwer. `edit_distance` alone is JAX: it runs under `jax.jit`, on any device.
"""

import typing
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._extras import needed_by
from jax_rnnt._keywords import keywords
from jax_rnnt.timing._words import OF_A_WORD

with needed_by("jax_rnnt.metrics", "metrics"):
    from rapidfuzz.distance import Levenshtein

__all__ = [
    "LabelErrors",
    "edit_distance",
    "label_errors",
    "word_confidence",
]


@_pytree.exportable("LabelErrors")
class LabelErrors(typing.NamedTuple):
    """The edits that turn targets into hypotheses, from `label_errors`.

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
        """The edit distance (Levenshtein), int32 [...]: the argument `errors` of `mwer_loss`."""
        return self.substitutions + self.deletions + self.insertions


@keywords
def label_errors(labels, counts, targets, target_lengths) -> LabelErrors:
    """Counts the fewest edits between hypotheses and targets, on the host; under `jax.jit` take `edit_distance`.

    L and U labels at most; `...` is any number of batch dimensions, the same for hypotheses and targets. A dimension of
    1 broadcasts: labels [B, N, L] and targets [B, 1, U] are N hypotheses of each utterance. The error rate of a test
    set is the sum of `total` over the sum of `target_lengths`. For words of texts take jiwer, which normalises them
    too.

    Parameters
    ----------
    labels : Array, integer [..., L]
        Hypotheses.
    counts : Array, integer [...]
        Number of labels of each hypothesis; later ones are never read.
    targets : Array, integer [..., U]
        Reference labels.
    target_lengths : Array, integer [...]
        Number of labels of each target; later ones are never read.

    Returns
    -------
    LabelErrors

    Raises
    ------
    TypeError, ValueError
        An argument is not an array of integers, is traced, has another shape or number of batch dimensions, or counts
        more labels than there are.

    Examples
    --------
    >>> import numpy as np
    >>> from jax_rnnt.metrics import label_errors
    >>> targets, target_lengths = np.array([[1, 2, 3], [4, 0, 0]]), np.array([3, 1])
    >>> errors = label_errors(np.array([[1, 3, 0], [4, 4, 5]]), np.array([2, 3]), targets, target_lengths)
    >>> errors.total.tolist(), float(errors.total.sum() / target_lengths.sum())
    ([1, 2], 0.75)
    """
    arrays, shape = _pairs(labels, counts, targets, target_lengths)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        way = "metrics.edit_distance runs under jax.jit and returns their total"
        raise _checks.bad_type(f"the arguments must be known, as it runs on the host, got traced ones: {way}.")
    labels, counts, targets, target_lengths = map(np.asarray, arrays)
    labels, targets = (np.broadcast_to(x, (*shape, x.shape[-1])) for x in (labels, targets))
    counts, target_lengths = np.broadcast_to(counts, shape), np.broadcast_to(target_lengths, shape)
    edits = np.zeros((3, *shape), np.int32)
    for index in np.ndindex(*shape):
        hypothesis, target = labels[index][: counts[index]], targets[index][: target_lengths[index]]
        tags = [edit.tag for edit in Levenshtein.editops(target.tolist(), hypothesis.tolist())]
        edits[(slice(None), *index)] = [tags.count(tag) for tag in ("replace", "delete", "insert")]
    return LabelErrors(*edits)


@keywords
def edit_distance(labels, counts, targets, target_lengths) -> jax.Array:
    """Computes the edit distance (Levenshtein) between hypotheses and targets, in JAX, for `errors` of `mwer_loss`.

    It runs on any device, under `jax.jit` and `jax.vmap`: one scan over the labels of the hypotheses, all sequences at
    once, so that search, loss and update can be one program. Arguments and their dimensions are those of
    `label_errors`, whose `total` it equals.

    Parameters
    ----------
    labels, counts, targets, target_lengths
        As for `label_errors`, traced or not.

    Returns
    -------
    Array, int32 [...]
        -1 where a traced number of labels is out of range.

    Raises
    ------
    TypeError, ValueError
        As for `label_errors`, which takes no traced arguments.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt.metrics import edit_distance
    >>> hypotheses = jnp.array([[[1, 3, 0], [1, 2, 3]]]), jnp.array([[2, 3]])  # two of one utterance
    >>> jax.jit(edit_distance)(*hypotheses, jnp.array([[[1, 2, 3]]]), jnp.array([[3]])).tolist()
    [[1, 0]]
    """
    arrays, shape = _pairs(labels, counts, targets, target_lengths)
    labels, counts, targets, target_lengths = (
        _checks.integers(name, x, x.shape, "[...]")
        for name, x in zip(("labels", "counts", "targets", "target_lengths"), arrays)
    )
    for name, x in ("labels", labels), ("targets", targets):
        _checks.unsplit(name, x, {-1: "labels"})
    labels, targets, counts, target_lengths = _xla.split_alike(len(shape), labels, targets, counts, target_lengths)

    def count(size):  # int32 [1, ..., 1, size]
        return lax.broadcasted_iota(jnp.int32, (1,) * len(shape) + (size,), len(shape))

    column = count(targets.shape[-1] + 1)

    def add_label(row, x):  # row[u]: distance between the labels so far and the first u targets
        label, used = x
        replaced = row[..., :-1] + (label[..., None] != targets).astype(jnp.int32)
        ends = jnp.concatenate([row[..., :1] + 1, jnp.minimum(row[..., 1:] + 1, replaced)], -1)
        # The targets that follow the last kept or replaced one are missing: the least of ends[v] + u - v for v <= u.
        following = lax.cummin(ends - column, axis=ends.ndim - 1) + column
        return jnp.where(used[..., None], following, row), None

    used = count(labels.shape[-1]) < counts[..., None]
    steps = [jnp.broadcast_to(jnp.moveaxis(x, -1, 0), (labels.shape[-1], *shape)) for x in (labels, used)]
    # As the carry of a scan, the row varies over devices, or is split over them, as the labels are.
    row = jnp.broadcast_to(column, (*shape, column.shape[-1]))
    row, *_ = _xla.split_alike(len(shape), row, counts, targets)
    row, *steps = _xla.vary_together(row, *steps, like=(targets,))
    row, _ = lax.scan(add_label, row, tuple(steps))
    distance = jnp.sum(jnp.where(column == target_lengths[..., None], row, 0), -1, dtype=jnp.int32)
    lengths = ((counts, labels.shape[-1]), (target_lengths, targets.shape[-1]))
    in_range = [(n >= 0) & (n <= most) for n, most in lengths]
    return jnp.where(in_range[0] & in_range[1], distance, -1)


@keywords
def word_confidence(
    labels: npt.ArrayLike,
    label_log_probs: npt.ArrayLike,
    counts: npt.ArrayLike,
    word_of_label: npt.ArrayLike | Callable[[np.ndarray], npt.ArrayLike],
    how: Literal["min", "mean", "product"] = "min",
) -> list[Any]:
    """Computes the confidence of each word of a hypothesis, a number from 0 to 1, from the probabilities of its labels.

    `timing.words` gives the words of one utterance with their times, too. L labels at most; `...` is any number of
    batch dimensions. The probabilities are those of a decoder's hypotheses, or of given targets: `targets`,
    `loss.label_log_probs(...)` and `target_lengths`. Labels of one word have the same number in `word_of_label`, later
    words have larger numbers.

    Parameters
    ----------
    labels : Array, integer [..., L]
        Hypotheses.
    label_log_probs : Array, floating [..., L]
        Log-probability of each label, in nats, or the logarithm of `Hypotheses.label_confidences`. A number above 0
        (rounding, arcs that are not normalised) counts as 0.
    counts : Array, integer [...]
        Number of labels of each hypothesis; later ones count for nothing.
    word_of_label : Array, integer [..., L], or function
        The number of the word that each label belongs to, -1 for a label of no word, such as a space. Numbers may have
        gaps. A function makes this array from `labels`, a NumPy array.
    how : {"min", "mean", "product"}
        The confidence of a word is the least of its labels' probabilities, their arithmetic mean, or their product,
        which is the probability of the word and is low for long ones.

    Returns
    -------
    list of float, in a list for each batch dimension
        The words of each hypothesis in order. NaN for a word with a label whose log-probability is NaN.

    Raises
    ------
    TypeError, ValueError
        An argument has another dtype or shape, counts more labels than there are, or is none of the choices; the number
        of a word is less than one before it.

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
    _checks.choice("how", how, tuple(OF_A_WORD))
    labels, counts = map(np.asarray, _sequences("labels", labels, "counts", counts))
    log_probs = _checks.array("label_log_probs", label_log_probs)
    words = word_of_label(labels) if callable(word_of_label) else word_of_label
    words = _checks.integral("word_of_label", words)
    if str(log_probs.dtype) not in _checks.FLOATS:
        raise _checks.bad_type(f"label_log_probs must have a floating dtype, got {log_probs.dtype}.")
    for argument, x in (("label_log_probs", log_probs), ("word_of_label", words)):
        if x.shape != labels.shape:
            raise _checks.bad_value(f"{argument} must have shape [..., L] = {labels.shape}, got {x.shape}.")

    def of(log_probs, words, count):
        if count.ndim:
            return [of(*hypothesis) for hypothesis in zip(log_probs, words, count, strict=True)]
        used = (np.arange(len(words)) < count) & (words >= 0)
        log_probs, words = log_probs[used], words[used]
        if (words[1:] < words[:-1]).any():
            raise _checks.bad_value(f"word_of_label must never decrease, but for -1, got {words.tolist()}.")
        probabilities = np.exp(np.minimum(log_probs, 0))
        return [float(OF_A_WORD[how](probabilities[words == word])) for word in np.unique(words)]

    return of(np.asarray(log_probs, np.float64), np.asarray(words), counts)


def _pairs(labels, counts, targets, target_lengths):
    """Returns ((labels, counts, targets, target_lengths), batch dimensions of the pairs), traced or not."""
    labels, counts = _sequences("labels", labels, "counts", counts)
    targets, target_lengths = _sequences("targets", targets, "target_lengths", target_lengths)
    if counts.ndim != target_lengths.ndim:  # NumPy would pair dimensions from the last one on: N with B
        expected = f"{counts.ndim} batch dimensions like labels {labels.shape}, with 1 for those that targets lack"
        way = "targets[:, None] and target_lengths[:, None] for N hypotheses of each utterance"
        raise _checks.bad_value(f"targets must have {expected} ({way}), got {targets.shape}.")
    try:
        shape = jnp.broadcast_shapes(counts.shape, target_lengths.shape)
    except ValueError:
        expected = f"batch dimensions that broadcast with those of labels, {counts.shape}"
        raise _checks.bad_value(f"targets must have {expected}, got {target_lengths.shape}.") from None
    return (labels, counts, targets, target_lengths), shape


def _sequences(name, labels, name_of_lengths, lengths, check=_checks.integral):
    """Returns labels [..., L], or numbers of them, and how many of them count [...], traced or not."""
    labels, lengths = check(name, labels), _checks.integral(name_of_lengths, lengths)
    if labels.shape[:-1] != lengths.shape or labels.ndim < 1:
        expected = f"shape [...] = {labels.shape[:-1]} of {name} [..., L]"
        raise _checks.bad_value(f"{name_of_lengths} must have {expected}, got {lengths.shape}.")
    known = _checks.known(lengths)
    if known is not None and known.size and (known.min() < 0 or known.max() > labels.shape[-1]):
        expected = f"lie in [0, {labels.shape[-1]}], the labels that {name} holds"
        raise _checks.bad_value(f"{name_of_lengths} must {expected}, got {known.tolist()}.")
    return labels, lengths
