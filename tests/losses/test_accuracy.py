"""Does the error stay small when sequences are long and vocabularies large? float32 against float64, within 1e-5."""

import numpy as np
import pytest

import batches
import compare
import door
import family
import reference_numpy as truth

BOUND = 1e-5  # of posteriors and gradients: the contract
MEGABYTES = 20  # of float64 logits at once


def check(p, gradient=BOUND):
    """The RNN-T loss of one sequence, its gradient and its posteriors. The truth is computed in slabs of frames."""
    logits, labels = p.logits[0], np.append(p.targets[0], -1)
    T, U1, V = logits.shape
    frames = max(MEGABYTES * 2**20 // (8 * U1 * V), 1)
    slabs = [slice(t, t + frames) for t in range(0, T, frames)]
    arcs = {"blank": np.empty((T, U1)), "label": np.empty((T, U1))}
    for slab in slabs:
        for slot, score in truth.softmax_emission(logits[slab], labels, blank=V - 1)[0].items():
            arcs[slot][slab] = score
    expected, posteriors = truth.posteriors(truth.STANDARD, arcs, T, U1 - 1)
    targets = door.TARGETS if p.logits.size < 1 << 23 else [None]
    answers = [door.run(family.RNNT, p, target=target) for target in targets]
    for slab in slabs:
        _, pullback = truth.softmax_emission(logits[slab], labels, blank=V - 1)
        exact = pullback({slot: -x[slab] for slot, x in posteriors.items()})
        for _, _, got in answers:
            assert np.abs(got[0, slab] - exact).max() <= gradient
    for values, found, _ in answers:
        np.testing.assert_allclose(values[0], -expected, rtol=1e-6)
        for slot, x in found.items():
            assert np.abs(x[0] + posteriors[slot]).max() <= gradient


def one_sequence(T, U, V, scale):
    rng = np.random.default_rng(T)
    logits = rng.standard_normal((1, T, U + 1, V), np.float32) * np.float32(scale)
    targets = rng.integers(0, V - 1, (1, U)).astype(np.int32)
    return batches.Problem(logits, targets, np.array([T], np.int32), np.array([U], np.int32))


# T, U, V, scale: U + 1 exceeds any block of threads; T is several minutes of audio; no labels; 33 MB of logits;
# T + U = 4000 with |log-likelihood| up to ten thousands, where plain float32 log alphas are off by 1e-3 to 5e-3.
SIZES = (
    (1, 2000, 3, 1.0),
    (20000, 1, 3, 1.0),
    (3000, 0, 3, 1.0),
    *(family.slow(*x) for x in ((999, 1, 4096, 1.0), (3900, 100, 4, 6.0), (100, 2500, 4, 1.0))),
)


@pytest.mark.parametrize(("T", "U", "V", "scale"), SIZES)
def test_long_lattices(kernel, T, U, V, scale):
    check(one_sequence(T, U, V, scale))


@pytest.mark.quick("rnnt", "tdt")
@pytest.mark.parametrize("loss", [*door.LOSSES, *family.SKIPPING], ids=str)
def test_long_lattices_of_every_loss(loss, kernel):
    p = batches.problem(1, 1500, 100, 5, loss=loss, dtype=np.float32, scale=1.0, lengths=([1500], [100]))
    expected, true_gradient = loss.expected(p)
    for values, gradient in door.answers(loss, p, kernel):
        np.testing.assert_allclose(values, expected, rtol=1e-6)
        assert np.abs(gradient - true_gradient).max() <= BOUND


def scored(scores, kernel):
    """Losses and gradients of log-probabilities [B, T, U1, 2] of one label and the blank."""
    B, T, U1, _ = scores.shape
    lengths = np.full(B, T, np.int32), np.full(B, U1 - 1, np.int32)
    p = batches.Problem(scores.astype(np.float32), np.zeros((B, U1 - 1), np.int32), *lengths)
    return door.answers(family.RNNT, p, kernel, fused_log_softmax=False)


def test_single_path(kernel):
    """One path of equal arcs: every product moves the mantissa in the same direction."""
    T, U, weights = 400, 400, np.array([-0.3465735, -0.6931472, -0.3, -1.04])
    scores = np.full((4, T, U + 1, 2), -np.inf)
    scores[:, 0, :U, 0] = scores[:, :, U, 1] = weights[:, None]
    for values, gradient in scored(scores, kernel):
        np.testing.assert_allclose(values, -weights * (T + U), rtol=1e-6)
        np.testing.assert_allclose(gradient, -1.0 * np.isfinite(scores), atol=BOUND)


def test_peaked_and_flat(kernel):
    """Equal paths, one dominant path while the others underflow float32, and a path that starts with arcs of e^-200."""
    for scale in (0.0, 20.0, 100.0):
        # Scores of size s are rounded to s eps before any kernel adds them; see `tolerance` for s = 8.
        limit = max(BOUND, scale * compare.eps(np.float32) * np.sqrt(400) * 4)
        check(one_sequence(300, 100, 5, scale), limit)
    p = one_sequence(60, 20, 4, 1.0)
    p.logits[:, :5, :, 3] -= 200
    p.logits[:, 40:, :, :3] -= 90
    check(p, 4 * 200 * compare.eps(np.float32) * np.sqrt(80))
