// Library lib_cpu.so: module.cc for any interpreter (common/plain.h).
#include "xla_kernels/common/plain.h"

#include "xla_kernels/cpu/dispatch.h"

const jax_rnnt::PlainTable* jax_rnnt_table() {
  static const jax_rnnt::PlainTable table = [] {
    jax_rnnt::PlainTable made = jax_rnnt::CommonTable("cpu");
    made.targets = &jax_rnnt::cpu::Targets;
    made.target = &jax_rnnt::cpu::CurrentTarget;
    made.use_target = &jax_rnnt::cpu::UseTarget;
    return made;
  }();
  return &table;
}
