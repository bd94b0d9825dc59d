"""Are label errors edit distances, and seconds those of the frames?"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
from jax_rnnt import timing
from reference_numpy import edit_distance

HOP = {"hop": 0.01, "subsampling": 4}


@pytest.fixture
def metrics():
    return pytest.importorskip("jax_rnnt.metrics")


# All sequences over two labels, with anything in the padding; the distances of all pairs.
SEQUENCES = [x for n in range(4) for x in itertools.product((3, 5), repeat=n)]
DISTANCES = [[edit_distance(a, b) for b in SEQUENCES] for a in SEQUENCES]
COUNTS, LABELS = np.array([*map(len, SEQUENCES)]), np.array([[*x, *range(-4, 0)][:4] for x in SEQUENCES])


def test_label_errors(metrics):
    counts, labels = COUNTS, LABELS
    errors = metrics.label_errors(labels[:, None], counts[:, None], jnp.asarray(labels)[None], counts[None])
    assert errors.total.tolist() == DISTANCES
    np.testing.assert_array_equal(errors.insertions - errors.deletions, counts[:, None] - counts[None])
    assert errors.total.dtype == np.int32
    single = metrics.label_errors([1, 2, 9], 2, [1, 3, 2], 3)
    assert [int(x) for x in single] == [0, 1, 0] and single.total.shape == ()
    none = np.zeros((0, 3), int), np.zeros(0, int)
    assert metrics.label_errors(*none, *none).total.shape == (0,)


def test_edit_distance(metrics):
    """In one program; any dtype and padding; lengths."""
    counts, labels = COUNTS, LABELS
    pairs = labels[:, None].astype(np.int16), counts[:, None], labels[None], counts[None].astype(np.uint8)
    found = jax.jit(metrics.edit_distance)(*pairs)
    assert found.tolist() == DISTANCES and found.dtype == np.int32
    of_rows = jax.vmap(lambda x, n: metrics.edit_distance(x, n, labels[3], counts[3]))(labels, counts)
    np.testing.assert_array_equal(of_rows, found[:, 3])
    traced = jax.jit(lambda n, m: metrics.edit_distance(labels[:3], n, labels[:3], m))
    assert traced(np.array([5, -1, 4]), np.array([0, 0, 5])).tolist() == [-1, -1, -1]
    none = np.zeros((0, 3), int), np.zeros(0, int)
    assert metrics.edit_distance(*none, *none).shape == (0,)
    assert metrics.edit_distance([], 0, [1, 2], 2) == metrics.edit_distance([1, 2], 2, [], 0) == 2
    with pytest.raises(ValueError, match=r"edit_distance: counts must lie in \[0, 2\]"):
        metrics.edit_distance([1, 2], 3, [], 0)
    with pytest.raises(TypeError, match=r"label_errors: .* traced ones: metrics\.edit_distance"):
        jax.jit(lambda *pairs: metrics.label_errors(*pairs).total)(*pairs)


def test_empty_lists(metrics):
    """NumPy makes floats of them. Without labels there is nothing to count, and everything to insert."""
    assert [int(x) for x in metrics.label_errors([], 0, [1, 2], 2)] == [0, 2, 0]
    assert [int(x) for x in metrics.label_errors([1, 2], 2, [], 0)] == [0, 0, 2]
    assert metrics.label_errors([[], []], [0, 0], [[1], [2]], [1, 0]).total.tolist() == [1, 0]
    assert metrics.label_errors([[[]]], [[0]], [[[]]], [[0]]).total.tolist() == [[0]]
    assert metrics.word_confidence([], [], 0, []) == []
    assert metrics.word_confidence([[], []], [[], []], [0, 0], lambda labels: labels) == [[], []]
    assert timing.frames_to_seconds([], **HOP).shape == timing.frames_to_seconds([[]], **HOP)[0].shape == (0,)
    assert timing.intervals([], [], durations=[], **HOP) == []
    for phrases, utterances in (([], None), ([[]], 1), ([[], [[1]]], 2), ([np.zeros(0)], 1)):
        assert jax_rnnt.decode.Phrases(phrases, classes=3).utterances == utterances
    assert jax_rnnt.decode.Phrases([], [], classes=3).utterances is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": np.ones((2, 3))}, "labels must have an integer dtype, got float64"),
        ({"counts": np.array([4, 1])}, r"counts must lie in \[0, 3\].*got \[4, 1\]"),
        ({"target_lengths": np.array([-1, 1])}, r"target_lengths must lie in \[0, 4\].*got \[-1, 1\]"),
        ({"counts": np.array([1])}, r"counts must have shape .*\(2,\).*got \(1,\)"),
        ({"targets": np.ones((3, 4), int), "target_lengths": np.ones(3, int)}, r"targets .*broadcast.*got \(3,\)"),
        ({"labels": object()}, "labels must be an array"),
        # NumPy would pair N with B: shapes that agree by accident, B = N and N = 1.
        (
            {"labels": np.ones((2, 2, 3), int), "counts": np.ones((2, 2), int)},
            r"targets .*2 batch .*targets\[:, None\]",
        ),
        ({"labels": np.ones((2, 1, 3), int), "counts": np.ones((2, 1), int)}, r"targets .*2 batch .*got \(2, 4\)"),
        ({"labels": np.ones(3, int), "counts": np.int32(2)}, r"targets must have 0 batch dimensions .*got \(2, 4\)"),
    ],
)
def test_bad_labels(metrics, change, message):
    good = {"labels": np.ones((2, 3), int), "counts": np.array([1, 3])}
    good |= {"targets": np.ones((2, 4), int), "target_lengths": np.array([4, 0])}
    with pytest.raises((TypeError, ValueError), match=f"label_errors: {message}"):
        metrics.label_errors(**good | change)


def confidences(log_probs, words, how):
    """Word by word: groups of equal numbers, without -1."""
    found, probabilities = [], [min(math.exp(x), 1.0) for x in log_probs]
    for number in sorted(set(words) - {-1}):
        own = [p for p, word in zip(probabilities, words, strict=True) if word == number]
        found.append({"min": min(own), "mean": sum(own) / len(own), "product": math.prod(own)}[how])
    return found


@pytest.mark.parametrize("how", ["min", "mean", "product"])
@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (0,)], ids=str)
def test_word_confidence(metrics, how, batch):
    """Any batch dimensions; words without labels, labels without words, garbage in the padding."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 8, batch)
    log_probs = rng.normal(-1, 1, (*batch, 7)).astype(np.float32)  # some above 0
    words = np.cumsum(rng.integers(0, 3, (*batch, 7)), -1)
    words = np.where(rng.random(words.shape) < 0.2, -1, words)
    padding = np.arange(7) >= counts[..., None]
    dirty = np.where(padding, np.nan, log_probs), np.where(padding, -9, words)
    labels = np.zeros_like(words)
    got = metrics.word_confidence(labels, jnp.asarray(dirty[0]), counts, dirty[1], how=how)
    flat = np.array([None] * counts.size, object)
    for i, (count, x, number) in enumerate(zip(counts.ravel(), log_probs.reshape(-1, 7), words.reshape(-1, 7))):
        flat[i] = confidences(x[:count].tolist(), number[:count].tolist(), how)
    got = [got] if batch == () else list(itertools.chain(*got)) if len(batch) == 2 else got
    assert [len(x) for x in got] == [len(x) for x in flat]
    np.testing.assert_allclose(list(itertools.chain(*got)), list(itertools.chain(*flat)), rtol=1e-6)
    assert all(isinstance(x, float) and 0 <= x <= 1 for x in itertools.chain(*got))


