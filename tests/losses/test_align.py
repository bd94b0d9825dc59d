"""Are best path, posteriors, expected frames and latency those of the lattice? Are ties always broken alike?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import family
import jax_rnnt
import reference_numpy as truth
from jax_rnnt import lattices
from jax_rnnt.lattices._viterbi import best_path
from topologies import EVERY, TOPOLOGIES, T, U, arcs_of

pytestmark = pytest.mark.no_kernel
EXACT = 1e-13


def best_of_all(topology, arcs, num_frames, num_labels):
    """(score, frames) of the best path, by enumeration."""
    paths = truth.enumerate_paths(topology, num_frames, num_labels)
    scores = [sum(arcs[slot][t, u] for slot, t, u in path) for path in paths]
    if not paths or max(scores) == -np.inf:
        return -np.inf, [-1] * num_labels
    path = paths[int(np.argmax(scores))]
    return max(scores), [t for slot, t, _ in path if truth.is_label(slot)]


@pytest.mark.parametrize("name", ["standard", "monotonic", "multi_blank", "durations_unordered_without_1"])
def test_best_path(name):
    """Every (T, U) up to (5, 3), some arcs forbidden, garbage outside the lengths."""
    topology = TOPOLOGIES[name]
    arcs = arcs_of(topology[1])
    rng = np.random.default_rng(1)
    arcs = {k: np.where(rng.random(x.shape) < 0.15, -np.inf, x) for k, x in arcs.items()}
    frames, labels = np.array(EVERY, np.int32).T
    outside = (np.arange(T)[:, None] >= frames[:, None, None]) | (np.arange(U + 1) > labels[:, None, None])
    dirty = {k: np.where(outside, np.nan, x) for k, x in arcs.items()}
    score, emitted = jax.jit(lambda *a: best_path(topology[0], *a))(dirty, frames, labels)
    for b, (n, m) in enumerate(EVERY):
        expected, where = best_of_all(topology[1], {k: x[b] for k, x in arcs.items()}, n, m)
        np.testing.assert_allclose(score[b], expected, rtol=EXACT, err_msg=f"T={n}, U={m}")
        np.testing.assert_array_equal(emitted[b], where + [-1] * (U - m), err_msg=f"T={n}, U={m}")


def check(loss, logits, rest, sequences, align=None, **given):
    """All questions to a loss, and to `align` about the best path, against the truth; nothing outside the lengths."""
    questions = [loss.posteriors, loss.label_frames, loss.latency, *([align.align] if align else [])]
    answers = jax.jit(lambda *p: [ask(*p, **given) for ask in questions])(logits, *rest)
    posteriors, frames, latency, (score, where) = (*answers, (None, None))[:4]
    assert all(x.shape == (*frames.shape[:-1], 7, 5) for x in posteriors)
    for b, n, m, topology, arcs in sequences:
        expected = truth.by_kind(truth.posteriors(topology, arcs, n, m)[1])
        for x, y in zip(posteriors, expected, strict=True):
            np.testing.assert_allclose(x[b, :n, : m + 1], y, atol=EXACT)
            assert not x[b, n:].any() and not x[b, :, m + 1 :].any()
        mean = (np.arange(n)[:, None] * expected[1]).sum(0)[:m]
        np.testing.assert_allclose(frames[b, :m], mean, atol=EXACT)
        assert not np.asarray(frames[b, m:]).any()
        np.testing.assert_allclose(latency[b], (mean + 1).sum() / max(m, 1), atol=EXACT)
        if align:
            best, path = best_of_all(topology, arcs, n, m)
            np.testing.assert_allclose(score[b], best, rtol=EXACT)
            np.testing.assert_array_equal(where[b], path + [-1] * (len(where[b]) - m))


@family.every_kind
def test_questions(loss, implementation):
    p = batches.problem(loss=loss)
    value = loss.value(implementation=implementation, reduction="none")
    search = loss.value(implementation=None if implementation == "kernel" else implementation)  # it has no kernel
    q = batches.poisoned(p)
    check(value, q.logits, q[1:], loss.sequences(p), search)


def test_options(kernel):
    """All at once; options of the gradient have no effect."""
    p, options = batches.problem(), {"blank": 0, "delay_penalty": 0.3, "fused_log_softmax": False}
    windows = np.array([[[0, 1], [1, 3], [2, 4], [3, 6]]] * 4, np.int32)
    of_gradient = {"clamp": 0.5, "fastemit_lambda": 0.5, "reduction": "none"}
    loss = jax_rnnt.RNNTLoss(**options, **of_gradient, implementation=kernel)
    sequences = family.RNNT.sequences(p, label_windows=windows, **options)
    check(loss, p.logits, p[1:], sequences, jax_rnnt.RNNTLoss(**options), label_windows=windows)


@pytest.mark.parametrize("sampled", [False, True])
def test_durations_arc_by_arc(kernel, sampled):
    """With FastEmit or sampling, each pair of token and duration is an arc; posteriors stay the same."""
    p = batches.problem(loss=family.TDT)
    tokens = family.RNNT.sequences(p._replace(logits=p.logits[..., :-3]))
    options = {"omega": 1.0} if sampled else {"fastemit_lambda": 0.5}
    loss = family.TDT.value(**options, reduction="none", implementation=kernel)
    check(loss, p.logits, p[1:], tokens if sampled else family.TDT.sequences(p), key=jax.random.key(0))


def test_windows_of_the_best_path_leave_it_alone():
    """With one path, the loss is minus its score, and its gradient that of the score: 1 for every arc of the path."""
    p = batches.problem()
    loss = jax_rnnt.RNNTLoss(fused_log_softmax=False, reduction="none")
    frames = np.asarray(loss.align(*p).frames)
    given = {"label_windows": np.stack([frames, frames], -1)}

    @jax.jit
    def run(x):
        score = lambda x: -loss.align(x, *p[1:], **given).score
        return [(f(x), jax.grad(lambda x: f(x).sum())(x)) for f in (lambda x: loss(x, *p[1:], **given), score)]

    (values, gradient), (scores, expected) = run(p.logits)
    np.testing.assert_allclose(values, scores, rtol=1e-12)
    np.testing.assert_allclose(gradient, expected, atol=1e-12)
    np.testing.assert_array_equal(expected.sum((1, 2, 3)), -(p.logit_lengths + p.target_lengths))


def test_ties_prefer_blank():
    """With equal paths, the search back from the end takes blanks first, so every label comes as early as possible."""
    p = batches.problem(3, 6, 3, 5, lengths=([6] * 3, [3] * 3), dtype=np.float32)
    p.logits[:] = np.array([0, 0.1, 0])[:, None, None, None]
    windows = np.array([[[0, 5]] * 3, [[0, 5]] * 3, [[1, 4], [1, 5], [3, 5]]], np.int32)
    for loss, expected in ((family.RNNT, [[0, 0, 0], [1, 1, 3]]), (family.MONOTONIC, [[0, 1, 2], [1, 2, 3]])):
        found = loss.value().align(*p, label_windows=windows)
        assert found.frames.tolist() == [expected[0], *expected], loss


def test_best_path_of_a_long_utterance():
    """float32 scores of thousands: the path is that of float64, even if paths differ by less than float32 resolves."""
    T, U = 2000, 300
    rng = np.random.default_rng(0)
    run = jax.jit(lambda arcs: best_path(lattices.STANDARD, arcs, np.int32(T), np.int32(U)))
    for spread in (1.0, 1e-4):
        arcs = {slot: rng.normal(-3, spread, (T, U + 1)).astype(np.float32) for slot in ("blank", "label")}
        score, frames = run(arcs)
        expected, exact = run({k: x.astype(np.float64) for k, x in arcs.items()})
        np.testing.assert_allclose(score, expected, rtol=1e-6)
        np.testing.assert_array_equal(frames, exact)


def test_search_has_no_kernel():
    with pytest.raises(NotImplementedError, match="implementation='kernel'"):
        jax_rnnt.RNNTLoss(implementation="kernel").align(*batches.problem())


@family.every_kind
def test_gradients(loss, implementation):
    """The gradient is the slope; odd sequences affect no other; the loss's FastEmit does not enter."""
    p = batches.problem(5, 4, 2, 5, loss=loss, scale=1.0, lengths=([4, 3, 4, 0, 5], [2, 1, 0, 1, 1]))
    p.logits[1, 0, 1, : 3 - loss.first_blank] = -np.inf
    value = loss.value(fastemit_lambda=1.0, implementation=implementation, reduction="none")
    weights = np.array([[1.0, 2.0, 1.0, 1.0, 0.0], [-0.4, 0.7, 1.0, 1.0, 0.0]])

    @jax.jit
    def run(x):
        ask = lambda x: jnp.stack([value.latency(x, *p[1:]), value.label_frames(x, *p[1:]).sum(1)])
        values, pull = jax.vjp(ask, x)
        return values, pull(weights)[0]

    values, gradient = map(np.asarray, run(p.logits))
    np.testing.assert_array_equal(values[:, 2:], [[0, 0, np.nan]] * 2)
    assert np.isfinite(gradient).all() and not gradient[3:].any()
    step = np.where(np.isfinite(p.logits), np.random.default_rng(0).normal(size=p.logits.shape), 0)
    up, down = (run(p.logits + h * step)[0] for h in (1e-5, -1e-5))
    slope = (weights * (up - down) / 2e-5)[:, :2].sum(0)
    np.testing.assert_allclose((gradient * step).sum((1, 2, 3))[:2], slope, rtol=1e-6, atol=1e-9)
