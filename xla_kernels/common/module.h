// Shared by the Python modules of all devices.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "xla_kernels/common/registration.h"

namespace jax_rnnt {

// `kernels`: the device that the kernels are written for.
inline void Export(pybind11::module_& m, const char* kernels) {
  namespace py = pybind11;
  m.attr("kernels") = kernels;
  m.def("api_version", &ApiVersion);
  m.def("registrations", [] {
    py::dict handlers;
    for (const auto& [target, execute, instantiate] : Registrations()) {
      py::dict stages;
      stages["execute"] = py::capsule(execute);
      if (instantiate != nullptr) stages["instantiate"] = py::capsule(instantiate);
      handlers[target] = stages;
    }
    return handlers;
  });
  m.def(
      "limits",
      [] {
        py::dict limits;
        for (const auto& [name, most] : Limits()) limits[name] = most;
        return limits;
      },
      "{name: the largest number that the kernels take}.");
  m.def(
      "workspace",
      [](bool unit_steps, int64_t num_arcs, bool gradient) {
        std::vector<std::tuple<int64_t, int64_t, int64_t>> terms;
        for (const auto& [elements, frames, columns] : WorkspaceOfLattice(unit_steps, num_arcs, gradient).terms) {
          if (elements != 0) terms.emplace_back(elements, frames, columns);
        }
        return terms;
      },
      py::arg("unit_steps"), py::arg("num_arcs"), py::arg("gradient"),
      "[(elements, frames, columns), ...]: see xla_kernels/common/workspace.h.");
}

}  // namespace jax_rnnt
