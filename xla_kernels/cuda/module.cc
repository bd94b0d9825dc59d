// Python module jax_rnnt._cuda: the handlers as capsules. Importing it needs neither GPU nor driver.
//
// Built as jax_rnnt._cpu, it is the emulation: the same kernels, run on the CPU, under the name of the CPU platform.
#include "xla_kernels/common/module.h"

#include "xla_kernels/cuda/devices.h"
#include "xla_kernels/cuda/joint.h"
#include "xla_kernels/cuda/lattice.h"

// As CMake names them: "75-real 80-real 90"; empty in the emulation. Those of the kernels of a joint network are fewer.
#ifndef JAX_RNNT_ARCHITECTURES
#define JAX_RNNT_ARCHITECTURES ""
#define JAX_RNNT_JOINT_ARCHITECTURES ""
#endif

PYBIND11_MODULE(JAX_RNNT_MODULE, m, pybind11::mod_gil_not_used()) {
  using namespace jax_rnnt::cuda;
  jax_rnnt::Export(m, "cuda");
  m.attr("architectures") = JAX_RNNT_ARCHITECTURES;
  m.attr("joint_architectures") = JAX_RNNT_JOINT_ARCHITECTURES;
  m.attr("runtime_version") = RuntimeVersion();
  m.def("driver_version", &DriverVersion, "1000 * major + 10 * minor of the newest CUDA of the driver; 0 without one.");
  m.def(
      "devices",
      [] {
        std::vector<std::tuple<int, int, int64_t>> devices;
        for (const Device& d : Devices()) devices.emplace_back(d.major, d.minor, d.shared_bytes);
        return devices;
      },
      "[(major, minor, most bytes of shared memory of a block), ...] of the visible devices.");
  m.def(
      "limits_of_shared_memory",
      [](int64_t bytes) {
        pybind11::dict limits;
        limits["unit_columns"] = MaxUnitColumns(bytes);
        return limits;
      },
      "The limits that depend on the shared memory of a block.");
  pybind11::dict joint, rows;
  for (const int size : {2, 4}) rows[pybind11::int_(size)] = JointBlockRows(size);
  joint["capability"] = kJointCapability;
  joint["shared_bytes"] = kSharedBytes;
  joint["columns"] = kJointColumns;
  joint["classes"] = kJointClasses;
  joint["unit_bytes"] = kJointBytes;
  joint["rows"] = rows;
  joint["blocks"] = kMaxJointBlocks;
  joint["activations"] = std::vector<std::string>(std::begin(kActivations), std::end(kActivations));
  m.attr("joint") = joint;  // see xla_kernels/cuda/joint.h
  m.def("joint_shared_bytes", &JointSharedBytes, pybind11::arg("rows"), pybind11::arg("row_bytes"),
        "Bytes of shared memory of a block with so many rows of hidden units.");
}
