"""Settings of the whole suite, and the choice between kernels and reference.

Eight CPU devices replace a small cluster. 64-bit types are on, so that the truth can be float64 (test_dtypes repeats
the essentials without them). Type and rank promotion are strict, so that no library call relies on implicit ones.
JAX_RNNT_REQUIRE=cpu or cuda turns the skip of a missing kernel into a failure. JAX_RNNT_INTERPRET=1 runs the kernels
for TPUs, interpreted, in place of the CPU's.

XLA takes four fifths of the suite's time to compile programs that run once on a few kilobytes. On CPUs, LLVM therefore
does not optimise them, and XLA takes options with which it compiles a reference in 0.3 s instead of 1.2 s. Custom calls
and collectives are the same. Tests of rounding over many steps, equal bits or memory use `optimized`:
programs as users compile them. Compiled programs are kept in pytest's cache, for all workers and for the next run. A
program names its kernels, so it runs with those of the day.
"""

import gc
import os
import re
import zlib

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import pytest
from jax._src import compiler

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads them: 5% of the suite

import losses

# Tracing makes millions of objects and few cycles: the collector took a tenth of the suite's time.
gc.freeze()
gc.set_threshold(200_000, 50, 1000)

if losses.interpreted():
    import interpreted

    interpreted.install()

QUICK = losses.platform() == "cpu"
if not QUICK:  # GPUs multiply float32 as TF32 and TPUs as bfloat16; tests compare float32 results at 1e-5
    jax.config.update("jax_default_matmul_precision", "highest")
OPTIONS = {  # in the order of what they save; an XLA without one goes without
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_llvm_disable_expensive_passes": True,
}


def accepted(name, value):
    try:
        jax.jit(jax.numpy.negative).lower(1.0).compile(compiler_options={name: value})
    except Exception:  # which one depends on the version
        return False
    return True


def compile_quickly(quick):
    """From here on programs are compiled quickly, or as users compile them."""
    jax.config.update("jax_disable_most_optimizations", quick)
    options.clear()
    options.update(known if quick else {})


original = getattr(compiler, "get_compile_options", None)  # private: without it programs compile as users compile them


def get_compile_options(*args, env_options_overrides=None, **kwargs):
    overrides = options | (env_options_overrides or {})
    return original(*args, env_options_overrides=overrides or None, **kwargs)


options: dict = {}
known = {name: value for name, value in OPTIONS.items() if QUICK and accepted(name, value)}
if original is not None:
    compiler.get_compile_options = get_compile_options  # JAX has no option for all programs of a process but XLA_FLAGS
compile_quickly(QUICK)


def pytest_addoption(parser):
    parser.addoption("--part", metavar="I/N", help="the tests of part I of N, 1 <= I <= N, drawn by their names")


def pytest_configure(config):
    if QUICK and not os.environ.get("JAX_COMPILATION_CACHE_DIR") and hasattr(config, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def require_kernel():
    reason = losses.missing_kernel()
    if reason is None:
        return
    (pytest.fail if os.environ.get("JAX_RNNT_REQUIRE") else pytest.skip)(reason)


def pytest_generate_tests(metafunc):
    """A test that takes `loss` runs on the RNN-T loss; if it is marked `family`, also on every other loss of the table.

    The other losses run on the path with kernels only, unless the mark says "reference". They are slow but for TDT,
    which has the other lattice kernel; "quick" makes none slow, "slow" all of them. "layouts": also the RNN-T loss
    of logits in tiles and in a band; "band": that alone.
    """
    marks = metafunc.definition.iter_markers("parametrize")
    names = set(metafunc.fixturenames) & {"loss", "implementation"}
    names -= {name for mark in marks for name in mark.args[0]}  # the test's own choice
    mark = metafunc.definition.get_closest_marker("family")
    rows = []
    layouts = [x for x in losses.LAYOUTS if mark and {"layouts", x.name} & {*mark.args}]
    for loss in (*losses.LOSSES, *layouts) if mark else losses.LOSSES[:1]:
        implementations = ("kernel", "reference") if loss is losses.RNNT or "reference" in mark.args else ("kernel",)
        quick = (
            loss is losses.RNNT
            or ("quick" in mark.args and loss not in losses.LAYOUTS)
            or (loss is losses.TDT and "slow" not in mark.args)
        )
        marks = [] if quick else [pytest.mark.slow]
        rows += [(loss, i, marks) for i in (implementations if "implementation" in names else (None,))]
    if names == {"loss", "implementation"}:
        cases = [pytest.param(loss, i, id=f"{loss.name}-{i}", marks=marks) for loss, i, marks in rows]
        metafunc.parametrize(("loss", "implementation"), cases, indirect=True)
    elif names == {"loss"}:
        cases = [pytest.param(loss, id=loss.name, marks=marks) for loss, _, marks in rows]
        metafunc.parametrize("loss", cases, indirect=True)
    elif names:
        metafunc.parametrize("implementation", ["kernel", "reference"], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Cases of a `rare` test are slow where their id has all words of an argument. --part leaves others out."""
    if given := config.getoption("part"):
        part, parts = (int(x) for x in given.split("/")) if re.fullmatch(r"\d+/\d+", given) else (0, 0)
        if not 1 <= part <= parts:
            raise pytest.UsageError(f"--part must be I/N with 1 <= I <= N, got {given}")
        mine: dict[bool, list] = {True: [], False: []}
        for item in items:
            mine[zlib.crc32(item.nodeid.encode()) % parts == part - 1].append(item)
        items[:] = mine[True]
        config.hook.pytest_deselected(items=mine[False])
    for item in items:
        case = {*getattr(getattr(item, "callspec", None), "id", "").split("-")}
        if any({*words.split("-")} <= case for mark in item.iter_markers("rare") for words in mark.args):
            item.add_marker(pytest.mark.slow)


@pytest.fixture
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
    if losses.interpreted():
        pytest.skip("interpreted kernels are no custom calls")
    return kernel


@pytest.fixture(scope="module")
def optimized():
    """From here to the end of the module, programs are compiled with the default options."""
    compile_quickly(False)
    jax.clear_caches()  # the key of a cached program does not contain the compiler's options
    yield
    compile_quickly(QUICK)
    jax.clear_caches()


@pytest.fixture
def loss(request):
    return request.param


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
