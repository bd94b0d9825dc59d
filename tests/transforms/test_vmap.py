"""Does vmap only add a batch dimension, with the same numbers, one custom call and no loop?"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import losses

pytestmark = pytest.mark.rare("reference")  # JAX itself transforms plain JAX


def per_sequence(loss, implementation, **options):
    return lambda *p: loss(*p, reduction="none", implementation=implementation, **options)


def value_and_gradient(loss, implementation, **options):
    return jax.value_and_grad(per_sequence(loss, implementation, **options))


@pytest.fixture
def batch(loss):
    """Four sequences, as a batch and one by one."""
    p = losses.problem(loss=loss)
    return p, loss.expected(p)


@pytest.mark.family("layouts")
def test_vmap_equals_batch(loss, implementation, batch):
    p, expected = batch
    got = jax.jit(jax.vmap(value_and_gradient(loss, implementation)))(*p)
    losses.assert_matches(got, expected, np.float64, 11)


def test_grad_of_vmap(loss, implementation, batch):
    p, expected = batch

    def total(x):
        values = jax.vmap(per_sequence(loss, implementation))(x, *p[1:])
        return values.sum(), values

    gradient, values = jax.jit(jax.grad(total, has_aux=True))(p.logits)
    losses.assert_matches((values, gradient), expected, np.float64, 11)


@pytest.mark.family("layouts")
def test_nested_vmap(loss, implementation, batch):
    """vmap of vmap of a batch of one."""
    p, expected = batch
    nested = [x.reshape(2, 2, 1, *x.shape[1:]) for x in map(np.asarray, p)]
    call = jax.vmap(jax.vmap(per_sequence(loss, implementation)))
    values, gradient = jax.jit(
        jax.value_and_grad(lambda x: (lambda v: (v.sum(), v))(call(x, *nested[1:])), has_aux=True)
    )(nested[0])
    losses.assert_matches((values[1].ravel(), gradient.reshape(p.logits.shape)), expected, np.float64, 11)


@pytest.mark.parametrize("axis", [1, 2, 3, -1])
def test_in_axes_and_out_axes(loss, implementation, batch, axis):
    p, expected = batch
    moved = np.moveaxis(p.logits, 0, axis), np.moveaxis(p.targets, 0, 1), p.logit_lengths, p.target_lengths
    mapped = jax.vmap(value_and_gradient(loss, implementation), in_axes=(axis, 1, 0, 0), out_axes=(0, axis))
    values, gradient = jax.jit(mapped)(*moved)
    losses.assert_matches((values, np.moveaxis(gradient, axis, 0)), expected, np.float64, 11)


@pytest.mark.parametrize("mapped", [0, 1, 2, 3])
def test_one_argument_mapped(loss, implementation, mapped):
    """The other three are shared: only logits, only targets (an n-best list), only lengths."""
    p = losses.problem(loss=loss, lengths=([7] * 4, [4] * 4))
    p = p._replace(logit_lengths=np.array([7, 5, 6, 4], np.int32), target_lengths=np.array([4, 2, 3, 0], np.int32))
    args = [x if i == mapped else x[0] for i, x in enumerate(p)]
    axes = [0 if i == mapped else None for i in range(4)]
    got = jax.jit(jax.vmap(value_and_gradient(loss, implementation), in_axes=axes))(*args)
    full = losses.Problem(*(x if i == mapped else np.stack([x[0]] * 4) for i, x in enumerate(p)))
    losses.assert_matches(got, loss.expected(full), np.float64, 11)


@pytest.mark.family("layouts")
def test_options_mapped(loss, implementation):
    """One lambda, clamp and penalty for each sequence."""
    p = losses.problem(loss=loss)
    options = {
        "fastemit_lambda": np.array([0.0, 0.5, 1.0, 0.25]),
        "clamp": np.array([-1.0, 0.125, 0.25, 0.0625]),
        "delay_penalty": np.array([0.0, 0.5, -0.25, 0.125]),
    }
    got = jax.jit(jax.vmap(lambda p, o: value_and_gradient(loss, implementation, **o)(*p)))(p, options)
    expected = [loss.expected(p.take(slice(b, b + 1)), **{k: v[b] for k, v in options.items()}) for b in range(4)]
    expected = [np.concatenate(x) for x in zip(*expected)]
    losses.assert_matches(got, expected, np.float64, 11, scale=2)


@pytest.mark.family("layouts")
def test_windows_mapped(loss, implementation):
    p = losses.problem(loss=loss)
    windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)
    call = lambda p, w: value_and_gradient(loss, implementation, label_windows=w)(*p)
    for got in (jax.jit(jax.vmap(call))(p, windows), jax.jit(jax.vmap(call, in_axes=(0, None)))(p, windows[0])):
        losses.assert_matches(got, loss.expected(p, label_windows=windows), np.float64, 11)


@pytest.mark.family("layouts")
def test_reduction_inside_vmap(loss, implementation):
    """A mean over two sequences, mapped over two such pairs."""
    p = losses.problem(loss=loss)
    pairs = [x.reshape(2, 2, *x.shape[1:]) for x in map(np.asarray, p)]
    for reduction in ("mean", "mean_target", "mean_volume"):
        call = lambda *p, r=reduction: loss(*p, reduction=r, implementation=implementation)
        mapped = jax.vmap(call)(*pairs)
        for i in range(2):
            np.testing.assert_allclose(mapped[i], call(*(x[i] for x in pairs)), rtol=1e-13)


@pytest.mark.family("layouts")
def test_vmap_over_nothing(loss, implementation):
    """An empty mapped axis."""
    p = losses.problem(loss=loss)
    values, gradient = jax.vmap(value_and_gradient(loss, implementation))(*(x[:0] for x in p))
    assert values.shape == (0,) and gradient.shape == (0, *p.logits.shape[1:])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_custom_call_and_no_loop(loss, native_kernel, depth):
    p = losses.problem(loss=loss, dtype=np.float32)
    args = [
        x.reshape(*(2,) * depth, *(() if depth == 2 else (4 // 2**depth,)), *x.shape[1:]) for x in map(np.asarray, p)
    ]
    value = per_sequence(loss, native_kernel)
    for _ in range(depth):
        value = jax.vmap(value)
    text = jax.jit(value).lower(*args).compile().as_text()
    assert losses.custom_calls(text) == losses.once(loss.value_calls)
    assert " while(" not in text
    gradient = jax.value_and_grad(lambda *p: value(*p).sum())
    text = jax.jit(gradient).lower(*args).compile().as_text()
    assert losses.custom_calls(text) == losses.once(loss.gradient_calls)
    assert " while(" not in text


@pytest.mark.family
def test_one_custom_call_under_vmap_of_grad(loss, native_kernel):
    p = losses.problem(loss=loss, dtype=np.float32)
    text = jax.jit(jax.vmap(value_and_gradient(loss, native_kernel))).lower(*p).compile().as_text()
    assert losses.custom_calls(text) == losses.once(loss.gradient_calls)
    assert " while(" not in text


def test_named_axis(loss, implementation):
    p = losses.problem(loss=loss)
    call = lambda *p: jax.lax.pmean(per_sequence(loss, implementation)(*p), "batch")
    values = jax.vmap(call, axis_name="batch")(*map(jnp.asarray, p))
    np.testing.assert_allclose(values, np.full(4, loss.expected(p)[0].mean()), rtol=1e-12)
