// The interface between a Python module and its handlers, without XLA's headers.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "xla_kernels/common/workspace.h"

namespace jax_rnnt {

// The handlers of a target by stage. XLA calls `instantiate`, if there is one, when it compiles or loads a program.
struct Registration {
  const char* target;
  void* execute;
  void* instantiate = nullptr;
};

std::vector<Registration> Registrations();
std::pair<int, int> ApiVersion();  // (major, minor) of the XLA FFI headers that the handlers were built with

// The largest problem that the kernels take. Quantities without an entry have no limit.
struct Limit {
  const char* name;
  int64_t most;
};
std::vector<Limit> Limits();

// Workspace of the lattice calls; it is lowered as an additional result.
Workspace WorkspaceOfLattice(bool unit_steps, int64_t num_arcs, bool gradient);

}  // namespace jax_rnnt
