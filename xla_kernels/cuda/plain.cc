// Library lib_cuda.so: module.cc for any interpreter (common/plain.h). Loading it needs neither GPU nor driver.
#include "xla_kernels/common/plain.h"

#include "xla_kernels/cuda/devices.h"
#include "xla_kernels/cuda/lattice.h"

const jax_rnnt::PlainTable* jax_rnnt_table() {
  using namespace jax_rnnt::cuda;
  static const jax_rnnt::PlainTable table = [] {
    jax_rnnt::PlainTable table = jax_rnnt::CommonTable("cuda");
    table.architectures = JAX_RNNT_ARCHITECTURES;
    table.runtime_version = RuntimeVersion();
    table.driver_version = &DriverVersion;
    table.devices = [](jax_rnnt::PlainDevice* devices, int32_t room) {
      int32_t count = 0;
      for (const Device& d : Devices()) {
        if (count < room) devices[count] = {d.major, d.minor, d.shared_bytes};
        ++count;
      }
      return count;
    };
    table.unit_columns = [](int64_t shared_bytes) { return int64_t{MaxUnitColumns(shared_bytes)}; };
    return table;
  }();
  return &table;
}
