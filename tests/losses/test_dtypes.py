"""Are the dtypes of arguments and results right, and are 16-bit results as good as possible?"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import batches
import compare
import family
from pages import defaults

DTYPES = "float16", "bfloat16", "float32", "float64"
WINDOWS = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)


@pytest.mark.quick("bfloat16-kernel", "float32-kernel", "float64-kernel")
@pytest.mark.parametrize(
    ("dtype", "implementation"),
    [*((x, "kernel") for x in DTYPES), ("float16", "reference")],
    indirect=["implementation"],
)
def test_result_dtypes(implementation, dtype):
    """Results are float32 (float64 for float64) for any dtypes of options; the gradient has the dtype of the logits.

    It is clipped before it is rounded.
    """
    p = batches.problem(dtype=dtype)
    values, gradient = compare.evaluate(family.RNNT, batches.poisoned(p), implementation)
    assert values.dtype == ("float64" if dtype == "float64" else "float32") and gradient.dtype == dtype
    assert not gradient[~batches.inside(p)].any()
    compare.assert_matches((values, gradient), family.RNNT.expected(p), dtype, 11)
    _, clipped = compare.evaluate(family.RNNT, p, implementation, clamp=0.1)
    assert np.abs(clipped).max() == np.asarray(jnp.asarray(np.float32(0.1), dtype))
    options = {"fastemit_lambda": 0.1, "delay_penalty": np.float64(0.1), "clamp": np.float32(1)}
    loss = family.RNNT.value(implementation=implementation, **options)
    reduced = [dataclasses.replace(loss, reduction=x) for x in ("sum", "mean_target", "mean_volume")]
    asked = loss, *reduced, loss.posteriors, loss.label_frames, loss.label_log_probs
    results = jax.eval_shape(lambda *p: [ask(*p) for ask in asked], *p)
    assert all(x.dtype == values.dtype for x in jax.tree.leaves(results))


def test_integer_dtypes(kernel):
    """Of each array another one. A frame of a window has no upper limit."""
    p, windows = batches.problem(), WINDOWS.copy()
    windows[:, 3, 1] = 120
    run = jax.jit(lambda *p: family.RNNT(*p[:4], reduction="none", label_windows=p[4], implementation=kernel))
    dtypes = "int8", "uint32", "int16", "uint64", "int64", "uint8", "int32", "uint16"
    for first in range(0, 8, 2):
        cast = [x.astype(dtype) for x, dtype in zip((*p[1:], windows), np.roll(dtypes, first))]
        cast[3][:, 3, 1] = 2**40 if cast[3].dtype == np.int64 else 120
        np.testing.assert_allclose(run(p.logits, *cast), family.RNNT.expected(p, label_windows=WINDOWS)[0])


WIDE = np.array([2**32 + 2, -(2**32) + 2, 2**63 - 1]), np.array([2**32 - 1, 2**31 + 1, 2**31], np.uint32)


@pytest.mark.parametrize("name", batches.Problem._fields[1:])
def test_wide_integers_do_not_wrap(kernel, name):
    """Labels and lengths out of range stay out of range when they are narrowed."""
    p = batches.problem()
    for values in WIDE:
        wide = getattr(p, name).astype(values.dtype)
        wide[:3] = values.reshape(3, *[1] * (wide.ndim - 1))
        p.target_lengths[2] = 1  # else it has no label
        found = family.RNNT(*p._replace(**{name: wide}), reduction="none", implementation=kernel)
        np.testing.assert_allclose(found, [*[np.nan] * 3, family.RNNT.expected(p)[0][3]], rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["kernel", "reference"], indirect=True)
def test_without_x64(implementation):
    """In JAX's default configuration there is no 64-bit type, and no warning about one."""
    options = {"fastemit_lambda": 0.5, "clamp": 0.25, "delay_penalty": 0.125, "label_windows": WINDOWS}
    cases = [(family.RNNT, jnp.float32)]
    if implementation == "kernel":
        cases += [(family.RNNT, jnp.bfloat16), (family.WILDCARD, jnp.bfloat16)]
    with defaults():
        for loss, dtype in cases:
            p = batches.problem(loss=loss, dtype=dtype)
            got = compare.evaluate(loss, p, implementation, **options)
            assert got[0].dtype == jnp.float32 and got[1].dtype == dtype
            compare.assert_matches(got, loss.expected(p, **options), dtype, 11, scale=1.5)
        p = batches.problem(dtype=jnp.float32)
        wide = p._replace(targets=p.targets.astype(np.int64), logit_lengths=p.logit_lengths.astype(np.int64))
        got = family.RNNT(*wide, implementation=implementation)
    np.testing.assert_allclose(got, family.RNNT.expected(p)[0].mean(), rtol=1e-5)
