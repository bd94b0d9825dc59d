"""Forward mode, Jacobians, and gradients of gradients beside what no path enters. test_derivatives.py has the rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses


@pytest.fixture
def small(loss):
    return losses.problem(2, 3, 2, 4, loss=loss, scale=1.0, lengths=([3, 2], [2, 1]))


def total(loss, p, implementation):
    return jax.jit(lambda x: loss(x, *p[1:], reduction="sum", implementation=implementation))


@pytest.mark.family
def test_reference_forward_mode(loss, small):
    """jvp, jacfwd and linearize agree with reverse mode."""
    call = total(loss, small, "reference")
    x = jnp.asarray(small.logits)
    tangent = jnp.asarray(np.random.default_rng(9).normal(size=x.shape))
    expected = loss.expected(small)[1]
    jvp = jax.jit(lambda x, v: jax.jvp(call, (x,), (v,))[1])
    np.testing.assert_allclose(jvp(x, tangent), (expected * tangent).sum(), rtol=1e-12)
    if loss is not losses.RNNT:
        return
    np.testing.assert_allclose(jax.linearize(call, x)[1](tangent), (expected * tangent).sum(), rtol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(call))(x), expected, atol=1e-13)


@pytest.mark.slow
def test_gradient_of_a_gradient_penalty(loss, implementation, small):
    """grad(|grad|^2), as gradient penalties need it, stays finite and right with padding of NaN."""
    p = losses.poisoned(small)
    call = total(loss, p, implementation)
    penalty = jax.jit(jax.grad(lambda x: (jax.grad(call)(x) ** 2).sum()))(p.logits)

    def truth_penalty(x):
        return (loss.expected(small._replace(logits=x))[1] ** 2).sum()

    direction = np.random.default_rng(11).normal(size=small.logits.shape)
    slope = (truth_penalty(small.logits + 1e-5 * direction) - truth_penalty(small.logits - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose((np.asarray(penalty) * direction).sum(), slope, rtol=1e-6)


def test_per_example_jacobian(loss, implementation):
    """jacrev of the vector of losses: rows of other sequences are zero."""
    p = losses.problem(2, 3, 2, 4, loss=loss, lengths=([3, 2], [2, 1]))
    call = lambda x: loss(x, *p[1:], reduction="none", implementation=implementation)
    jacobian = jax.jit(jax.jacrev(call))(p.logits)
    _, expected = loss.expected(p)
    for b in range(2):
        np.testing.assert_allclose(jacobian[b, b], expected[b], atol=1e-13)
        assert not np.asarray(jacobian[b, 1 - b]).any()


@pytest.mark.slow
def test_second_derivative_beside_rows_that_no_path_enters(implementation):
    """The softmax of such rows must not be formed, since its exponentials may be infinite."""
    x = np.zeros((4, 3, 5))
    x[3, 0] = 1000
    rest = np.array([1, 2], np.int32), np.int32(4), np.int32(2)
    options = dict(label_windows=np.array([[0, 1], [0, 2]], np.int32), implementation=implementation)
    first = jax.grad(lambda x: jax_rnnt.rnnt_loss(x, *rest, **options))
    assert np.isfinite(jax.jit(jax.grad(lambda x: (first(x) ** 2).sum()))(x)).all()
