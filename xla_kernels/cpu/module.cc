// Python module jax_rnnt._cpu: the handlers as capsules, and the choice of the instruction set for tests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "xla_kernels/common/registration.h"
#include "xla_kernels/cpu/dispatch.h"

PYBIND11_MODULE(_cpu, m) {
  namespace cpu = jax_rnnt::cpu;
  namespace py = pybind11;
  m.attr("kernels") = "cpu";
  m.def("api_version", &jax_rnnt::ApiVersion);
  m.def("registrations", [] {
    py::dict handlers;
    for (const auto& [target, handler] : jax_rnnt::Registrations()) handlers[target] = py::capsule(handler);
    return handlers;
  });
  m.def(
      "targets",
      [] {
        std::vector<std::string> names;
        for (const char* const* name = cpu::Targets(); *name != nullptr; ++name) names.emplace_back(*name);
        return names;
      },
      "Instruction sets that this processor runs, best first.");
  m.def("target", [] { return std::string(cpu::CurrentTarget()); });
  m.def("use_target", [](const std::string& name) {
    if (!cpu::UseTarget(name.c_str())) throw py::value_error("jax_rnnt._cpu.use_target: no target " + name);
  });
}
