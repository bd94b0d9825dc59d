"""Is the log-probability of each target, given those before it, that of all partial paths? Does it train?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import family
import feeds
import jax_rnnt
import reference_numpy as truth
import slopes
from jax_rnnt import lattices
from jax_rnnt.lattices import _reference as reference
from topologies import EVERY, TOPOLOGIES, T, U, arcs_of

EXACT = 1e-12
PAIRS = lattices.Arc("label", 0, 1), lattices.Arc("blank", 1, 0), lattices.Arc("pair", 1, 2)
TWO_LABELS = PAIRS, tuple(truth.Arc(arc.slot, arc.dt, arc.du) for arc in PAIRS)


def assert_close(got, expected, limit=EXACT, message=""):
    np.testing.assert_allclose(got, expected, rtol=limit, atol=limit, err_msg=message)


def by_enumeration(topology, arcs, num_frames, num_labels):
    """log(A_u / A_(u - 1)), [U], path by path."""
    total = 0.0
    for u in range(num_labels):
        before, total = total, truth.sum_of_prefixes(topology, arcs, num_frames, num_labels, u + 1)
        yield total - before if total > -np.inf else -np.inf


@pytest.mark.parametrize("name", ["standard", "multi_blank", "durations_unordered_without_1", "two_labels"])
def test_topologies(name):
    """Every (T, U) up to (5, 3), some arcs forbidden, garbage outside the lengths."""
    topology = (TOPOLOGIES | {"two_labels": TWO_LABELS})[name]
    arcs, rng = arcs_of(topology[1]), np.random.default_rng(1)
    arcs = {k: np.where(rng.random(x.shape) < 0.15, -np.inf, x) for k, x in arcs.items()}
    frames, labels = np.array(EVERY, np.int32).T
    outside = (np.arange(T)[:, None] >= frames[:, None, None]) | (np.arange(U + 1) > labels[:, None, None])
    dirty = {k: np.where(outside, np.nan, x) for k, x in arcs.items()}
    got = np.asarray(jax.jit(lambda *a: reference.label_log_probs(topology[0], *a))(dirty, frames, labels))
    for b, (n, m) in enumerate(EVERY):
        own = {k: x[b] for k, x in arcs.items()}
        expected = np.array([*by_enumeration(topology[1], own, n, m), *[0] * (U - m)])
        assert_close(got[b], expected, message=f"T={n}, U={m}")
        if topology is not TWO_LABELS:
            assert_close(truth.label_log_probs(topology[1], own, n, m), expected[:m], message="the truth itself")


@family.every_kind
def test_every_loss(loss, implementation):
    """NaN in every logit and a bad label in every target outside the lengths. Frames after the last label cost more.

    Options act on arcs: test_align.py.
    """
    p = batches.problem(loss=loss)
    got = np.asarray(jax.jit(loss.value(implementation=implementation).label_log_probs)(*batches.poisoned(p)))
    for b, n, m, topology, arcs in loss.sequences(p):
        assert_close(got[b], [*truth.label_log_probs(topology, arcs, n, m), *[0] * (got.shape[1] - m)])
    assert (got.sum(1) >= -loss.expected(p)[0]).all()


NORMALIZED = {
    "rnnt": jax_rnnt.RNNTLoss(),
    "monotonic": jax_rnnt.MonotonicRNNTLoss(),
    "hat": jax_rnnt.HATLoss(),
    "monotonic_hat": jax_rnnt.HATLoss(variant="monotonic"),
}


@pytest.mark.parametrize("loss", NORMALIZED.values(), ids=NORMALIZED)
def test_next_labels_and_the_end_sum_to_one(loss, kernel):
    """sum over y of P(y | y_<u) + P(end | y_<u) = 1, for prefixes of 0 ... 4 labels."""
    V, loss = 6, dataclasses.replace(loss, implementation=kernel)
    p = batches.problem(1, 7, 4, V, lengths=([7], [4]))
    longer = np.tile(p.targets, (4, V - 1, 1))  # [m, y]: label y after m others
    longer[range(4), :, range(4)] = np.arange(V - 1)
    targets = np.concatenate([longer.reshape(-1, 4), np.tile(p.targets, (5, 1))])
    counts = np.concatenate([np.repeat(np.arange(1, 5), V - 1), np.arange(5)]).astype(np.int32)

    def run(targets, count):
        rest = targets, np.int32(7), count
        return loss.label_log_probs(p.logits[0], *rest), -loss(p.logits[0], *rest)

    each, likelihood = map(np.asarray, jax.jit(jax.vmap(run))(targets, counts))
    each, of_prefix = each[:-5].reshape(4, V - 1, 4), each[-5:]
    end = likelihood[-5:] - of_prefix.sum(-1)
    for m in range(4):
        assert_close(np.exp(each[m, :, m]).sum() + np.exp(end[m]), 1)
        for more in range(m, 5):  # later labels change no entry
            assert_close(of_prefix[more, :m], of_prefix[4, :m])


@family.reference_slow
def test_weighted_tokens(implementation):
    """Both recipes of docs/transcripts.md, path by path: without and with the frames after the last label."""
    p = batches.problem(3, 4, 2, 5, lengths=([4, 3, 2], [2, 1, 0]))
    weights = np.random.default_rng(4).uniform(0, 2, (3, 2))
    weights[1, 1] = 1e30  # past U_b
    loss = family.RNNT.value(reduction="none", implementation=implementation)
    run = jax.jit(lambda w: (-(w * loss.label_log_probs(*p)).sum(1), loss(*p)))
    of_ones, losses_of_all = map(np.asarray, run(np.ones((3, 2))))
    of_weights, _ = run(weights)
    added = losses_of_all + run(weights - 1)[0]
    for b, n, m, topology, arcs in family.RNNT.sequences(p):
        each = np.array([*by_enumeration(topology, arcs, n, m)])
        total = truth.sum_of_paths(truth.enumerate_paths(topology, n, m), arcs)[1]
        last = truth.sum_of_prefixes(topology, arcs, n, m, m) if m else 0.0
        assert_close(of_ones[b], -last)
        assert_close(of_weights[b], -(weights[b, :m] * each).sum())
        assert_close(added[b], -(weights[b, :m] * each).sum() - (total - last))


def weighted_truth(loss, p, weights):
    """The weighted sum of all finite answers, as a function of the logits."""

    def total(x):
        answers = (truth.label_log_probs(*arcs, n, m) for _, n, m, *arcs in loss.sequences(p._replace(logits=x)))
        return sum((w[: len(a)] * np.where(np.isfinite(a), a, 0)).sum() for a, w in zip(answers, weights, strict=True))

    return total


@family.every_kind
def test_gradients(loss, implementation):
    """The slope of the truth, for weights of both signs; odd sequences and impossible labels affect no other."""
    p = batches.problem(6, 4, 2, 6, loss=loss, scale=1.0, lengths=([4, 3, 4, 0, 5, 4], [2, 1, 0, 1, 1, 2]))
    logits = p.logits.copy()
    # The second label is impossible; it may be skipped if another one is possible.
    logits[5, :, 1, slice(None, -1) if loss is family.ROBUST else p.targets[5, 1]] = -np.inf
    weights = np.random.default_rng(2).normal(size=(6, 2))
    value = loss.value(fastemit_lambda=1.0, implementation=implementation)

    @jax.jit
    def run(x):
        found, pull = jax.vjp(lambda x: value.label_log_probs(x, *p[1:]), x)
        return found, pull(weights)[0]

    found, gradient = map(np.asarray, run(logits))
    assert (found[3, 0], found[5, 1]) == (-np.inf, -np.inf) and np.isnan(found[4]).all()
    assert np.isfinite(found[[0, 1, 2]]).all() and np.isfinite(found[5, 0])
    assert np.isfinite(gradient).all() and not gradient[2:5].any() and gradient[5].any()

    kept = [0, 1, 5]
    expected = weighted_truth(loss, p.take(kept), weights[kept])
    slopes.assert_slopes([gradient[kept]], expected, [logits[kept]])


def test_second_derivatives_of_the_reference():
    """Hessian-vector products against differences of differences, and the first derivative in forward mode."""
    loss, p = family.RNNT, batches.problem(2, 4, 2, 6, scale=1.0, lengths=([4, 3], [2, 1]))
    rng = np.random.default_rng(3)
    (v, w), weights = rng.normal(size=(2, *p.logits.shape)), rng.normal(size=(2, 2))
    value = loss.value(implementation="reference")
    total = lambda x: (value.label_log_probs(x, *p[1:]) * weights).sum()
    got = jax.jit(lambda x: jax.jvp(jax.grad(total), (x,), (v,))[1])(p.logits)
    of, h = weighted_truth(loss, p, weights), 1e-3
    x = p.logits
    mixed = of(x + h * (v + w)) - of(x + h * (v - w)) - of(x - h * (v - w)) + of(x - h * (v + w))
    np.testing.assert_allclose((got * w).sum(), mixed / (4 * h**2), rtol=1e-4)
    tangent = jax.jit(lambda x: jax.jvp(total, (x,), (v,))[1])(x)
    np.testing.assert_allclose(tangent, slopes.slope(of, x, directions=[v]), **slopes.CLOSE)


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


@pytest.mark.parametrize("loss", [family.RNNT, family.TDT, family.slow(family.CONSTRAINED)], ids=str)
def test_masks(loss, kernel):
    """Masks of any finite size, against exact fractions; the gradient is finite, and each label has a sign."""
    rows = feeds.table(loss)
    p = feeds.problem_of(rows)
    value = loss.value(implementation=kernel)
    found, pull = jax.vjp(jax.jit(lambda x: value.label_log_probs(x, *p[1:])), p.logits)
    assert np.isfinite(pull(jnp.ones_like(found))[0]).all()

    def failures():
        for row, scores in zip(rows, np.asarray(found)):
            topology, before = loss.truth.get("topology", truth.STANDARD), 0
            for u, score in enumerate(scores):
                total = truth.sum_of_prefixes(topology, row.solution.arcs, row.frames, feeds.U, u + 1)
                expected = -np.inf if total == -np.inf else float(total - before)
                limit = 1e-5 + 1e-6 * float(max(abs(total), abs(before)))
                if score != expected and feeds.far(score, expected, limit):
                    yield f"{row.name}: label {u} has {score}, expected {expected}"
                if (before := total) == -np.inf:
                    break

    feeds.none_of(failures())
