"""Is the loss the one that the definition gives, for every length, vocabulary size, blank and batch shape?"""

import jax
import numpy as np
import pytest

import cases
import jax_rnnt
import losses
import reference_numpy as truth


@pytest.mark.family("quick", "layouts")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("blank", [0, 3, -1])
def test_value_and_gradient(loss, implementation, blank, dtype):
    p, blank = losses.problem(loss=loss, dtype=dtype), loss.blank(blank)
    got = losses.evaluate(loss, p, implementation, blank=blank)
    losses.assert_matches(got, loss.expected(p, blank=blank), dtype, 11)


def test_every_small_length_against_all_paths(implementation):
    """One batch has every (T, U) up to (5, 3), padded to the largest; the truth is the enumeration of paths."""
    frames, labels = np.array(truth.every_length(5, 3)).T
    p = losses.problem(len(frames), 5, 3, 6, lengths=(frames, labels))
    values, _ = losses.evaluate(losses.RNNT, losses.poisoned(p), implementation, blank=0)
    for b, (n, m) in enumerate(zip(frames, labels, strict=True)):
        classes = np.append(p.targets[b, :m], -1)
        arcs, _ = truth.softmax_emission(p.logits[b, :n, : m + 1], classes, blank=0)
        expected, _ = truth.enumerate_log_likelihood(truth.STANDARD, arcs, n, m)
        np.testing.assert_allclose(values[b], -expected, rtol=1e-13, err_msg=f"T={n}, U={m}")


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 1000])
def test_vocabulary_sizes(loss, kernel, classes):
    """Sizes around every vector width, since the remainder of a row has its own code."""
    for dtype in (np.float32, np.float64):
        p = losses.problem(2, 3, 2, classes, loss=loss, dtype=dtype, lengths=([3, 2], [2, 1]))
        for blank in {0, classes - 1}:
            got = losses.evaluate(loss, p, kernel, blank=blank)
            losses.assert_matches(got, loss.expected(p, blank=blank), dtype, 5)


@pytest.mark.parametrize(
    ("frames", "labels"),
    [(1, 0), (1, 1), (1, 9), (2, 7), (3, 8), (4, 15), (5, 16), (9, 17), (40, 1), (33, 32), (16, 31), (8, 33), (21, 64)],
)
def test_lattice_sizes(loss, kernel, frames, labels):
    """Wide, tall and square lattices around every vector width, full and one short in both directions."""
    for dtype in (np.float32, np.float64):
        lengths = [frames, max(frames - 1, 1)], [labels, max(labels - 1, 0)]
        p = losses.problem(2, frames, labels, 3, loss=loss, dtype=dtype, lengths=lengths)
        got = losses.evaluate(loss, p, kernel)
        losses.assert_matches(got, loss.expected(p), dtype, frames + labels)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_longer_sequences(loss, implementation, dtype):
    p = losses.problem(4, 60, 25, 40, loss=loss, dtype=dtype)
    got = losses.evaluate(loss, losses.poisoned(p), implementation)
    losses.assert_matches(got, loss.expected(p), dtype, 85)


@pytest.mark.rare(
    "reference-square",
    "reference-long",
    "reference-odd_classes",
    "reference-two_classes",
    "reference-more_labels_than_frames",
)
@pytest.mark.parametrize("case", cases.SMALL, ids=lambda case: case.name)
def test_small_cases(implementation, case):
    p = losses.Problem(*cases.make_inputs(case, np.float64))
    got = losses.evaluate(losses.RNNT, losses.poisoned(p), implementation)
    losses.assert_matches(got, losses.RNNT.expected(p), np.float64, case.T + case.U)


@pytest.mark.parametrize("name", ["tiny", "small", "characters", "lattice_bound"])
def test_speech_shapes(kernel, name):
    """In float32, as in the benchmarks."""
    p = losses.Problem(*cases.make_inputs(cases.CASES[name], np.float32))
    losses.assert_matches(losses.evaluate(losses.RNNT, p, kernel), losses.RNNT.expected(p), np.float32, 500)


