"""Does the error stay small when sequences are long and vocabularies large? float32 against float64, within 1e-5."""

import jax
import numpy as np
import pytest

import jax_rnnt
import losses
import reference_numpy as truth

pytestmark = pytest.mark.usefixtures("optimized")

BOUND = 1e-5  # of posteriors and gradients: the contract


def float64_gradient_error(p, gradient, frames=200):
    """Largest error of a float32 gradient of one RNN-T loss. The truth is computed in slabs of frames."""
    logits, labels = p.logits[0], np.append(p.targets[0], -1)
    T, U1, V = logits.shape
    arcs = {"blank": np.empty((T, U1)), "label": np.empty((T, U1))}
    slabs = [slice(t, t + frames) for t in range(0, T, frames)]
    for slab in slabs:
        for slot, score in truth.softmax_emission(logits[slab], labels, blank=V - 1)[0].items():
            arcs[slot][slab] = score
    value, posteriors = truth.posteriors(truth.STANDARD, arcs, T, U1 - 1)
    worst = 0.0
    for slab in slabs:
        _, pullback = truth.softmax_emission(logits[slab], labels, blank=V - 1)
        expected = pullback({slot: -x[slab] for slot, x in posteriors.items()})
        worst = max(worst, np.abs(gradient[0, slab] - expected).max())
    return -value, posteriors, worst


def one_sequence(T, U, V, scale):
    rng = np.random.default_rng(T)
    logits = rng.standard_normal((1, T, U + 1, V), np.float32) * np.float32(scale)
    targets = rng.integers(0, V - 1, (1, U)).astype(np.int32)
    return losses.Problem(logits, targets, np.array([T], np.int32), np.array([U], np.int32))


@pytest.mark.slow
@pytest.mark.parametrize(("T", "U", "scale"), [(3900, 100, 1.0), (3900, 100, 6.0), (1000, 3000, 1.0)], ids=str)
def test_long_lattices(implementation, T, U, scale):
    """T + U = 4000, |log-likelihood| up to ten thousands; plain float32 log alphas are off by 1e-3 to 5e-3 here."""
    if implementation == "reference" and U > 100:
        pytest.skip("the reference's lattice has no limit of its own in U; once is enough")
    p = one_sequence(T, U, 4, scale)
    values, gradient = losses.evaluate(losses.RNNT, p, implementation)
    value, posteriors, worst = float64_gradient_error(p, gradient)
    np.testing.assert_allclose(values[0], value, rtol=1e-6)
    assert worst <= BOUND
    got = jax.jit(lambda *p: jax_rnnt.rnnt_posteriors(*p, implementation=implementation))(*p)
    for found, expected in zip(got, (posteriors["blank"], posteriors["label"]), strict=True):
        assert np.abs(np.asarray(found)[0] - expected).max() <= BOUND


@pytest.mark.family
def test_long_lattices_of_every_loss(loss, kernel):
    """T = 3900, U = 100 as above."""
    if loss is losses.RNNT:
        pytest.skip("above")
    p = losses.problem(1, 3900, 100, 5, loss=loss, dtype=np.float32, scale=1.0, lengths=([3900], [100]))
    values, gradient = losses.evaluate(loss, p, kernel)
    expected, true_gradient = loss.expected(p)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    assert np.abs(gradient - true_gradient).max() <= BOUND


@pytest.mark.slow
def test_large_vocabulary_and_long_lattice(kernel):
    """T + U = 4000 and V = 4096: 400 MB of logits."""
    p = one_sequence(3995, 5, 4096, 2.0)
    values, gradient = losses.evaluate(losses.RNNT, p, kernel)
    value, _, worst = float64_gradient_error(p, gradient, frames=100)
    np.testing.assert_allclose(values[0], value, rtol=1e-6)
    assert worst <= BOUND


@pytest.mark.parametrize(("T", "U"), [(1, 4000), (20000, 1)], ids=str)
def test_thin_lattices(kernel, T, U):
    """U + 1 exceeds any block of threads; T is several minutes of audio."""
    p = one_sequence(T, U, 3, 1.0)
    values, gradient = losses.evaluate(losses.RNNT, p, kernel)
    value, _, worst = float64_gradient_error(p, gradient, frames=2000)
    np.testing.assert_allclose(values[0], value, rtol=1e-6)
    assert worst <= BOUND


