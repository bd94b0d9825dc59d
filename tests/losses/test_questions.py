"""Are posteriors, expected frames, latency, the best path and the log-probabilities of labels those of the lattice?"""

import dataclasses

import jax
import numpy as np
import pytest

import batches
import family
import jax_rnnt
import reference_numpy as truth
import slopes
from jax_rnnt import lattices
from jax_rnnt.lattices import _reference as reference
from jax_rnnt.lattices._viterbi import best_path
from topologies import EVERY, TOPOLOGIES, T, U, arcs_of

EXACT = 1e-12
PAIRS = lattices.Arc("label", 0, 1), lattices.Arc("blank", 1, 0), lattices.Arc("pair", 1, 2)
OF_TWO_LABELS = {"two_labels": (PAIRS, tuple(truth.Arc(arc.slot, arc.dt, arc.du) for arc in PAIRS))}
NAMES = "standard", "monotonic", "multi_blank", "durations_unordered_without_1", *OF_TWO_LABELS


def assert_close(got, expected, message=""):
    np.testing.assert_allclose(got, expected, rtol=EXACT, atol=EXACT, err_msg=message)


def best_of_all(topology, arcs, num_frames, num_labels):
    """(score, frames) of the best path, by enumeration."""
    paths = truth.enumerate_paths(topology, num_frames, num_labels)
    scores = [sum(arcs[slot][t, u] for slot, t, u in path) for path in paths]
    if not paths or max(scores) == -np.inf:
        return -np.inf, [-1] * num_labels
    path = paths[int(np.argmax(scores))]
    return max(scores), [t for slot, t, _ in path if truth.is_label(slot)]


def by_enumeration(topology, arcs, num_frames, num_labels):
    """log(A_u / A_(u - 1)), [U], path by path."""
    total = 0.0
    for u in range(num_labels):
        before, total = total, truth.sum_of_prefixes(topology, arcs, num_frames, num_labels, u + 1)
        yield total - before if total > -np.inf else -np.inf


@pytest.mark.quick("standard", "two_labels", "monotonic")
@pytest.mark.no_kernel
@pytest.mark.parametrize("name", NAMES)
def test_topologies(name):
    """Every (T, U) up to (5, 3), some arcs forbidden, garbage outside the lengths."""
    topology = (TOPOLOGIES | OF_TWO_LABELS)[name]
    arcs, rng = arcs_of(topology[1]), np.random.default_rng(1)
    arcs = {k: np.where(rng.random(x.shape) < 0.15, -np.inf, x) for k, x in arcs.items()}
    frames, labels = np.array(EVERY, np.int32).T
    outside = (np.arange(T)[:, None] >= frames[:, None, None]) | (np.arange(U + 1) > labels[:, None, None])
    dirty = {k: np.where(outside, np.nan, x) for k, x in arcs.items()}
    run = jax.jit(lambda *a: (*best_path(topology[0], *a), reference.label_log_probs(topology[0], *a)))
    score, emitted, log_probs = map(np.asarray, run(dirty, frames, labels))
    for b, (n, m) in enumerate(EVERY):
        own, message = {k: x[b] for k, x in arcs.items()}, f"T={n}, U={m}"
        best, where = best_of_all(topology[1], own, n, m)
        assert_close(score[b], best, message)
        expected = np.array([*by_enumeration(topology[1], own, n, m)])
        assert_close(log_probs[b], [*expected, *[0] * (U - m)], message)
        if name not in OF_TWO_LABELS:
            assert emitted[b].tolist() == where + [-1] * (U - m), message
            assert_close(truth.label_log_probs(topology[1], own, n, m), expected, "the truth itself")


# ------------------------------------------------------------------------------------------------------- every loss
def latency_and_frames(topology, arcs, n, m):
    """(latency, expected frames [U_b]), 0 without a path."""
    label = truth.by_kind(truth.posteriors(topology, arcs, n, m)[1])[1][:, :m]
    t = np.arange(n)[:, None]
    return ((t + 1) * label).sum() / max(m, 1), (t * label).sum(0)


def check(found, sequences):
    """Answers by name against the truth; nothing outside the lengths."""
    for b, n, m, *arcs in sequences:
        for x, y in zip(found["posteriors"], truth.by_kind(truth.posteriors(*arcs, n, m)[1]), strict=True):
            assert_close(x[b, :n, : m + 1], y)
            assert not x[b, n:].any() and not x[b, :, m + 1 :].any()
        latency, frames = latency_and_frames(*arcs, n, m)
        assert_close(found["latency"][b], latency)
        assert_close(found["label_frames"][b], [*frames, *[0] * (found["label_frames"].shape[1] - m)])
        best, path = best_of_all(*arcs, n, m)
        assert_close(found["align"].score[b], best)
        assert found["align"].frames[b].tolist() == path + [-1] * (found["align"].frames.shape[1] - m)
        each = truth.label_log_probs(*arcs, n, m)
        assert_close(found["label_log_probs"][b], [*each, *[0] * (found["label_log_probs"].shape[1] - m)])


DIFFERENTIABLE = "latency", "label_frames", "label_log_probs"
ODD = ([5, 4, 5, 3, 4, 0, 6], [3, 2, 0, 1, 2, 1, 1])  # of the fifth, a label is impossible; no frames, one too many


def odd_problem(loss):
    p = batches.problem(7, 5, 3, 6, loss=loss, scale=1.0, lengths=ODD)
    p.logits[1, 0, 1, : 3 - loss.first_blank] = -np.inf
    # It may be skipped if another one is possible.
    p.logits[4, :, 1, slice(None, -1) if loss is family.ROBUST else p.targets[4, 1]] = -np.inf
    return p


