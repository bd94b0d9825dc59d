// Python module jax_rnnt._cpu: the handlers as capsules; tests may choose the instruction set.
#include "xla_kernels/common/module.h"

#include <string>

#include "xla_kernels/cpu/dispatch.h"

PYBIND11_MODULE(_cpu, m, pybind11::mod_gil_not_used()) {
  namespace cpu = jax_rnnt::cpu;
  namespace py = pybind11;
  jax_rnnt::Export(m, "cpu");
  m.def("targets", &cpu::Targets, "Instruction sets that this processor runs, best first.");
  m.def("target", &cpu::CurrentTarget);
  m.def("use_target", [](const std::string& name) {
    if (!cpu::UseTarget(name)) throw py::value_error("jax_rnnt._cpu.use_target: no target " + name);
  });
}
