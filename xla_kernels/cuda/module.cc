// Python module jax_rnnt._cuda: the handlers as capsules. Importing it needs neither GPU nor driver.
//
// Built as jax_rnnt._cpu, it is the emulation: the same kernels, run on the CPU, under the name of the CPU platform.
#include "xla_kernels/common/module.h"

PYBIND11_MODULE(JAX_RNNT_MODULE, m) { jax_rnnt::Export(m, "cuda"); }
