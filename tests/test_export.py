"""Can a training step be exported, stored, and run elsewhere?"""

import warnings

import jax
import numpy as np
import pytest
from jax import export

import jax_rnnt
import losses

pytestmark = pytest.mark.rare("reference")  # JAX itself transforms plain JAX


def step(loss, **options):
    return jax.jit(jax.value_and_grad(lambda *p: loss(*p, **options)))


def shapes(p):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in p]


def round_trip(exported):
    pytest.importorskip("flatbuffers")
    return export.deserialize(exported.serialize())


def check(got, p, expected):
    np.testing.assert_allclose(got[0], expected[0].mean(), rtol=1e-6)
    np.testing.assert_allclose(got[1], expected[1] / len(expected[0]), atol=losses.tolerance(np.float32, 11))


@pytest.mark.family
def test_round_trip(loss, implementation):
    p = losses.problem(loss=loss, dtype=np.float32)
    f = step(loss, implementation=implementation, clamp=0.5)
    exported = export.export(f, disabled_checks=jax_rnnt.export_checks())(*p)
    check(round_trip(exported).call(*p), p, loss.expected(p, clamp=0.5))
    calls = [f"custom_call @{target}" in exported.mlir_module() for target in loss.gradient_calls]
    assert all(calls) if implementation == "kernel" and not losses.interpreted() else not any(calls)


def test_without_the_checks(loss, native_kernel):
    """Fails without `export_checks`. If JAX ever gives the guarantee, the helper may go."""
    p = losses.problem(loss=loss, dtype=np.float32)
    with pytest.raises(ValueError, match="custom call"):
        export.export(step(loss, implementation=native_kernel))(*p)


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("tpu",), ("cpu", "cuda", "tpu", "rocm")], ids="+".join)
def test_platforms(loss, platforms):
    """One program for several platforms: kernels where there are some, the reference elsewhere."""
    p = losses.problem(loss=loss, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # "no kernels for platform", once a process
        exported = export.export(step(loss), platforms=platforms, disabled_checks=jax_rnnt.export_checks())(*p)
    assert exported.platforms == platforms
    restored = round_trip(exported)
    if losses.platform() in platforms:
        check(restored.call(*p), p, loss.expected(p))
    if platforms == ("tpu",):
        assert "custom_call @jax_rnnt" not in exported.mlir_module()


@pytest.mark.family
def test_symbolic_batch(loss, implementation):
    """One exported program serves every batch size."""
    pytest.importorskip("flatbuffers")
    (b,) = export.symbolic_shape("b")
    p = losses.problem(loss=loss, dtype=np.float32)
    symbolic = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in p]
    f = step(loss, implementation=implementation)
    restored = round_trip(export.export(f, disabled_checks=jax_rnnt.export_checks())(*symbolic))
    for size in (1, 3, 4) if loss is losses.RNNT else (3,):
        part = p.take(slice(size))
        check(restored.call(*part), part, loss.expected(part))


@pytest.mark.family
def test_symbolic_frames(loss, kernel):
    """Frames and labels may be symbolic too: the shapes reach the kernels at run time."""
    pytest.importorskip("flatbuffers")
    b, t = export.symbolic_shape("b, t", constraints=["t >= 1"])
    p = losses.problem(loss=loss, dtype=np.float32)
    symbolic = [jax.ShapeDtypeStruct((b, t, *p.logits.shape[2:]), np.float32)]
    symbolic += [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in p[1:]]
    restored = round_trip(
        export.export(step(loss, implementation=kernel), disabled_checks=jax_rnnt.export_checks())(*symbolic)
    )
    check(restored.call(*p), p, loss.expected(p))


def test_vmapped_and_exported(loss, kernel):
    p = losses.problem(loss=loss, dtype=np.float32)
    f = jax.jit(jax.vmap(jax.value_and_grad(lambda *p: loss(*p, reduction="none", implementation=kernel))))
    got = round_trip(export.export(f, disabled_checks=jax_rnnt.export_checks())(*p)).call(*p)
    losses.assert_matches(got, loss.expected(p), np.float32, 11)


def test_gradient_of_an_exported_loss(loss, implementation):
    """vjp_order keeps a derivative in the file."""
    p = losses.problem(loss=loss, dtype=np.float32)
    f = jax.jit(lambda *p: loss(*p, implementation=implementation))
    exported = export.export(f, disabled_checks=jax_rnnt.export_checks())(*p)
    pytest.importorskip("flatbuffers")
    restored = export.deserialize(exported.serialize(vjp_order=1))
    check(jax.value_and_grad(restored.call)(*map(jax.numpy.asarray, p)), p, loss.expected(p))


def test_checks_name_every_target(kernel):
    checks = str(jax_rnnt.export_checks())
    for target in losses.RNNT.value_calls + losses.RNNT.gradient_calls:
        assert target in checks
