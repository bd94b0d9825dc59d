"""Does anything outside the lengths, the size of the padding or the neighbours in the batch change a single bit?"""

import functools
import os
import platform
import subprocess
import sys

import jax
import numpy as np
import pytest

import jax_rnnt
import losses

pytestmark = pytest.mark.usefixtures("optimized")

GARBAGE = {
    "nan": (np.nan, -1),
    "inf": (np.inf, 2**31 - 1),
    "-inf": (-np.inf, -(2**31)),
    "large": (3e38, 9),
    "small": (-3e38, 8),
}


@pytest.mark.rare("reference")
@pytest.mark.family("layouts")
@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log_probs"])
@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_padding_content_changes_no_bit(loss, implementation, garbage, fused):
    p = losses.problem(loss=loss, dtype=np.float32)
    options = {"fused_log_softmax": fused, "fastemit_lambda": 0.5, "clamp": 0.25}
    values, gradient = losses.evaluate(loss, p, implementation, **options)
    got = losses.evaluate(loss, losses.poisoned(p, *garbage), implementation, **options)
    losses.assert_same_bits(got[0], values)
    losses.assert_same_bits(got[1], gradient)


@pytest.mark.rare("reference-float64", "reference-float16", "reference-float32-log_probs", "reference-bfloat16-logits")
@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log_probs"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_padding_gradient_is_exactly_zero(loss, implementation, dtype, fused):
    p = losses.poisoned(losses.problem(loss=loss, dtype=dtype))
    _, gradient = losses.evaluate(loss, p, implementation, fused_log_softmax=fused, fastemit_lambda=0.5)
    outside = gradient[~losses.inside(p)]
    assert outside.size and not outside.any()


@pytest.mark.rare("reference")
@pytest.mark.family("band")
def test_padding_gradient_is_zero_for_any_cotangent(loss, implementation):
    """0 * inf and 0 * NaN would be NaN."""
    p = losses.poisoned(losses.problem(loss=loss))
    call = lambda x: loss(x, *p[1:], reduction="none", implementation=implementation)
    gradient = np.asarray(
        jax.jit(lambda x, c: jax.vjp(call, x)[1](c)[0])(p.logits, np.array([np.inf, np.nan, 1.0, -np.inf]))
    )
    assert not gradient[~losses.inside(p)].any()
    np.testing.assert_allclose(gradient[2], loss.expected(p)[1][2], atol=1e-13)


def padded(p, T, U, garbage=np.nan):
    """The same sequences in a larger frame of garbage."""
    B, old_T, old_U1, V = p.logits.shape
    logits = np.full((B, T, U + 1, V), garbage, p.logits.dtype)
    logits[:, :old_T, :old_U1] = p.logits
    targets = np.full((B, U), -5, p.targets.dtype)
    targets[:, : old_U1 - 1] = p.targets
    return losses.poisoned(p._replace(logits=logits, targets=targets), garbage, -5)


@pytest.mark.parametrize("size", [(8, 4), (7, 5), (11, 17), (28, 16)], ids=str)
def test_padding_size_changes_no_bit_of_the_kernels(loss, native_kernel, size):
    """One frame more, one label more, up to four times both."""
    for dtype in (np.float32, np.float64):
        p = losses.problem(loss=loss, dtype=dtype)
        values, gradient = losses.evaluate(loss, p, native_kernel)
        got_values, got = losses.evaluate(loss, padded(p, *size), native_kernel)
        losses.assert_same_bits(got_values, values)
        losses.assert_same_bits(got[:, :7, :5], gradient)
        assert not got[:, 7:].any() and not got[:, :, 5:].any()


@pytest.mark.slow
def test_padding_size_of_the_reference(loss):
    """Up to the last bits, since XLA may order sums differently for another shape."""
    p = losses.problem(loss=loss)
    values, gradient = losses.evaluate(loss, p, "reference")
    got_values, got = losses.evaluate(loss, padded(p, 14, 9), "reference")
    np.testing.assert_allclose(got_values, values, rtol=1e-14)
    np.testing.assert_allclose(got[:, :7, :5], gradient, atol=1e-14)
    assert not got[:, 7:].any() and not got[:, :, 5:].any()


