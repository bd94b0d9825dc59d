"""Finds phrases in the frames of a CTC head: where each is said, and how much worse it is than the best path there.

B utterances, T frames, V classes, P phrases of at most L labels.
"""

import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_rnnt import _checks, _pytree, _xla
from jax_rnnt._keywords import keywords
from jax_rnnt.decode.lm._phrases import depth_of, earned, is_list, weights_of


@_pytree.exportable("FoundPhrase")
class FoundPhrase(typing.NamedTuple):
    """A place where a phrase is said, as returned by `find_phrases`.

    Parameters
    ----------
    phrase : int
        Its index in the list of phrases.
    start, end : int
        The frames of its first and its last label, both inclusive.
    score : float
        In nats: what the phrase earns, less what its path there is worse than the best path.

    Examples
    --------
    >>> from jax_rnnt.decode import FoundPhrase
    >>> FoundPhrase(0, 3, 9, 2.5).end
    9
    """

    phrase: int
    start: int
    end: int
    score: float


@keywords
def phrase_scores(
    log_probs: jax.Array, lengths: jax.Array, phrases: jax.Array, phrase_lengths: jax.Array, *, blank: int = -1
) -> tuple[jax.Array, jax.Array]:
    """Returns how well each phrase ends in each frame of a CTC head, and the frame where it then began.

    A phrase is said on the frames s ... e by a path of classes, one for each frame, that begins with its first label in
    s, ends with its last one in e, and says the phrase by the rules of CTC: equal classes in a row count once, blanks
    may come between labels, and one must come between equal labels. With log-probabilities l, a path costs what it is
    worse than the best path there::

        score(e) = max over s and paths of sum over t = s ... e of (l[t, class] - max over v of l[t, v])

    which is 0 where the best path says the phrase, and below 0 elsewhere. Numbers that are added to all classes of a
    frame change nothing, so logits will do.

    Parameters
    ----------
    log_probs : Array, floating [B, T, V]
        Log-probabilities or logits of a CTC head.
    lengths : Array, integer [B]
        Frames of each utterance; later ones are never read.
    phrases : Array, integer [P, L]
        Labels. Those from `phrase_lengths` on are never read.
    phrase_lengths : Array, integer [P]
        From 1 to L.
    blank : int, default -1
        The blank class; a negative one counts from the end.

    Returns
    -------
    scores : Array, float32 (float64 for float64 logits) [B, P, T]
        -inf where a phrase can't end; NaN where the utterance holds NaN or its length is out of range, or where a label
        or the length of a phrase is.
    starts : Array, int32 [B, P, T]
        s of the best path; of equal ones the latest. -1 where there is none.

    See Also
    --------
    find_phrases : The places, one after another.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import decode
    >>> heard = 9.0 * jax.nn.one_hot(jnp.array([[3, 0, 0, 3, 1, 3]]), 4)  # class 3 is the blank
    >>> scores, starts = decode.phrase_scores(heard, jnp.array([6]), jnp.array([[0, 1]]), jnp.array([2]))
    >>> scores[0, 0].tolist(), starts[0, 0].tolist()
    ([-inf, -18.0, -9.0, -9.0, 0.0, -9.0], [-1, 0, 1, 2, 2, 2])
    """
    log_probs = _checks.floating("log_probs", log_probs, 3, "[B, T, V]")
    _checks.unsplit("log_probs", log_probs, {-2: "T", -1: "V"})
    if log_probs.ndim != 3:
        raise _checks.bad_value(f"log_probs must have shape [B, T, V], got {tuple(log_probs.shape)}.")
    phrases = _checks.integral("phrases", phrases)
    if phrases.ndim != 2 or phrases.shape[1] == 0:
        raise _checks.bad_value(f"phrases must have shape [P, L] with L > 0, got {tuple(phrases.shape)}.")
    phrases = _checks.integers("phrases", phrases, phrases.shape, "[P, L]")
    lengths = _checks.integers("lengths", lengths, log_probs.shape[:1], "[B]")
    counts = _checks.integers("phrase_lengths", phrase_lengths, phrases.shape[:1], "[P]")
    blank = _checks.class_index("blank", blank, log_probs.shape[2])
    log_probs, lengths = _xla.split_alike(1, log_probs, lengths)
    return _phrase_scores(log_probs, lengths, phrases, counts, blank)


