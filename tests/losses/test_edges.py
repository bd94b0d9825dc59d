"""Do extreme problems get the promised answer? Sequences with a fault: test_promises.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import door
import family
import reference_numpy as truth


def certain(loss, frames):
    """Many paths that share a probability of 1 on the standard lattice."""
    p = batches.problem(64, frames, 6, 4, loss=loss, scale=1.0, lengths=([frames] * 64, [6] * 64))
    p.targets[:] = 0
    p.logits[..., 1:3] = -100  # neither the label nor the blank
    p.logits[:, -1, :-1, 0], p.logits[:, :, -1, 3] = 100, 100
    return p


@pytest.mark.quick("kernel")
def test_never_negative(implementation):
    """The loss is not below 0, not even by a bit, nor is a label's probability above 1. (Those that skip add some.)"""
    kernel = implementation == "kernel"
    cases = [(family.RNNT, np.float32, 12)]
    if kernel:
        cases += [(family.RNNT, np.float64, 12), (family.RNNT, np.float32, 1)]
        cases += [(x, np.float32, 12) for x in (family.TDT, family.MULTIBLANK, family.HAT, family.CONSTRAINED)]
    for loss, dtype, frames in cases:
        p = certain(loss, frames).astype(dtype)
        if loss is family.RNNT:  # of a label that is the blank both arcs are certain, and paths add up
            p.targets[0], p.logits[0], p.logits[0, ..., 3] = 3, -100, 100
        (first, *values), _ = compare.evaluate(loss, p, implementation)
        values, expected = np.array(values), -np.log(math.comb(frames + 5, 6))
        assert loss is not family.RNNT or abs(first - expected) < 1e-5, first
        assert (values >= 0).all(), values.min()
        assert loss.truth != {} or (values < 1e-5).all(), values.max()
    label_log_probs = jax.jit(family.RNNT.value(implementation=implementation).label_log_probs)
    for dtype in (np.float32, np.float64) if kernel else ():
        found = np.asarray(label_log_probs(*certain(family.RNNT, 12).astype(dtype)))
        assert (found <= 0).all() and (found > -1e-5).all(), (found.max(), found.min())


@pytest.mark.quick("rnnt-kernel")
@pytest.mark.parametrize(
    ("loss", "implementation"),
    [(family.RNNT, "kernel"), (family.TILES, "kernel"), family.slow(family.RNNT, "reference")],
    ids=str,
    indirect=["implementation"],
)
def test_infinite_losses(loss, implementation):
    """The mean is inf with a finite gradient, zero for the impossible sequence; where(isinf) trains on the rest."""
    p = batches.problem(loss=loss, lengths=([7, 0, 6, 4], [4, 2, 0, 3]))
    expected, gradient = loss.expected(p)

    def masked(x):
        values = loss(x, *p[1:], reduction="none", implementation=implementation)
        return jnp.where(jnp.isinf(values), 0.0, values).sum()

    mean = lambda x: loss(x, *p[1:], implementation=implementation)
    found = jax.jit(lambda x: [jax.value_and_grad(call)(x) for call in (mean, masked)])(p.logits)
    for got, value, weight in zip(found, (np.inf, expected[[0, 2, 3]].sum()), (0.25, 1)):
        np.testing.assert_allclose(got[0], value, rtol=1e-13)
        np.testing.assert_allclose(got[1], weight * gradient, atol=1e-13)


def test_more_sequences_than_a_grid_is_high(kernel):
    """65,535 blocks is the most that CUDA starts in one dimension."""
    size = 65_600
    logits = np.random.default_rng(0).standard_normal((size, 1, 1, 2), np.float32)
    p = batches.Problem(logits, np.zeros((size, 0), np.int32), np.ones(size, np.int32), np.zeros(size, np.int32))
    log_probs = truth.log_softmax(logits[:, 0, 0].astype(np.float64))
    for values, gradient in door.answers(family.RNNT, p, kernel):
        np.testing.assert_allclose(values, -log_probs[:, 1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(gradient[:, 0, 0, 1], np.exp(log_probs[:, 1]) - 1, atol=1e-6)
