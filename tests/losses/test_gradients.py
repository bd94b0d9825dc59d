"""Is the gradient right for every cotangent, and does it leave its arguments alone? test_values.py has the options."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import door
import family


def pull(loss, implementation, p, cotangents, clamp):
    """Gradient of the losses [B] for these cotangents."""

    @jax.jit
    def run(logits, cotangents):
        call = lambda x: loss(x, *p[1:], clamp=clamp, reduction="none", implementation=implementation)
        return jax.vjp(call, logits)[1](cotangents)[0]

    return np.asarray(run(p.logits, cotangents))


def pulls(loss, implementation, p, cotangents, clamp):
    """What `pull` gives, of kernels through the door where there is one for the loss."""
    if implementation == "reference" or loss not in door.LOSSES:
        yield pull(loss, implementation, p, cotangents, clamp)
        return
    for target in door.TARGETS:
        yield door.evaluate(loss, p, target=target, scale=cotangents, clamp=clamp)[1]


@pytest.mark.quick("kernel")
def test_cotangents_that_are_not_finite(implementation):
    """Exact zeros stay 0: sequences without a path, impossible classes, padding."""
    kernel = implementation == "kernel"
    losses = (*door.LOSSES, family.BAND, family.ROBUST) if kernel else (family.RNNT,)
    for loss, clamp in itertools.product(losses, (-1.0, 0.1)):
        for classes in (9, 70, 300) if loss in door.LOSSES and kernel else (9,):  # short and long rows of the kernels
            check_infinite_cotangents(loss, implementation, classes, clamp)


def check_infinite_cotangents(loss, implementation, classes, clamp):
    p = batches.problem(5, V=classes, loss=loss, lengths=([7, 5, 6, 0, 7], [4, 2, 0, 3, 4]))
    p.logits[..., 1] = -np.inf
    p = batches.poisoned(p._replace(targets=np.maximum(p.targets, 2)))
    cotangents = np.array([np.inf, np.nan, -np.inf, np.inf, 2.0])
    values, unit = loss.expected(p, clamp=clamp)
    assert np.isinf(values[3]) and not unit[3].any() and (unit[:3] == 0).any() and np.isfinite(unit).all()
    with np.errstate(invalid="ignore"):
        expected = np.where(unit == 0, 0, unit * cotangents[:, None, None, None])
    for gradient in pulls(loss, implementation, p, cotangents, clamp):
        assert not gradient[~batches.inside(p)].any()
        if implementation == "reference" and clamp < 0:  # plain automatic differentiation: 0 times infinity is NaN
            gradient, expected = gradient[4], expected[4]
        np.testing.assert_allclose(gradient, expected, atol=1e-12)


def test_options_that_are_off(kernel):
    p = batches.problem()
    run = lambda **options: compare.evaluate(family.RNNT, p, kernel, **options)[1]
    for options in ({"clamp": 0.0}, {"clamp": -0.01}, {"fastemit_lambda": 0.0, "delay_penalty": 0.0}):
        compare.assert_same_bits(run(**options), run())


@pytest.mark.parametrize("loss", [family.RNNT, family.TILES], ids=str)
def test_logits_survive_their_gradient(loss, kernel):
    """Writing in place must not change an array that is still in use: the argument, a second loss, a later use."""
    p, other = batches.problem(loss=loss, dtype=np.float32), loss.blank(0)
    logits = jnp.asarray(p.logits)

    def total(x):
        first = loss(x, *p[1:], reduction="sum", implementation=kernel)
        second = loss(x, *p[1:], reduction="sum", blank=other, implementation=kernel)
        return first + second + (x**2).sum()

    gradient = jax.jit(jax.grad(total))(logits)
    expected = sum(loss.expected(p, blank=b)[1] for b in (-1, other)) + 2 * p.logits.astype(np.float64)
    np.testing.assert_allclose(gradient, expected, atol=3 * compare.tolerance(np.float32, 11))
    compare.assert_same_bits(logits, p.logits)


def test_vjp_called_twice(kernel):
    """Integer arguments have no gradient."""
    arrays = [*map(jnp.asarray, batches.problem())]
    value, vjp = jax.vjp(lambda *p: family.RNNT(*p, reduction="none", implementation=kernel), *arrays)
    (first, *others), (second, *_) = vjp(jnp.ones_like(value)), vjp(2 * jnp.ones_like(value))
    compare.assert_same_bits(2 * first, second)
    assert all(x.dtype == jax.dtypes.float0 for x in others)
