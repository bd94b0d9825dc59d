"""Settings of the whole suite, and the choice between kernels and reference.

Eight CPU devices replace a small cluster. 64-bit types are on, so that the truth can be float64 (test_dtypes repeats
the essentials without them). Type and rank promotion are strict, so that no library call relies on implicit ones.
JAX_RNNT_REQUIRE=cpu or cuda turns the skip of a missing kernel into a failure. JAX_RNNT_INTERPRET=1 runs the kernels
for TPUs, interpreted, in place of the CPU's. JAX_RNNT_INSTALLED=FOLDER tests the package in that folder (a wheel, a
build with sanitizers) in place of the checkout.

A test costs what its programs cost: a loss on the kernels 0.015 s to trace, 0.02 to lower and 0.03 to compile, one on
the reference 0.2 s each. So XLA and LLVM do not optimise programs that run once on a few kilobytes, and where XLA
has the option, it compiles a reference in 0.2 s, not in 0.6. Custom calls and collectives are the same. Tests of
rounding over many steps, equal bits or memory use `optimized`. Compiled programs are kept in pytest's cache, for all
workers and for the next run. A program names its kernels, so it runs with those of the day.
"""

import gc
import importlib.metadata
import os
import pathlib
import sys

# JAX reads them when it is imported, and stops at one that XLA does not know.
FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

import chex
import jax
import pytest

chex.set_n_cpu_devices(8)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads them: 5% of the suite

FOLDER = pathlib.Path(os.environ.get("JAX_RNNT_INSTALLED") or pathlib.Path(__file__).parent)
sys.path.insert(0, str(FOLDER))

import jax_rnnt
import platforms

if pathlib.Path(jax_rnnt.__file__).parents[1] != FOLDER:
    raise RuntimeError(f"the tests must run on the jax_rnnt of {FOLDER}, got {jax_rnnt.__file__}")

# Tracing makes millions of objects and few cycles: the collector took a tenth of the suite's time.
gc.freeze()
gc.set_threshold(200_000, 50, 1000)

if platforms.interpreted():
    import interpreted

    interpreted.install()

QUICK = platforms.platform() == "cpu"
if not QUICK or platforms.emulated():  # GPUs multiply float32 as TF32, TPUs as bfloat16; tests compare it at 1e-5
    jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_disable_most_optimizations", QUICK)


def pytest_configure(config):
    if QUICK and not os.environ.get("JAX_COMPILATION_CACHE_DIR") and hasattr(config, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def pytest_itemcollected(item):
    """Decoders and what is around the library do not concern the kernels. Other files say so themselves."""
    if item.path.parent.name in ("decode", "tools"):
        item.add_marker("no_kernel")


def pytest_collection_modifyitems(config, items):
    """`quick(ID, ...)` names the cases that `make test` has; the others are slow."""
    named = set()
    for item in items:
        for mark in item.iter_markers("quick"):
            named |= {(item.path, item.originalname, x) for x in mark.args}
            if item.callspec.id not in mark.args:
                item.add_marker("slow")
    named -= {(item.path, item.originalname, item.callspec.id) for item in items if hasattr(item, "callspec")}
    if named and not any("::" in x for x in config.args):
        raise pytest.UsageError(f"quick(...) names cases that no test has: {sorted(map(str, named))}")


def require_kernel():
    reason = platforms.missing_kernel()
    if reason is None:
        return
    (pytest.fail if os.environ.get("JAX_RNNT_REQUIRE") else pytest.skip)(reason)


@pytest.fixture(autouse=True)
def traces():
    """`chex.assert_max_traces` counts those of one test: it knows a function by its place and text."""
    chex.clear_trace_counter()


@pytest.fixture(params=["kernel", "reference"])
def implementation(request):
    if request.param == "kernel":
        require_kernel()
    return request.param


@pytest.fixture
def kernel():
    """For properties that only kernels have (bits, custom calls, memory)."""
    require_kernel()
    return "kernel"


@pytest.fixture
def native_kernel(kernel):
    """For properties of custom calls: interpreted kernels are none, and the emission beside them is XLA's."""
    if platforms.interpreted():
        pytest.skip("interpreted kernels are no custom calls")
    return kernel


@pytest.fixture(scope="module")
def optimized():
    """From here to the end of the module, XLA and LLVM optimise programs as by default, but for its fusion emitters."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # the key of a cached program does not contain the compiler's options
    yield
    jax.config.update("jax_disable_most_optimizations", QUICK)
    jax.clear_caches()


@pytest.fixture
def flax_promotion():
    """Flax promotes implicitly."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def devices():
    """Eight CPU devices, on any default platform."""
    try:
        found = jax.devices("cpu")
    except RuntimeError as error:
        pytest.skip(f"no CPU platform: {error}")
    if len(found) < 8:
        pytest.skip("needs 8 CPU devices; something initialised JAX before conftest.py")
    return found[:8]
