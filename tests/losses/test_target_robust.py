"""Are skipped frames and labels weighted as the recursion says? Values and gradients of logits: `LOSSES`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
import reference_numpy as truth
from jax_rnnt import BandLogits, RNNTLoss, TargetRobustRNNTLoss

SKIPS = (0.0, 0.0), (-1.5, -0.5), (2.0, -0.2), (-40.0, -40.0), (None, 0.0), (-1.0, None), (-np.inf, -np.inf)


def values(skip_frame, skip_label, p, implementation):
    return TargetRobustRNNTLoss(
        skip_frame=skip_frame, skip_label=skip_label, reduction="none", implementation=implementation
    )(*p)


@pytest.mark.slow
def test_weights(kernel):
    """Loss and the derivatives by both weights, against float64 sums and their differences."""
    p, names, h = batches.problem(), ("skip_frame", "skip_label"), 1e-5

    run = jax.jit(compare.with_gradient(lambda leaves: values(*map(leaves.get, names), p, kernel)))
    for skips in SKIPS:
        leaves = {name: x for name, x in zip(names, skips) if x is not None}
        known = {"emission": family.ROBUST.truth["emission"], **dict.fromkeys(names, -np.inf), **leaves}
        of = lambda known=known, **changed: truth.loss_and_gradient(*p, **known | changed)[0]
        found, gradient = run(leaves)
        np.testing.assert_allclose(found, of(), rtol=1e-12)
        for name, x in leaves.items() if np.isfinite([*leaves.values()]).all() else ():
            # At 0, the largest skip_label, the difference is one-sided, of second order.
            ends = [(x, 1.5), (x - h, -2), (x - 2 * h, 0.5)] if name == "skip_label" else [(x + h, 0.5), (x - h, -0.5)]
            expected = sum(weight * of(**{name: end}).sum() for end, weight in ends) / h
            np.testing.assert_allclose(gradient[name], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_traced_weights_of_nothing(kernel):
    """At -inf: the gradients of the RNN-T loss, an impossible blank included, and 0 for the weights."""
    p = batches.problem()
    p.logits[0, 1, 0, -1] = -np.inf
    run = lambda x, *skips: values(*skips, p._replace(logits=x), kernel).sum()
    gradient, *weights = jax.jit(jax.grad(run, (0, 1, 2)))(p.logits, -np.inf, -np.inf)
    expected = jax.grad(lambda x: RNNTLoss(implementation=kernel)(x, *p[1:]) * len(x))(p.logits)
    np.testing.assert_allclose(gradient, expected, atol=1e-12)
    assert weights == [0, 0]


def test_sure_of_a_blank():
    """A blank of probability 1 after rounding leaves labels their own probability."""
    logits = jnp.zeros((2, 2, 3)).at[..., 0].set(200.0)
    batch = logits, jnp.array([1]), jnp.array(2), jnp.array(1)
    loss = TargetRobustRNNTLoss(blank=0, skip_frame=None)
    assert 198 < float(loss(*batch)) < 201 and np.isfinite(jax.grad(loss)(*batch)).all()


def test_label_weights_above_0():
    p = batches.problem()
    for known in (0.5, jnp.float32(0.5)):
        with pytest.raises(ValueError, match=r"TargetRobustRNNTLoss: skip_label must be 0 or less, got .*0\.5"):
            TargetRobustRNNTLoss(skip_label=known)
    found = jax.jit(lambda x: values(0.0, x, p, None))(0.5)
    np.testing.assert_array_equal(np.isnan(found), p.target_lengths > 0)


def test_band(kernel):
    """Nothing skips at nodes outside of a band: sums over the nodes inside of it alone."""
    rng = np.random.default_rng(3)
    rows, first, targets = rng.normal(size=(5, 2, 6)), np.array([0, 0, 1, 1, 1]), np.array([2, 4])
    p = np.exp(rows) / np.exp(rows).sum(-1, keepdims=True)
    alpha = np.zeros((6, 4))
    alpha[0, 0] = 1
    for t in range(5):
        for u in range(first[t], first[t] + 2):
            blank, label = p[t, u - first[t], 5], p[t, u - first[t], targets[u]] if u < 2 else 0
            alpha[t, u + 1] += alpha[t, u] * (label + np.exp(-0.5) * (1 - blank - label) if u < 2 else 0)
            alpha[t + 1, u] += alpha[t, u] * (blank + (np.exp(-1.0) if t < 4 else 0))
    loss = TargetRobustRNNTLoss(skip_frame=-1.0, skip_label=-0.5, implementation=kernel)
    got = loss(BandLogits(rows, first), targets, np.array(5), np.array(2))
    np.testing.assert_allclose(got, -np.log(alpha[5, 2]), rtol=1e-12)
