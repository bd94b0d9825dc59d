"""Which derivatives exist beyond the plain gradient, and are they right?"""

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


def by_autodiff(p, **options):
    """The RNN-T loss of small problems as a sum over enumerated paths, in plain jax.numpy, for JAX to differentiate."""
    import reference_numpy as truth

    def value(x):
        log_probs = jax.nn.log_softmax(x)
        out = 0.0
        for b in range(len(x)):
            n, m = int(p.logit_lengths[b]), int(p.target_lengths[b])
            paths = truth.enumerate_paths(truth.STANDARD, n, m)
            score = lambda slot, t, u, b=b: log_probs[b, t, u, p.targets[b, u] if slot == "label" else -1]
            out = out - jax.nn.logsumexp(jnp.stack([sum(score(*arc) for arc in path) for path in paths]))
        return out

    return value


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
def test_hessian(implementation):
    """Forward over reverse, and reverse over reverse, on both implementations."""
    p = losses.problem(2, 3, 2, 4, scale=1.0, lengths=([3, 2], [2, 1]))
    call = total(losses.RNNT, p, implementation)
    expected = jax.jit(jax.hessian(by_autodiff(p)))(p.logits)
    np.testing.assert_allclose(jax.jit(jax.hessian(call))(p.logits), expected, atol=1e-12)
    np.testing.assert_allclose(jax.jit(jax.jacrev(jax.grad(call)))(p.logits), expected, atol=1e-12)


@pytest.mark.rare("reference")
@pytest.mark.family("slow")
def test_hessian_vector_product(loss, implementation, small):
    """Both common forms, against the slope of the gradient."""
    call = total(loss, small, implementation)
    x = jnp.asarray(small.logits)
    vector = jnp.asarray(np.random.default_rng(10).normal(size=x.shape))
    up, down = (loss.expected(small._replace(logits=small.logits + h * np.asarray(vector)))[1] for h in (1e-5, -1e-5))
    forward = jax.jit(lambda x, v: jax.jvp(jax.grad(call), (x,), (v,))[1])(x, vector)
    np.testing.assert_allclose(forward, (up - down) / 2e-5, atol=1e-8)
    if loss is losses.RNNT:
        reverse = jax.jit(lambda x, v: jax.grad(lambda x: (jax.grad(call)(x) * v).sum())(x))(x, vector)
        np.testing.assert_allclose(reverse, (up - down) / 2e-5, atol=1e-8)


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
