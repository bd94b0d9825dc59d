"""Is anything compiled twice needlessly, and do all kinds of numbers and control flow give the same numbers?"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import family
import jax_rnnt

VALUES = {"fastemit_lambda": (0.25, 0.5), "clamp": (0.125, 0.0625), "delay_penalty": (0.25, -0.5)}


def test_changing_lengths_and_labels_compiles_nothing(kernel):
    """Nor does another value of an option. Many training scripts schedule options as Python floats."""

    class Traced(jax_rnnt.RNNTLoss):
        compose = chex.assert_max_traces(jax_rnnt.RNNTLoss.compose, n=5)  # all in the first call

    p = batches.Problem(*map(jnp.asarray, batches.problem(3, 7, 2, 11)))
    other = p._replace(targets=p.targets + 1, logit_lengths=p.logit_lengths - 1)
    for options, arrays in zip(zip(*VALUES.values()), (p, other)):
        loss = Traced(implementation=kernel, **dict(zip(VALUES, options)))
        jax.value_and_grad(loss)(*arrays)
    with pytest.raises(AssertionError, match="traced > 5 times"):
        jax.value_and_grad(loss)(*p.take(slice(1, None)))


@pytest.mark.parametrize("loss", [family.RNNT, family.TDT], ids=str)
def test_inside_control_flow(loss, kernel):
    """scan, fori_loop and cond, with the gradient through those that have one; steps of descent in a scan."""
    p = batches.problem(loss=loss)
    expected, gradient = loss.expected(p)
    one = loss.value(reduction="none", implementation=kernel)
    mean = jax.grad(loss.value(implementation=kernel))

    def scanned(x):
        return jax.lax.scan(lambda c, p: (c + one(*p), None), jnp.zeros(()), (x, *map(jnp.asarray, p[1:])))[0]

    def conditional(x):
        return jax.lax.cond(x.sum() < np.inf, lambda x: one(x, *p[1:]).sum(), lambda x: 0 * x.sum(), x)

    for f in (scanned, conditional):
        value, got = jax.jit(jax.value_and_grad(f))(p.logits)
        np.testing.assert_allclose(value, expected.sum(), rtol=1e-13)
        np.testing.assert_allclose(got, gradient, atol=1e-13)
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + one(x, *p[1:]).sum(), jnp.zeros(())))(p.logits)
    np.testing.assert_allclose(looped, 3 * expected.sum(), rtol=1e-13)
    # The gradient takes the memory of the logits, in a loop body too.
    descended = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x - mean(x, *p[1:]), None), x, None, length=5)[0])
    x = jnp.asarray(p.logits)
    for _ in range(5):
        x = x - mean(x, *p[1:])
    np.testing.assert_allclose(descended(p.logits), x, rtol=1e-12, atol=1e-12)
