// What a Python module needs of its handlers, without XLA's headers.
#pragma once

#include <utility>
#include <vector>

namespace jax_rnnt {

struct Registration {
  const char* target;
  void* handler;
};

std::vector<Registration> Registrations();
std::pair<int, int> ApiVersion();  // (major, minor) of the XLA FFI headers this was built with

}  // namespace jax_rnnt
