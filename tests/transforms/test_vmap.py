"""Does vmap only add a batch dimension, with the same numbers, one custom call and no loop?"""

import jax
import numpy as np
import pytest

import batches
import compare
import family
import hlo


def per_sequence(loss, implementation, **options):
    return lambda *p: loss(*p, reduction="none", implementation=implementation, **options)


def value_and_gradient(loss, implementation, **options):
    return jax.value_and_grad(per_sequence(loss, implementation, **options))


def check(got, p, loss):
    compare.assert_matches(got, loss.expected(p), np.float64, 11)


@family.implementations(family.RNNT, family.TDT, family.BAND, slowly=(family.WILDCARD, family.TILES))
def test_vmap_and_nested_vmap(loss, implementation):
    """vmap of sequences; the gradient of vmap of vmap of a batch of one."""
    p = batches.problem(loss=loss)
    nested = [x.reshape(2, 2, 1, *x.shape[1:]) for x in p]

    twice = compare.with_gradient(jax.vmap(jax.vmap(per_sequence(loss, implementation))))
    mapped = jax.vmap(value_and_gradient(loss, implementation))
    of_batch, (values, gradient) = jax.jit(lambda p, nested: (mapped(*p), twice(*nested)))(p, nested)
    check(of_batch, p, loss)
    check((values.ravel(), gradient.reshape(p.logits.shape)), p, loss)


def test_one_argument_mapped(kernel):
    """The other three are shared: only logits, only targets (an n-best list), only lengths."""
    p = batches.problem(lengths=([7, 5, 6, 4], [4, 2, 3, 0]))
    for mapped in range(4):
        args = [x if i == mapped else x[0] for i, x in enumerate(p)]
        axes = [0 if i == mapped else None for i in range(4)]
        got = jax.jit(jax.vmap(value_and_gradient(family.RNNT, kernel), in_axes=axes))(*args)
        whole = batches.Problem(*(x if i == mapped else np.stack([x[0]] * 4) for i, x in enumerate(p)))
        check(got, whole, family.RNNT)


def test_options_mapped(kernel):
    """One lambda, clamp and penalty for each sequence; windows that are mapped or shared."""
    p, loss = batches.problem(), family.RNNT
    windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)
    options = {
        "fastemit_lambda": np.array([0.0, 0.5, 1.0, 0.25]),
        "clamp": np.array([-1.0, 0.125, 0.25, 0.0625]),
        "delay_penalty": np.array([0.0, 0.5, -0.25, 0.125]),
    }
    call = lambda p, w, o: value_and_gradient(loss, kernel, label_windows=w, **o)(*p)
    own = lambda b: {"label_windows": windows[:1]} | {k: v[b] for k, v in options.items()}
    expected = [np.concatenate(x) for x in zip(*(loss.expected(p.take([b]), **own(b)) for b in range(4)))]
    for axes, given in (((0, 0, 0), windows), ((0, None, 0), windows[0])):
        got = jax.jit(jax.vmap(call, in_axes=axes))(p, given, options)
        compare.assert_matches(got, expected, np.float64, 11, scale=2)


@pytest.mark.parametrize("loss", [family.RNNT, family.TDT], ids=str)
def test_one_custom_call_and_no_loop(loss, native_kernel):
    """Without vmap, under one, and under two."""
    p = batches.problem(loss=loss, dtype=np.float32)
    value = per_sequence(loss, native_kernel)
    for shape in ((4,), (4,), (2, 2)):
        arguments = [x.reshape(*shape, *x.shape[1:]) for x in p]
        gradient = jax.value_and_grad(lambda *p, f=value: f(*p).sum())
        for f, calls in ((value, loss.value_calls), (gradient, loss.gradient_calls)):
            _, text = hlo.compiled(f, *arguments)
            assert hlo.custom_calls(text) == hlo.once(calls)
            assert " while(" not in text
        value = jax.vmap(value)
