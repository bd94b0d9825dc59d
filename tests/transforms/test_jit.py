"""Is anything traced or compiled twice needlessly, and do static and traced options give the same numbers?"""

import contextlib
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses

pytestmark = pytest.mark.rare("reference")

VALUES = {"fastemit_lambda": (0.25, 0.5), "clamp": (0.125, 0.0625), "delay_penalty": (0.25, -0.5)}


@contextlib.contextmanager
def compilations():
    """A list that grows by one with every program XLA compiles."""
    seen = []

    def listen(event, *_, **__):
        if active and event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    active = True
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        active = False


@pytest.mark.family
@pytest.mark.parametrize("option", VALUES)
def test_traced_options_do_not_retrace(loss, implementation, option):
    p = losses.problem(loss=loss)
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(1)
    def gradient(logits, value):
        call = lambda x: loss(x, *p[1:], implementation=implementation, reduction="sum", **{option: value})
        return jax.grad(call)(logits)

    for value in VALUES[option]:
        got = gradient(p.logits, value)
        np.testing.assert_allclose(got, loss.expected(p, **{option: value})[1], atol=1e-12)


@pytest.mark.parametrize("option", VALUES)
def test_changing_an_eager_float_compiles_nothing(loss, implementation, option):
    """Many training scripts schedule options as Python floats."""
    p = losses.Problem(*map(jnp.asarray, losses.problem(loss=loss)))
    call = lambda x, value: loss(x, *p[1:], implementation=implementation, reduction="sum", **{option: value})
    first, second = VALUES[option]
    jax.block_until_ready(jax.value_and_grad(call)(p.logits, first))
    with compilations() as seen:
        jax.block_until_ready(jax.value_and_grad(call)(p.logits, second))
    assert not seen


@pytest.mark.family
def test_changing_lengths_and_labels_compiles_nothing(loss, implementation):
    p = losses.Problem(*map(jnp.asarray, losses.problem(loss=loss)))
    other = p._replace(targets=p.targets + 1, logit_lengths=p.logit_lengths - 1)
    call = lambda p: loss(*p, implementation=implementation)
    jax.block_until_ready(call(p))
    with compilations() as seen:
        jax.block_until_ready(call(other))
    assert not seen


@pytest.mark.parametrize("option", VALUES)
def test_python_float_equals_traced(loss, implementation, option):
    """For zero, too, which the library may leave out of the program."""
    p = losses.problem(loss=loss)
    for value in (VALUES[option][1], 0.0):
        options = {option: value, "implementation": implementation}
        gradient = jax.jit(jax.grad(lambda x: loss(x, *p[1:], reduction="sum", **options)))(p.logits)
        _, traced = losses.evaluate(loss, p, implementation, **{option: value})
        np.testing.assert_allclose(gradient, traced, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kind", [float, np.float32, np.float64, np.asarray, jnp.float32, jnp.asarray, int])
def test_every_kind_of_number(loss, kernel, kind):
    p = losses.problem(loss=loss, dtype=np.float32)
    options = {"fastemit_lambda": kind(1), "clamp": kind(1), "delay_penalty": kind(1)}
    got = jax.value_and_grad(lambda x: loss(x, *p[1:], reduction="sum", implementation=kernel, **options))(p.logits)
    values, gradient = loss.expected(p, fastemit_lambda=1, clamp=1, delay_penalty=1)
    np.testing.assert_allclose(got[0], values.sum(), rtol=1e-5)
    np.testing.assert_allclose(got[1], gradient, atol=2e-5)


def test_loss_object_as_static_argument():
    """Equal objects are one cache entry; a different one is another."""
    p = losses.problem()
    chex.clear_trace_counter()

    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(2)
    def run(criterion, p):
        return criterion(*p)

    first = run(jax_rnnt.RNNTLoss(blank=0), p)
    np.testing.assert_allclose(run(jax_rnnt.RNNTLoss(blank=0), p), first)
    assert abs(run(jax_rnnt.RNNTLoss(blank=1), p) - first) > 1e-3


@pytest.mark.family
def test_inside_control_flow(loss, implementation):
    """scan, while_loop, fori_loop, cond and switch, with the gradient through those that have one."""
    p = losses.problem(loss=loss)
    expected, gradient = loss.expected(p)

    def one(x, *rest):
        return loss(x, *rest, reduction="none", implementation=implementation)

    def scanned(x):
        return jax.lax.scan(lambda c, p: (c + one(*p), None), jnp.zeros(()), (x, *map(jnp.asarray, p[1:])))[0]

    def conditional(x, flag):
        return jax.lax.cond(flag, lambda x: one(x, *p[1:]).sum(), lambda x: 0 * x.sum(), x)

    value, got = jax.jit(jax.value_and_grad(scanned))(p.logits)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-13)
    np.testing.assert_allclose(got, gradient, atol=1e-13)
    value, got = jax.jit(jax.value_and_grad(conditional))(p.logits, True)
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-13)
    np.testing.assert_allclose(got, gradient, atol=1e-13)
    looped = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + one(x, *p[1:]).sum(), jnp.zeros(())))(p.logits)
    np.testing.assert_allclose(looped, 3 * expected.sum(), rtol=1e-13)


@pytest.mark.family
def test_gradient_descent_in_a_scan(loss, implementation):
    """Aliasing inside a loop body: ten steps equal ten calls."""
    p = losses.problem(loss=loss)
    gradient = jax.grad(lambda x: loss(x, *p[1:], implementation=implementation))
    looped = jax.jit(lambda x: jax.lax.scan(lambda x, _: (x - gradient(x), None), x, None, length=5)[0])(p.logits)
    x = jnp.asarray(p.logits)
    for _ in range(5):
        x = x - gradient(x)
    np.testing.assert_allclose(looped, x, rtol=1e-12, atol=1e-12)


@pytest.mark.family
def test_under_debug_nans(loss, implementation):
    """jax_debug_nans must not trip over a loss without NaN, padding of NaN and missing paths included."""
    p = losses.problem(loss=loss, lengths=([7, 5, 0, 4], [4, 2, 2, 3]))
    with jax.debug_nans(True):
        values, _ = losses.evaluate(loss, p, implementation)
    assert values[2] == np.inf
