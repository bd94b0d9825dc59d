"""Is the expected error of an N-best list right, and do its hypotheses share their encoder?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compare
from jax_rnnt import JointLogits, LinearJoint, RNNTLoss, mwer_loss

pytestmark = pytest.mark.no_kernel
B, N, T, U, H, V = 2, 3, 6, 3, 5, 4


def expected(nll, errors):
    """In float64, list by list."""
    values = []
    for x, e in zip(nll, errors):
        kept = x < np.inf
        weights = np.exp(-(x[kept] - x[kept].min()))
        values.append(np.sum(weights / weights.sum() * (e[kept] - e[kept].mean())))
    return np.array(values)


@compare.with_gradient
def total(nll, errors, reduction="none"):
    return mwer_loss(nll, errors, reduction)


run = jax.jit(total, static_argnums=2)


def test_values_and_gradient():
    rng = np.random.default_rng(0)
    nll, errors = rng.normal(0, 2, (4, 5)) + np.array([[0], [0], [500], [1e5]]), rng.integers(0, 6, (4, 5))
    nll[1, [0, 3]] = np.inf
    values = expected(nll, errors)
    np.testing.assert_allclose(jax.jit(mwer_loss)(nll, errors), values.mean(), rtol=1e-9)
    np.testing.assert_allclose(run(nll, errors)[0], values, rtol=1e-9)
    value, gradient = run(nll, errors, "sum")
    np.testing.assert_allclose(value, values.sum(), rtol=1e-9)
    for b, n in np.ndindex(nll.shape):
        step = np.zeros_like(nll)
        step[b, n] = 1e-4
        slope = (expected(nll + step, errors).sum() - expected(nll - step, errors).sum()) / 2e-4
        np.testing.assert_allclose(gradient[b, n], 0 if nll[b, n] == np.inf else slope, rtol=1e-5, atol=1e-8)


def test_empty_lists():
    """Without a hypothesis: 0. Without a list too; half precision counts in float32."""
    errors = np.array([[1, 2], [1, 2]])
    values, gradient = run(np.array([[np.inf, np.inf], [1.0, 2.0]]), errors)
    assert values[0] == 0 and not gradient[0].any() and np.isfinite(values[1])
    assert jax.jit(mwer_loss)(np.zeros((0, 3)), np.zeros((0, 3))) == 0
    assert jax.eval_shape(mwer_loss, jnp.zeros((2, 3), jnp.bfloat16), jnp.zeros((2, 3), int)).dtype == jnp.float32


BAD_NUMBERS = (-np.inf, 2.0), (np.nan, 2.0), (1.0, np.nan), (1.0, np.inf)


def test_bad_numbers_spoil_their_own_list():
    """NaN with a zero gradient there; a hypothesis that is not in the list may have any errors."""
    rng = np.random.default_rng(1)
    nll, errors = rng.normal(0, 2, (3, 4)), rng.integers(0, 6, (3, 4)).astype(float)
    nll[2, 1], errors[2, 1] = np.inf, np.nan
    clean, gradient = map(np.asarray, run(nll, errors))
    np.testing.assert_allclose(clean, expected(nll, errors), rtol=1e-12)
    assert np.isfinite(gradient).all()
    for bad in BAD_NUMBERS:
        nll[1, 2], errors[1, 2] = bad
        spoiled, spoiled_gradient = run(nll, errors)
        np.testing.assert_array_equal(spoiled, clean * [1, np.nan, 1])
        if not np.isnan(bad[0]):
            np.testing.assert_array_equal(spoiled_gradient, gradient * [[1], [0], [1]])


def test_errors():
    zeros = np.zeros
    for arguments, message in (
        ((zeros((2, 3)), zeros((2, 2))), r"errors must have the shape of nll, \(2, 3\), got \(2, 2\)"),
        ((zeros(3, int), zeros(3)), "nll must have one of the dtypes"),
        ((zeros(3), zeros(3, complex)), "errors must be numbers"),
        ((zeros(3), zeros(3), "mean_target"), "reduction must be one of"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            mwer_loss(*arguments)


def problem(batch=B, hypotheses=N, frames=T, units=H, dtype=np.float64):
    rng = np.random.default_rng(1)
    shapes = (batch, 1, frames, units), (batch, hypotheses, U + 1, units), (units, V)
    arrays = [rng.normal(size=shape).astype(dtype) for shape in shapes]
    targets = rng.integers(0, V - 1, (batch, hypotheses, U)).astype(np.int32)
    labels = rng.integers(0, U + 1, (batch, hypotheses)).astype(np.int32)
    return arrays, targets, (np.full_like(labels, frames), labels), rng.integers(0, 4, (batch, hypotheses))


def test_a_bad_hypothesis_spoils_its_own_utterance(kernel):
    """NaN in one hypothesis reaches the encoder that it reads, and no other."""
    bad = 1
    arrays, targets, lengths, errors = problem()
    arrays[1][bad, 1] = np.nan
    call = lambda arrays: jnp.sum(mwer_loss(nll(arrays), errors, "none")[1 - bad])

    def nll(arrays):
        logits = JointLogits(LinearJoint(arrays[2]), *arrays[:2], chunk=16)
        return RNNTLoss(reduction="none", implementation=kernel)(logits, targets, *lengths)

    gradient = jax.jit(jax.grad(call))(arrays)
    assert np.isfinite(gradient[2]).all() and np.isfinite(gradient[0][1 - bad]).all()
    every = jax.jit(jax.grad(lambda arrays: jnp.sum(nll(arrays))))(arrays)
    assert np.isnan(every[0][bad]).any() and np.isfinite(every[0][1 - bad]).all() and np.isfinite(every[2]).all()
    assert np.isfinite(every[1][bad, 0]).all()