@functools.partial(jax.jit, static_argnums=4)
def _phrase_scores(x, lengths, phrases, counts, blank: int):
    frames, classes = x.shape[1:]
    x = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    inside = jnp.arange(frames, dtype=jnp.int32)[None] < lengths[:, None]
    x = jnp.where(inside[..., None], x, -jnp.inf)
    bad = (lengths < 0) | (lengths > frames) | jnp.any(jnp.isnan(x) | (x == jnp.inf), (1, 2))
    used = jnp.arange(phrases.shape[1], dtype=jnp.int32)[None] < counts[:, None]
    bad_phrase = jnp.any(used & ((phrases < 0) | (phrases >= classes)), 1) | (counts < 1) | (counts > phrases.shape[1])
    labels = jnp.clip(phrases, 0, classes - 1)
    last = jnp.clip(counts - 1, 0, phrases.shape[1] - 1)[None, :, None]
    new = (labels[:, 1:] != labels[:, :-1])[None]  # whether a label may follow without a blank between
    best = jnp.max(x, -1, keepdims=True)
    x = jnp.where(jnp.isneginf(x), -jnp.inf, x - jnp.where(jnp.isneginf(best), 0, best))

    def better(*ways):
        """Returns the best of these scores with its start; the latest start among equal scores."""

        def pair(a, b):
            wins = (b[0] > a[0]) | ((b[0] == a[0]) & (b[1] > a[1]))
            return tuple(jnp.where(wins, j, i) for i, j in zip(a, b))

        return functools.reduce(pair, ways)

    def moved(way, allowed=None):
        """Moves each path on to the next label; the first label has none before it."""
        score, start = (way[0][..., :-1], way[1][..., :-1])
        score = score if allowed is None else jnp.where(allowed, score, -jnp.inf)
        pad = [(0, 0), (0, 0), (1, 0)]
        return jnp.pad(score, pad, constant_values=-jnp.inf), jnp.pad(start, pad, constant_values=-1)

    def step(carry, xs):
        label, pause = carry  # (scores, starts) [B, P, L] of paths that are in a label, and in a blank after it
        t, row = xs
        first = jnp.arange(labels.shape[1], dtype=jnp.int32)[None, None] == 0
        begin = jnp.where(first, jnp.zeros_like(label[0]), -jnp.inf), jnp.where(first, t, jnp.full_like(label[1], -1))
        after = better(label, moved(label, new), moved(pause), begin)
        waits = better(pause, label)
        label = after[0] + row[:, labels], after[1]
        pause = waits[0] + row[:, blank, None, None], waits[1]
        return (label, pause), tuple(jnp.take_along_axis(y, last, -1)[..., 0] for y in label)

    batch = x[:, 0, 0] if frames else jnp.zeros(x.shape[0], x.dtype)
    none = jnp.zeros((x.shape[0], *labels.shape), x.dtype) * jnp.where(jnp.isfinite(batch), batch, 0)[:, None, None]
    nowhere = none - jnp.inf, jnp.zeros_like(none, jnp.int32) - 1
    steps = jnp.arange(frames, dtype=jnp.int32), jnp.swapaxes(x, 0, 1)
    _, (scores, starts) = jax.lax.scan(step, (nowhere, nowhere), steps)
    scores, starts = (jnp.moveaxis(y, 0, 2) for y in (scores, starts))
    bad = (bad[:, None] | bad_phrase[None])[..., None]
    starts = jnp.where(bad | jnp.isneginf(scores), -1, starts)
    return jnp.where(bad, jnp.nan, scores), starts