@family.implementations(
    family.TDT, slowly=(family.CONSTRAINED, *family.SKIPPING), reference=(), reference_slowly=(family.RNNT,)
)
def test_every_loss(loss, implementation):
    """Products, a step, skips, and ends are what differs behind the emission.

    Values and slopes are those of the truth; odd sequences affect no other; arcs lead to the loss.

    A penalty acts on arcs, FastEmit on gradients of the loss alone.
    """
    p, arcs_of_loss = odd_problem(loss), {"delay_penalty": 0.2}
    options = arcs_of_loss | ({} if loss is family.TDT else {"fastemit_lambda": 1.0})
    value = loss.value(reduction="none", implementation=implementation, **options)
    weights = [np.random.default_rng(2).normal(size=shape) for shape in ((7,), (7, 3), (7, 3))]
    topology, rest = value.topology, batches.poisoned(p)[1:]

    @jax.jit
    def run(x):
        ask = lambda x: [getattr(value, name)(x, *rest) for name in DIFFERENTIABLE]
        found, pull = jax.vjp(ask, x)
        arcs = value.arc_log_probs(x, *rest)
        by_arcs = lattices.log_likelihood(topology, arcs, *rest[1:], implementation=implementation)
        best = dataclasses.replace(value, implementation=None).align(x, *rest)  # it has no kernel
        more = {"posteriors": value.posteriors(x, *rest), "align": best}
        return dict(zip(DIFFERENTIABLE, found)) | more, pull(weights)[0], arcs, by_arcs, value(x, *rest)

    found, gradient, arcs, by_arcs, losses = jax.tree.map(np.asarray, run(batches.poisoned(p).logits))
    good = p.take(slice(5))
    check(found, loss.sequences(good, **arcs_of_loss))
    assert (found["latency"][5], found["label_log_probs"][5, 0]) == (0, -np.inf)
    assert not found["label_frames"][5].any() and all(np.isnan(found[name][6]).all() for name in DIFFERENTIABLE)
    assert np.isneginf(found["label_log_probs"][4, 1]) and np.isfinite(found["label_log_probs"][4, 0])

    assert set(arcs) == set(lattices._topology.slots(topology))
    assert_close(by_arcs[:6], -losses[:6])
    for x in arcs.values():
        assert np.isneginf(x[:6][~batches.inside(p)[:6]]).all() and np.isnan(x[6]).all()

    assert np.isfinite(gradient).all() and not gradient[[2, 5, 6]].any() and gradient[4].any()

    def total(x):
        each = lambda n, m, *arcs: (*latency_and_frames(*arcs, n, m), truth.label_log_probs(*arcs, n, m))
        return sum(
            (w[b].ravel()[: np.size(x)] * np.where(np.isfinite(x), x, 0)).sum()
            for b, *sequence in loss.sequences(good._replace(logits=x), **arcs_of_loss)
            for w, x in zip(weights, each(*sequence), strict=True)
        )

    slopes.assert_slopes([gradient[:5]], total, [good.logits])


@pytest.mark.no_kernel
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


@pytest.mark.no_kernel
def test_ties_prefer_blank():
    """With equal paths, the search back from the end takes blanks first, so every label comes as early as possible."""
    p = batches.problem(3, 6, 3, 5, lengths=([6] * 3, [3] * 3), dtype=np.float32)
    p.logits[:] = np.array([0, 0.1, 0])[:, None, None, None]
    windows = np.array([[[0, 5]] * 3, [[0, 5]] * 3, [[1, 4], [1, 5], [3, 5]]], np.int32)
    for loss, expected in ((family.RNNT, [[0, 0, 0], [1, 1, 3]]), (family.MONOTONIC, [[0, 1, 2], [1, 2, 3]])):
        found = loss.value().align(*p, label_windows=windows)
        assert found.frames.tolist() == [expected[0], *expected], loss


@pytest.mark.slow
@pytest.mark.no_kernel
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


@pytest.mark.no_kernel
def test_search_has_no_kernel():
    message = (
        "^RNNTLoss.align: implementation='kernel': jax_rnnt has no kernel for the best path; use implementation=None"
    )
    with pytest.raises(NotImplementedError, match=message):
        jax_rnnt.RNNTLoss(implementation="kernel").align(*batches.problem())


# ---------------------------------------------------------------------------------------------- log-probabilities


@pytest.mark.slow
def test_long_utterance(kernel):
    """Logs of prefixes reach 2000, where float32 resolves 1e-4: ratios stay exact, and so do gradients.

    Each path to a label emits each earlier label once. So the gradient by the arcs of a label sums to its weight.
    """
    frames, labels = 1000, 200
    p = batches.problem(2, frames, labels, 8, lengths=([frames, frames - 7], [labels, labels - 3]), scale=1.0)
    p = p.astype(np.float32)
    loss = family.RNNT.value(implementation=kernel)
    wide = family.RNNT.sequences(p._replace(logits=p.logits.astype(np.float64)))
    found = jax.jit(loss.label_log_probs)(*p)
    assert found.dtype == np.float32
    for b, n, m, topology, arcs in wide:
        expected = truth.label_log_probs(topology, arcs, n, m)
        assert expected.sum() < -300
        np.testing.assert_allclose(found[b, :m], expected, rtol=1e-6, atol=1e-6)
        assert not np.asarray(found[b, m:]).any()
    weights = np.random.default_rng(1).normal(size=(2, labels)).astype(np.float32)
    arcs = loss.arc_log_probs(*p)
    call = lambda arcs: (reference.label_log_probs(lattices.STANDARD, arcs, *p[2:]) * weights).sum()
    gradient = np.asarray(jax.jit(jax.grad(call))(arcs)["label"])
    used = np.arange(labels) < p.target_lengths[:, None]
    np.testing.assert_allclose(gradient[..., :-1].sum(1), np.where(used, weights, 0), atol=2e-5)
