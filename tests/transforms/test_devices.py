"""Do programs for a GPU run on the reference, with one warning, where its kernels cannot run, and do limits follow the
device? The extension module is faked; no GPU is needed."""

import re
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_rnnt
import losses
from jax_rnnt._xla import devices, loading, primitive

# (major, minor, bytes of shared memory of a block), from the CUDA C++ programming guide's table of compute capabilities
V100, T4, A100, A10, H100, B200 = (
    (7, 0, 96 << 10),
    (7, 5, 64 << 10),
    (8, 0, 163 << 10),
    (8, 6, 99 << 10),
    (9, 0, 227 << 10),
    (10, 0, 227 << 10),
)
WHEEL = "75-real 80-real 90-real 100"


def module(*found, driver=13000, runtime=13000, architectures=WHEEL):
    """What the extension module says on a machine with these devices; 32 columns take 128 bytes, a warp 8256."""
    return types.SimpleNamespace(
        devices=lambda: list(found),
        driver_version=lambda: driver,
        runtime_version=runtime,
        architectures=architectures,
        limits_of_shared_memory=lambda shared: {"unit_columns": (shared - 12352) // 128 * 32},
    )


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (module(), None),
        (module(driver=0), None),  # no driver: a program compiled ahead of time
        (module(T4), None),
        (module(T4, A100, A10, H100, B200), None),
        (module((12, 0, 99 << 10)), None),  # by PTX
        (module(H100, driver=13020, runtime=13000), None),
        (module(H100, driver=12080, runtime=12000), None),
        (module(H100, architectures="native"), None),
        (module(A10, architectures="80-real"), None),  # code of a minor version runs on later ones
        (module(A100, architectures="75"), None),  # by PTX
        (
            module(driver=12080),
            "CUDA 13.0, and the driver supports CUDA 12.8 at most: update it, or put an nvcc of CUDA 12 on",
        ),
        (module(H100, driver=11080, runtime=12090), "built with CUDA 12.9, and the driver supports CUDA 11.8"),
        (module(V100), "none for device 0, of compute capability 7.0: hide it by CUDA_VISIBLE_DEVICES$"),
        (module(H100, V100), "none for device 1, of compute capability 7.0"),
        (module(H100, architectures="80-real"), "have code for 80-real, and none for device 0.*ARCHITECTURES=90`"),
        (module(A100, architectures="86-real"), "none for device 0"),  # no code for an earlier minor version
        (module(A100, architectures="90"), "none for device 0"),  # nor PTX for an earlier device
        (module(H100, architectures="75-virtual", driver=12060, runtime=12090), "none for device 0"),
    ],
)
def test_reason_and_cure(fake, reason):
    """A driver of an older CUDA cannot run the kernels; one of an older minor version cannot compile their PTX."""
    found = devices.unfit(fake)
    assert (found is None) == (reason is None), found
    if reason:
        assert re.search(reason, found), found


def test_limits_are_of_the_smallest_device():
    assert devices.limits(module()) == {}  # nothing is known: those of the module stay
    assert devices.limits(module(H100, T4, A100)) == {"unit_columns": 13280}
    assert devices.limits(module(H100)) == {"unit_columns": 55008}
    assert devices.limits(types.SimpleNamespace()) == {}  # the kernels of the CPU


def test_nothing_changes_without_a_device(kernel):
    """The module of this build: the CPU's knows no devices, CUDA's sees those that JAX sees."""
    for platform in loading.KERNELS:
        if losses.platform() != "cuda":
            assert loading.missing(platform) is None
            assert loading.limits(platform) == loading.LIMITS[platform]


@pytest.fixture
def fake(monkeypatch, kernel):
    """Puts another answer of the module in place of that of this platform's kernels."""
    primitive._warn_reference.cache_clear()
    return lambda answer: monkeypatch.setattr(loading, "module", lambda platform: answer)


def step(loss, implementation):
    return jax.jit(jax.value_and_grad(lambda *p: loss(*p, implementation=implementation)))


@pytest.mark.parametrize("answer", [module(V100), module(H100, driver=12080)], ids=["device", "driver"])
def test_unfit_devices_run_the_reference(fake, answer, loss, capsys):
    """One warning for all kernels; the result is right, and no custom call is left in the program."""
    fake(answer)
    p = losses.problem(loss=loss, dtype=np.float32)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.clear_caches()
        got = losses.evaluate(loss, p, None)
        text = step(loss, None).lower(*p).as_text()
    losses.assert_matches(got, loss.expected(p), np.float32, 11)
    assert "custom_call @jax_rnnt" not in text
    (warning,) = (w for w in seen if "jax_rnnt" in str(w.message))
    assert str(warning.message).startswith("jax_rnnt runs on its pure-JAX reference: the CUDA kernels ")
    with pytest.raises(NotImplementedError, match=r"implementation='kernel': .* for this: the CUDA kernels"):
        step(loss, "kernel").lower(*p)
    with pytest.raises(RuntimeError, match=r"required kernels are missing:\n.*the CUDA kernels"):
        jax_rnnt.selftest(require=(losses.platform(),))
    assert "the reference runs: the CUDA kernels" in jax_rnnt.selftest(require=())[0]
    jax.clear_caches()
    losses._compiled.cache_clear()


@pytest.mark.parametrize(("answer", "most"), [(module(T4), 13280), (module(H100), 55008)], ids=["T4", "H100"])
def test_labels_that_fit_the_device(fake, answer, most):
    """The lattice runs on the reference above the limit of the device, and only the lattice."""
    fake(answer)

    def lower(columns):
        shapes = ((1, 1, columns, 2), np.float32), ((1, columns - 1), np.int32), ((1,), np.int32), ((1,), np.int32)
        return step(losses.RNNT, None).lower(*(jax.ShapeDtypeStruct(*s) for s in shapes)).as_text()

    assert "custom_call @jax_rnnt_lattice_grad" in lower(most)
    with pytest.warns(RuntimeWarning, match=rf"at most {most} columns U \+ 1, got {most + 1}"):
        text = lower(most + 1)
    assert "custom_call @jax_rnnt_lattice_grad" not in text and "custom_call @jax_rnnt_softmax_emission_fwd" in text


def test_module_without_a_gpu(kernel):
    """What the extension module of CUDA answers on a machine without a driver."""
    found = loading.module("cuda")
    if found is None or not hasattr(found, "devices") or losses.platform() == "cuda":
        pytest.skip("needs the kernels of CUDA and no GPU")
    assert devices.unfit(found) is None
    assert found.limits_of_shared_memory(99 << 10)["unit_columns"] == found.limits()["unit_columns"] == 22240
    assert found.limits_of_shared_memory(64 << 10)["unit_columns"] == 13280
    assert found.limits_of_shared_memory(227 << 10)["unit_columns"] == 55008


def test_products_of_float32_are_of_float32():
    """Tests compare them at 1e-5; TF32 keeps 11 bits, off by up to 5e-4 for each factor (conftest.py)."""
    rng = np.random.default_rng(0)
    a, b = rng.uniform(1, 2, (2, 64, 64)).astype(np.float32)
    got = jax.jit(jnp.matmul)(a, b)
    np.testing.assert_allclose(got, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5)
