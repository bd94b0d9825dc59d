// The kernels are compiled once per instruction set; the best one that the machine has is taken at the first call.
#pragma once

namespace jax_rnnt::cpu {

// Names of the targets that this machine can run, best first; null-terminated.
const char* const* Targets();

// The target that the kernels run on. UseTarget is for tests: false, and no change, where the machine has no such
// target.
const char* CurrentTarget();
bool UseTarget(const char* name);

}  // namespace jax_rnnt::cpu