def test_words_of_pieces_and_of_characters(metrics):
    """A hypothesis may begin within a word; impossible labels, and unknown ones."""
    labels, probabilities = np.array([3, 1, 3, 2, 0, 0]), [0.5, 0.25, 1.0, 0.0, np.nan, np.nan]
    with np.errstate(divide="ignore"):
        log_probs = np.log(probabilities)
    begins = np.array([False, True, True, False])  # pieces of a word
    pieces = lambda labels: np.cumsum(begins[labels], -1)
    assert metrics.word_confidence(labels, log_probs, 4, pieces, "product") == [0.5, 0.25, 0.0]
    characters = lambda labels: np.where(labels == 1, -1, np.cumsum(labels == 1, -1))
    assert metrics.word_confidence(labels, log_probs, 4, characters, "mean") == [0.5, 0.5]
    unknown = metrics.word_confidence(labels, log_probs, 5, np.array([0, 1, 1, 1, 2, 2], np.uint8))
    assert unknown[:2] == [0.5, 0.0] and np.isnan(unknown[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"how": "max"}, "how must be .*'min', 'mean', 'product'.*got 'max'"),
        ({"counts": [4, 1]}, r"counts must lie in \[0, 3\].*got \[4, 1\]"),
        ({"labels": np.ones((2, 3))}, "labels must have an integer dtype, got float64"),
        ({"label_log_probs": np.ones((2, 3), int)}, "label_log_probs must have a floating dtype, got int64"),
        ({"label_log_probs": np.zeros((2, 4))}, r"label_log_probs must have shape .* = \(2, 3\), got \(2, 4\)"),
        ({"word_of_label": np.ones((2, 3), bool)}, "word_of_label must have an integer dtype, got bool"),
        ({"word_of_label": lambda labels: labels[0]}, r"word_of_label must have shape .* = \(2, 3\), got \(3,\)"),
        ({"word_of_label": "a b"}, "word_of_label must have an integer dtype"),
        ({"word_of_label": [[0, 1, -1], [1, 0, 0]]}, r"word_of_label must never decrease.*got \[1, 0\]"),
        ({"word_of_label": np.array([[0, 1, 1], [1, 0, 0]], np.uint8)}, r"word_of_label must never decrease.*\[1, 0\]"),
    ],
)
def test_bad_words(metrics, change, message):
    good = {"labels": np.ones((2, 3), int), "label_log_probs": np.zeros((2, 3)), "counts": [3, 2]}
    with pytest.raises((TypeError, ValueError), match=f"word_confidence: {message}"):
        metrics.word_confidence(**good | {"word_of_label": np.zeros((2, 3), int)} | change)