@keywords
def find_phrases(
    log_probs: jax.Array,
    lengths: jax.Array,
    phrases: Any,
    weights: Any = 1.0,
    *,
    blank: int = -1,
    depth: float = 0.0,
    threshold: float = 0.0,
) -> list[list[FoundPhrase]]:
    """Finds where phrases are said in the frames of a CTC head, such as the second head of a hybrid model.

    A phrase earns what `Phrases` gives it, weight times length, and pays what its path is worse than the best path
    there (`phrase_scores`). Of all places with a score of at least `threshold`, the best one is taken first, then the
    best one that shares no frame with it, and so on: of equal ones the earlier start, then the lower number.

    So a weight is how much worse a label of a phrase may be, in nats, than what the head would choose. The words of a
    transcript on the frames of a phrase can be replaced by it (Andrusenko et al. 2024).

    Parameters
    ----------
    log_probs, lengths, blank
        As for `phrase_scores`.
    phrases : sequence
        Phrases as sequences of labels, for all utterances.
    weights : float or sequence, default 1.0
        Nats for each label of a phrase: one number for all, or one for each phrase.
    depth : float, default 0.0
        As in `Phrases`.
    threshold : float, default 0.0
        The least score.

    Returns
    -------
    list of list of FoundPhrase
        The phrases found in each utterance, in the order of their frames; none where its scores are NaN.

    Raises
    ------
    TypeError, ValueError
        As for `phrase_scores` and `Phrases`.

    References
    ----------
    Andrusenko et al., "Fast Context-Biasing for CTC and Transducer ASR models with CTC-based Word Spotter", 2024,
    arXiv:2406.07096.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from jax_rnnt import decode
    >>> heard = 9.0 * jax.nn.one_hot(jnp.array([[3, 0, 0, 3, 1, 3, 2]]), 4)
    >>> [found] = decode.find_phrases(heard, jnp.array([7]), [[0, 1], [1, 1]], weights=2.0)
    >>> found
    [FoundPhrase(phrase=0, start=2, end=4, score=4.0)]
    """
    if not is_list(phrases) or not all(map(is_list, phrases)):
        wrong = phrases if not is_list(phrases) else next(x for x in phrases if not is_list(x))
        raise _checks.bad_type(f"phrases must be a list of phrases, which are lists of labels, got {wrong!r}.")
    counts = np.array([len(x) for x in phrases], np.int32)
    if (counts == 0).any():
        raise _checks.bad_value(f"phrases must have one label or more, got phrase {counts.argmin()} without.")
    table = np.zeros((len(phrases), max(counts, default=1)), np.int32)
    for row, phrase in zip(table, phrases):
        row[: len(phrase)] = _checks.integral("phrases", [*phrase])
    classes = np.shape(log_probs)[-1] if np.ndim(log_probs) else 0
    if wrong := [int(x) for row, n in zip(table, counts) for x in row[:n] if not 0 <= x < classes][:5]:
        raise _checks.bad_value(f"phrases must have labels in [0, {classes}), got {wrong}.")
    each = weights_of(weights, True, [[*phrases]])
    gain = np.asarray(earned(counts.astype(np.int64), each, depth_of(depth, each)))
    least = _checks.known(_checks.number("threshold", threshold))
    found = phrase_scores(log_probs, lengths, jnp.asarray(table), jnp.asarray(counts), blank=blank)
    scores, starts = map(np.asarray, found)
    return [_apart(score + gain[:, None], start, least) for score, start in zip(scores, starts)]


def _apart(scores, starts, least) -> list[FoundPhrase]:
    """Returns the best places in one utterance that share no frame; arrays are [P, T]."""
    phrase, end = np.nonzero(scores >= least)
    score, start = scores[phrase, end], starts[phrase, end]
    free, found = np.ones(scores.shape[1], bool), []
    for i in np.lexsort((phrase, start, -score)):
        here = slice(int(start[i]), int(end[i]) + 1)
        if free[here].all():
            free[here] = False
            found.append(FoundPhrase(int(phrase[i]), here.start, here.stop - 1, float(score[i])))
    return sorted(found, key=lambda x: x.start)
