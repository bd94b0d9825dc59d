// The kernels are compiled once per instruction set. The first call chooses the best one that the machine has.
#pragma once

namespace jax_rnnt::cpu {

// Names of the targets that this machine can run, best first; null-terminated.
const char* const* Targets();

// The target that the kernels run on. UseTarget is for tests; it returns false, and changes nothing, if the machine
// cannot run the target.
const char* CurrentTarget();
bool UseTarget(const char* name);

}  // namespace jax_rnnt::cpu
