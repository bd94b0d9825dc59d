"""Are label errors edit distances, seconds those of the frames, and files what other programs read?"""

import decimal
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


def test_utterance_confidence(metrics):
    """All labels of a hypothesis; none of an empty one."""
    sure = np.array([[0.5, 1.5, 0.25], [0.5, 0.25, -7.0], [np.nan] * 3], np.float32)
    counts = np.array([3, 2, 0])
    for how, expected in {"mean": [1.75 / 3, 0.375], "min": [0.25, 0.25], "product": [0.125, 0.125]}.items():
        got = metrics.utterance_confidence(jnp.asarray(sure)[None], counts[None], how)
        np.testing.assert_allclose(got, [[*expected, np.nan]], rtol=1e-6)
    assert metrics.utterance_confidence([0.0], 1) == 0 and np.isnan(metrics.utterance_confidence([], 0))
    for bad, message in (
        (([[0.0]], 1), r"counts must have shape \[...\] = \(1,\) of confidences"),
        (([1], 1), "confidences must have a floating dtype, got int64"),
        (([0.0], 1, "most"), "how must be"),
        (([0.5, np.nan], 2), "confidences must be 0 or more"),
        (([-0.1], 1), r"confidences must be 0 or more.*got -0.1"),
        (([0.0], 2), r"counts must lie in \[0, 1\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"utterance_confidence: {message}"):
            metrics.utterance_confidence(*bad)


def test_correct_words(metrics):
    """As many as the fewest edits leave, in the right order."""
    right = lambda words, reference: metrics.correct_words(words.split(), reference.split()).tolist()
    assert right("a b c", "a x c") == [True, False, True]
    assert right("a a b", "a b") in ([True, False, True], [False, True, True])
    assert right("", "a") == [] and right("a b", "") == [False, False]
    rng = np.random.default_rng(0)
    for _ in range(200):
        one, other = (rng.choice(["x", "y", "zz"], rng.integers(0, 6)).tolist() for _ in range(2))
        kept = metrics.correct_words(one, other)
        pick = [x for x, is_right in zip(one, kept) if is_right]
        rest = iter(other)
        assert all(x in rest for x in pick)  # a subsequence
        edits = edit_distance(tuple(one), tuple(other))
        assert max(len(one), len(other)) - len(pick) <= edits <= len(one) + len(other) - 2 * len(pick)
    with pytest.raises(TypeError, match="correct_words: reference must be a sequence of words, got 'a b'"):
        metrics.correct_words(["a"], "a b")


def test_calibration(metrics):
    """Bin by bin in a loop; what is calibrated by construction has no error, and what is sure and wrong has all."""
    rng = np.random.default_rng(0)
    confidences = np.concatenate([rng.random(500), np.linspace(0, 1, 21)]).astype(np.float32).reshape(-1, 1)
    correct = rng.random(confidences.shape) < 0.3 + 0.5 * confidences
    found = metrics.calibration(jnp.asarray(confidences), correct, bins=7)
    error = 0.0
    for i in range(7):
        low, high = i / 7, (i + 1) / 7
        inside = [
            (float(c), bool(k)) for c, k in zip(confidences[:, 0], correct[:, 0]) if low < c <= high or i == c == 0
        ]
        assert found.counts[i] == len(inside) > 0
        sure, right = (sum(x) / len(inside) for x in zip(*inside))
        np.testing.assert_allclose([found.confidences[i], found.accuracies[i]], [sure, right], rtol=1e-12)
        error += len(inside) * abs(sure - right) / len(confidences)
    np.testing.assert_allclose(found.expected_error, error, rtol=1e-12)
    halves = metrics.calibration([0.5] * 4 + [1.0] * 3, [True, False] * 2 + [True] * 3)
    assert halves.expected_error == 0 and np.isnan(halves.accuracies[:4]).all()
    assert metrics.calibration([1.0, 1 + 1e-7], [False, False]).expected_error == 1  # rounding, as in `words`
    assert np.isnan(metrics.calibration([], []).expected_error)
    for bad, message in (
        (([0.1, -0.1], [True, True]), r"confidences must be 0 or more, .* got -0.1"),
        (([math.nan], [True]), "confidences must be 0 or more, .* got nan"),
        (([1], [True]), "confidences must have a floating dtype, got int64"),
        (([0.5], [1]), "correct must have the dtype bool, got int64"),
        (([0.5], [True, False]), r"correct must have the shape of confidences, \(1,\), got \(2,\)"),
        (([0.5], [True], 0), "bins must be 1 or more, got 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"calibration: {message}"):
            metrics.calibration(*bad)


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


def test_files_of_an_alignment(tmp_path):
    """From the best path to both files and back."""
    textgrid = pytest.importorskip("praatio.textgrid")
    logits = np.full((6, 3, 4), -5.0, np.float32)
    logits[..., 3] = 0
    logits[1, 0, 2] = logits[4, 1, 1] = 5
    frames = jax_rnnt.RNNTLoss().align(logits, np.array([2, 1]), 6, 2).frames
    spoken = timing.intervals(frames, ["two", 'o"ne'], **HOP)
    timing.write_ctm(tmp_path / "x.ctm", {"first": spoken, "silent": [], "second": spoken[1:]}, channel="A")
    lines = [line.split() for line in (tmp_path / "x.ctm").read_text().splitlines()]
    assert lines == [
        ["first", "A", "0.040000", "0.040000", "two"],
        ["first", "A", "0.160000", "0.040000", 'o"ne'],
        ["second", "A", "0.160000", "0.040000", 'o"ne'],
    ]
    timing.write_textgrid(tmp_path / "x.TextGrid", {"labels": spoken, "none": []}, seconds=0.19)
    grid = textgrid.openTextgrid(str(tmp_path / "x.TextGrid"), includeEmptyIntervals=False)
    assert grid.tierNames == ("labels", "none") and grid.maxTimestamp == 0.19
    assert [tuple(x) for x in grid.getTier("labels").entries] == [(0.04, 0.08, "two"), (0.16, 0.19, 'o"ne')]
    assert len(grid.getTier("none").entries) == 0


def test_edges_in_files(tmp_path):
    """In the digits of the files, neighbours meet, nothing is empty, and times are right to half a microsecond."""
    textgrid = pytest.importorskip("praatio.textgrid")
    rng = np.random.default_rng(0)
    shared = timing.intervals([7] * 30, ["x"] * 30, hop=0.01)  # of one frame, a third of a millisecond each
    thirds = timing.intervals(np.arange(99) // 3, ["y"] * 99, hop=0.01, subsampling=4, offset=1 / 3)
    edges = np.cumsum(rng.uniform(1e-4, 0.2, 100))
    chain = [timing.Interval(*x, "z") for x in itertools.pairwise(edges)]
    rounded = [timing.Interval(0.1 + 0.2, 0.4, "a"), timing.Interval(0.4, 0.1 + 0.7, "b"), timing.Interval(0.8, 1, "c")]
    spoken = {"shared": shared, "thirds": thirds, "chain": chain, "rounded": rounded}
    timing.write_ctm(tmp_path / "x.ctm", spoken)
    timing.write_textgrid(tmp_path / "x.TextGrid", spoken | {';;a "b"': []}, seconds=1 + edges[-1])
    grid = textgrid.openTextgrid(str(tmp_path / "x.TextGrid"), includeEmptyIntervals=False)
    assert grid.tierNames == (*spoken, ';;a "b"')
    rows = [line.split() for line in (tmp_path / "x.ctm").read_text().splitlines()]
    for name, given in spoken.items():
        ctm = [[decimal.Decimal(x) for x in row[2:4]] for row in rows if row[0] == name]
        ctm = [(start, start + duration) for start, duration in ctm]
        praat = [(decimal.Decimal(repr(x.start)), decimal.Decimal(repr(x.end))) for x in grid.getTier(name).entries]
        assert ctm == praat and len(ctm) == len(given)
        np.testing.assert_allclose(np.array(ctm, float), [x[:2] for x in given], rtol=0, atol=5.01e-7)
        assert all(start < end for start, end in ctm)
        for one, other, *pair in zip(given, given[1:], ctm, ctm[1:]):
            assert (one.end == pytest.approx(other.start, abs=1e-9)) == (pair[0][1] == pair[1][0])
