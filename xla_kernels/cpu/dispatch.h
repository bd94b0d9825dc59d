// The kernels are compiled once per instruction set. The first call chooses the best one that the machine has.
#pragma once

#include <string>
#include <vector>

namespace jax_rnnt::cpu {

// Names of the targets that this machine can run, best first.
std::vector<std::string> Targets();

// The target that the kernels run on. UseTarget is for tests; it returns false, and changes nothing, if the machine
// cannot run the target.
std::string CurrentTarget();
bool UseTarget(const std::string& name);

}  // namespace jax_rnnt::cpu