def test_frames_to_seconds():
    np.testing.assert_allclose(timing.frames_to_seconds([[0, 3], [10, 2]], **HOP), [[0, 0.12], [0.4, 0.08]])
    np.testing.assert_allclose(timing.frames_to_seconds(jnp.array([1.5]), hop=0.5, offset=2.0), [2.75])
    padded = timing.frames_to_seconds(jnp.array([-1, 0, -1]), hop=0.5, offset=2.0)
    np.testing.assert_array_equal(padded, [np.nan, 2, np.nan])
    for dtype in (jnp.bfloat16, np.float16, np.float32, np.uint8, np.int64):
        np.testing.assert_array_equal(timing.frames_to_seconds(np.array([0, 3], dtype), hop=0.5), [0, 1.5])


def test_intervals():
    """A frame each, shared where labels share it; with durations up to the next label."""
    found = timing.intervals([0, 2, 2, 2, 9], "abcde", **HOP)
    third = 4 / 3
    expected = [(0, 4), (8, 8 + third), (8 + third, 8 + 2 * third), (8 + 2 * third, 12), (36, 40)]
    np.testing.assert_allclose([x[:2] for x in found], np.array(expected) / 100)
    assert [x.text for x in found] == list("abcde")
    found = timing.intervals([0, 2, 2, 5], "abcd", durations=[1, 0, 4, 2], hop=1, offset=0.5)
    assert [x[:2] for x in found] == [(0.5, 1.5), (2.5, 4.0), (4.0, 5.5), (5.5, 7.5)]
    assert timing.intervals([], [], **HOP) == []