@pytest.mark.rare("reference")
@pytest.mark.parametrize("scale", [0.0, 20.0, 100.0])
def test_peaked_and_flat(implementation, scale):
    """Equal paths, and one dominant path while the others underflow float32."""
    p = one_sequence(300, 100, 5, scale)
    values, gradient = losses.evaluate(losses.RNNT, p, implementation)
    value, _, worst = float64_gradient_error(p, gradient)
    np.testing.assert_allclose(values[0], value, rtol=1e-6)
    # Scores of size s are rounded to s eps before any kernel adds them; see `tolerance` for s = 8.
    limit = max(BOUND, scale * losses.eps(np.float32) * np.sqrt(400) * 4)
    assert worst <= limit


@pytest.mark.rare("reference")
def test_float64(implementation):
    p = one_sequence(600, 200, 5, 2.0)
    p = p._replace(logits=p.logits.astype(np.float64))
    values, gradient = losses.evaluate(losses.RNNT, p, implementation)
    value, _, worst = float64_gradient_error(p, gradient)
    np.testing.assert_allclose(values[0], value, rtol=1e-13)
    assert worst <= 1e-10


@pytest.mark.rare("reference")
def test_improbable_beginning(implementation):
    """The right path starts with arcs of e^-200: alphas must not underflow before they recover."""
    p = one_sequence(60, 20, 4, 1.0)
    logits = p.logits.copy()
    logits[:, :5, :, 3] -= 200
    logits[:, 40:, :, :3] -= 90
    p = p._replace(logits=logits)
    values, gradient = losses.evaluate(losses.RNNT, p, implementation)
    value, _, worst = float64_gradient_error(p, gradient)
    np.testing.assert_allclose(values[0], value, rtol=1e-6)
    assert worst <= 4 * 200 * losses.eps(np.float32) * np.sqrt(80)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "U"), [(20, 900), (900, 20), (300, 300)], ids=str)
@pytest.mark.parametrize("classes", [2, 3, 1024])
def test_equal_paths(implementation, T, U, classes):
    """Equal scores: sums double at every step, so mantissas overflow unless they are normalized.

    The loss is small if the sum over paths nearly cancels the scores (4.1 for T = U = 300 and two classes). A GPU's
    exponential is right within 2 ulp, 2^-22 below 2, and is off alike for equal arcs, so the errors of a path add up.
    """
    ulps = (T + U) * 2.0**-22 if losses.platform() == "cuda" and implementation == "kernel" else 0
    scores = np.full((1, T, U + 1, 2), -np.log(classes), np.float32)
    p = losses.Problem(scores, np.zeros((1, U), np.int32), np.array([T], np.int32), np.array([U], np.int32))
    values, gradient = losses.evaluate(losses.RNNT, p, implementation, fused_log_softmax=False)
    np.testing.assert_allclose(values[0], truth.uniform_loss(T, U, classes), rtol=1e-6, atol=ulps)
    arcs = {"blank": np.zeros((T, U + 1)), "label": np.zeros((T, U + 1))}
    _, posteriors = truth.posteriors(truth.STANDARD, arcs, T, U)
    assert np.abs(gradient[0, ..., 1] + posteriors["blank"]).max() <= BOUND
    assert np.abs(gradient[0, :, :U, 0] + posteriors["label"][:, :U]).max() <= BOUND


@pytest.mark.rare("reference")
@pytest.mark.parametrize("score", [-0.3465735, -0.6931472, -0.3, -1.04], ids=str)
def test_single_path(implementation, score):
    """One path of equal arcs: every product moves the mantissa in the same direction."""
    T, U = 400, 400
    scores = np.full((1, T, U + 1, 2), -np.inf, np.float32)
    scores[0, 0, :U, 0] = scores[0, :, U, 1] = score
    p = losses.Problem(scores, np.zeros((1, U), np.int32), np.array([T], np.int32), np.array([U], np.int32))
    values, gradient = losses.evaluate(losses.RNNT, p, implementation, fused_log_softmax=False)
    np.testing.assert_allclose(values[0], -score * (T + U), rtol=1e-6)
    np.testing.assert_allclose(gradient, -1.0 * np.isfinite(scores), atol=BOUND)
