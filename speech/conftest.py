"""Settings of all tests of this folder: eight CPU devices, and programs that are compiled in little time and kept.

Fixtures run a program, by default rnnt-speech, in this process.
"""

import gc
import importlib.metadata
import os

FLAGS = ["--xla_cpu_parallel_codegen_split_count=1"]
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # compiles in half of the time
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS])

import chex
import jax
import pytest

chex.set_n_cpu_devices(8)
jax.config.update("jax_disable_most_optimizations", True)
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads them
gc.freeze()  # tracing makes millions of objects and few cycles
gc.set_threshold(200_000, 50, 1000)


def pytest_configure(config):
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR") and hasattr(config, "cache"):
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture
def said(capsys):
    """What a program that ends with this status writes: its output, and its errors."""

    def call(arguments, status=0, main=None):
        from jax_rnnt_speech import cli

        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            (main or cli.main)(list(map(str, arguments)))
        assert caught.value.code == status
        return capsys.readouterr()

    return call


@pytest.fixture
def refused(said):
    """Asserts that a program says one line with this message, and ends with this status.

    Lines before it may say which files are read, and how.
    """

    def check(arguments, message, status=2, main=None):
        *before, error = said(arguments, status, main).err.strip().splitlines()
        assert message in error
        assert all(x.startswith(("reading ", "train ")) for x in before)

    return check