@pytest.mark.rare("reference")
@pytest.mark.family("layouts")
def test_batch_order_changes_no_bit(loss, implementation):
    p = losses.problem(16, loss=loss, dtype=np.float32)
    order = np.random.default_rng(0).permutation(16)
    values, gradient = losses.evaluate(loss, p, implementation)
    got_values, got = losses.evaluate(loss, p.take(order), implementation)
    if implementation == "kernel":
        losses.assert_same_bits(got_values, values[order])
        losses.assert_same_bits(got, gradient[order])
    np.testing.assert_allclose(got_values, values[order], rtol=1e-6)
    np.testing.assert_allclose(got, gradient[order], atol=1e-6)


def test_batch_size_changes_no_bit(loss, native_kernel):
    """One by one, in pairs or all at once: the split over threads does not show."""
    p = losses.problem(16, 100, 60, 9, loss=loss, dtype=np.float32)
    values, gradient = losses.evaluate(loss, p, native_kernel)
    for size in (1, 2):
        for b in range(0, 16, size):
            part = slice(b, b + size)
            got_values, got = losses.evaluate(loss, p.take(part), native_kernel)
            losses.assert_same_bits(got_values, values[part])
            losses.assert_same_bits(got, gradient[part])


@pytest.mark.rare("reference")
@pytest.mark.family("layouts")
def test_windows_outside_the_lengths_change_no_bit(loss, implementation):
    p = losses.problem(loss=loss, dtype=np.float32)
    windows = np.tile(np.array([[0, 3], [1, 4], [1, 9], [2, 9]], np.int32), (4, 1, 1))
    other = windows.copy()
    used = np.arange(4) < p.target_lengths[:, None]
    other[~used] = [2**31 - 1, -(2**31)]
    evaluate = functools.partial(losses.evaluate, loss, p, implementation)
    for a, b in zip(evaluate(label_windows=windows), evaluate(label_windows=other), strict=True):
        losses.assert_same_bits(a, b)


@pytest.mark.rare("reference")
def test_posteriors_outside_the_lengths_are_zero(implementation):
    p = losses.problem(dtype=np.float32)
    clean = jax_rnnt.rnnt_posteriors(*p, implementation=implementation)
    for x, expected in zip(
        jax_rnnt.rnnt_posteriors(*losses.poisoned(p), implementation=implementation), clean, strict=True
    ):
        losses.assert_same_bits(x, expected)
        assert not np.asarray(x)[~losses.inside(p)].any()


DIRTY = """
import numpy as np
import jax, jax_rnnt, losses
jax.config.update("jax_enable_x64", True)
assert np.empty(5000, np.uint8).any(), "memory is not dirty"
for T, U in ((7, 4), (19, 33)):
    for dtype in (np.float32, np.float64):
        p = losses.problem(6, T, U, 9, dtype=dtype)
        for x in jax_rnnt.rnnt_posteriors(*p, implementation="kernel"):
            assert not np.asarray(x)[~losses.inside(p)].any(), "posteriors"
        for loss in losses.LOSSES if dtype == np.float32 else losses.LOSSES[:1]:
            p = losses.poisoned(losses.problem(6, T, U, 9, loss=loss, dtype=dtype))
            for options in ({}, {"fused_log_softmax": False}) if loss is losses.RNNT else ({},):
                got = losses.evaluate(loss, p, "kernel", **options)
                losses.assert_matches(got, loss.expected(p, **options), dtype, T + U)
                assert not got[1][~losses.inside(p)].any(), "gradient"
print("ok")
"""


@pytest.mark.slow
def test_results_do_not_depend_on_what_memory_held(kernel):
    """glibc fills new memory with a pattern, which reveals elements that a kernel does not write."""
    if platform.libc_ver()[0] != "glibc" or losses.platform() != "cpu":
        pytest.skip("MALLOC_PERTURB_ is glibc's")
    command = [sys.executable, "-c", DIRTY]
    environment = {**os.environ, "MALLOC_PERTURB_": "85"}
    done = subprocess.run(
        command, cwd=losses.HERE, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stderr
