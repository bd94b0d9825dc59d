"""Are the dtypes of arguments and results right, and are 16-bit results as good as possible?"""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64]


@pytest.mark.rare("reference-float64", "reference-float32")
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_result_dtypes(loss, implementation, dtype):
    """The loss is float32 (float64 for float64) for any dtypes of options; the gradient has the dtype of the logits."""
    p = losses.problem(loss=loss, dtype=dtype)
    values, gradient = losses.evaluate(loss, p, implementation)
    assert values.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)
    assert gradient.dtype == dtype
    losses.assert_matches((values, gradient), loss.expected(p), dtype, 11)
    for reduction in ("mean", "sum", "mean_target", "mean_volume"):
        options = {"fastemit_lambda": 0.1, "delay_penalty": np.float64(0.1), "clamp": np.float32(1)}
        reduced = jax.eval_shape(lambda *p, r=reduction: loss(*p, reduction=r, **options), *p)
        assert reduced.dtype == values.dtype


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_posterior_dtypes(implementation, dtype):
    p = losses.problem(dtype=dtype)
    for x in jax_rnnt.rnnt_posteriors(*p, implementation=implementation):
        assert x.dtype == (jnp.float64 if dtype == jnp.float64 else jnp.float32)


@pytest.mark.rare("9-float16", "1000-bfloat16")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("classes", [9, 1000])
def test_half_precision_kernel_against_reference(loss, kernel, dtype, classes):
    """Both against float64 on the same rounded logits: the kernel's error is at most twice the reference's."""
    p = losses.problem(4, 12, 6, classes, loss=loss, dtype=dtype, scale=4.0)
    expected = loss.expected(p, fastemit_lambda=0.5)
    floor = losses.tolerance(np.float32, 18)
    error = {}
    for implementation in (kernel, "reference"):
        values, gradient = losses.evaluate(loss, p, implementation, fastemit_lambda=0.5)
        error[implementation] = np.array(
            [
                np.abs(values / expected[0] - 1).max(),
                np.abs(gradient.astype(np.float64) - expected[1]).max(),
                np.abs(gradient.astype(np.float64) - expected[1]).mean(),
            ]
        )
    assert (error[kernel] <= 2 * error["reference"] + floor * np.array([1, 1, 1 / classes])).all(), error


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=lambda d: d.__name__)
def test_half_precision_sums_are_wide(loss, implementation, dtype):
    """16384 equal logits: a 16-bit sum of exponentials would stop growing at 2048 (float16) or 256 (bfloat16)."""
    p = losses.problem(1, 2, 1, 16384, loss=loss, lengths=([2], [1]))
    p = p._replace(logits=np.full(p.logits.shape, 0.5)).astype(dtype)
    values, gradient = losses.evaluate(loss, p, implementation)
    losses.assert_matches((values, gradient), loss.expected(p), dtype, 3)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
def test_half_precision_clamp_is_applied_before_rounding(loss, implementation, dtype):
    p = losses.problem(loss=loss, dtype=dtype)
    _, gradient = losses.evaluate(loss, p, implementation, clamp=0.1)
    limit = np.asarray(jnp.asarray(np.float32(0.1), dtype))
    assert np.abs(gradient).max() == limit


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64])
def test_integer_dtypes(loss, implementation, dtype):
    p = losses.problem(loss=loss)
    expected = losses.evaluate(loss, p, implementation)[0]
    cast = p._replace(
        **{name: getattr(p, name).astype(dtype) for name in ("targets", "logit_lengths", "target_lengths")}
    )
    np.testing.assert_allclose(loss(*cast, reduction="none", implementation=implementation), expected, rtol=1e-14)


@pytest.mark.parametrize("name", ["targets", "logit_lengths", "target_lengths"])
@pytest.mark.parametrize("value", [2**32 + 2, -(2**32) + 2, 2**63 - 1], ids=["2^32+2", "2-2^32", "2^63-1"])
def test_wide_integers_do_not_wrap(loss, implementation, name, value):
    """An int64 label or length out of range stays out of range when it is narrowed."""
    p = losses.problem(loss=loss)
    wide = getattr(p, name).astype(np.int64)
    wide[0] = value
    values = loss(*p._replace(**{name: wide}), reduction="none", implementation=implementation)
    assert np.isnan(values[0])
    np.testing.assert_allclose(values[1:], loss.expected(p)[0][1:], rtol=1e-13)


@pytest.mark.parametrize("value", [2**32 - 1, 2**31 + 1], ids=["2^32-1", "2^31+1"])
def test_unsigned_labels_do_not_turn_negative(loss, implementation, value):
    p = losses.problem(loss=loss)
    targets = p.targets.astype(np.uint32)
    targets[0, 1] = value
    values = loss(*p._replace(targets=targets), reduction="none", implementation=implementation)
    assert np.isnan(values[0])


def test_windows_of_any_integer_dtype(loss, implementation):
    p = losses.problem(loss=loss)
    windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4)
    expected = loss.expected(p, label_windows=windows)[0]
    for dtype in (np.int8, np.int32, np.int64, np.uint16):
        got = loss(*p, reduction="none", label_windows=windows.astype(dtype), implementation=implementation)
        np.testing.assert_allclose(got, expected, rtol=1e-13)
    windows[:, 3, 1] = 2**40  # "no upper limit", in 64 bit
    got = loss(*p, reduction="none", label_windows=windows, implementation=implementation)
    np.testing.assert_allclose(got, expected, rtol=1e-13)


def test_arrays_of_any_kind(loss, implementation):
    """NumPy, JAX, non-contiguous and read-only arrays."""
    p = losses.problem(loss=loss)
    expected = loss.expected(p)[0]
    wide = np.zeros((*p.logits.shape[:-1], 2 * p.logits.shape[-1]))
    wide[..., ::2] = p.logits
    strided = wide[..., ::2]
    strided.flags.writeable = False
    for logits in (jnp.asarray(p.logits), np.asfortranarray(p.logits), strided):
        got = loss(logits, *p[1:], reduction="none", implementation=implementation)
        np.testing.assert_allclose(got, expected, rtol=1e-13)


PROGRAM = """
import jax, numpy as np, jax.numpy as jnp
import losses
assert not jax.config.jax_enable_x64
for implementation in ("kernel", "reference"):
    if implementation == "kernel" and losses.missing_kernel():
        continue
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32) if implementation == "kernel" else (jnp.float32,):
        for loss in losses.LOSSES if (implementation, dtype) == ("kernel", jnp.bfloat16) else losses.LOSSES[:1]:
            p = losses.problem(loss=loss, dtype=dtype)
            windows = np.array([[[0, 3], [1, 4], [2, 9], [3, 9]]] * 4, np.int32)
            options = dict(fastemit_lambda=0.5, clamp=0.25, delay_penalty=0.125, label_windows=windows)
            got = losses.evaluate(loss, p, implementation, **options)
            assert got[0].dtype == jnp.float32 and got[1].dtype == dtype
            losses.assert_matches(got, loss.expected(p, **options), dtype, 11, scale=1.5)
            wide = p._replace(targets=p.targets.astype(np.int64), logit_lengths=p.logit_lengths.astype(np.int64))
            np.testing.assert_allclose(loss(*wide), loss.expected(p)[0].mean(), rtol=1e-5)
print("ok")
"""


def test_without_x64():
    """In JAX's default configuration there is no 64-bit type, and no warning about one."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)]
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, cwd=losses.HERE, env=quick, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stderr
