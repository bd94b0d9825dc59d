// Library lib_cpu.so: module.cc for any interpreter (common/plain.h).
#include "xla_kernels/common/plain.h"

#include "xla_kernels/cpu/dispatch.h"

const jax_rnnt::PlainTable* jax_rnnt_table() {
  static const jax_rnnt::PlainTable table = [] {
    jax_rnnt::PlainTable table = jax_rnnt::CommonTable("cpu");
    table.targets = &jax_rnnt::cpu::Targets;
    table.target = &jax_rnnt::cpu::CurrentTarget;
    table.use_target = &jax_rnnt::cpu::UseTarget;
    return table;
  }();
  return &table;
}
