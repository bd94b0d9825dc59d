"""The library's results, and the tolerances with which tests compare them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np

SCHEDULED = {"clamp": -1.0, "fastemit_lambda": 0.0, "delay_penalty": 0.0}  # traced: new values compile nothing


def with_gradient(function, argnums=0):
    """A function of the same arguments: (values, gradients of their sum)."""

    def total(*arguments):
        values = function(*arguments)
        return values.sum(), values

    gradient = jax.grad(total, argnums, has_aux=True)
    return lambda *arguments: gradient(*arguments)[::-1]


@functools.cache
def _compiled(loss, implementation, static):
    static = dict(static)

    @jax.jit
    def run(p, scheduled, label_windows):
        options = {**static, **scheduled, "label_windows": label_windows, "implementation": implementation}
        return with_gradient(lambda logits: loss(logits, *p[1:], reduction="none", **options))(p.logits)

    return run


def evaluate(loss, p, implementation, *, label_windows=None, **options):
    """(loss [B], gradient of their sum) from the library, as NumPy arrays in the library's dtypes."""
    scheduled = {k: np.float32(options.pop(k, default)) for k, default in SCHEDULED.items()}
    values, gradient = _compiled(loss, implementation, tuple(sorted(options.items())))(p, scheduled, label_windows)
    return np.asarray(values), np.asarray(gradient)


def eps(dtype):
    return float(jnp.finfo(dtype).eps)


def tolerance(dtype, path_length):
    """Absolute error of a posterior: at most the contract's 1e-5 (float64: 1e-10), less if that follows from rounding.

    Arc scores of these problems are below 16 in size (log V plus a logit) and each is rounded in float32 or better; a
    path adds `path_length` of them.
    """
    wide = np.dtype(dtype) == np.float64
    return min(16 * path_length * eps(np.float64 if wide else np.float32), 1e-10 if wide else 1e-5)


def rounding(dtype):
    """(relative, absolute) error of a 16-bit result, which is rounded to nearest once, subnormals included; else 0."""
    return (eps(dtype) / 2, 2.0**-24) if np.dtype(dtype).itemsize == 2 else (0, 0)


def assert_matches(got, expected, dtype, path_length, *, scale=1.0):
    """(loss, gradient) of `evaluate` against float64 truth, inf and NaN in place.

    A loss is a sum of scores of one sign, so its relative error is theirs.
    """
    limit, (relative, smallest) = tolerance(dtype, path_length), rounding(dtype)
    of_values = 16 * eps(jnp.float64 if np.dtype(dtype) == np.float64 else jnp.float32)
    np.testing.assert_allclose(got[0], expected[0], rtol=of_values, atol=limit)
    gradient = np.asarray(got[1], np.float64)
    np.testing.assert_allclose(gradient, expected[1], rtol=relative, atol=scale * limit + smallest)


def assert_mean(got, expected):
    """(mean loss, its gradient) of a batch in float32 against those of each sequence in float64."""
    values, gradient = expected
    np.testing.assert_allclose(got[0], values.mean(), rtol=1e-6)
    np.testing.assert_allclose(got[1], gradient / len(values), atol=tolerance(np.float32, 11))


def assert_close(got, expected, limit=None, *, message=None, **limits):
    """Of equal trees of arrays of equal shapes, within `limit` or the limits of `np.testing.assert_allclose`."""
    limits = {"rtol": 1e-7} | limits if limits else {"rtol": limit, "atol": limit}
    chex.assert_trees_all_close(got, expected, **limits, custom_message=message)


def assert_same_bits(got, expected):
    """Of trees of arrays, NaN included."""
    for a, b in zip(*(map(np.asarray, jax.tree.leaves(x)) for x in (got, expected)), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        np.testing.assert_array_equal(*(np.ascontiguousarray(x).view(np.uint8) for x in (a, b)))
