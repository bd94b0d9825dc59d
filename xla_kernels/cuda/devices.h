// The host's questions about the GPUs of this process, by which Python decides whether the kernels can run (see
// jax_rnnt/_xla/devices.py).
#pragma once

#include <cstdint>
#include <vector>

namespace jax_rnnt::cuda {

struct Device {
  int major, minor;      // compute capability
  int64_t shared_bytes;  // most shared memory of a block
};

// The visible devices; none without a driver that knows this runtime. Makes no context on a device.
std::vector<Device> Devices();

// 1000 * major + 10 * minor. The driver's is that of the newest CUDA that it runs, 0 without a driver; the runtime's is
// that of the toolkit that compiled this file.
int DriverVersion();
int RuntimeVersion();

// Loads every kernel onto every device on which this process has a context, once. CUDA otherwise loads a kernel at its
// first launch, which fails if XLA is capturing launches then. Also lets them have more than 48 KiB of shared memory:
// without this call, larger launches fail. Errors are left to the launch.
void LoadKernels();

// The same on the current device, at each execution: XLA instantiates no handler of a program that it reads from a
// cache (a state that nobody has set is stored, and taken for one that was). It may be capturing, and then lets this
// thread load nonetheless.
void LoadKernelsHere();

}  // namespace jax_rnnt::cuda
