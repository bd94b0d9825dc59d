"""Runs the TPU's Pallas kernels in Pallas's interpreter on the CPU, not the CPU's kernels: `lab/run.sh interpret`.

The interpreter knows float64 too, so tests compare it with the truth as closely as they do the CPU's kernels.
"""

import functools

from jax.interpreters import mlir

from jax_rnnt._xla import loading
from jax_rnnt.emissions import _softmax as softmax
from jax_rnnt.lattices import _lattice as lattice
from jax_rnnt.lattices import _pallas as pallas

KERNELS = (softmax.forward_kernel, softmax.backward_kernel, lattice._loss_kernel, lattice._grad_kernel)


def install():
    for kernel in KERNELS:
        rule = functools.partial(kernel.lower_tpu, interpret=True)
        mlir.register_lowering(kernel.primitive, rule, platform="cpu")
    pallas.LIMITS["bytes"] = 8
    loading.LIMITS["cpu"] = pallas.LIMITS
