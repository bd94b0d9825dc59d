// Python module jax_rnnt._cuda: the handlers as capsules. Importing it needs neither GPU nor driver.
//
// Built as jax_rnnt._cpu it is the emulation: the same kernels, run on the CPU, under the CPU platform's name.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "xla_kernels/common/registration.h"

PYBIND11_MODULE(JAX_RNNT_MODULE, m) {
  namespace py = pybind11;
  m.attr("kernels") = "cuda";
  m.def("api_version", &jax_rnnt::ApiVersion);
  m.def("registrations", [] {
    py::dict handlers;
    for (const auto& [target, handler] : jax_rnnt::Registrations()) handlers[target] = py::capsule(handler);
    return handlers;
  });
}
