"""Kernels of a linear joint network with its loss; `KERNELS` has those of each kind of device.

B encoders with N sequences each, T frames, U1 columns, H units, V classes. The modules: `_classes` is the order of the
classes, `_blocks` the list of blocks, `_planes` what XLA makes of a kernel's numbers and the gradient written down, and
`_tpu` and `_gpu` the kernels.
"""

from jax_rnnt.tiles.joint import _gpu, _tpu
from jax_rnnt.tiles.joint._kernel import JointKernel

# By the kind of kernels that `_xla.Grouped` names.
KERNELS = {
    "tpu": JointKernel("TPUs", _tpu.plan, _tpu.forward, _tpu.backward),
    "cuda": JointKernel("GPUs", _gpu.plan, _gpu.forward, _gpu.backward),
}
