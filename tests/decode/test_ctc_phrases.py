"""Are phrases found in the frames of a CTC head where enumeration of its paths has them?"""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jax_rnnt import decode

T, V, BLANK = 5, 4, 1
PHRASES = [[0], [0, 2], [2, 2], [3, 0, 3]]
TABLE, COUNTS = np.array([[0, -9, -9], [0, 2, -9], [2, 2, -9], [3, 0, 3]]), np.array([1, 2, 2, 3])


def best_of_all(x, phrase, end):
    """(score, start) of the best path that says the phrase and ends in this frame; of equal ones the latest start."""
    found = [(-np.inf, -1)]
    for start in range(end + 1):
        for path in itertools.product({*phrase, BLANK}, repeat=end + 1 - start):
            said = [label for label, _ in itertools.groupby(path) if label != BLANK]
            if said == phrase and path[0] == phrase[0] and path[-1] == phrase[-1]:
                found.append((sum(x[t, k] - x[t].max() for t, k in zip(range(start, end + 1), path)), start))
    return max(found)


def test_scores_are_the_enumeration():
    """Of every end; logits will do; nothing behind an utterance is read, and a faulty one is NaN alone."""
    x, lengths = np.random.default_rng(0).normal(0, 2, (6, T, V)), np.array([5, 3, 0, 5, 6, -1])
    x[0] = 0  # equal paths
    x[1, 3:] = np.nan
    x[3, 2, 1] = np.nan
    shifted = x + np.arange(5.0)[:, None]
    for given in (x, shifted):
        scores, starts = decode.phrase_scores(jnp.asarray(given), lengths, TABLE, COUNTS, blank=BLANK)
        assert (scores.shape, scores.dtype, starts.dtype) == ((6, 4, T), np.float64, np.int32)
        for b, (i, phrase), end in itertools.product(range(3), enumerate(PHRASES), range(T)):
            score, start = best_of_all(x[b], phrase, end) if end < lengths[b] else (-np.inf, -1)
            np.testing.assert_allclose(scores[b, i, end], score, atol=1e-12)
            assert given is shifted or starts[b, i, end] == start
        assert np.isnan(scores[3:]).all() and (np.asarray(starts)[3:] == -1).all()
    wrong, counts = np.array([[0, 7, 0], [0, 2, 2], [0, 2, 2], [0, 2, 2]]), np.array([2, 0, 4, 3])
    scores, _ = decode.phrase_scores(jnp.asarray(x), lengths, wrong, counts, blank=BLANK)
    assert np.isnan(scores[:, :3]).all() and not np.isnan(scores[:3, 3]).any()


def test_places():
    """The best one first, then the best that shares no frame with it; a phrase twice, and none."""
    x = 9 * np.eye(V)[[BLANK, 0, 0, 2, BLANK, 3, 0, BLANK, 2, 2]][None]

    def find(phrases, weights=1.0, **options):
        return decode.find_phrases(x, [10], phrases, weights, blank=BLANK, **options)[0]

    assert find([[0, 2]]) == [(0, 2, 3, 2.0), (0, 6, 8, 2.0)]  # no blank between, or one
    assert find([[0, 2], [0]], [2.0, 1.0]) == [(1, 1, 1, 1.0), (0, 2, 3, 4.0), (0, 6, 8, 4.0)]
    assert find([[0, 2], [0]], [2.0, 5.0]) == [(1, 1, 1, 5.0), (1, 2, 2, 5.0), (1, 6, 6, 5.0)]
    assert find([[3, 0, 2]], depth=1.0) == [(0, 5, 8, pytest.approx(5 + np.log(6)))]
    assert find([[2, 3]], 4.0) == [(0, 3, 5, 8.0)] and find([[2, 3]], 4.0, threshold=8.1) == []
    assert find([[3, 3]], 4.0) == [] and find([[3, 3]], 9.0) == [(0, 3, 5, 9.0), (0, 6, 8, 0.0)]
    assert find([]) == []
    nan = np.where(np.arange(10)[:, None] == 4, np.nan, x)
    assert decode.find_phrases(nan, [10], [[0, 2]], blank=BLANK) == [[]]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(log_probs=np.zeros((2, 3))), ValueError, "phrase_scores: log_probs must have shape [B, T, V]"),
        (dict(log_probs=np.zeros((1, 2, 3), int)), TypeError, "phrase_scores: log_probs must have one of the dtypes"),
        (dict(lengths=[1, 2]), ValueError, "phrase_scores: lengths must have shape [B] = (1,), got (2,)"),
        (dict(phrases=[[0], []]), ValueError, "find_phrases: phrases must have one label or more, got phrase 1 with"),
        (dict(phrases=[[0, 4]]), ValueError, "find_phrases: phrases must have labels in [0, 4), got [4]"),
        (dict(phrases=["ab"]), TypeError, "find_phrases: phrases must be a list of phrases, which are lists"),
        (dict(phrases=3), TypeError, "find_phrases: phrases must be a list of phrases, which are lists of labels"),
        (dict(blank=4), ValueError, "phrase_scores: blank must lie in [-4, 4) for 4 classes, got 4"),
        (dict(threshold=np.nan), ValueError, "find_phrases: threshold must be a number, got nan"),
        (dict(depth=-1), ValueError, "find_phrases: depth must be known, 0 or more"),
        (dict(weights=[1, 2]), ValueError, "find_phrases: weights must be a number, or one of each phrase"),
    ],
)
def test_errors(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        decode.find_phrases(**dict(log_probs=np.zeros((1, T, V)), lengths=[T], phrases=[[0]]) | changes)