@pytest.mark.rare("reference-()", "reference-(2, 1, 2)")
@pytest.mark.family("layouts")
@pytest.mark.parametrize("batch", [(), (2, 2), (2, 1, 2)], ids=str)
def test_any_number_of_batch_dimensions(loss, implementation, batch):
    """All leading dimensions are batch."""
    p = losses.problem(loss=loss)
    size = int(np.prod(batch))
    shaped = losses.Problem(*(np.reshape(x[:size], batch + x.shape[1:]) for x in p))
    values, gradient = losses.evaluate(loss, shaped, implementation)
    assert values.shape == batch and gradient.shape == shaped.logits.shape
    flat = values.reshape(size), gradient.reshape(size, *p.logits.shape[1:])
    losses.assert_matches(flat, loss.expected(p.take(slice(size))), np.float64, 11)
    for reduction in ("mean", "mean_target", "mean_volume") if implementation == "kernel" else ("mean",):
        reduced = loss(*shaped, reduction=reduction, implementation=implementation)
        expected, _ = truth.reduce(flat[0], p.target_lengths[:size], reduction)
        assert reduced.shape == ()
        np.testing.assert_allclose(reduced, expected, rtol=1e-13)


@pytest.mark.family("layouts")
def test_log_probs_mode(loss, implementation):
    """fused_log_softmax=False takes scores as they are, normalised or not."""
    p = losses.problem(loss=loss)
    got = losses.evaluate(loss, p, implementation, fused_log_softmax=False)
    losses.assert_matches(got, loss.expected(p, fused_log_softmax=False), np.float64, 11)


@pytest.mark.family("layouts")
def test_value_alone_equals_value_with_gradient(loss, implementation):
    """The loss without a gradient is another kernel; both must agree."""
    for dtype in (np.float32, np.float64):
        p = losses.problem(loss=loss, dtype=dtype)
        alone = jax.jit(lambda *p: loss(*p, reduction="none", implementation=implementation))(*p)
        both, _ = losses.evaluate(loss, p, implementation)
        np.testing.assert_allclose(alone, both, rtol=losses.tolerance(dtype, 11))


def test_the_last_column_is_scaled_too(kernel):
    """It has a vector of its own if labels fill whole ones. Unscaled, 350 factors of 1/3 leave the range of floats."""
    lengths = [350, 349, 350, 348], [32, 16, 8, 4]
    p = losses.problem(4, 350, 32, 3, dtype=np.float32, scale=0, lengths=lengths)
    losses.assert_matches(losses.evaluate(losses.RNNT, p, kernel), losses.RNNT.expected(p), np.float32, 382)


@pytest.mark.family("layouts")
def test_eager_equals_jit(loss, implementation):
    p = losses.problem(loss=loss)
    eager = loss(*p, reduction="none", implementation=implementation)
    np.testing.assert_allclose(eager, losses.evaluate(loss, p, implementation)[0], rtol=1e-14)


@pytest.mark.family("layouts")
def test_default_implementation_is_one_of_the_two(loss):
    p = losses.problem(loss=loss)
    np.testing.assert_allclose(loss(*p, reduction="none"), loss.expected(p)[0], rtol=1e-13)


def test_posteriors(implementation):
    p = losses.problem()
    for options in ({"blank": 0}, {"delay_penalty": 0.3}, {"fused_log_softmax": False}):
        got = jax_rnnt.rnnt_posteriors(*losses.poisoned(p), **options, implementation=implementation)
        for found, expected in zip(got, truth.arc_posteriors(*p, **options), strict=True):
            assert found.shape == p.logits.shape[:-1]
            np.testing.assert_allclose(found, expected, atol=losses.tolerance(np.float64, 11))


def test_posteriors_respect_windows(implementation):
    p = losses.problem(1, lengths=([7], [4]))
    windows = np.array([[[0, 1], [1, 3], [2, 4], [6, 6]]], np.int32)
    _, label = jax_rnnt.rnnt_posteriors(*p, label_windows=windows, implementation=implementation)
    t = np.arange(7)[:, None]
    outside = (t < windows[0, :, 0]) | (t > windows[0, :, 1])
    assert not np.asarray(label)[0, :, :4][outside].any()
    np.testing.assert_allclose(np.asarray(label).sum(1)[0, :4], 1, rtol=1e-13)
