"""Which kernels the default platform has."""

import functools
import os

import jax
import numpy as np

import jax_rnnt
from jax_rnnt._xla import loading


def emulated():
    """Whether the CPU platform runs the CUDA kernels in the emulation (`lab/run.sh emulation`)."""
    return loading.KERNELS.get("cpu") == "cuda"


def cuda_kernels():
    """Whether kernels are those for CUDA, on a GPU or emulated."""
    return emulated() or platform() == "cuda"


def interpreted():
    """Whether the CPU platform interprets the TPU's kernels (lab/run.sh interpret). They are no custom calls then."""
    return bool(os.environ.get("JAX_RNNT_INTERPRET"))


def platform():
    """The default platform by the name that lowering uses: cpu, cuda, tpu."""
    return {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())


@functools.cache
def missing_kernel():
    """The reason why implementation="kernel" cannot run on the default platform, or None if it can."""
    required = os.environ.get("JAX_RNNT_REQUIRE")
    if required and platform() != required:
        return f"JAX_RNNT_REQUIRE={required}, but the default platform is {platform()}"
    tiny = np.zeros((1, 1, 1, 2), np.float32), np.zeros((1, 0), np.int32), np.ones(1, np.int32), np.zeros(1, np.int32)
    try:
        jax.block_until_ready(jax_rnnt.rnnt_loss(*tiny, implementation="kernel"))
    except NotImplementedError as error:
        return str(error)
    return None
