"""Does anything outside the lengths, the size of the padding or the neighbours in the batch change a single bit?"""

import os
import platform

import numpy as np
import pytest

import losses
from programs import run

pytestmark = pytest.mark.usefixtures("optimized")

# (logit, label)
GARBAGE = (np.nan, -1), (np.inf, 2**31 - 1), (-np.inf, -(2**31)), (3e38, 9), (-3e38, 8)


@pytest.mark.parametrize("fused", [True, False], ids=["logits", "log_probs"])
@losses.every_layout
def test_padding_content_changes_no_bit(loss, implementation, fused):
    """Logits, labels and windows outside the lengths. The gradient there is zero."""
    p = losses.problem(loss=loss, dtype=np.float32)
    windows = np.tile(np.array([[0, 3], [1, 4], [1, 9], [2, 9]], np.int32), (4, 1, 1))
    odd = np.where(np.arange(4)[:, None] < p.target_lengths[:, None, None], windows, [2**31 - 1, -(2**31)])
    options = {"fused_log_softmax": fused, "fastemit_lambda": 0.5, "clamp": 0.25}
    clean = losses.evaluate(loss, p, implementation, label_windows=windows, **options)
    assert not clean[1][~losses.inside(p)].any()
    for garbage in GARBAGE:
        other = losses.poisoned(p, *garbage)
        got = losses.evaluate(loss, other, implementation, label_windows=odd.astype(np.int32), **options)
        losses.assert_same_bits(got, clean)


def padded(p, T, U, garbage=np.nan):
    """The same sequences in a larger frame of garbage."""
    B, old_T, old_U1, V = p.logits.shape
    logits = np.full((B, T, U + 1, V), garbage, p.logits.dtype)
    logits[:, :old_T, :old_U1] = p.logits
    targets = np.full((B, U), -5, p.targets.dtype)
    targets[:, : old_U1 - 1] = p.targets
    return losses.poisoned(p._replace(logits=logits, targets=targets), garbage, -5)


@pytest.mark.parametrize("size", [(8, 4), (7, 5), (11, 17), (28, 16)], ids=str)
def test_padding_size_changes_no_bit(native_kernel, size):
    """One frame more, one label more, up to four times both."""
    for dtype in (np.float32, np.float64):
        p = losses.problem(dtype=dtype)
        values, gradient = losses.evaluate(losses.RNNT, p, native_kernel)
        got_values, got = losses.evaluate(losses.RNNT, padded(p, *size), native_kernel)
        losses.assert_same_bits(got_values, values)
        losses.assert_same_bits(got[:, :7, :5], gradient)
        assert not got[:, 7:].any() and not got[:, :, 5:].any()


@losses.every_layout
def test_batch_order_changes_no_bit(loss, implementation):
    """Of the kernels; the reference may round otherwise."""
    p = losses.problem(16, loss=loss, dtype=np.float32)
    order = np.random.default_rng(0).permutation(16)
    clean, got = losses.evaluate(loss, p, implementation), losses.evaluate(loss, p.take(order), implementation)
    for x, expected, limit in zip(got, clean, ({"rtol": 1e-6}, {"atol": 1e-6})):
        if implementation == "kernel":
            losses.assert_same_bits(x, expected[order])
        np.testing.assert_allclose(x, expected[order], **limit)


def test_batch_size_changes_no_bit(native_kernel):
    """One by one, in pairs or all at once: the split over threads does not show."""
    p = losses.problem(16, 100, 60, 9, dtype=np.float32)
    clean = losses.evaluate(losses.RNNT, p, native_kernel)
    for part in (slice(b, b + size) for size in (1, 2) for b in range(0, 16, size)):
        got = losses.evaluate(losses.RNNT, p.take(part), native_kernel)
        losses.assert_same_bits(got, [x[part] for x in clean])


DIRTY = """
import numpy as np
import jax, jax_rnnt, losses
jax.config.update("jax_enable_x64", True)
assert np.empty(5000, np.uint8).any(), "memory is not dirty"
for T, U in ((7, 4), (19, 33)):
    for dtype in (np.float32, np.float64):
        p = losses.problem(6, T, U, 9, dtype=dtype)
        for x in jax_rnnt.RNNTLoss(implementation="kernel").posteriors(*p):
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
    assert run(DIRTY, env=os.environ | {"MALLOC_PERTURB_": "85"}).endswith("ok\n")
