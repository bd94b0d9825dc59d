"""Is the loss right on every compiled instruction set that this machine can run, not only on its best?"""

import numpy as np
import pytest

import losses


@pytest.fixture(scope="module")
def cpu():
    if losses.platform() != "cpu" or losses.missing_kernel() or losses.emulated():
        pytest.skip("instruction sets are a matter of the CPU kernels")
    return pytest.importorskip("jax_rnnt._cpu")


@pytest.fixture
def use_target(cpu):
    """Switches the instruction set, and restores the default at the end."""
    default = cpu.targets()[0] if not hasattr(cpu, "target") else cpu.target()
    yield cpu.use_target
    cpu.use_target(default)


def names():
    try:
        from jax_rnnt import _cpu
    except ImportError:
        return ["none"]
    return ["none"] if losses.emulated() else list(_cpu.targets())


TARGETS = pytest.mark.parametrize("name", names())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@TARGETS
def test_value_and_gradient(use_target, name, dtype):
    """Odd sizes, padding of NaN, every option, both input modes."""
    use_target(name)
    p = losses.poisoned(losses.problem(4, 9, 18, 37, dtype=dtype))
    for options in ({}, {"fastemit_lambda": 0.5, "clamp": 0.25, "delay_penalty": 0.125, "fused_log_softmax": False}):
        got = losses.evaluate(losses.RNNT, p, "kernel", **options)
        losses.assert_matches(got, losses.RNNT.expected(p, **options), dtype, 27, scale=1.5)


@pytest.mark.parametrize("classes", [2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 65])
@TARGETS
def test_remainders(use_target, name, classes):
    use_target(name)
    for dtype in ("bfloat16", "float32"):
        p = losses.problem(2, 3, 2, classes, dtype=dtype, lengths=([3, 2], [2, 1]))
        losses.assert_matches(losses.evaluate(losses.RNNT, p, "kernel"), losses.RNNT.expected(p), dtype, 5)


@TARGETS
def test_odd_values(use_target, name):
    """-inf classes, a NaN sequence, an impossible one, and logits of +-1e4, in vector and remainder lanes alike."""
    use_target(name)
    p = losses.problem(6, 7, 4, 19, dtype=np.float32, lengths=([7, 7, 7, 7, 5, 6], [4, 4, 4, 4, 2, 0]))
    logits = p.logits.copy()
    logits[0, :, :, ::3] = -np.inf
    logits[0][..., p.targets[0]] = 0
    logits[0, ..., -1] = 1
    logits[1, 3, 2, 17] = np.nan
    logits[2, 4] = -np.inf
    logits[3, 0, 0, 2] = np.inf
    logits[4] = np.where(logits[4] > 0, 1e4, -1e4)
    p = p._replace(logits=logits)
    values, gradient = losses.evaluate(losses.RNNT, p, "kernel")
    true_values, true_gradient = losses.RNNT.expected(p)
    np.testing.assert_allclose(values, true_values, rtol=1e-6)
    np.testing.assert_allclose(gradient, true_gradient, atol=2e4 * 11 * losses.eps(np.float32))
    for b in (0, 5):
        np.testing.assert_allclose(gradient[b], true_gradient[b], atol=losses.tolerance(np.float32, 11))


@pytest.mark.parametrize("shift", [-1e5, -1e6])
@TARGETS
def test_arcs_far_below_zero(use_target, name, shift):
    """Without FMA, the product of ln 2 and the exponent of such an arc rounds in float32."""
    use_target(name)
    p = losses.problem(3, 9, 5, 7, dtype=np.float32)
    p = p._replace(logits=(np.round(p.logits * 2) / 2 + shift).astype(np.float32))
    values, gradient = losses.evaluate(losses.RNNT, p, "kernel", fused_log_softmax=False)
    expected, exact = losses.RNNT.expected(p, fused_log_softmax=False)
    np.testing.assert_allclose(values, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, exact, atol=1e-5)


def test_names_of_targets(cpu, use_target):
    assert "portable" in cpu.targets()
    with pytest.raises((ValueError, RuntimeError)):
        use_target("sse9")
