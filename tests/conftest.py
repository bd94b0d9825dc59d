"""Settings of the whole suite, and the choice between kernels and reference.

Eight CPU devices stand in for a small cluster; 64-bit types are on so that truth can be float64 (test_dtypes repeats
the essentials without them); type and rank promotion are strict, so that no library call relies on an implicit one.
JAX_RNNT_REQUIRE=cpu or cuda turns the skip of a missing kernel into a failure.

Four fifths of the suite's time is XLA compiling programs that then run once on a few kilobytes. On CPUs LLVM therefore
optimises none of them, which takes a quarter off; HLO passes, and so fusions, buffers and custom calls, are the same.
What is about rounding over many steps, equal bits or memory asks for `optimized`: programs as users compile them.
"""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

import losses

QUICK = losses.platform() == "cpu"
jax.config.update("jax_disable_most_optimizations", QUICK)


def require_kernel():
    reason = losses.missing_kernel()
    if reason is None:
        return
    (pytest.fail if os.environ.get("JAX_RNNT_REQUIRE") else pytest.skip)(reason)


def pytest_generate_tests(metafunc):
    """A test that takes `loss` runs on the RNN-T loss; marked `family` on every loss of the table, too.

    Of the variants it then takes the path with kernels alone, unless the mark says "reference".
    """
    names = set(metafunc.fixturenames) & {"loss", "implementation"}
    mark = metafunc.definition.get_closest_marker("family")
    rows = []
    for loss in losses.LOSSES if mark else losses.LOSSES[:1]:
        implementations = ("kernel", "reference") if loss is losses.RNNT or "reference" in mark.args else ("kernel",)
        rows += [(loss, i) for i in (implementations if "implementation" in names else (None,))]
    if names == {"loss", "implementation"}:
        ids = [f"{loss.name}-{implementation}" for loss, implementation in rows]
        metafunc.parametrize(("loss", "implementation"), rows, ids=ids, indirect=True)
    elif names == {"loss"}:
        metafunc.parametrize("loss", [x for x, _ in rows], ids=[x.name for x, _ in rows], indirect=True)
    elif names:
        metafunc.parametrize("implementation", ["kernel", "reference"], indirect=True)


@pytest.fixture
def implementation(request):
    if request.param == "kernel":
        require_kernel()
    return request.param


@pytest.fixture
def kernel():
    """For what only kernels promise (bits, custom calls, memory)."""
    require_kernel()
    return "kernel"


@pytest.fixture(scope="module")
def optimized():
    """From here to the end of the module, programs are compiled as they are by default."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # a program's key in memory does not say how it was compiled
    yield
    jax.config.update("jax_disable_most_optimizations", QUICK)
    jax.clear_caches()


@pytest.fixture
def loss(request):
    return request.param


@pytest.fixture
def devices():
    """Eight CPU devices, whatever the default platform is."""
    try:
        found = jax.devices("cpu")
    except RuntimeError as error:
        pytest.skip(f"no CPU platform: {error}")
    if len(found) < 8:
        pytest.skip("needs 8 CPU devices; something initialised JAX before conftest.py")
    return found[:8]
